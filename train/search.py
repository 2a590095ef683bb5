"""Searching a split with a run: a text finds images, an image file finds captions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.search import search
from vse.features.cache import FeatureCache, open_cache
from vse.features.cnn import CnnExtractor, recreate
from vse.features.hardware import pick_device
from vse.features.pictures import decode
from vse.pipeline.captions import tokenize
from vse.pipeline.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.train.batches import Pairs, images_of
from vse.train.encode import encode, trained
from vse.train.model import TwoBranchModel
from vse.train.run import RunFolder


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
) -> list[Hit]:
    """The ``k`` best of a split for a text (its images) or for an image file (its captions), best first.

    The model is the run's, with its best weights. An image file goes through the CNN that made the run's cache, or through
    the run's own if it trained one. Order scores re-rank candidates of FAISS, see :func:`vse.eval.search.search`.
    """
    folder = RunFolder(run)
    cache = open_cache(features or folder.feature_file())
    dataset = load_dataset_file(captions or cache.captions)
    where = pick_device(device)
    similarity = folder.experiment().model.similarity
    pairs = Pairs(images_of(dataset, [split], cache), folder.vocabulary())
    model, seen = trained(folder, cache, dataset, pairs.images, where)
    if isinstance(query, Path):
        found = _of_picture(model, query, cache, weights_dir, where)
    else:
        found = _of_text(model, query, pairs, where)
    images, sentences = (side.numpy() for side in encode(model, pairs, seen, where))
    corpus, way = (sentences, "i2t") if isinstance(query, Path) else (images, "t2i")
    scores, rows = search(corpus, found, k, similarity, way=way)
    hits = []
    for score, row in zip(scores[0].tolist(), rows[0].tolist(), strict=True):
        caption = pairs.captions[row] if isinstance(query, Path) else None
        image = pairs.images[int(pairs.image_of[row]) if caption else row]
        file = Path(os.path.normpath(dataset.image_path(image)))
        hits.append(Hit(score, file, caption.raw if caption else None))
    return hits


def _of_text(model: TwoBranchModel, text: str, pairs: Pairs, device: torch.device) -> NDArray[np.float32]:
    tokens = tokenize(text)
    if not tokens:
        raise UserError(f"{text!r}: no word to search for")
    words = pairs.vocabulary.encode(tokens)
    model.eval()
    with torch.inference_mode():
        found = model.embed_captions(torch.tensor([words], device=device), torch.tensor([len(words)]))
    return found.cpu().numpy()


def _of_picture(
    model: TwoBranchModel, file: Path, cache: FeatureCache, weights_dir: Path | None, device: torch.device
) -> NDArray[np.float32]:
    picture = decode(file)
    extractor: CnnExtractor = recreate(cache, weights_dir, str(device), trained=model.cnn is not None)
    crops = extractor.prepare(picture, 0)[None]
    if model.cnn is None:
        vectors = extractor.features(crops)
        crops = vectors if vectors.ndim == 2 else vectors.mean(1)
    model.eval()
    with torch.inference_mode():
        found = model.embed_images(crops.to(device))
    return found.cpu().numpy()
