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

from vse.pipeline.command import one_line_errors
from vse.pipeline.errors import UserError
from vse.pipeline.provenance import making

StrPath = str | os.PathLike[str]
Sets = Mapping[str, object] | Sequence[str]

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")
_OPTION = re.compile(r"(?<![\w/.-])--([a-z][a-z-]*)")
_RENAMED = {"set": "sets", "no_cross_check": "cross_check=False"}
_LONGEST = 200  # characters of an argument that a file records
_LAST_SEED = 2**63 - 1


def public(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """A function of the interface: files say that this call made them, and every mistake is a :class:`vse.UserError`.

    Options in its message are named as arguments are in Python.
    """

    @wraps(function)
    def called(*arguments: _Given.args, **named: _Given.kwargs) -> _Returned:
        texts = [*map(_shown, arguments), *(f"{name}={_shown(value)}" for name, value in named.items())]
        try:
            with making(f"vse.{function.__name__}({', '.join(texts)})"), one_line_errors():
                return function(*arguments, **named)
        except UserError as error:
            raise UserError(in_python(str(error))) from error.__cause__

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
        raise UserError(f"a path is needed, not {type(given).__name__} ({_shown(given)})")
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


def whole(name: str, value: int, low: int) -> int:
    """A whole number from ``low`` on, of 63 bits; :class:`vse.UserError` otherwise."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= int(value) <= _LAST_SEED:
        raise UserError(f"{name}={value!r}: a whole number from {low} on is needed")
    return int(value)


def threads_of(threads: int | None) -> int | None:
    """How many cores to use, at least one; None changes nothing."""
    return None if threads is None else whole("threads", threads, 1)


def in_range(name: str, value: float | None, low: float, high: float) -> float | None:
    """A number between two, both included, or None; :class:`vse.UserError` otherwise."""
    if value is not None and not low <= value <= high:
        raise UserError(f"{name}={value!r}: a number from {low} to {high} is needed")
    return value


def _as_yaml(key: str, value: object) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    plain = value.item() if hasattr(value, "item") else value
    try:
        return yaml.safe_dump(plain, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
    except yaml.YAMLError:
        raise UserError(f"sets: {key}: a {type(value).__name__} is no setting") from None


def _shown(value: object) -> str:
    """An argument as a file records it: an array by its shape."""
    if isinstance(value, os.PathLike):
        text = repr(str(getattr(value, "path", value)))
    elif hasattr(value, "shape"):
        text = f"<{type(value).__name__} {' x '.join(map(str, value.shape))}>"
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
