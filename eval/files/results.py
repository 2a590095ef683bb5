"""The files that ``vse-eval`` writes, results and comparisons: signed when written, checked when read."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Len
from pydantic import AfterValidator, BaseModel, ConfigDict, StrictInt, ValidationError

from vse.eval.defaults import FOLD
from vse.eval.files.hdf5_fields import Described
from vse.eval.files.split import SplitIdentity
from vse.pipeline.dataset.identity import DataChecksums
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import json_kind
from vse.pipeline.files.writing import read_json, sha256_json

log = logging.getLogger(__name__)
RESULT = json_kind("a result of vse-eval", "version", "dataset", "split", "seeds", "protocols")
COMPARISON = json_kind("a comparison of vse-eval", "version", "dataset", "split", "comparisons")
VERSION = 1
COMPARISON_VERSION = 1


class OverSeeds(BaseModel):
    """A metric over several seeds: its mean, and the sample's standard deviation."""

    mean: float
    std: float


def _ascending(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("low above high")
    return interval


Metric = float | OverSeeds
Interval = Annotated[tuple[float, float], AfterValidator(_ascending)]
_Fold = dict[str, Metric | dict[str, Metric]]


class ProtocolMetrics(BaseModel):
    """The metrics of a protocol: of each direction by name, and the sums of both; ``ci95`` has their 95% intervals.

    The protocol ``phrase`` has those of ``phrase`` and ``per_type``, and the IoU from which on a candidate was right.
    """

    model_config = ConfigDict(extra="allow")
    i2t: dict[str, Metric] = {}
    t2i: dict[str, Metric] = {}
    s2s: dict[str, Metric] = {}
    i2i: dict[str, Metric] = {}
    t2t: dict[str, Metric] = {}
    phrase: dict[str, Metric] = {}
    per_type: dict[str, dict[str, Metric]] = {}
    iou: float | None = None
    n_phrases: int | None = None
    n_without_box: int | None = None
    n_without_candidate: int | None = None
    rsum: Metric | None = None
    mean_recall: Metric | None = None
    ci95: dict[str, Interval | dict[str, Interval | dict[str, Interval]]] = {}
    folds: int = 1
    per_fold: list[_Fold] = []

    @property
    def directions(self) -> dict[str, dict[str, Metric]]:
        """The metrics of the directions that have any."""
        names = ("i2t", "t2i", "i2i", "t2t", "s2s", "phrase")
        directions: dict[str, dict[str, Metric]] = {name: getattr(self, name) for name in names}
        return {direction: metrics for direction, metrics in directions.items() if metrics}

    @property
    def sums(self) -> dict[str, Metric]:
        """The metrics of both directions together."""
        sums = {"rsum": self.rsum, "mean_recall": self.mean_recall}
        return {name: metric for name, metric in sums.items() if metric is not None}

    def metric(self, name: str) -> Metric | None:
        """A metric by the name of its column, e.g. ``i2t_r1`` or ``rsum``; None if it is not there."""
        direction, _, rest = name.partition("_")
        return self.sums.get(name, self.directions.get(direction, {}).get(rest))

    def interval(self, name: str) -> tuple[float, float] | None:
        """The 95% interval of a metric, e.g. of ``i2t_r1``; None if it has none."""
        direction, _, rest = name.partition("_")
        of_direction = self.ci95.get(direction)
        nested = of_direction.get(rest) if isinstance(of_direction, dict) else None
        interval = self.ci95.get(name, nested)
        return None if isinstance(interval, dict) else interval

    def interval_of_type(self, name: str, metric: str) -> tuple[float, float] | None:
        """The 95% interval of a metric of the phrases of a type; None if it has none."""
        of_types = self.ci95.get("per_type")
        of_type = of_types.get(name) if isinstance(of_types, dict) else None
        interval = of_type.get(metric) if isinstance(of_type, dict) else None
        return None if isinstance(interval, dict) else interval


class Member(BaseModel):
    """A member of an ensemble; ``seed`` is None if its file does not say."""

    experiment: str
    seed: StrictInt | None


class Combination(BaseModel):
    """How an image-sentence model and a phrase model were combined (see :mod:`vse.eval.protocols.ensemble`).

    ``rsum_val`` is the rsum on the validation split of each ``alpha`` that was tried there.
    """

    alpha: float
    rsum_val: dict[str, float] = {}
    n_captions_without_phrases: StrictInt
    n_images_without_regions: StrictInt


class Result(BaseModel):
    """A result file. A seed is None if the embeddings do not name it.

    ``trained_on`` is the data set that the model was trained on, if that is another one than ``dataset``; ``unfinished`` has
    the embeddings ``file`` and the ``state`` of each run whose training did not finish.
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
    ensemble: list[Member] = []
    combination: Combination | None = None
    index: dict[str, Any] = {}
    rerank: list[dict[str, Any]] = []
    trained_on: str | None = None
    unfinished: list[dict[str, str]] = []
    cross_check: dict[str, dict[str, Any]] = {}
    sha256: str | None = None

    @property
    def shown_name(self) -> str:
        """What tables call the model; see :func:`shown_name`."""
        return shown_name(self.experiment, self.provenance)


class ComparedMetric(BaseModel):
    """A metric of two models on the same queries: how far they are apart, and whether the test images explain it."""

    a: float
    b: float
    difference: float
    ci95: Interval
    p: float


class ComparedModel(BaseModel):
    """One of two models that are compared; ``name`` is what tables call it, if that is not its experiment."""

    experiment: str
    name: str = ""
    seeds: list[StrictInt | None]


class Comparison(BaseModel):
    """A comparison file: by protocol, then as in a result."""

    model_config = ConfigDict(extra="allow")
    dataset: str
    split: str
    data: DataChecksums | None = None
    n_images: StrictInt
    a: ComparedModel
    b: ComparedModel
    comparisons: dict[str, dict[str, ComparedMetric | dict[str, ComparedMetric]]]
    sha256: str


_CHANGE = re.compile(r"([^:]+): .* -> (.*)", re.DOTALL)
_Schema = TypeVar("_Schema", bound=BaseModel)
_Protocol = TypeVar("_Protocol")


def read_result(path: Path) -> Result:
    """A result file; :class:`UserError` if it is none, or was changed after ``vse-eval`` wrote it."""
    return _read(path, VERSION, "protocols", Result, "a result file of vse-eval")


def read_comparison(path: Path) -> Comparison:
    """A comparison file; :class:`UserError` if it is none, or was changed after ``vse-eval`` wrote it."""
    return _read(path, COMPARISON_VERSION, "comparisons", Comparison, "a comparison of vse-eval --compare")


def check_one_data(files: Sequence[tuple[Path, Result | Comparison]]) -> None:
    """Raise UserError if two results or comparisons are of one name, split and ids, but of other photographs or captions."""
    known: dict[tuple[str, str, str], list[tuple[Path, DataChecksums]]] = {}
    for path, result in files:
        if result.data is None:
            continue
        others = known.setdefault((result.dataset, result.split, result.data.ids_sha256), [])
        for other_path, other in others:
            if differing := other.differences(result.data):
                raise UserError(
                    f"{path} and {other_path} are of different data sets called {result.dataset!r}: their "
                    f"{' and '.join(differing)} differ; results side by side must be of one data set"
                )
        others.append((path, result.data))


def shown_name(experiment: str, provenance: Mapping[str, Any]) -> str:
    """What to call a model: what ``vse-train --name`` gave or, without it, its experiment and the settings that were changed.

    ``vsepp[margin=0.1]`` is a run of ``vsepp`` with another margin. Which features it read is no part of the name.
    """
    config = provenance.get("config")
    label = config.get("label") if isinstance(config, Mapping) else None
    return str(label) if label else experiment + changes_suffix(provenance)


def changes_suffix(provenance: Mapping[str, Any]) -> str:
    """``[margin=0.1]`` for the settings in which a run is not its preset; empty without any."""
    changes = [match.groups() for text in changed_settings_of(provenance) if (match := _CHANGE.match(text))]
    shown = {key: value for key, value in changes if not key.endswith(("feature", "code_sha256"))}
    last = [key.rpartition(".")[2] for key in shown]
    names = [name if last.count(name) == 1 else key for key, name in zip(shown, last, strict=True)]
    return f"[{', '.join(f'{name}={value}' for name, value in zip(names, shown.values(), strict=True))}]" if names else ""


def changed_settings_of(provenance: Mapping[str, Any]) -> list[str]:
    """``loss.margin: 0.2 -> 0.1`` for every setting in which a run is not its preset, as far as the file says."""
    noted = provenance.get("changed_settings")
    return [text for text in noted if isinstance(text, str)] if isinstance(noted, list) else []


def mean_and_std(metric: Metric | None) -> tuple[float, float]:
    """A metric and its standard deviation over seeds; NaN is what is not known."""
    if isinstance(metric, OverSeeds):
        return metric.mean, metric.std
    return (math.nan if metric is None else metric), math.nan


def distinct(protocols: Mapping[str, _Protocol], n_images: int) -> dict[str, _Protocol]:
    """The protocols of a result or a comparison, but those whose one fold is the whole split where that is there, too."""
    folded = {"1k": "full", "sentence-1k": "sentence"}
    repeated = {name for name, whole in folded.items() if n_images <= FOLD and whole in protocols}
    return {name: protocol for name, protocol in protocols.items() if name not in repeated}


def without_comparisons(paths: Sequence[Path]) -> list[Path]:
    """Those of some files that are no comparisons, which may lie in the same folder; a line says which are."""
    kept = []
    for path in paths:
        content = read_json(path)
        if isinstance(content, dict) and "comparisons" in content:
            log.warning("%s is left out: it is a comparison, of which vse-table significance makes a table", path)
        else:
            kept.append(path)
    return kept


def content_sha256(content: Mapping[str, Any]) -> str:
    """SHA-256 of all of a file but its own ``sha256``, by which a later change of the file is noticed."""
    return sha256_json({name: value for name, value in content.items() if name != "sha256"})


def file_reference(embeddings: Described, out: Path) -> dict[str, str]:
    """The path of an embeddings file, relative to the folder of the file ``out``, and the SHA-256 of what was read of it."""
    if embeddings.source is None:
        raise ValueError("embeddings that were read from no file")
    return {"file": os.path.relpath(embeddings.source.path, out.parent), "sha256": embeddings.source.sha256}


def _read(path: Path, version: int, key: str, schema: type[_Schema], what: str) -> _Schema:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("version") != version or key not in content:
        raise UserError(f"{path}: not {what}")
    if "sha256" in content and content["sha256"] != content_sha256(content):
        raise UserError(
            f"{path}: was edited after vse-eval wrote it (its sha256 is of another content); remove it and evaluate again"
        )
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: not {what}: {place}: {first['msg']}; evaluate again") from None
