"""Check the arguments of the Python interface against their annotations, before anything is opened or computed.

An annotation such as ``From0`` has a type, for type checkers, and an :class:`Allowed`, which tests the value of a call and
says in an error what is allowed.

How a call of the Python interface becomes a command: paths, settings, ranges, and errors in the names of arguments.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import yaml

from vse.pipeline.command import explain_system_errors, record_command
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.outputs import allow_replacing_others

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")
_OPTION = re.compile(r"(?<![\w/.-])--([a-z][a-z-]*)")
_RENAMED = {"set": "sets", "no_cross_check": "cross_check=False"}


def public(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """A function of the interface: files say that this call made them, and every mistake is a :class:`vse.UserError`.

    Its arguments are checked first, see :mod:`vse.arguments`. Options in its message are named as arguments are in Python.
    With ``force=True`` outputs replace files of other kinds (see :func:`vse.pipeline.files.outputs.check_output`).
    """

    @wraps(function)
    def called(*arguments: _Given.args, **named: _Given.kwargs) -> _Returned:
        bound = bind_arguments(function, arguments, named)
        texts = [*map(shown, arguments), *(f"{name}={shown(value)}" for name, value in named.items())]
        try:
            making_call = record_command(f"vse.{function.__name__}({', '.join(texts)})")
            with making_call, explain_system_errors(), allow_replacing_others(bound.arguments.get("force") is True):
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


if TYPE_CHECKING:
    from numpy.typing import ArrayLike
else:
    ArrayLike = object  # its own definition takes numpy

LAST_SEED = 2**63 - 1
_LONGEST = 200  # characters of a value in an error


class Allowed(NamedTuple):
    """A test of a value, words for the values that pass it, and their conversion to plain values of Python."""

    words: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def is_whole(value: object, low: int = 0) -> bool:
    """Return whether a value is a whole number of Python or numpy, from ``low`` on, of 63 bits."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "shape", ()) != ():
        return False
    return low <= int(value) <= LAST_SEED


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number of Python or numpy, of any sign, of 63 bits."""
    return is_whole(value, -LAST_SEED)


def is_share(value: object) -> bool:
    """Return whether a value is a number from 0 to 1; NaN is not."""
    if isinstance(value, bool | str | bytes) or getattr(value, "shape", ()) != ():
        return False
    return hasattr(value, "__float__") and 0 <= float(value) <= 1


def is_path(value: object) -> bool:
    """Return whether a value is a path that the system could have: a text that is not empty, or a path object."""
    return isinstance(value, str | os.PathLike) and _as_text(value) != "" and "\0" not in _as_text(value)


def is_query(value: object) -> bool:
    """Return whether a value is a text, which may be empty, or a path object."""
    return is_text(value) if isinstance(value, str) else is_path(value)


def is_text(value: object) -> bool:
    """Return whether a value is a text that a file can hold."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= sign <= "\udfff" for sign in value)


def is_flag(value: object) -> bool:
    """Return whether a value is True or False, of Python or numpy."""
    return isinstance(value, bool) or (type(value).__name__ in ("bool_", "bool") and getattr(value, "shape", None) == ())


def is_list_of(holds: Callable[[Any], bool], value: object) -> bool:
    """Return whether a value is a list, or another collection, of values that pass a test."""
    if isinstance(value, str | bytes | os.PathLike | Mapping) or getattr(value, "ndim", 1) != 1:
        return False
    return isinstance(value, Iterable) and not isinstance(value, Iterator) and all(map(holds, value))


def one_or_list_of(holds: Callable[[Any], bool], value: object) -> bool:
    """Return whether a value passes a test, or is a list of values that do."""
    return holds(value) or is_list_of(holds, value)


def are_paths(value: object) -> bool:
    """Return whether a value is a path, a list of paths, or an iterator, whose paths are checked when they are read."""
    return one_or_list_of(is_path, value) or isinstance(value, Iterator)


