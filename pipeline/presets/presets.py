"""Load presets: merge their layers of settings and validate the result against a schema.

The layers of an experiment are the presets that it extends, its own preset, the changes in the preset of the data set, and the
option ``--set``. Later layers replace settings of earlier layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.presets.parts import Registry, find_field_default, find_registry, find_settings_class
from vse.pipeline.presets.preset_files import NOT_INHERITED_KEYS, parse_yaml, read_preset_layers, read_yaml
from vse.pipeline.presets.preset_files import list_preset_names as list_preset_names
from vse.pipeline.presets.schema import (
    ENSEMBLE_KEYS,
    ComposedName,
    DatasetConfig,
    ExperimentOutline,
    LadderConfig,
    Settings,
    WorkflowConfig,
    parse_composed_name,
)

_Schema = TypeVar("_Schema", bound=Settings)
# Settings that only fit the features of the preset. An experiment with one of them cannot use other features.
_KEYS_BINDING_FEATURES = ("ensemble_of", "backbone", "start_from", "truth_feature")
_UNCHANGEABLE_KEYS = ("name", "extractor", "ensemble_of")  # keys of presets that --set does not change


def load_dataset_preset(name: str) -> DatasetConfig:
    """Load the preset of the data set ``name``. Raises UserError if the preset is unknown or not valid."""
    return validate_settings(DatasetConfig, "data set", name, read_preset_settings("datasets", name))


def load_experiment_outline(name: str, dataset: str | None = None, overrides: Sequence[str] = ()) -> ExperimentOutline:
    """Load the experiment ``name``, and check only the settings that the workflow needs.

    The preset of the data set ``dataset`` and ``overrides`` (``key=value``) may change settings. Raises UserError if a setting
    is not valid, or if a member of an ensemble is unknown or is an ensemble. Also raises UserError if ``start_from`` or
    ``backbone`` is an ensemble: these settings name experiments whose weights are reused, and an ensemble has no weights.
    """
    outline = validate_settings(
        ExperimentOutline, "experiment", name, read_experiment_settings(name, dataset, overrides, ExperimentOutline)
    )
    known = list_preset_names("experiments")
    for member in outline.ensemble_of:
        if not is_experiment(member):
            raise UserError(f"experiment {name!r}: ensemble_of: unknown experiment {member!r}{did_you_mean(member, known)}")
        if "ensemble_of" in read_preset_settings("experiments", member):
            raise UserError(f"experiment {name!r}: ensemble_of: {member!r} is an ensemble itself; name its members instead")
    for key, base in (("start_from", outline.start_from), ("backbone", outline.backbone)):
        if base in known and "ensemble_of" in read_preset_settings("experiments", str(base)):
            raise UserError(f"experiment {name!r}: {key}: {base!r} is an ensemble, which has no weights")
    return outline


def load_ladder(name: str) -> LadderConfig:
    """Load the ladder ``name``: a comparison of all combinations of some experiments and features.

    Raises UserError if the ladder is unknown or not valid, or has an unknown experiment.
    """
    ladder = validate_settings(LadderConfig, "ladder", name, read_preset_settings("ladders", name))
    for experiment in ladder.experiments:
        if experiment not in list_preset_names("experiments"):
            hint = did_you_mean(experiment, list_preset_names("experiments"))
            raise UserError(f"ladder {name!r}: unknown experiment {experiment!r}{hint}")
    return ladder


def is_experiment(name: str) -> bool:
    """Return whether an experiment has this name, such as ``vsepp``, ``vsepp+tfidf+effnet`` or ``vsepp@f8k+tfidf+effnet``."""
    composed = parse_composed_name(name)
    if composed is None or composed.experiment not in list_preset_names("experiments"):
        return composed is None and name in list_preset_names("experiments")
    if composed.ladder is None:
        return True
    return composed.ladder in list_preset_names("ladders") and composed.experiment in load_ladder(composed.ladder).experiments


def load_workflow_settings(overrides: Mapping[str, Any]) -> WorkflowConfig:
    """Load the settings of the workflow; ``overrides`` are the values of ``snakemake --config``.

    A key such as ``f8k_dir`` sets the folder of the published files of the data set ``f8k``.
    """
    datasets = list_preset_names("datasets")
    sources = {
        key.removesuffix("_dir"): str(value) for key, value in overrides.items() if key.removesuffix("_dir") in datasets
    }
    rest = {key: value for key, value in overrides.items() if key.removesuffix("_dir") not in datasets}
    defaults = read_yaml(Path(str(files("vse.presets").joinpath("config.yaml"))))
    content = merge_settings(merge_settings(defaults, rest, WorkflowConfig, replace=True), {"sources": sources})
    return validate_settings(WorkflowConfig, "workflow", "--config", content)


def read_preset_settings(kind: str, name: str, schema: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the settings of a preset, merged with the settings of the presets that it ``extends``.

    ``kind`` is a folder of presets, such as ``experiments``. ``name`` is the name of the preset or the path of its file.
    """
    composed = parse_composed_name(name) if kind == "experiments" else None
    content: dict[str, Any] = {}
    for layer in read_preset_layers(kind, name if composed is None else composed.experiment):
        content = merge_settings(content, layer, schema)
    return content if composed is None else _compose_settings(composed, content, schema)


