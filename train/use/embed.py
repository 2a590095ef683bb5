"""A trained run put to use: its model, and the file of a split's embeddings that the evaluator reads."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.features.cache import FeatureCache, open_cache
from vse.features.cnn_extractor import rebuild_extractor
from vse.features.hardware import pick_device
from vse.features.reader import FeatureReader
from vse.pipeline.config import ExperimentConfig
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.vocabulary import Vocabulary
from vse.train.data.captions import CachedCaptions, Captions, Words
from vse.train.data.images import CachedImages, EvaluationImages, pictures
from vse.train.data.pairs import Pairs, Split, images_of
from vse.train.models.build import TwoBranchModel
from vse.train.models.trainable_cnn import TrainableCnn
from vse.train.run.folder import RunFolder
from vse.train.solvers.encode import encode, score_matrix


@dataclass(frozen=True)
class TrainedRun:
    """A run's model with its best weights, and a split as that model reads it."""

    folder: RunFolder
    experiment: ExperimentConfig
    record: dict[str, Any]
    dataset: Dataset
    cache: FeatureCache
    caption_cache: FeatureCache | None
    vocabulary: Vocabulary
    model: TwoBranchModel
    split: Split
    device: torch.device


def load_run(
    run: Path,
    split: str,
    features: Path | None = None,
    captions: Path | None = None,
    caption_features: Path | None = None,
    device: str = "auto",
) -> TrainedRun:
    """A trained run. ``features``, ``captions`` and ``caption_features`` name other places of the image cache, of
    ``dataset.json`` and of the cache of captions than those in ``run.json``. A run that trained its CNN reads the pictures.
    """
    folder = RunFolder(run)
    experiment, record = folder.experiment(), folder.record()
    cache = _same(features or folder.feature_file(), folder.evaluated(), folder)
    trained_on = folder.caption_feature_file()
    if caption_features is not None and trained_on is None:
        raise UserError(f"{run} reads captions as words, not from a cache; leave --caption-features out")
    caption_file = caption_features or trained_on
    caption_cache = None
    if caption_file is not None:
        caption_cache = _same(caption_file, record["caption_features"], folder, "--caption-features")
    dataset = load_dataset_file(captions or cache.captions)
    if dataset.name != cache.dataset:
        raise UserError(f"{cache.path} holds features of {cache.dataset!r}, but {dataset.path} is {dataset.name!r}")
    where = pick_device(device)
    pairs = Pairs(images_of(dataset, [split], cache))
    images: EvaluationImages
    cnn = None
    if experiment.images.finetune:
        extractor = rebuild_extractor(cache, device=str(where), trained=True)
        cnn = TrainableCnn(extractor, experiment.images.batch_norm)
        images = pictures(extractor, dataset, pairs.images, experiment.images)
    else:
        images = CachedImages(FeatureReader(cache, 0, mapped=False), pairs.image_ids, where)
    sentences: Captions
    vocabulary = folder.vocabulary()
    if caption_cache is None:
        sentences = Words(pairs.captions, vocabulary, where)
    else:
        sentences = CachedCaptions(FeatureReader(caption_cache, 0, mapped=False), pairs.caption_ids, where)
    caption_dim = None if caption_cache is None else caption_cache.dim
    model = TwoBranchModel(experiment.model, cache.dim, len(vocabulary), cnn, caption_dim).to(where)
    try:
        model.load_state_dict(folder.best_weights())
    except RuntimeError as error:
        raise UserError(
            f"{folder.best_file}: not weights of this run's model ({str(error).splitlines()[-1].strip()})"
        ) from None
    model.eval()
    found = Split(pairs, images, sentences)
    return TrainedRun(folder, experiment, record, dataset, cache, caption_cache, vocabulary, model, found, where)


def embed_split(
    run: Path,
    out: Path,
    split: str = "test",
    features: Path | None = None,
    captions: Path | None = None,
    device: str = "auto",
    caption_features: Path | None = None,
) -> Path:
    """Write the embeddings of a split by the best weights of a run; returns ``out``.

    A similarity network's file has the scores of all pairs, and the embeddings of captions for the protocol ``sentence``.
    See :func:`load_run` for the other places of files.
    """
    found = load_run(run, split, features, captions, caption_features, device)
    images, sentences = encode(found.model, found.split, found.device)
    scores = score_matrix(found.model, images, sentences).numpy() if found.model.pairwise else None
    caches = [cache for cache in (found.cache, found.caption_cache) if cache is not None]
    provenance = {
        "features": {cache.feature: cache.key for cache in caches},
        "config": found.experiment.model_dump(mode="json"),
        "captions": os.path.relpath(found.dataset.path, out.parent),
        "best_epoch": found.record.get("best_epoch"),
        "versions": found.record["versions"],
    }
    pairs = found.split.pairs
    embeddings = Embeddings(
        image_ids=pairs.image_ids,
        caption_ids=pairs.caption_ids,
        caption_image_ids=pairs.caption_image_ids,
        images=images.numpy() if scores is None else None,
        captions=sentences.numpy(),
        scores=scores,
        dataset=found.dataset.name,
        split=split,
        experiment=found.experiment.name,
        seed=found.record["seed"],
        similarity=found.experiment.model.ranked_by,
        provenance=json.dumps(provenance, sort_keys=True),
        coco_ids=pairs.coco_ids,
    )
    return write_embeddings(out, embeddings)


def _same(file: Path, trained_on: dict[str, Any], folder: RunFolder, option: str = "--features") -> FeatureCache:
    """The cache in ``file``, if it is the one that the run was trained with."""
    if not file.exists():
        place = os.path.normpath(file)
        raise UserError(f"{folder.path}: no feature cache {place}, with which it was trained; if it was moved, give {option}")
    cache = open_cache(file)
    if cache.key != trained_on["key"]:
        raise UserError(
            f"{cache.path} is not the cache that {folder.path} is evaluated with (its key differs); train again or name it"
        )
    return cache
