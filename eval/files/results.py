"""The files that ``vse-eval`` writes, results and comparisons: signed when written, checked when read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Len
from pydantic import AfterValidator, BaseModel, ConfigDict, StrictInt, ValidationError

from vse.eval.ranking.metrics import FOLD
from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, sha256_file, sha256_json

log = logging.getLogger(__name__)
VERSION = 1
COMPARISON_VERSION = 1


class _OverSeeds(BaseModel):
    mean: float
    std: float


def _ascending(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("low above high")
    return interval


_Figure = float | _OverSeeds
_Direction = dict[str, _Figure]
_Interval = Annotated[tuple[float, float], AfterValidator(_ascending)]


class _Protocol(BaseModel):
    model_config = ConfigDict(extra="allow")
    i2t: _Direction = {}
    t2i: _Direction = {}
    s2s: _Direction = {}
    rsum: _Figure | None = None
    mean_recall: _Figure | None = None
    ci95: dict[str, _Interval | dict[str, _Interval]] = {}
    per_fold: list[dict[str, _Figure | _Direction]] = []


class _Result(BaseModel):
    model_config = ConfigDict(extra="allow")
    dataset: str
    experiment: str
    split: str
    n_images: StrictInt
    n_captions: StrictInt
    seeds: Annotated[list[StrictInt], Len(1)]
    protocols: dict[str, _Protocol]
    provenance: dict[str, Any] = {}


class _Compared(BaseModel):
    a: float
    b: float
    difference: float
    ci95: _Interval
    p: float


class _Model(BaseModel):
    experiment: str
    seeds: list[int]


class _Comparison(BaseModel):
    model_config = ConfigDict(extra="allow")
    dataset: str
    split: str
    n_images: StrictInt
    a: _Model
    b: _Model
    comparisons: dict[str, dict[str, _Compared | dict[str, _Compared]]]
    sha256: str


_Schema = TypeVar("_Schema", bound=BaseModel)


def read_result(path: Path) -> dict[str, Any]:
    """A result file; :class:`UserError` if it is none, or was changed after ``vse-eval`` wrote it."""
    return _read(path, VERSION, "protocols", _Result, "a result file of vse-eval")


def read_comparison(path: Path) -> dict[str, Any]:
    """A comparison file; :class:`UserError` if it is none, or was changed after ``vse-eval`` wrote it."""
    return _read(path, COMPARISON_VERSION, "comparisons", _Comparison, "a comparison of vse-eval --compare")


def distinct(protocols: Mapping[str, Any], n_images: int) -> dict[str, Any]:
    """The protocols of a result or a comparison, but ``1k`` where its one fold is the whole split, as ``full`` is."""
    repeated = n_images <= FOLD and "full" in protocols
    return {name: found for name, found in protocols.items() if name != "1k" or not repeated}


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


def file_reference(embeddings: Path, out: Path) -> dict[str, str]:
    """Where a file of embeddings lies, seen from the file ``out``, and its SHA-256."""
    return {"file": os.path.relpath(embeddings, out.parent), "sha256": sha256_file(embeddings)}


def _read(path: Path, version: int, key: str, schema: type[_Schema], what: str) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("version") != version or key not in content:
        raise UserError(f"{path}: not {what}")
    if "sha256" in content and content["sha256"] != content_sha256(content):
        raise UserError(
            f"{path}: was edited after vse-eval wrote it (its sha256 is of another content); remove it and evaluate again"
        )
    try:
        schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: not {what}: {place}: {first['msg']}; evaluate again") from None
    return content
