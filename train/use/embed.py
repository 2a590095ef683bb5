"""A trained run put to use: its model, and the file of a split's embeddings or scores that the evaluator reads."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vse.eval.files.embeddings import Embeddings, write_embeddings, write_scores
from vse.features.backbone_cache import backbone_of, captions_beside
from vse.features.cache import FeatureCache, open_cache
from vse.features.caption_extractor import encoder_path
from vse.features.cnn_extractor import rebuild_extractor
from vse.features.hardware import pick_device
from vse.features.new_captions import caption_reader
from vse.features.reader import FeatureReader
from vse.features.shards import shards_folder
from vse.features.transformer import Transformer
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files import check_out
from vse.pipeline.presets import changed_fields
from vse.pipeline.provenance import made
from vse.pipeline.vocabulary import UNKNOWN, Vocabulary
from vse.train.data.captions import CaptionInputs, EncodedCaptions
from vse.train.data.images import CachedImages, EvaluationImages, photo_crops
from vse.train.data.pairs import Pairs, Split, images_of
from vse.train.data.tokens import TokenNumbers
from vse.train.experiment import ExperimentConfig, changed_settings
from vse.train.kinds import Kind
from vse.train.models.build import Model, build_model
from vse.train.models.trainable_cnn import TrainableCnn
from vse.train.prepare import check_one_space, model_inputs, read_captions
from vse.train.run.folder import RunFolder
from vse.train.solvers.encode import PairScores, encode, pooled
from vse.train.use.leak import images_trained_on

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPlaces:
    """Where the feature cache, ``dataset.json`` and the cache of captions of a run are, if not where ``run.json`` says.

    ``weights_dir`` has the weights of networks that read what no cache has: other captions, or an image file.
    """

    features: Path | None = None
    captions: Path | None = None
    caption_features: Path | None = None
    weights_dir: Path | None = None


@dataclass(frozen=True)
class TrainedRun:
    """A run's model with its best weights, and a split as that model reads it."""

    folder: RunFolder
    experiment: ExperimentConfig
    record: dict[str, Any]
    dataset: Dataset
    cache: FeatureCache
    caption_cache: FeatureCache | None
    transformer: Transformer | None
    vocabulary: Vocabulary
    model: Model
    split: Split
    device: torch.device
    weights_sha256: str
    vocabulary_sha256: str

    @property
    def trained_on(self) -> str | None:
        """The data set that it was trained on, if that is another one than the one that it reads."""
        name = str(self.record["dataset"])
        return None if name == self.dataset.name else name

    @property
    def inputs(self) -> list[Path]:
        """All that was read of it, or may be: no output may be one of these files, or lie in one of these folders."""
        caches = [cache for cache in (self.cache, self.caption_cache) if cache is not None]
        of_caches = [path for cache in caches for path in (cache.path, shards_folder(cache.path), encoder_path(cache.path))]
        return [*self.folder.files, *of_caches, self.dataset.path, self.dataset.path.parent / "images"]


