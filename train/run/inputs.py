"""The inputs of a run: open and check its caches and data set, and record them so that a resume can identify them.

Also initialises word embeddings from a file of word vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vse.features.backbones.transformer import Transformer
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.reader import check_text_rows
from vse.features.cache.rows import TextRows
from vse.features.data_checks import check_data, check_same_photos, data_sums
from vse.features.exchange.embeddings import captions_cache_path, read_backbone
from vse.features.extractors.words import read_word_vectors
from vse.features.settings.captions import word_file_sha256
from vse.pipeline.dataset.captions import SPECIAL_TOKENS, Vocabulary
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile
from vse.pipeline.presets.schema import ExperimentPlan
from vse.train.kinds import Kind, kind_of_rows
from vse.train.models.build import Model
from vse.train.models.encoders.base import EncoderSettings
from vse.train.models.encoders.word_reader import WordReader
from vse.train.options import TrainInputs
from vse.train.run.folder import RunFolder, relative_path

log = logging.getLogger(__name__)


def start_words(model: Model, vocabulary: Vocabulary, file: Path) -> None:
    """Initialise the word embeddings of ``model`` with the vectors of ``file``, and log the number of missing words.

    Raises :class:`UserError` if the model reads no words, if its word embeddings have another length, or if no word has a
    vector.
    """
    encoder = model.caption_encoder
    if not isinstance(encoder, WordReader):
        raise UserError(f"{file}: word vectors are for encoders of words, and the captions are not read by one")
    known = read_word_vectors(file).select(vocabulary.words, 0)
    dim, expected = known.vectors.shape[1], encoder.words.embedding_dim
    if dim != expected:
        raise UserError(f"{file}: vectors of {dim} numbers, but model.word_dim is {expected}; --set model.word_dim={dim}")
    n_words = len(vocabulary) - len(SPECIAL_TOKENS)
    n_known = len(set(known.words) - set(SPECIAL_TOKENS))
    if not n_known:
        raise UserError(f"{file}: no word of the captions has a vector; does the file have their language and case?")
    vectors, there = np.zeros((len(vocabulary), dim), np.float32), np.zeros(len(vocabulary), bool)
    for row, word in enumerate(vocabulary.words):
        if word in known.rows:
            vectors[row], there[row] = known.vectors[known.rows[word]], True
    encoder.start_words(torch.from_numpy(vectors), torch.from_numpy(there))
    log.info(
        "%s: has vectors of %d of %d words; the other %d are initialised at random", file, n_known, n_words, n_words - n_known
    )


@dataclass(frozen=True)
class Inputs:
    """The caches of images for training and for validation, which are often the same, and the inputs for captions.

    Captions are read from a cache, or as tokens of a transformer, or else as words. For training on phrases, ``captions`` is a
    cache of phrases and ``truths`` a cache of regions at their ground-truth boxes.
    """

    cache: FeatureCache
    evaluated: FeatureCache
    captions: FeatureCache | None
    transformer: Transformer | None
    dataset: Dataset
    base: RunFolder | None
    base_sha256: str
    weights_dir: Path | None
    words: Path | None = None
    words_sha256: str | None = None
    truths: FeatureCache | None = None

    @property
    def caption_input_kind(self) -> Kind:
        """The kind of input that captions are."""
        if self.captions is not None:
            return kind_of_rows(self.captions.row_kind)
        return Kind.WORDS if self.transformer is None else Kind.TOKENS

    def identity(self, seed: int) -> dict[str, Any]:
        """Return the data that identifies the run's inputs, without its settings."""
        identity = {
            "dataset": self.dataset.name,
            "captions_sha256": self.dataset.sha256,
            "seed": seed,
            "feature": self.cache.feature,
            "feature_key": self.cache.key,
            "words_sha256": self.words_sha256,
        }
        if self.evaluated is not self.cache:
            identity |= {"eval_feature_key": self.evaluated.key}
        if self.captions is not None:
            identity |= {"caption_feature_key": self.captions.key}
        if self.truths is not None:
            identity |= {"truth_feature_key": self.truths.key}
        if self.transformer is not None:
            identity |= {
                "tokenizer_sha256": self.transformer.tokenizer_sha256,
                "transformer_sha256": self.transformer.weights_sha256,
            }
        if self.base is not None:
            identity |= {"start_from_sha256": self.base_sha256}
        return identity

    def record(self, folder: Path) -> dict[str, Any]:
        """Return the record of the inputs for ``run.json``, with paths relative to the run folder."""

        def place(cache: FeatureCache) -> dict[str, Any]:
            path = relative_path(cache.path, folder)
            return {"name": cache.feature, "key": cache.key, "path": path, "extractor": dict(cache.extractor)}

        record: dict[str, Any] = {
            "features": place(self.cache),
            "captions": relative_path(self.dataset.path, folder),
            "tokeniser": self.dataset.tokeniser,
            "data": data_sums(self.evaluated, self.dataset).model_dump(),
        }
        if self.evaluated is not self.cache:
            record["eval_features"] = place(self.evaluated)
        if self.captions is not None:
            record["caption_features"] = place(self.captions)
        if self.truths is not None:
            record["truth_features"] = place(self.truths)
        if self.base is not None:
            record["start_from"] = relative_path(self.base.path, folder)
        if self.transformer is not None and self.transformer.commit is not None:
            record["transformer_commit"] = self.transformer.commit
        if self.words is not None:
            record["words"] = relative_path(self.words, folder)
        return record


