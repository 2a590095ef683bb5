"""Read the YAML files of presets.

A file holds one preset with the name of the file, or several presets under the key ``presets``. The package contains presets.
The environment variable ``VSE_PRESETS`` names a folder that is searched first; it has the layout of ``config/``. Commands
also accept the path of a file with one preset.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import MAX_NAME_BYTES, check_input, is_valid_name, wrap_read_errors

try:
    from yaml import CSafeLoader as SafeLoader  # from libyaml, ten times as fast
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

_MAX_NODES = 100_000  # the most nodes of a YAML text; nodes behind an alias are counted for each alias
_MAX_INTEGER = 2**63 - 1  # the largest integer in YAML files
_MAX_DEPTH = 50  # the most nested lists and mappings
_MAX_LAYERS = 50  # the most presets in a chain in which each preset extends the next
NOT_INHERITED_KEYS = ("about", "title", "rows")  # settings that a preset does not take over from the preset that it extends


@dataclass(frozen=True)
class Preset:
    """A preset: settings and the file that defines the preset."""

    name: str
    path: Path
    settings: Mapping[str, Any]


def list_preset_names(kind: str) -> list[str]:
    """Return the sorted names of all presets of a ``kind``: ``datasets``, ``features``, ``experiments`` or ``ladders``."""
    return sorted({name for folder in _preset_folders(kind) for name in _read_preset_folder(folder)})


def read_own_values(kind: str, key: str) -> dict[str, Any]:
    """Return a dict from the name of each preset of a ``kind`` to its own value of the setting ``key``, sorted by name.

    Presets without this setting are left out. Settings of the presets that a preset extends do not count. A preset of the user
    replaces a packaged preset of the same name.
    """
    presets: dict[str, Preset] = {}
    for folder in _preset_folders(kind):
        presets = {**_read_preset_folder(folder), **presets}
    return {name: presets[name].settings[key] for name in sorted(presets) if key in presets[name].settings}


def list_preset_names_and_descriptions(kind: str, without_key: str = "") -> list[tuple[str, str]]:
    """Return the name and description (``about``) of every preset of a ``kind``, in the order of the files.

    Presets that have the setting named ``without_key`` are left out. ``kind`` is a folder, such as ``experiments``.
    """
    descriptions: dict[str, str] = {}
    for folder in _preset_folders(kind):
        for preset in _read_preset_folder(folder).values():
            if without_key not in preset.settings:
                descriptions.setdefault(preset.name, str(preset.settings.get("about", "")))
    return list(descriptions.items())


def read_preset_layers(kind: str, name: str, extended_by: tuple[Preset, ...] = ()) -> list[dict[str, Any]]:
    """Return the settings of a preset as layers: first the layers of the preset that it ``extends``, then its own settings.

    ``extended_by`` is used by recursive calls: it has the presets that extend this preset, directly or through others. Raises
    UserError if the preset is unknown, or extends itself.
    """
    preset = _load_preset(kind, name)
    if len(extended_by) > _MAX_LAYERS:
        raise UserError(f"{preset.path}: extends more than {_MAX_LAYERS} presets, one after the other")
    if any((preset.path, preset.name) == (upper.path, upper.name) for upper in extended_by):
        raise UserError(f"{preset.path}: extends itself ({' -> '.join(p.name for p in (*extended_by, preset))})")
    settings = {**_copy_settings(dict(preset.settings)), "name": preset.name}
    base = settings.pop("extends", None)
    if base is None:
        return [settings]
    if not isinstance(base, str):
        raise UserError(f"{preset.path}: extends: must be the name of a preset, not {base!r}")
    inherited = read_preset_layers(kind, base, (*extended_by, preset))
    return [*({key: layer[key] for key in layer if key not in NOT_INHERITED_KEYS} for layer in inherited), settings]


def _copy_settings(value: Any) -> Any:
    """Return settings with a copy of each dictionary and list in them. ``copy.deepcopy`` takes longer."""
    if isinstance(value, dict):
        return {key: _copy_settings(part) for key, part in value.items()}
    return [_copy_settings(part) for part in value] if isinstance(value, list) else value


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises UserError if the file is not valid YAML, repeats a key, or is too large."""
    check_input(path)
    with wrap_read_errors(path, "valid YAML"):
        return parse_yaml(path.read_text(encoding="utf-8"))


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML text. The exception for a text that is not valid or repeats a key may be of any class.

    The number of nodes and the depth are checked first, because aliases of aliases can stand for billions of nodes.
    """
    _check_yaml_size(text)
    return yaml.load(text, _StrictSafeLoader)


def _check_yaml_size(text: str) -> None:
    sizes: dict[str, int] = {}  # number of nodes below each anchor
    open_collections: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, _StrictSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise yaml.YAMLError(f"the alias {event.anchor!r} has no anchor before it")
            total += sizes[event.anchor]
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_collections.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                open_collections.append((event.anchor, total))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
            total += 1
        if total > _MAX_NODES or len(open_collections) > _MAX_DEPTH:
            limit = f"more than {_MAX_NODES} values" if total > _MAX_NODES else f"nested deeper than {_MAX_DEPTH} levels"
            raise yaml.YAMLError(f"{limit} (each alias counts as often as it is used)")


class _StrictSafeLoader(SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in keys:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
                keys.add(key.value)
        content = super().construct_mapping(node, deep)
        others = [key for key in content if not isinstance(key, str)]
        if others:
            problem = f"the key {others[0]} is not a text; put it in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return content


def _construct_integer(loader: SafeLoader, node: yaml.ScalarNode) -> int:
    number: int = loader.construct_yaml_int(node)
    if abs(number) > _MAX_INTEGER:
        raise yaml.MarkedYAMLError(problem="an integer beyond 64 bits", problem_mark=node.start_mark)
    return number


_StrictSafeLoader.add_constructor("tag:yaml.org,2002:int", _construct_integer)


def _preset_folders(kind: str) -> list[Path]:
    user_folder = os.environ.get("VSE_PRESETS")
    packaged = Path(str(files("vse.presets").joinpath(kind)))
    return [Path(user_folder, kind), packaged] if user_folder else [packaged]


def _load_preset(kind: str, name: str) -> Preset:
    if name.endswith((".yaml", ".yml")):
        return _read_single_preset(Path(name))
    for folder in _preset_folders(kind):
        if preset := _read_preset_folder(folder).get(name):
            return preset
    raise UserError(f"unknown {kind.removesuffix('s')} {name!r}{did_you_mean(name, list_preset_names(kind))}")


def _read_single_preset(path: Path) -> Preset:
    if not path.is_file():
        raise UserError(f"{path}: no such preset file")
    status = path.stat()
    presets = _read_preset_file(path, status.st_mtime_ns, status.st_size)
    if list(presets) != [path.stem]:
        raise UserError(
            f"{path}: is a family of presets ({', '.join(presets)}), but a path can only name one preset; put the file into "
            "a folder of VSE_PRESETS and give the name of a preset"
        )
    return presets[path.stem]


def _read_preset_folder(folder: Path) -> Mapping[str, Preset]:
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        states = [(entry.name, entry.stat()) for entry in entries if entry.name.endswith(".yaml")]
    return _read_preset_folder_cached(
        folder, tuple(sorted((name, status.st_mtime_ns, status.st_size) for name, status in states))
    )


@lru_cache(maxsize=100)
def _read_preset_folder_cached(folder: Path, states: tuple[tuple[str, int, int], ...]) -> Mapping[str, Preset]:
    """Return the presets in a folder by name.

    ``states`` (the name, mtime and size of each file) is part of the cache key, so that changed files are read again.
    """
    presets: dict[str, Preset] = {}
    for path, *state in ((folder / name, *state) for name, *state in states):
        for name, preset in _read_preset_file(path, *state).items():
            if name in presets:
                raise UserError(f"the preset {name!r} is in two files, {presets[name].path} and {path}; rename one of them")
            presets[name] = preset
    return presets


@lru_cache(maxsize=1000)
def _read_preset_file(path: Path, mtime_ns: int, size: int) -> Mapping[str, Preset]:
    """Return the presets of a file by name. Because ``mtime_ns`` and ``size`` are cache keys, a changed file is read again."""
    content = read_yaml(path) or {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: a preset is a YAML mapping")
    if "presets" not in content:
        return {path.stem: Preset(path.stem, path, content)}
    family = content["presets"]
    if len(content) > 1:
        others = sorted(str(key) for key in content if key != "presets")
        raise UserError(f"{path}: a file with presets: has no other keys, so {others} is wrong")
    if not isinstance(family, dict) or not all(isinstance(settings or {}, dict) for settings in family.values()):
        raise UserError(f"{path}: presets: is a YAML mapping of names to settings")
    wrong = [name for name in family if not is_valid_name(name)]
    if wrong:
        what = f"a text of at most {MAX_NAME_BYTES} bytes, without slashes or a leading dot"
        raise UserError(f"{path}: {wrong[0]!r} is not the name of a preset: {what}")
    return {str(name): Preset(str(name), path, settings or {}) for name, settings in family.items()}