def load_run(
    run: Path, split: str | None, places: RunPlaces = RunPlaces(), device: str = "auto", unfinished: bool = False
) -> TrainedRun:
    """A trained run, and a split for it, or all of its data set (None); a run that trained its CNN reads the photos.

    ``places`` are where its caches and data set were moved, or those of another data set, made by the same extractors.
    :class:`UserError` if its training did not finish, unless ``unfinished`` ones will do.
    """
    folder = RunFolder(run)
    experiment, record = folder.settings(ExperimentConfig), folder.record()
    folder.content(folder.config_file)
    if (state := unfinished_state(record)) and not unfinished:
        raise UserError(
            f"{run}: its training did not finish (state: {state}); continue it with vse-train --resume, or take the best "
            "weights so far with --unfinished"
        )
    if "files" not in record:
        log.info("%s: has no sums of its files, so whether they are as they were written cannot be told", folder.record_file)
    cache = _alike(places.features or folder.feature_file(), folder.evaluated(), folder)
    trained_on = folder.caption_feature_file()
    if trained_on is not None and places.features is not None and backbone_of(cache) is not None:
        trained_on = captions_beside(places.features)
    if places.caption_features is not None and trained_on is None:
        raise UserError(f"{run} reads captions as words, not from a cache; leave --caption-features out")
    caption_file = places.caption_features or trained_on
    caption_cache = None
    if caption_file is not None:
        caption_cache = _alike(caption_file, record["caption_features"], folder, "--caption-features")
    dataset = load_dataset_file(places.captions or cache.captions)
    if dataset.name != cache.dataset:
        raise UserError(f"{cache.path} holds features of {cache.dataset!r}, but {dataset.path} is {dataset.name!r}")
    where = pick_device(device)
    pairs = Pairs(images_of(dataset, list(dataset.splits) if split is None else [split], cache))
    images: EvaluationImages
    cnn = None
    if experiment.images.finetune:
        extractor = rebuild_extractor(cache, device=str(where), trained=True, positions=True)
        cnn = TrainableCnn(extractor, experiment.images.batch_norm)
        images = photo_crops(extractor, dataset, pairs.images, experiment.images)
    else:
        images = CachedImages(FeatureReader(cache, 0, mapped=False), pairs.image_ids, where)
    check_one_space(experiment.model, cache, caption_cache)
    vocabulary, vocabulary_sha256 = folder.read_vocabulary()
    encoder = experiment.model.caption_encoder
    transformer = folder.read_transformer() if encoder is not None and Kind.TOKENS in encoder.takes else None
    captions: CaptionInputs
    if caption_cache is not None and caption_cache.dataset != dataset.name:  # its encoder reads the captions of any data set
        reader = caption_reader(caption_cache, places.weights_dir, str(where))
        captions = EncodedCaptions(pairs.captions, reader, caption_cache, where)
    else:
        captions = read_captions(caption_cache, transformer, vocabulary, pairs, where)
    model = build_model(experiment.model, *model_inputs(cache, caption_cache, transformer, vocabulary), cnn).to(where)
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
        transformer=transformer,
        vocabulary=vocabulary,
        model=model,
        split=as_read,
        device=where,
        weights_sha256=weights_sha256,
        vocabulary_sha256=vocabulary_sha256,
    )


def unfinished_state(record: Mapping[str, Any]) -> str | None:
    """The state of a run whose training did not finish, e.g. ``running`` or ``collapsed``; None if it did."""
    state = record.get("state", "unknown")
    return None if state == "finished" else str(state)


