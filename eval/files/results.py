"""Schemas and readers of the JSON files that ``vse-eval`` writes: results of one model, and comparisons of two models."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from annotated_types import Len
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from vse.eval.files.cards import DifferingFact, display_name
from vse.eval.options import N_IMAGES_PER_FOLD, published_folder
from vse.eval.ranking.metrics import DIRECTIONS
from vse.pipeline.dataset.identity import DataChecksums
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import ModelOutputMetadata
from vse.pipeline.files.outputs import json_kind
from vse.pipeline.files.writing import read_json, sha256_json
from vse.pipeline.presets.preset_files import read_yaml

log = logging.getLogger(__name__)


class SplitIdentity(BaseModel):
    """The identity of the images of a split.

    Attributes
    ----------
    ids : the name of the array whose ids are hashed: ``coco_ids`` or ``image_ids``
    sha256 : SHA-256 of the sorted ids, written as a canonical JSON list
    name : name of the published test split with these images, e.g. ``karpathy``; None without such a split
    """

    ids: str = Field(description="name of the array whose ids are hashed: coco_ids or image_ids")
    sha256: str
    name: str | None = None


def split_identity_from_ids(dataset: str, kind: str, ids: NDArray[np.int64]) -> SplitIdentity:
    """Return the identity of the images with ``ids`` (n,).

    ``kind`` is the name of the array with these ids, ``image_ids`` or ``coco_ids``. If a published split of ``dataset`` has
    the same ids, the identity has its name.
    """
    sha256 = sha256_json(sorted(ids.tolist()))
    return SplitIdentity(ids=kind, sha256=sha256, name=find_split_name(dataset, sha256))


def find_split_name(dataset: str, sha256: str) -> str | None:
    """Return the name of the published test split whose image ids have the hash ``sha256``; None if there is no such split.

    The published splits of ``dataset`` are in ``config/published/splits.yaml``. The folder in the environment variable
    ``VSE_PRESETS`` may have a further file ``published/splits.yaml``.
    """
    return next((name for name, known in _read_published_splits(dataset) if known == sha256), None)


def _read_published_splits(dataset: str) -> Iterator[tuple[str, str]]:
    user_folder = os.environ.get("VSE_PRESETS")
    for folder in [*([Path(user_folder, "published")] if user_folder else []), published_folder()]:
        path = folder / "splits.yaml"
        if not path.is_file():
            continue
        content = read_yaml(path) or {}
        splits = (content.get(dataset) or {}) if isinstance(content, dict) else None
        if not isinstance(splits, dict):
            raise UserError(f"{path}: names splits as DATASET: {{ NAME: SHA-256 }}")
        for name, hashes in splits.items():
            for sha256 in hashes if isinstance(hashes, list) else [hashes]:
                yield str(name), str(sha256)


RESULT_KIND = json_kind("a result of vse-eval", "version", "dataset", "split", "seeds", "protocols")
COMPARISON_KIND = json_kind("a comparison of vse-eval", "version", "dataset", "split", "comparisons")
UNSAVED_RESULT_PATH = Path("result.json")  # stands for the path of a result that is not written to a file
RESULT_VERSION = 1
COMPARISON_VERSION = 1


class SeedStatistics(BaseModel):
    """The mean and the sample standard deviation of a metric over several seeds."""

    mean: float
    std: float


def _check_ascending(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("the lower end is above the upper end")
    return interval


Metric = float | SeedStatistics
Interval = Annotated[tuple[float, float], AfterValidator(_check_ascending)]
_FoldMetrics = dict[str, Metric | dict[str, Metric]]


class ProtocolMetrics(BaseModel):
    """The metrics of a protocol.

    ``directions`` has the metrics of each direction, such as ``i2t``. In a result file, the directions are keys of the
    protocol itself. ``rsum`` is the sum of the six recalls of ``i2t`` and ``t2i``, and ``mean_recall`` is their mean. ``ci95``
    has the 95% intervals of all metrics.

    The protocol ``phrase`` also has ``per_type``, the metrics of each type of phrases, and ``iou``: a candidate box is right
    if its IoU (intersection over union) with the true box is at least ``iou``. ``n_phrases`` counts the phrases with a true
    box, ``n_without_box`` the other phrases, and ``n_without_candidate`` the phrases with a true box but no candidate box.
    """

    model_config = ConfigDict(extra="allow")
    directions: dict[str, dict[str, Metric]] = {}
    per_type: dict[str, dict[str, Metric]] = {}
    iou: float | None = None
    n_phrases: int | None = None
    n_without_box: int | None = None
    n_without_candidate: int | None = None
    rsum: Metric | None = None
    mean_recall: Metric | None = None
    ci95: dict[str, Interval | dict[str, Interval | dict[str, Interval]]] = {}
    folds: int = 1
    per_fold: list[_FoldMetrics] = []

    @model_validator(mode="before")
    @classmethod
    def _group_directions(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        others = {name: value for name, value in content.items() if name not in DIRECTIONS and name != "directions"}
        return {**others, "directions": {name: content[name] for name in DIRECTIONS if content.get(name, {}) != {}}}

    @property
    def metrics_over_directions(self) -> dict[str, Metric]:
        sums = {"rsum": self.rsum, "mean_recall": self.mean_recall}
        return {name: metric for name, metric in sums.items() if metric is not None}

    def metric(self, name: str) -> Metric | None:
        """Return the metric with a name such as ``i2t_r1`` or ``rsum``; None if the protocol does not have this metric."""
        direction, _, rest = name.partition("_")
        return self.metrics_over_directions.get(name, self.directions.get(direction, {}).get(rest))

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return the 95% interval of a metric such as ``i2t_r1``; None if the file does not have this interval."""
        direction, _, rest = name.partition("_")
        direction_intervals = self.ci95.get(direction)
        nested = direction_intervals.get(rest) if isinstance(direction_intervals, dict) else None
        interval = self.ci95.get(name, nested)
        return None if isinstance(interval, dict) else interval

    def type_interval(self, type_name: str, metric: str) -> tuple[float, float] | None:
        """Return the 95% interval of a metric for the phrases of a type; None if the file has no such interval."""
        intervals_by_type = self.ci95.get("per_type")
        type_intervals = intervals_by_type.get(type_name) if isinstance(intervals_by_type, dict) else None
        interval = type_intervals.get(metric) if isinstance(type_intervals, dict) else None
        return None if isinstance(interval, dict) else interval


