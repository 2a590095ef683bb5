"""Select the captions of one language from embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from vse.eval.files.split import Embeddings
from vse.pipeline.errors import UserError, did_you_mean


def select_language(path: Path, embeddings: Embeddings, language: str) -> Embeddings:
    """Return the captions in ``language``, and the images that have captions in every language of the file.

    So the results of several languages are results on the same images. Raises UserError if the file does not have the
    language, or if no image has captions in all languages.
    """
    names = (embeddings.languages or "").split(",")
    if embeddings.caption_languages is None:
        raise UserError(f"{path}: does not have the languages of its captions, so --language and --pairs cannot select some")
    if language not in names:
        raise UserError(f"{path}: has no caption in the language {language!r}{did_you_mean(language, names)}")
    image_of_caption = embeddings.image_of_caption()
    has_language = np.zeros((len(embeddings.image_ids), len(names)), bool)
    has_language[image_of_caption, embeddings.caption_languages] = True
    has_all = np.logical_and.reduce(has_language, axis=1)
    if not has_all.any():
        raise UserError(f"{path}: no image has captions in all of its languages, {', '.join(names)}")
    captions = (embeddings.caption_languages == names.index(language)) & has_all[image_of_caption]
    selected = embeddings.select(np.flatnonzero(has_all), np.flatnonzero(captions))
    return replace(selected, caption_languages=np.zeros(len(selected.caption_ids), np.int64), languages=language)