def read_experiment_settings(
    name: str, dataset: str | None, overrides: Sequence[str], schema: type[Settings]
) -> dict[str, Any]:
    """Return the settings of an experiment, changed by the preset of ``dataset`` (if any) and by ``overrides``.

    The preset of a data set may have changes for all experiments, and changes for this experiment, which are applied last. A
    change for all experiments is ignored if the experiment lacks the setting, because it is an ensemble or because of its
    chosen classes, such as its loss.
    """
    content = read_preset_settings("experiments", name, schema)
    if dataset in list_preset_names("datasets"):
        changes = load_dataset_preset(dataset)
        general = changes.experiment
        if "ensemble_of" in content:
            general = {key: value for key, value in general.items() if key in ENSEMBLE_KEYS}
        content = merge_settings(content, general, schema, lenient=True)
        composed = parse_composed_name(name)
        if composed is not None:
            content = merge_settings(content, changes.experiments.get(composed.experiment, {}), schema)
            content = _compose_settings(composed, content, schema)
        content = merge_settings(content, changes.experiments.get(content["name"], {}), schema)
    return apply_overrides(schema, content, overrides)


def _compose_settings(composed: ComposedName, base: Mapping[str, Any], schema: type[BaseModel] | None) -> dict[str, Any]:
    """Return the settings of a composed experiment, such as ``vsepp@f8k+tfidf+effnet``. ``base`` are those of ``vsepp``.

    The result reads the features in the name. A ladder (a comparison, here ``f8k``) may also change settings. Raises UserError
    if the experiment cannot read other features, or if the ladder lacks the experiment.
    """
    for key in _KEYS_BINDING_FEATURES:
        if base.get(key):
            raise UserError(f"experiment {composed.name!r}: {composed.experiment} has {key}, so it takes no other features")
    content = {key: value for key, value in base.items() if key not in NOT_INHERITED_KEYS}
    if composed.ladder is not None:
        ladder = load_ladder(composed.ladder)
        if composed.experiment not in ladder.experiments:
            raise UserError(f"experiment {composed.name!r}: the ladder {composed.ladder!r} has no {composed.experiment}")
        content = merge_settings(content, ladder.experiment_overrides(composed.experiment), schema)
    return {**content, **composed.feature_settings(), "name": composed.name}


def merge_settings(
    base: Mapping[str, Any],
    over: Mapping[str, Any],
    schema: type[BaseModel] | None = None,
    *,
    lenient: bool = False,
    replace: bool = False,
) -> dict[str, Any]:
    """Return the settings ``base`` with the changes ``over``. Nested groups of settings are merged by key.

    With a schema, a value may describe an object such as a loss (:mod:`vse.pipeline.presets.parts`), by the name of its class
    or by settings. If settings in ``over`` name no class, they change the object in ``base``. If they name another class than
    ``base``, settings of ``base`` that the new class lacks are dropped.

    lenient : if ``over`` names no class, ignore those of its settings that the class in ``base`` lacks
    replace : whether a plain dictionary, such as ``train.frozen``, replaces the dictionary in ``base``; otherwise the two are
        merged by key. An empty dictionary always replaces the other one
    """
    result = dict(base)
    for key, value in over.items():
        field = schema is not None and key in schema.model_fields
        registry, group = (find_registry(schema, key), find_settings_class(schema, key)) if schema and field else (None, None)
        if schema and registry:
            old = result[key] if key in result else find_field_default(schema, key)
            result[key] = _merge_part(registry, old, value, lenient, replace)
        elif field and not group and isinstance(value, Mapping) and (replace or not value):
            result[key] = dict(value)
        elif isinstance(value, Mapping) and (group or isinstance(result.get(key), Mapping)):
            if lenient and schema and field and result.get(key, schema.model_fields[key].default) is None:
                continue
            result[key] = merge_settings(_mapping_or_empty(result.get(key)), value, group, lenient=lenient, replace=replace)
        else:
            result[key] = value
    return result


