"""Searching a split with a run: a text finds images, an image file finds captions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vse.eval.search import search
from vse.features.cnn import CnnExtractor, recreate
from vse.features.sentences import encoder_of
from vse.pipeline.captions import tokenize
from vse.pipeline.errors import UserError
from vse.pipeline.pictures import decode
from vse.train.embed import TrainedRun, load_run
from vse.train.encode import encode, score_matrix


@dataclass(frozen=True)
class Hit:
    """A result: its score, the picture's file, and the caption if captions were searched."""

    score: float
    picture: Path
    caption: str | None = None


def search_split(
    run: Path,
    query: str | Path,
    k: int = 10,
    split: str = "test",
    features: Path | None = None,
    captions: Path | None = None,
    weights_dir: Path | None = None,
    device: str = "auto",
    caption_features: Path | None = None,
) -> list[Hit]:
    """The ``k`` best of a split for a text (its images) or for an image file (its captions), best first.

    The model is the run's, with its best weights. An image file goes through the CNN that made the run's cache, or through
    the run's own if it trained one; a text through the encoder that made the cache of captions, if the run reads one. Order
    scores re-rank candidates of FAISS, see :func:`vse.eval.search.search`; a similarity network scores all pairs.
    """
    found = load_run(run, split, features, captions, caption_features, device)
    pairs = found.split.pairs
    by_picture = isinstance(query, Path)
    asked = _of_picture(found, query, weights_dir) if isinstance(query, Path) else _of_text(found, query)
    images, sentences = encode(found.model, found.split, found.device)
    corpus, way = (sentences, "i2t") if by_picture else (images, "t2i")
    if found.model.pairwise:
        every = score_matrix(found.model, *((asked, corpus) if by_picture else (corpus, asked))).flatten()
        best = torch.sort(every, descending=True, stable=True)
        scores, rows = best.values[:k].numpy(), best.indices[:k].numpy()
    else:
        nearest = search(corpus.numpy(), asked.numpy(), k, found.model.config.ranked_by, way=way)
        scores, rows = nearest[0][0], nearest[1][0]
    hits = []
    for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
        caption = pairs.captions[row] if by_picture else None
        image = pairs.images[int(pairs.image_of[row]) if caption else row]
        file = Path(os.path.normpath(found.dataset.image_path(image)))
        hits.append(Hit(score, file, caption.raw if caption else None))
    return hits


def _of_text(found: TrainedRun, text: str) -> Tensor:
    tokens = tokenize(text)
    if not tokens:
        raise UserError(f"{text!r}: no word to search for")
    if found.caption_cache is None:
        words = found.vocabulary.encode(tokens)
        asked: tuple[Tensor, ...] = torch.tensor([words], device=found.device), torch.tensor([len(words)])
    else:
        vectors = encoder_of(found.caption_cache, str(found.device)).encode([tokens])
        if not vectors.any():
            raise UserError(f"{text!r}: none of its words is known to {found.caption_cache.feature!r}")
        asked = (vectors.to(found.device),)
    with torch.inference_mode():
        return found.model.embed_captions(*asked).cpu()


def _of_picture(found: TrainedRun, file: Path, weights_dir: Path | None) -> Tensor:
    model = found.model
    picture = decode(file)
    extractor: CnnExtractor = recreate(found.cache, weights_dir, str(found.device), trained=model.cnn is not None)
    crops = extractor.prepare(picture, 0)[None]
    if model.cnn is None:
        vectors = extractor.features(crops)
        crops = vectors if vectors.ndim == 2 else vectors.mean(1)
    with torch.inference_mode():
        return model.embed_images(crops.to(found.device)).cpu()
