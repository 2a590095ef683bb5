"""A trained run put to use: its model, and the file of a split's embeddings or scores that the evaluator reads."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vse.eval.files.embeddings import Embeddings, write_embeddings, write_scores
from vse.features.cache import FeatureCache, open_cache
from vse.features.caption_extractor import encoder_path
from vse.features.cnn_extractor import rebuild_extractor
from vse.features.hardware import pick_device
from vse.features.reader import FeatureReader
from vse.features.shards import shards_folder
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files import check_out
from vse.pipeline.vocabulary import Vocabulary
from vse.train.data.images import CachedImages, EvaluationImages, photo_crops
from vse.train.data.pairs import Pairs, Split, images_of
from vse.train.experiment import ExperimentConfig, changed_settings
from vse.train.kinds import Kind
from vse.train.models.build import Model, build_model
from vse.train.models.trainable_cnn import TrainableCnn
from vse.train.prepare import model_inputs, read_captions
from vse.train.run.folder import RunFolder
from vse.train.solvers.encode import PairScores, encode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPlaces:
    """Where the feature cache, ``dataset.json`` and the cache of captions of a run are, if not where ``run.json`` says."""

    features: Path | None = None
    captions: Path | None = None
    caption_features: Path | None = None


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
    model: Model
    split: Split
    device: torch.device
    weights_sha256: str
    vocabulary_sha256: str

    @property
    def inputs(self) -> list[Path]:
        """All that was read of it, or may be: no output may be one of these files, or lie in one of these folders."""
        caches = [cache for cache in (self.cache, self.caption_cache) if cache is not None]
        of_caches = [path for cache in caches for path in (cache.path, shards_folder(cache.path), encoder_path(cache.path))]
        return [*self.folder.files, *of_caches, self.dataset.path, self.dataset.path.parent / "images"]


def load_run(run: Path, split: str, places: RunPlaces = RunPlaces(), device: str = "auto") -> TrainedRun:
    """A trained run; ``places`` are where its caches and data set were moved. A run that trained its CNN reads the photos."""
    folder = RunFolder(run)
    experiment, record = folder.settings(ExperimentConfig), folder.record()
    folder.content(folder.config_file)
    if "files" not in record:
        log.info("%s: has no sums of its files, so whether they are as they were written cannot be told", folder.record_file)
    cache = _same(places.features or folder.feature_file(), folder.evaluated(), folder)
    trained_on = folder.caption_feature_file()
    if places.caption_features is not None and trained_on is None:
        raise UserError(f"{run} reads captions as words, not from a cache; leave --caption-features out")
    caption_file = places.caption_features or trained_on
    caption_cache = None
    if caption_file is not None:
        caption_cache = _same(caption_file, record["caption_features"], folder, "--caption-features")
    dataset = load_dataset_file(places.captions or cache.captions)
    if dataset.name != cache.dataset:
        raise UserError(f"{cache.path} holds features of {cache.dataset!r}, but {dataset.path} is {dataset.name!r}")
    where = pick_device(device)
    pairs = Pairs(images_of(dataset, [split], cache))
    images: EvaluationImages
    cnn = None
    if experiment.images.finetune:
        extractor = rebuild_extractor(cache, device=str(where), trained=True)
        cnn = TrainableCnn(extractor, experiment.images.batch_norm)
        images = photo_crops(extractor, dataset, pairs.images, experiment.images)
    else:
        images = CachedImages(FeatureReader(cache, 0, mapped=False), pairs.image_ids, where)
    vocabulary, vocabulary_sha256 = folder.read_vocabulary()
    captions = read_captions(caption_cache, pairs, vocabulary, where)
    model = build_model(experiment.model, *model_inputs(cache, caption_cache, vocabulary), cnn).to(where)
    weights, weights_sha256 = folder.read_best()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"{folder.best_file}: not weights of this run's model ({str(error).splitlines()[-1].strip()})"
        ) from None
    model.eval()
    as_read = Split(pairs, images, captions)
    return TrainedRun(
        folder=folder,
        experiment=experiment,
        record=record,
        dataset=dataset,
        cache=cache,
        caption_cache=caption_cache,
        vocabulary=vocabulary,
        model=model,
        split=as_read,
        device=where,
        weights_sha256=weights_sha256,
        vocabulary_sha256=vocabulary_sha256,
    )


def embed_split(run: Path, out: Path, split: str = "test", places: RunPlaces = RunPlaces(), device: str = "auto") -> Path:
    """Write the embeddings of a split by the best weights of a run; returns ``out``.

    Of a model that scores every pair, the file has the scores, written block by block, of each direction if they depend on it,
    and single vectors of captions for the protocol ``sentence``.
    """
    check_out(out, RunFolder(run).files)
    trained = load_run(run, split, places, device)
    check_out(out, trained.inputs)
    images, captions = encode(trained.model, trained.split, trained.device)
    caches = [cache for cache in (trained.cache, trained.caption_cache) if cache is not None]
    provenance = {
        "features": {cache.feature: cache.key for cache in caches},
        "config": trained.experiment.model_dump(mode="json"),
        "changed_settings": changed_settings(trained.experiment, trained.dataset.name),
        "captions": os.path.relpath(trained.dataset.path, out.parent),
        "best_epoch": trained.record.get("best_epoch"),
        "versions": trained.record.get("versions", {}),
    }
    for side, embedded in (("images", images), ("captions", captions)):
        if not torch.isfinite(embedded[0]).all():
            raise UserError(f"{run}: embeddings of {side} are not finite (NaN or infinite); nothing is written")
    pairs, similarity = trained.split.pairs, trained.experiment.model.similarity
    ranked_by = similarity.ranked_by
    embeddings = Embeddings(
        image_ids=pairs.image_ids,
        caption_ids=pairs.caption_ids,
        caption_image_ids=pairs.caption_image_ids,
        images=None if trained.model.pairwise else images[0].numpy(),
        captions=captions[0].numpy() if similarity.captions == Kind.VECTORS else None,
        scores=None,
        dataset=trained.dataset.name,
        split=split,
        experiment=trained.experiment.name,
        seed=trained.record["seed"],
        similarity="cosine" if ranked_by is None else ranked_by,
        provenance=json.dumps(provenance, sort_keys=True),
        coco_ids=pairs.coco_ids,
    )
    if not trained.model.pairwise:
        return write_embeddings(out, embeddings)
    scores = PairScores(trained.model, images, captions)
    return write_scores(out, embeddings, *scores.blocks(torch.from_numpy(pairs.image_of)))


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