def apply_overrides(schema: type[Settings], content: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings ``content`` with the changes ``overrides``, each in the form ``key=value``.

    A key such as ``loss.margin`` must be a setting of the loss that is chosen after all changes. A value that is a dictionary
    replaces the complete dictionary. Raises UserError, which suggests the nearest key, if a key is unknown.
    """
    result, keys = dict(content), []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"--set takes key=value, got {item!r}")
        try:
            value = parse_yaml(text)
        except Exception:  # odd dates and very long integers raise other errors than YAML's
            raise UserError(f"--set {item}: {text!r} is not a YAML value") from None
        for name in reversed(key.split(".")):
            value = {name: value}
        result = merge_settings(result, value, schema, replace=True)
        keys.append(key)
    for key in keys:
        if key in schema.renamed_keys:
            raise UserError(f"{key} is now {schema.renamed_keys[key]}")
        if key in _UNCHANGEABLE_KEYS or not _is_known_key(schema, result, key.split(".")):
            raise UserError(f"unknown setting {key!r}{did_you_mean(key, _list_known_keys(schema, result))}")
    return result


def validate_settings(schema: type[_Schema], kind: str, name: str, content: Mapping[str, Any]) -> _Schema:
    """Return ``content`` as an object of ``schema``. Raises UserError with ``kind`` and ``name`` if a setting is not valid."""
    for key in _list_nested_keys(content) if schema.renamed_keys else ():
        if key in schema.renamed_keys:
            raise UserError(f"{kind} {name!r}: {key} is now {schema.renamed_keys[key]}")
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = did_you_mean(key, _list_known_keys(schema, content))
            raise UserError(f"{kind} {name!r}: unknown setting {key!r}{known}") from None
        where = f"{kind} {name!r}: {key}" if key else f"{kind} {name!r}"
        raise UserError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def list_setting_changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a line such as ``loss.margin: 0.2 -> 0.1`` for every setting that differs between ``old`` and ``new``."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changes += list_setting_changes(a, b, f"{prefix}{key}.")
        elif a != b:
            changes.append(f"{prefix}{key}: {a} -> {b}")
    return changes


def _merge_part(registry: Registry[Any], base: Any, over: Any, lenient: bool, replace: bool) -> Any:
    """Return the settings ``base`` of a loss, encoder or other class with the changes ``over``.

    ``registry`` holds the classes by name. ``base`` and ``over`` are names, settings or objects. With ``lenient``, if ``over``
    names no class, settings that the class lacks are ignored. With ``replace``, dictionaries are replaced, not merged by key.
    """
    new = registry.as_settings(over)
    if new is None:
        return over
    settings, unnamed = registry.as_settings(base) or {}, registry.key not in new
    name = settings.get(registry.key) if unnamed else new[registry.key]
    if not isinstance(name, str) or name not in registry:  # the validation reports this, unless a later layer changes the name
        return base if lenient and unnamed else {**settings, **new}
    part = registry[name]
    if lenient and unnamed:
        new = {key: value for key, value in new.items() if key in part.model_fields}
    if name != settings.get(registry.key):
        settings = {key: value for key, value in settings.items() if key in part.model_fields and key != "code_sha256"}
    return merge_settings(settings, {registry.key: name, **new}, part, lenient=lenient, replace=replace)


def _mapping_or_empty(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_known_key(schema: type[BaseModel], content: Mapping[str, Any], path: Sequence[str]) -> bool:
    """Return whether the nested keys ``path``, such as ``loss`` and ``margin``, lead to a setting.

    ``content`` states which loss (or other class of a registry) has the setting. Any key of an unknown class is accepted.
    """
    name, *rest = path
    if name not in schema.model_fields:
        return schema.model_config.get("extra") == "allow"
    if not rest:
        return True
    value = content.get(name)
    if registry := find_registry(schema, name):
        part = registry.find_class(value)
        return part is None or _is_known_key(part, _mapping_or_empty(value), rest)
    group = find_settings_class(schema, name)
    return group is not None and _is_known_key(group, _mapping_or_empty(value), rest)


def _list_known_keys(schema: type[BaseModel], content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in schema.model_fields:
        value = content.get(name)
        group = find_settings_class(schema, name)
        if registry := find_registry(schema, name):
            group = registry.find_class(value if name in content else find_field_default(schema, name))
        if group:
            yield from _list_known_keys(group, _mapping_or_empty(value), f"{prefix}{name}.")
        elif prefix or name not in _UNCHANGEABLE_KEYS:
            yield prefix + name


def _list_nested_keys(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{prefix}{key}"
        yield from _list_nested_keys(_mapping_or_empty(value), f"{prefix}{key}.")
