"""Presets by name or path, with ``extends``, the data set's own changes and ``--set``, checked against the schema.

Presets ship with the package. A folder laid out like ``config/`` and named by the environment variable
``VSE_PRESETS`` is searched first, and any preset can be given as the path of a YAML file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from vse.pipeline.config import DatasetConfig, ExperimentConfig, Settings, WorkflowConfig
from vse.pipeline.errors import UserError, did_you_mean

_Config = TypeVar("_Config", bound=Settings)


def load_dataset(name: str) -> DatasetConfig:
    """The data set preset ``name``."""
    return _validated(DatasetConfig, "data set", name, _read("datasets", name))


def load_experiment(name: str, dataset: str | None = None, sets: Sequence[str] = ()) -> ExperimentConfig:
    """The experiment preset ``name`` as ``dataset`` changes it, with ``key=value`` settings on top."""
    content = _read("experiments", name)
    if dataset in known_presets("datasets"):
        changes = load_dataset(dataset)
        content = merged(merged(content, changes.experiment), changes.experiments.get(content["name"], {}))
    return _validated(ExperimentConfig, "experiment", name, _with_sets(ExperimentConfig, content, sets))


def load_workflow(overrides: Mapping[str, Any]) -> WorkflowConfig:
    """The workflow's settings with ``--config`` on top; ``<dataset>_dir`` names a data set's source folder."""
    datasets = known_presets("datasets")
    short = {key.removesuffix("_dir"): str(value) for key, value in overrides.items() if key.removesuffix("_dir") in datasets}
    rest = {key: value for key, value in overrides.items() if key.removesuffix("_dir") not in datasets}
    defaults = yaml.safe_load(files("vse.presets").joinpath("config.yaml").read_text(encoding="utf-8"))
    content = merged(merged(defaults, rest), {"sources": short})
    return _validated(WorkflowConfig, "workflow", "--config", content)


def known_presets(kind: str) -> list[str]:
    """Names of the presets of a ``kind`` (``datasets``, ``features`` or ``experiments``)."""
    return sorted({path.stem for folder in _folders(kind) for path in folder.glob("*.yaml")})


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` on top, group by group."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``loss.margin: 0.2 -> 0.1`` for every setting in which two configurations differ."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changes += changed_fields(a, b, f"{prefix}{key}.")
        elif a != b:
            changes.append(f"{prefix}{key}: {a} -> {b}")
    return changes


def _folders(kind: str) -> list[Path]:
    own = os.environ.get("VSE_PRESETS")
    packaged = Path(str(files("vse.presets").joinpath(kind)))
    return [Path(own, kind), packaged] if own else [packaged]


def _read(kind: str, name: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A preset's settings, with those of the preset it ``extends`` underneath."""
    path = _find(kind, name)
    if path in above:
        raise UserError(f"{path}: extends itself ({' -> '.join(p.stem for p in (*above, path))})")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a preset is a YAML mapping")
    base = content.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise UserError(f"{path}: extends: takes the name of a preset, not {base!r}")
    inherited = _read(kind, base, (*above, path)) if base else {}
    inherited.pop("rows", None)  # a preset that changes another is not that one's row of a table
    return {**merged(inherited, content), "name": path.stem}


def _find(kind: str, name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"{name}: no such preset file")
        return path
    for folder in _folders(kind):
        if (path := folder / f"{name}.yaml").is_file():
            return path
    raise UserError(f"unknown {kind.removesuffix('s')} {name!r}{did_you_mean(name, known_presets(kind))}")


def _with_sets(schema: type[BaseModel], content: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    known = _keys(schema)
    result = dict(content)
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"--set takes key=value, got {item!r}")
        if key not in known:
            raise UserError(f"unknown setting {key!r}{did_you_mean(key, known)}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"--set {item}: {text!r} is not a YAML value") from None
        for part in reversed(key.split(".")):
            value = {part: value}
        result = merged(result, value)
    return result


def _keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += _keys(kind, f"{prefix}{name}.")
        elif prefix or name not in ("name", "extractor"):
            keys.append(prefix + name)
    return keys


def _validated(schema: type[_Config], kind: str, name: str, content: dict[str, Any]) -> _Config:
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        hint = did_you_mean(key, _keys(schema)) if first["type"] == "extra_forbidden" else ""
        where = f"{kind} {name!r}: {key}" if key else f"{kind} {name!r}"
        raise UserError(f"{where}: {first['msg'].removeprefix('Value error, ')}{hint}") from None
