"""How a call of the Python interface becomes a command: paths, settings, ranges, and errors in the names of arguments."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar, overload

import yaml

from vse.arguments import bind_arguments, name_path, shown
from vse.pipeline.command import one_line_errors
from vse.pipeline.errors import UserError
from vse.pipeline.outputs import replacing_others
from vse.pipeline.provenance import making

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")
_OPTION = re.compile(r"(?<![\w/.-])--([a-z][a-z-]*)")
_RENAMED = {"set": "sets", "no_cross_check": "cross_check=False"}


def public(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """A function of the interface: files say that this call made them, and every mistake is a :class:`vse.UserError`.

    Its arguments are checked first, see :mod:`vse.arguments`. Options in its message are named as arguments are in Python.
    With ``force=True`` outputs replace files of other kinds (see :func:`vse.pipeline.outputs.check_out`).
    """

    @wraps(function)
    def called(*arguments: _Given.args, **named: _Given.kwargs) -> _Returned:
        bound = bind_arguments(function, arguments, named)
        texts = [*map(shown, arguments), *(f"{name}={shown(value)}" for name, value in named.items())]
        try:
            making_call = making(f"vse.{function.__name__}({', '.join(texts)})")
            with making_call, one_line_errors(), replacing_others(bound.arguments.get("force") is True):
                return function(*bound.args, **bound.kwargs)
        except UserError as error:
            message = name_path(in_python(str(error)), function, bound.arguments)
            raise UserError(message) from error.__cause__

    return called


def in_python(message: str) -> str:
    """A message with options, such as ``--skip-bad``, as arguments: ``skip_bad``."""

    def argument(option: re.Match[str]) -> str:
        name = option[1].rstrip("-").replace("-", "_")
        return _RENAMED.get(name, name)

    return _OPTION.sub(argument, message)


@overload
def as_path(given: str | os.PathLike[str]) -> Path: ...
@overload
def as_path(given: str | os.PathLike[str] | None) -> Path | None: ...
def as_path(given: str | os.PathLike[str] | None) -> Path | None:
    """A path as the commands take it."""
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise UserError(f"a path is needed, not {type(given).__name__} ({shown(given)})")
    return Path(os.fspath(given))


def as_paths(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """One path or several as a list; :class:`vse.UserError` if there is none."""
    several = [given] if isinstance(given, str | os.PathLike) else list(given)
    if not several:
        raise UserError("no file is given")
    return [as_path(one) for one in several]


def as_sets(sets: Mapping[str, object] | Sequence[str] | None) -> list[str]:
    """Settings as ``--set`` takes them, ``key=value``; a mapping has Python's values."""
    if sets is None:
        return []
    if isinstance(sets, str):
        return [sets]
    if not isinstance(sets, Mapping):
        return list(sets)
    return [f"{key}={_as_yaml(key, value)}" for key, value in sets.items()]


def device_of(device: str | None) -> str:
    """A device, by default the one in the environment, as of the commands."""
    return device or os.environ.get("VSE_DEVICE") or "auto"


def weights_dir_of(folder: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """A folder of weights, by default the one in the environment, as of the commands."""
    return folder or os.environ.get("VSE_WEIGHTS_DIR") or None


def _as_yaml(key: str, value: object) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    plain = value.item() if hasattr(value, "item") else value
    try:
        return yaml.safe_dump(plain, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
    except yaml.YAMLError:
        raise UserError(f"sets: {key}: a {type(value).__name__} is no setting") from None