def open_inputs(
    cache: FeatureCache,
    dataset: Dataset,
    experiment: ExperimentPlan,
    folder: RunFolder,
    seed: int,
    paths: TrainInputs,
    caption_encoder: EncoderSettings | None = None,
    texts: TextRows = "captions",
) -> Inputs:
    """Find and check all inputs of an experiment besides ``cache``; its ``caption_encoder`` may have a tokenizer of its own.

    ``texts`` states whether captions or phrases are matched.
    """
    evaluated = _evaluated(cache, experiment, paths.eval_features)
    for images in {cache.path: cache, evaluated.path: evaluated}.values():
        check_data(images, dataset)
        if images.kind != "image":
            raise UserError(f"{images.path} holds {images.describe()}; features of images are needed")
    base = _base(experiment, dataset.name, seed, folder, paths.start_from)
    captions = _captions(cache, dataset, experiment, paths.caption_features, texts)
    truths = _truths(cache, experiment, paths.truth_features)
    if truths is not None:
        check_data(truths, dataset)
    transformer = None
    if captions is None and caption_encoder is not None:
        transformer = caption_encoder.transformer(paths.weights_dir, lambda: _training_words(dataset))
    base_sha256 = "" if base is None else InputFile(base.best_file).sha256
    words_sha256 = None if paths.words is None else word_file_sha256(paths.words)
    read = cache, evaluated, captions, transformer, dataset, base, base_sha256
    return Inputs(*read, paths.weights_dir, paths.words, words_sha256, truths)


def _training_words(dataset: Dataset) -> Iterator[str]:
    for image in dataset.split("train"):
        for caption in image.captions:
            yield from caption.tokens


def _other(cache: FeatureCache, feature: str | None, path: Path | None, hint: str) -> FeatureCache:
    """Return the cache of ``feature`` next to ``cache``, or the cache at ``path``."""
    beside = cache.path.with_name(f"{cache.dataset}_{feature}.h5")
    if path is None and not beside.exists():
        raise UserError(f"{beside}: no such feature cache; {hint}")
    return open_cache(path or beside)


def _captions(
    cache: FeatureCache, dataset: Dataset, experiment: ExperimentPlan, path: Path | None, texts: TextRows
) -> FeatureCache | None:
    """Return the cache of captions, or of phrases."""
    if path is None and experiment.backbone is not None and read_backbone(cache) is not None:
        path = captions_cache_path(cache.path)
    if experiment.caption_feature is None and path is None:
        return None
    hint = f"{experiment.name} reads {texts} as {experiment.caption_feature!r}: extract it, or name its cache with "
    captions = _other(cache, experiment.caption_feature, path, f"{hint}--caption-features")
    check_text_rows(captions, texts)
    check_data(captions, dataset)
    return captions


def _truths(cache: FeatureCache, experiment: ExperimentPlan, path: Path | None) -> FeatureCache | None:
    """Return the cache of regions at ground-truth boxes, computed by the same network as the candidates."""
    if experiment.truth_feature is None and path is None:
        return None
    hint = f"{experiment.name} is trained on {experiment.truth_feature!r}: extract it, or name its cache with --truth-features"
    truths = _other(cache, experiment.truth_feature, path, hint)
    _check_compatible(truths, cache)
    return truths


def _evaluated(cache: FeatureCache, experiment: ExperimentPlan, path: Path | None) -> FeatureCache:
    """Return the cache for validation and test."""
    if experiment.eval_feature is None and path is None:
        return cache
    hint = f"{experiment.name} is validated on {experiment.eval_feature!r}: extract it, name its cache with --eval-features, "
    hint += "or --set eval_feature=null to validate on the cache that it trains on"
    evaluated = _other(cache, experiment.eval_feature, path, hint)
    _check_compatible(evaluated, cache)
    return evaluated


def _check_compatible(other: FeatureCache, cache: FeatureCache) -> None:
    """Raise :class:`UserError` if a model that reads one of two caches of images cannot read the other."""
    if (other.dataset, other.dim) != (cache.dataset, cache.dim):
        raise UserError(
            f"{other.path} holds {other.dim} numbers per vector of {other.dataset!r}, "
            f"{cache.path} {cache.dim} of {cache.dataset!r}"
        )
    if (other.row_kind == "sets") != (cache.row_kind == "sets"):
        raise UserError(f"{other.path} holds {other.describe()}, {cache.path} {cache.describe()}")
    networks = [c.provenance.get("weights_sha256") for c in (other, cache)]
    if None not in networks and networks[0] != networks[1]:
        raise UserError(f"{other.path} and {cache.path} were computed by networks with different weights")
    check_same_photos(cache, other)


def _base(experiment: ExperimentPlan, dataset: str, seed: int, folder: RunFolder, path: Path | None) -> RunFolder | None:
    """Return the run whose weights this one starts from."""
    if experiment.start_from is None and path is None:
        return None
    base = RunFolder(path or folder.path.parent.parent / f"{dataset}_{experiment.start_from}" / f"seed-{seed}")
    if not base.best_file.is_file():
        raise UserError(
            f"{base.path}: no trained run to start from, but {experiment.name} starts from {experiment.start_from!r}: train "
            f"it "
            "first, or name its run folder with --start-from"
        )
    if base.path.resolve() == folder.path.resolve():
        raise UserError(f"{base.path}: output is also an input; a run that starts from this one requires another --out")
    return base
