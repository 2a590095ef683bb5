"""Presets by name or path as layers of settings: what they extend, the data set's changes and ``--set``, under a schema.

Where the schema says that a field is a part (:mod:`vse.pipeline.presets.parts`), layers are merged by the part's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.presets.parts import Registry, find_default_part, find_group, find_registry
from vse.pipeline.presets.preset_files import NOT_INHERITED, parse_yaml, preset_layers, read_yaml
from vse.pipeline.presets.preset_files import known_presets as known_presets
from vse.pipeline.presets.preset_files import preset_descriptions as preset_descriptions
from vse.pipeline.presets.schema import (
    ENSEMBLE_KEYS,
    ComposedName,
    DatasetConfig,
    ExperimentPlan,
    LadderConfig,
    Settings,
    WorkflowConfig,
    parse_composed_name,
)

_Schema = TypeVar("_Schema", bound=Settings)
_BOUND = ("ensemble_of", "backbone", "start_from", "truth_feature")  # to caches or runs that other features do not fit
_FIXED = ("name", "extractor", "ensemble_of")  # of a preset as a whole: no setting


def load_dataset(name: str) -> DatasetConfig:
    """The data set preset ``name``."""
    return validate_settings(DatasetConfig, "data set", name, read_preset("datasets", name))


def load_plan(name: str, dataset: str | None = None, sets: Sequence[str] = ()) -> ExperimentPlan:
    """What the workflow needs to know of the experiment ``name``; its other settings are not checked.

    The members of an ensemble are: :class:`UserError` if one is no experiment, or an ensemble itself.
    """
    plan = validate_settings(ExperimentPlan, "experiment", name, read_experiment_settings(name, dataset, sets, ExperimentPlan))
    known = known_presets("experiments")
    for member in plan.ensemble_of:
        if not is_experiment(member):
            raise UserError(f"experiment {name!r}: ensemble_of: unknown experiment {member!r}{did_you_mean(member, known)}")
        if "ensemble_of" in read_preset("experiments", member):
            raise UserError(f"experiment {name!r}: ensemble_of: {member!r} is an ensemble itself; name its members instead")
    for key, base in (("start_from", plan.start_from), ("backbone", plan.backbone)):
        if base in known and "ensemble_of" in read_preset("experiments", str(base)):
            raise UserError(f"experiment {name!r}: {key}: {base!r} is an ensemble, which has no weights")
    return plan


def load_ladder(name: str) -> LadderConfig:
    """The ladder ``name``; :class:`UserError` if one of its experiments is none."""
    ladder = validate_settings(LadderConfig, "ladder", name, read_preset("ladders", name))
    for experiment in ladder.experiments:
        if experiment not in known_presets("experiments"):
            near = did_you_mean(experiment, known_presets("experiments"))
            raise UserError(f"ladder {name!r}: unknown experiment {experiment!r}{near}")
    return ladder


def is_experiment(name: str) -> bool:
    """Whether ``name`` is that of an experiment: of a preset, or composed of one and of features."""
    made = parse_composed_name(name)
    if made is None or made.experiment not in known_presets("experiments"):
        return made is None and name in known_presets("experiments")
    if made.ladder is None:
        return True
    return made.ladder in known_presets("ladders") and made.experiment in load_ladder(made.ladder).experiments


def load_workflow(overrides: Mapping[str, Any]) -> WorkflowConfig:
    """The workflow's settings with ``--config`` on top; ``<dataset>_dir`` names a data set's source folder."""
    datasets = known_presets("datasets")
    short = {key.removesuffix("_dir"): str(value) for key, value in overrides.items() if key.removesuffix("_dir") in datasets}
    rest = {key: value for key, value in overrides.items() if key.removesuffix("_dir") not in datasets}
    defaults = read_yaml(Path(str(files("vse.presets").joinpath("config.yaml"))))
    content = merge_settings(merge_settings(defaults, rest, WorkflowConfig, replace=True), {"sources": short})
    return validate_settings(WorkflowConfig, "workflow", "--config", content)


def read_preset(kind: str, name: str, schema: type[BaseModel] | None = None) -> dict[str, Any]:
    """The settings of a preset by name or path, on top of those of the presets that it ``extends``."""
    made = parse_composed_name(name) if kind == "experiments" else None
    content: dict[str, Any] = {}
    for layer in preset_layers(kind, name if made is None else made.experiment):
        content = merge_settings(content, layer, schema)
    return content if made is None else _composed(made, content, schema)


def read_experiment_settings(name: str, dataset: str | None, sets: Sequence[str], schema: type[Settings]) -> dict[str, Any]:
    """All layers of an experiment's settings: its presets, the data set's changes of all and of this one, and ``--set``.

    A data set does not know which parts an experiment has: what it changes in every experiment concerns the parts that have
    such a setting, and no others; nor that it is an ensemble, which has few settings.
    """
    content = read_preset("experiments", name, schema)
    if dataset in known_presets("datasets"):
        changes = load_dataset(dataset)
        of_all = changes.experiment
        if "ensemble_of" in content:
            of_all = {key: value for key, value in of_all.items() if key in ENSEMBLE_KEYS}
        content = merge_settings(content, of_all, schema, lenient=True)
        made = parse_composed_name(name)
        if made is not None:
            content = _composed(made, merge_settings(content, changes.experiments.get(made.experiment, {}), schema), schema)
        content = merge_settings(content, changes.experiments.get(content["name"], {}), schema)
    return apply_overrides(schema, content, sets)


def _composed(made: ComposedName, base: Mapping[str, Any], schema: type[BaseModel] | None) -> dict[str, Any]:
    """The settings of a composed experiment on top of those of its ``base``.

    :class:`UserError` if that reads more than a feature of images and one of captions, or something else.
    """
    for key in _BOUND:
        if base.get(key):
            raise UserError(f"experiment {made.name!r}: {made.experiment} has {key}, so it takes no other features")
    content = {key: value for key, value in base.items() if key not in NOT_INHERITED}
    if made.ladder is not None:
        ladder = load_ladder(made.ladder)
        if made.experiment not in ladder.experiments:
            raise UserError(f"experiment {made.name!r}: the ladder {made.ladder!r} has no {made.experiment}")
        content = merge_settings(content, ladder.settings(made.experiment), schema)
    return {**content, **made.reads(), "name": made.name}


def merge_settings(
    base: Mapping[str, Any],
    over: Mapping[str, Any],
    schema: type[BaseModel] | None = None,
    *,
    lenient: bool = False,
    replace: bool = False,
) -> dict[str, Any]:
    """``base`` with the values of ``over`` on top, group by group; with a schema, a part is merged by its name.

    A part is given as its name alone or as its settings, without the name if that stays the same. If ``over`` names another
    part than ``base``, the settings that the new one has as well are kept, and the others dropped. ``lenient`` leaves out
    what ``over`` sets in a part that has no such setting. A dictionary, whose keys no schema lists, is merged key by key, and
    an empty one in ``over`` replaces it; with ``replace`` every one does.
    """
    result = dict(base)
    for key, value in over.items():
        field = schema is not None and key in schema.model_fields
        registry, group = (find_registry(schema, key), find_group(schema, key)) if schema and field else (None, None)
        if schema and registry:
            below = result[key] if key in result else find_default_part(schema, key)
            result[key] = _merged_part(registry, below, value, lenient, replace)
        elif field and not group and isinstance(value, Mapping) and (replace or not value):
            result[key] = dict(value)
        elif isinstance(value, Mapping) and (group or isinstance(result.get(key), Mapping)):
            if lenient and schema and field and result.get(key, schema.model_fields[key].default) is None:
                continue
            result[key] = merge_settings(_mapping(result.get(key)), value, group, lenient=lenient, replace=replace)
        else:
            result[key] = value
    return result


def apply_overrides(schema: type[Settings], content: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """``content`` with settings on top that are given as ``key=value``; an unknown key is answered with the nearest.

    A key of a part, such as ``loss.margin``, must be known to the part that is chosen in the end. A dictionary, such as
    ``train.frozen``, becomes the one that is given.
    """
    result, keys = dict(content), []
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"--set takes key=value, got {item!r}")
        try:
            value = parse_yaml(text)
        except Exception:  # odd dates and endless integers are others than YAML's own
            raise UserError(f"--set {item}: {text!r} is not a YAML value") from None
        for name in reversed(key.split(".")):
            value = {name: value}
        result = merge_settings(result, value, schema, replace=True)
        keys.append(key)
    for key in keys:
        if key in schema.renamed:
            raise UserError(f"{key} is now {schema.renamed[key]}")
        if key in _FIXED or not _is_known(schema, result, key.split(".")):
            raise UserError(f"unknown setting {key!r}{did_you_mean(key, _keys(schema, result))}")
    return result


def validate_settings(schema: type[_Schema], kind: str, name: str, content: Mapping[str, Any]) -> _Schema:
    """The settings ``content`` as a ``schema``; what is wrong with them is said of the ``kind`` and ``name`` of preset."""
    for key in _leaves(content):
        if key in schema.renamed:
            raise UserError(f"{kind} {name!r}: {key} is now {schema.renamed[key]}")
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = did_you_mean(key, _keys(schema, content))
            raise UserError(f"{kind} {name!r}: unknown setting {key!r}{known}") from None
        where = f"{kind} {name!r}: {key}" if key else f"{kind} {name!r}"
        raise UserError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def list_changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``loss.margin: 0.2 -> 0.1`` for every setting in which two configurations differ."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changes += list_changes(a, b, f"{prefix}{key}.")
        elif a != b:
            changes.append(f"{prefix}{key}: {a} -> {b}")
    return changes


def _merged_part(registry: Registry[Any], below: Any, above: Any, lenient: bool, replace: bool) -> Any:
    old, new = registry.as_settings(below), registry.as_settings(above)
    if new is None:
        return above
    kept, unnamed = old or {}, registry.key not in new
    name = kept.get(registry.key) if unnamed else new[registry.key]
    if not isinstance(name, str) or name not in registry:  # an error if it stays so, which the schema reports
        return below if lenient and unnamed else {**kept, **new}
    part = registry[name]
    if lenient and unnamed:
        new = {key: value for key, value in new.items() if key in part.model_fields}
    if name != kept.get(registry.key):
        kept = {key: value for key, value in kept.items() if key in part.model_fields and key != "code_sha256"}
    return merge_settings(kept, {registry.key: name, **new}, part, lenient=lenient, replace=replace)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_known(schema: type[BaseModel], content: Mapping[str, Any], path: Sequence[str]) -> bool:
    """Whether ``path`` leads to a setting, in the parts that ``content`` names; what is in no known part is left for later."""
    name, *rest = path
    if name not in schema.model_fields:
        return schema.model_config.get("extra") == "allow"
    if not rest:
        return True
    value = content.get(name)
    if registry := find_registry(schema, name):
        part = registry.find_class(value)
        return part is None or _is_known(part, _mapping(value), rest)
    group = find_group(schema, name)
    return group is not None and _is_known(group, _mapping(value), rest)


def _keys(schema: type[BaseModel], content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """All settings that there are, in the parts that ``content`` names."""
    for name in schema.model_fields:
        value = content.get(name)
        group = find_group(schema, name)
        if registry := find_registry(schema, name):
            group = registry.find_class(value if name in content else find_default_part(schema, name))
        if group:
            yield from _keys(group, _mapping(value), f"{prefix}{name}.")
        elif prefix or name not in _FIXED:
            yield prefix + name


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{prefix}{key}"
        yield from _leaves(_mapping(value), f"{prefix}{key}.")
