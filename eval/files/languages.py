"""The languages of captions in a file of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.split import Embeddings
from vse.pipeline.dataset.languages import is_language_tag
from vse.pipeline.errors import UserError, did_you_mean


def encode_languages(languages: Sequence[str]) -> dict[str, Any]:
    """Return the fields ``caption_languages`` and ``languages`` of :class:`vse.eval.files.split.Embeddings`.

    ``languages`` holds the language of each caption. Returns an empty dictionary if a caption has none.
    """
    if not languages or not all(languages):
        return {}
    names = list(dict.fromkeys(languages))
    return {"caption_languages": np.asarray([names.index(one) for one in languages], np.int64), "languages": ",".join(names)}


def check_languages(path: Path, indices: NDArray[np.int64], names: str, n_captions: int) -> None:
    """Raise UserError if ``indices`` are not ``n_captions`` indices in the list of languages ``names``."""
    listed = names.split(",")
    if wrong := next((name for name in listed if not is_language_tag(name)), None):
        raise UserError(f"{path}: the attribute languages is {names!r}, and {wrong!r} is not a tag such as en or de")
    if indices.shape != (n_captions,) or indices.min() < 0 or indices.max() >= len(listed):
        raise UserError(f"{path}: caption_languages are not {n_captions} numbers from 0 to {len(listed) - 1}")


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