def embed_split(
    run: Path,
    out: Path | None = None,
    split: str = "test",
    places: RunPlaces = RunPlaces(),
    device: str = "auto",
    unfinished: bool = False,
    leak: bool = False,
) -> Path:
    """Write the embeddings of a split by the best weights of a run; returns ``out``. See :func:`load_run`.

    Without ``out`` that is ``<split>.h5`` in the run's folder or, of another data set, ``<dataset>_<split>.h5``.
    :class:`UserError` if the run was trained on images of that split, unless a ``leak`` is allowed.

    Of a model that scores every pair, the file has the scores, written block by block, of each direction if they depend on it,
    single vectors of captions for the protocol ``sentence``, and pooled vectors of both sides, for a re-ranking.
    """
    if out is not None:
        check_out(out, RunFolder(run).files)
    trained = load_run(run, split, places, device, unfinished)
    if out is None:
        out = run / (f"{split}.h5" if trained.trained_on is None else f"{trained.dataset.name}_{split}.h5")
    check_out(out, trained.inputs)
    if not len(trained.split.pairs):
        raise UserError(
            f"{trained.dataset.path}: no image of the split {split!r} has a caption; vse-search searches such images"
        )
    restval = trained.experiment.train.restval
    n_seen = images_trained_on(trained.folder, restval, trained.cache, trained.dataset, split, leak)
    images, captions = encode(trained.model, trained.split, trained.device)
    caches = [cache for cache in (trained.cache, trained.caption_cache) if cache is not None]
    provenance: dict[str, Any] = {
        "features": {cache.feature: cache.key for cache in caches},
        "config": trained.experiment.model_dump(mode="json"),
        "changed_settings": changed_settings(trained.experiment, trained.record["dataset"]),
        "captions": os.path.relpath(trained.dataset.path, out.parent),
        "best_epoch": trained.record.get("best_epoch"),
        "versions": trained.record.get("versions", {}),
        "trained": trained.record.get("made", {}),
        "embedded": made(),
    }
    if isinstance(trained.split.captions, TokenNumbers):
        provenance["cut_captions"] = trained.split.captions.n_cut
    elif trained.caption_cache is None:
        provenance["unknown_words"] = unknown_words(trained)
    if state := unfinished_state(trained.record):
        provenance["unfinished"] = state
    if n_seen:
        provenance["images_trained_on"] = {"images": n_seen, "of": len(trained.dataset.split(split))}
    for side, embedded in (("images", images), ("captions", captions)):
        if not torch.isfinite(embedded.vectors).all():
            raise UserError(f"{run}: embeddings of {side} are not finite (NaN or infinite); nothing is written")
    pairs, similarity = trained.split.pairs, trained.experiment.model.similarity
    ranked_by, pairwise = similarity.ranked_by, trained.model.pairwise
    embeddings = Embeddings(
        image_ids=pairs.image_ids,
        caption_ids=pairs.caption_ids,
        caption_image_ids=pairs.caption_image_ids,
        images=None if pairwise else images.vectors.numpy(),
        captions=captions.vectors.numpy() if similarity.captions == Kind.VECTORS else None,
        pooled_images=pooled(images) if pairwise else None,
        pooled_captions=pooled(captions) if pairwise else None,
        dataset=trained.dataset.name,
        split=split,
        experiment=trained.experiment.name,
        seed=trained.record["seed"],
        similarity="cosine" if ranked_by is None else ranked_by,
        provenance=json.dumps(provenance, sort_keys=True),
        trained_on=trained.trained_on,
        coco_ids=pairs.coco_ids,
    )
    if not pairwise:
        return write_embeddings(out, embeddings)
    scores = PairScores(trained.model, images, captions)
    return write_scores(out, embeddings, *scores.blocks(torch.from_numpy(pairs.image_of)))


def unknown_words(trained: TrainedRun) -> dict[str, int]:
    """How many ``words`` of the captions are not in the vocabulary, ``of`` how many, and how many ``captions`` have one."""
    counts = {"words": 0, "of": 0, "captions": 0}
    for caption in trained.split.pairs.captions:
        numbers = trained.vocabulary.encode(caption.tokens)[1:-1]
        unknown = numbers.count(UNKNOWN)
        counts["words"] += unknown
        counts["of"] += len(numbers)
        counts["captions"] += bool(unknown)
    if counts["words"]:
        log.info(
            "%s: %d of the captions' %d words (%.1f%%) are none of the training captions'",
            trained.dataset.path,
            counts["words"],
            counts["of"],
            100 * counts["words"] / counts["of"],
        )
    return counts


def _alike(file: Path, trained_on: Mapping[str, Any], folder: RunFolder, option: str = "--features") -> FeatureCache:
    """The cache in ``file``, if it is the one that the run was trained with, or of the same extractor."""
    if not file.exists():
        place = os.path.normpath(file)
        raise UserError(f"{folder.path}: no feature cache {place}, with which it was trained; if it was moved, give {option}")
    cache = open_cache(file)
    if cache.key == trained_on["key"]:
        return cache
    extractor = trained_on.get("extractor") or _extractor_at(folder.path / str(trained_on["path"]), str(trained_on["key"]))
    differs = ["its key differs"] if extractor is None else changed_fields(extractor, cache.extractor)
    if differs:
        raise UserError(
            f"{cache.path} is not the cache that {folder.path} is evaluated with, nor made by the same extractor "
            f"({'; '.join(differs[:4])}); extract it with the settings of that one, or train again"
        )
    log.info("%s: of other rows than %s was trained with, by the same extractor", cache.path, folder.path)
    if "imported" in cache.provenance:
        log.warning("%s: imported, so whether the same network made it cannot be told", cache.path)
    return cache


def _extractor_at(path: Path, key: str) -> Mapping[str, Any] | None:
    """The extractor of the cache that a run was trained with, if that is still where it was."""
    try:
        cache = open_cache(path)
    except UserError:
        return None
    return cache.extractor if cache.key == key else None