class EnsembleMember(BaseModel):
    """One of the models whose scores an ensemble averages. ``seed`` is None if the seed is not known."""

    experiment: str
    seed: StrictInt | None


class PhraseEnsemble(BaseModel):
    """The ensemble of an image-sentence model and a phrase model, which scores phrases with regions.

    ``alpha`` is the weight of the phrase model's scores. ``rsum_val`` maps each weight that was tried to its rsum (the sum of
    six recalls) on the validation split.
    """

    alpha: float
    rsum_val: dict[str, float] = {}
    n_captions_without_phrases: StrictInt
    n_images_without_regions: StrictInt


class Result(BaseModel):
    """The content of a result file.

    ``trained_on`` is the data set of the training, or None if the model was trained on ``dataset``. ``unfinished`` lists the
    runs whose training did not finish, each with the path of its embeddings (``file``) and a ``state`` such as ``diverged``.
    An unknown seed is None in ``seeds``.
    """

    model_config = ConfigDict(extra="allow")
    dataset: str
    experiment: str
    split: str
    n_images: StrictInt
    n_captions: StrictInt
    seeds: Annotated[list[StrictInt | None], Len(1)]
    protocols: dict[str, ProtocolMetrics]
    split_identity: SplitIdentity | None = None
    data: DataChecksums | None = None
    provenance: dict[str, Any] = {}
    ensemble: list[EnsembleMember] = []
    combination: PhraseEnsemble | None = None
    index: dict[str, Any] = {}
    rerank: list[dict[str, Any]] = []
    trained_on: str | None = None
    unfinished: list[dict[str, str]] = []
    cross_check: dict[str, dict[str, Any]] = {}
    judgements: dict[str, dict[str, Any]] = {}
    choices: dict[str, dict[str, Any]] = {}
    correction: dict[str, Any] | None = None
    hubness: dict[str, dict[str, Metric]] = {}
    language: str | None = None
    compression: list[dict[str, Any]] = []
    sha256: str | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings of the model; empty if they are not recorded."""
        config = self.provenance.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def display_name(self) -> str:
        return display_name(self.experiment, self.provenance) + self.evaluation_suffix

    @property
    def evaluation_suffix(self) -> str:
        """The text that tables append to a method's name: the language of the captions, or the correction of the scores.

        An example is `` (de)``. Another is `` + csls (bank train)``, for scores that the method csls corrected by queries of
        the training split. The text is empty without a language and without a correction.
        """
        if self.language is not None:
            return f" ({self.language})"
        if self.correction is None:
            return ""
        bank = f"bank {self.correction['bank']}{', transductive' if self.correction.get('transductive') else ''}"
        return f" + {self.correction['method']} ({bank})"


class ComparedMetric(BaseModel):
    """A metric of two models on the same queries: its values ``a`` and ``b``, and their ``difference`` a - b.

    ``ci95`` is the 95% interval of the difference, and ``p`` its p-value.
    """

    a: float
    b: float
    difference: float
    ci95: Interval
    p: float


class ComparedModel(BaseModel):
    """One of two compared models. Tables display ``name`` or, if ``name`` is empty, ``experiment``.

    ``embeddings`` has, for each seed, the path (``file``) and the SHA-256 (``sha256``) of the embeddings.
    """

    experiment: str
    name: str = ""
    seeds: list[StrictInt | None]
    embeddings: list[dict[str, str]] = []


class Comparison(BaseModel):
    """The content of a comparison file. ``comparisons`` has the compared metrics of each protocol.

    ``differing_facts`` are the facts in which the models differ, such as a setting, the features or the processor; None in
    files of earlier versions.
    """

    model_config = ConfigDict(extra="allow")
    dataset: str
    split: str
    data: DataChecksums | None = None
    n_images: StrictInt
    a: ComparedModel
    b: ComparedModel
    comparisons: dict[str, dict[str, ComparedMetric | dict[str, ComparedMetric]]]
    differing_facts: list[DifferingFact] | None = None
    provenance: dict[str, Any] = {}
    sha256: str


_Schema = TypeVar("_Schema", bound=BaseModel)
_Protocol = TypeVar("_Protocol")


def read_result(path: Path) -> Result:
    """Read a result file. Raises UserError if the file is not a result, or was edited after ``vse-eval`` wrote it."""
    return _read_schema(path, RESULT_VERSION, "protocols", Result, "a result file of vse-eval")


def read_comparison(path: Path) -> Comparison:
    """Read a comparison file. Raises UserError if the file is not a comparison, or was edited after ``vse-eval`` wrote it."""
    return _read_schema(path, COMPARISON_VERSION, "comparisons", Comparison, "a comparison of vse-eval --compare")


def check_consistent_data(files: Sequence[tuple[Path, Result | Comparison]]) -> None:
    """Raise UserError if two files have the same data set name, split and ids, but different photographs or captions."""
    known: dict[tuple[str, str, str], list[tuple[Path, DataChecksums]]] = {}
    for path, result in files:
        if result.data is None:
            continue
        others = known.setdefault((result.dataset, result.split, result.data.ids_sha256), [])
        for other_path, other in others:
            if differing := other.list_differences(result.data):
                raise UserError(
                    f"{path} and {other_path} have different data sets with the name {result.dataset!r}: their "
                    f"{' and '.join(differing)} differ; files that are compared must have the same data set"
                )
        others.append((path, result.data))


def mean_and_std(metric: Metric | None) -> tuple[float, float]:
    """Return the mean and the standard deviation of a metric over seeds.

    With one seed, the standard deviation is NaN. If ``metric`` is None, both are NaN.
    """
    if isinstance(metric, SeedStatistics):
        return metric.mean, metric.std
    return (math.nan if metric is None else metric), math.nan


def drop_repeated_protocols(protocols: Mapping[str, _Protocol], n_images: int) -> dict[str, _Protocol]:
    """Return ``protocols`` without the protocols that repeat the metrics of another protocol.

    On a split of at most 1,000 images, ``1k`` (folds of 1,000 images) repeats ``full``, and ``sentence-1k`` repeats
    ``sentence``.
    """
    folded = {"1k": "full", "sentence-1k": "sentence"}
    repeated = {name for name, whole in folded.items() if n_images <= N_IMAGES_PER_FOLD and whole in protocols}
    return {name: protocol for name, protocol in protocols.items() if name not in repeated}


def drop_comparisons(paths: Sequence[Path]) -> list[Path]:
    """Return ``paths`` without comparison files, and log a warning for each comparison file."""
    kept = []
    for path in paths:
        content = read_json(path)
        if isinstance(content, dict) and "comparisons" in content:
            log.warning("%s is left out: it is a comparison, which vse-table significance prints", path)
        else:
            kept.append(path)
    return kept


def drop_transductive_results(paths: Sequence[Path]) -> list[Path]:
    """Return ``paths`` without results whose scores were corrected by queries of the test split (transductive results).

    A warning is logged for each result that is left out.
    """
    kept = []
    for path in paths:
        content = read_json(path)
        correction = content.get("correction") if isinstance(content, dict) else None
        if isinstance(correction, dict) and correction.get("transductive"):
            log.warning(
                "%s is left out: its bank is the test split itself, so it is transductive (--transductive keeps it)", path
            )
        else:
            kept.append(path)
    return kept


def hash_file_content(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the content of a JSON file. The key ``sha256``, which stores this hash, is not hashed."""
    return sha256_json({name: value for name, value in content.items() if name != "sha256"})


def file_reference(embeddings: ModelOutputMetadata, out: Path) -> dict[str, str]:
    """Return the path and the SHA-256 of an embeddings file, as the dict ``{"file": ..., "sha256": ...}`` in results.

    The path is relative to the folder of ``out``. Raises ValueError if the embeddings were not read from a file.
    """
    if embeddings.source is None:
        raise ValueError("these embeddings were not read from a file")
    return {"file": os.path.relpath(embeddings.source.path, out.parent), "sha256": embeddings.source.sha256}


def _read_schema(path: Path, version: int, key: str, schema: type[_Schema], kind: str) -> _Schema:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("version") != version or key not in content:
        raise UserError(f"{path}: not {kind}")
    if "sha256" in content and content["sha256"] != hash_file_content(content):
        raise UserError(
            f"{path}: was edited after vse-eval wrote it (its sha256 does not match); remove it and evaluate again"
        )
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "directions")
        raise UserError(f"{path}: not {kind}: {place}: {first['msg']}; evaluate again") from None