def are_sets(value: object) -> bool:
    """Return whether a value is a mapping of names to settings, or a list of texts, or one text."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and key for key in value)
    return one_or_list_of(is_text, value)


def are_columns(value: object) -> bool:
    """Return whether a value is a mapping of names to one name or several."""
    return isinstance(value, Mapping) and all(is_text(key) and one_or_list_of(is_text, value[key]) for key in value)


def is_array(value: object) -> bool:
    """Return whether a value is an array of numbers, or what numpy makes one of."""
    import numpy as np

    if isinstance(value, str | bytes | Mapping | set | frozenset):
        return False
    dtype = getattr(value, "dtype", None)
    if str(dtype).startswith("torch."):
        return "complex" not in str(dtype)
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except (ValueError, TypeError, RuntimeError):  # rows of different lengths, or an object that only looks like an array
        return False


_from_1 = partial(is_whole, low=1)
StrPath = Annotated[str | os.PathLike[str], Allowed("a path", is_path)]
Paths = Annotated[
    str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    Allowed("a path or a list of paths", are_paths),
]
ListOfPaths = Annotated[Sequence[str | os.PathLike[str]], Allowed("a list of paths", are_paths)]
Sets = Annotated[
    Mapping[str, object] | Sequence[str],
    Allowed('a mapping such as {"train.epochs": 3} or a list such as ["train.epochs=3"]', are_sets),
]
Columns = Annotated[Mapping[str, str | Sequence[str]], Allowed('a mapping such as {"file": "picture"}', are_columns)]
Names = Annotated[str | Sequence[str], Allowed("a name or a list of names", partial(one_or_list_of, is_text))]
Query = Annotated[str | os.PathLike[str], Allowed("a text, or the path of an image", is_query)]
From0 = Annotated[int, Allowed("a whole number from 0 on", is_whole, int)]
From1 = Annotated[int, Allowed("a whole number from 1 on", _from_1, int)]
ListFrom1 = Annotated[
    Sequence[int],
    Allowed(
        "a list of whole numbers from 1 on", partial(is_list_of, partial(is_whole, low=1)), lambda many: [*map(int, many)]
    ),
]
Share = Annotated[float, Allowed("a number from 0 to 1", is_share, float)]
Array = Annotated[ArrayLike, Allowed("an array of numbers, of numpy or torch, or a list of lists", is_array)]
_PATHS = [get_args(hint)[1] for hint in (StrPath, Paths, ListOfPaths, Query)]
_PLAIN = {str: Allowed("a text", is_text), bool: Allowed("True or False", is_flag, bool)}


def checked(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Decorate a function so that a wrong, missing or unknown argument is a :class:`vse.UserError` that names it."""

    @wraps(function)
    def called(*arguments: _Given.args, **named: _Given.kwargs) -> _Returned:
        bound = bind_arguments(function, arguments, named)
        return function(*bound.args, **bound.kwargs)

    return called


def bind_arguments(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> inspect.BoundArguments:
    """Return the arguments of a call as plain values; :class:`vse.UserError` if one is unknown, missing or not allowed."""
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")
    for unknown in named.keys() - signature.parameters.keys():
        known = did_you_mean(unknown, signature.parameters)
        raise UserError(f"{unknown}={shown(named[unknown])}: {name} has no such argument{known}")
    try:
        bound = signature.bind(*arguments, **named)
    except TypeError as error:
        raise UserError(f"{name}: {error}; it takes {', '.join(signature.parameters)}") from None
    allowances = allowed_arguments(function)
    for argument in bound.arguments.keys() & allowances.keys():
        value, (allowed, may_be_none) = bound.arguments[argument], allowances[argument]
        if value is None and may_be_none:
            continue
        if not allowed.holds(value):
            none = ", or None," if may_be_none else ""
            raise UserError(f"{argument}={shown(value)}: {allowed.words}{none} is needed")
        bound.arguments[argument] = allowed.convert(value)
    return bound


def name_path(message: str, function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Return an error that starts with a path, such as ``a.h5: no such file``, after the argument that named this path."""
    for argument, (allowed, _) in allowed_arguments(function).items():
        value = given.get(argument)
        for path in [value] if is_path(value) else value if isinstance(value, list | tuple) else []:
            text = str(Path(_as_text(path)))
            if allowed in _PATHS and message.startswith((f"{text}:", f"{text}/")):
                return f"{argument}: {message}"
    return message


@cache
def allowed_arguments(function: Callable[..., Any]) -> dict[str, tuple[Allowed, bool]]:
    """Return what each argument of a function may be, and whether it may be None."""
    annotations = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    given = types.SimpleNamespace(__annotations__=annotations)
    hints = get_type_hints(given, inspect.unwrap(function).__globals__, include_extras=True)
    return {name: _allowed(hint) for name, hint in hints.items()}


def shown(value: object) -> str:
    """Return a value for an error or a record: an array by its shape, and not more than a line of anything."""
    if isinstance(value, os.PathLike):
        text = repr(_as_text(value))
    elif hasattr(value, "shape"):
        text = f"<{type(value).__name__} {' x '.join(map(str, value.shape))}>"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _allowed(hint: Any) -> tuple[Allowed, bool]:
    """Return the first :class:`Allowed` of an annotation, or that of a text or a flag, and whether it allows None."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [part for part in get_args(hint) if part is not types.NoneType]
        return _allowed(inner[0])[0], len(inner) < len(get_args(hint))
    marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Allowed)]
    return (marks or [_PLAIN[hint]])[0], False


def _as_text(value: Any) -> Any:
    return value if isinstance(value, str) else str(getattr(value, "path", value))
