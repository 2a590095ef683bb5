"""Checks of the arguments of the Python interface, and their conversion to plain Python values.

An annotation of an argument combines a type, for type checkers, with an :class:`AllowedValues`, the check at run time. For
example, ``PositiveInteger`` allows integers from 1 on, and ``PositiveIntegers`` allows lists of such integers.
:func:`public_api` decorates the functions and methods of the interface.
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
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import yaml

from vse.former_calls import find_new_call
from vse.pipeline.command import explain_system_errors, record_command
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.outputs import allow_replacing_other_kinds
from vse.pipeline.option_types import MAX_SEED, AllowedValues, Flag, Text, is_integer_from, is_path, is_text
from vse.pipeline.options import Options, format_value

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
else:
    ArrayLike = Any  # importing its definition would load numpy

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_DESCRIBED_ARGUMENT_PATTERN = re.compile(r"^    (\w+): .*(?:\n     .*)*", re.M)
_ARGUMENTS_SECTION_END_PATTERN = re.compile(r"\n(?=(Returns|Raises|Examples):\n)|\Z")
_OPTION_NAME_PATTERN = re.compile(r"(?<![\w/.-])--([a-z][a-z-]*)")
_ARGUMENT_BY_OPTION = {
    "set": "sets",
    "ensemble": "vse.Ensemble",
    "index_type": "factory",
    "index_parameters": "parameters",
    "trec": "to_trec",
    "trec_depth": "depth",
    "no_cross_check": "cross_check=False",
}


def is_integer(value: object) -> bool:
    """Return whether a value is an integer (Python or numpy) whose absolute value is below 2^63."""
    return is_integer_from(value, -MAX_SEED)


def is_text_or_path(value: object) -> bool:
    """Return whether a value is a text, which may be empty, or a path object."""
    return is_text(value) if isinstance(value, str) else is_path(value)


def is_list_of(is_allowed: Callable[[Any], bool], value: object) -> bool:
    """Return whether a value is a list or another collection, and ``is_allowed`` returns True for each of its items."""
    if isinstance(value, str | bytes | os.PathLike | Mapping) or getattr(value, "ndim", 1) != 1:
        return False
    return isinstance(value, Iterable) and not isinstance(value, Iterator) and all(map(is_allowed, value))


def is_one_or_list_of(is_allowed: Callable[[Any], bool], value: object) -> bool:
    """Return whether ``is_allowed`` returns True for a value or, if the value is a list, for each of its items."""
    return is_allowed(value) or is_list_of(is_allowed, value)


def are_paths(value: object) -> bool:
    """Return whether a value is a path, a list of paths, or an iterator. The items of an iterator are not checked."""
    return is_one_or_list_of(is_path, value) or isinstance(value, Iterator)


def are_settings(value: object) -> bool:
    """Return whether a value is a text, a list of texts, or a mapping whose keys are non-empty texts."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and key for key in value)
    return is_one_or_list_of(is_text, value)


def is_column_mapping(value: object) -> bool:
    """Return whether a value is a mapping from names of fields to names of columns: one name or a list for each field."""
    return isinstance(value, Mapping) and all(is_text(key) and is_one_or_list_of(is_text, value[key]) for key in value)


def is_array(value: object) -> bool:
    """Return whether numpy can convert a value to an array of real numbers, e.g. a torch tensor or a list of lists."""
    import numpy as np

    if isinstance(value, str | bytes | Mapping | set | frozenset):
        return False
    dtype = getattr(value, "dtype", None)
    if str(dtype).startswith("torch."):
        return "complex" not in str(dtype)
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except (ValueError, TypeError, RuntimeError):  # rows of different lengths, or an object that only resembles an array
        return False


_is_positive_integer = partial(is_integer_from, low=1)
StrPath = Annotated[str | os.PathLike[str], AllowedValues("a path", is_path, may_be_path=True)]
Paths = Annotated[
    str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    AllowedValues("a path or a list of paths", are_paths, may_be_path=True),
]
ChangedSettings = Annotated[
    Mapping[str, object] | Sequence[str],
    AllowedValues('a mapping such as {"train.epochs": 3} or a list such as ["train.epochs=3"]', are_settings),
]
ColumnMapping = Annotated[
    Mapping[str, str | Sequence[str]], AllowedValues('a mapping such as {"file": "picture"}', is_column_mapping)
]
Names = Annotated[str | Sequence[str], AllowedValues("a name or a list of names", partial(is_one_or_list_of, is_text))]
Texts = Annotated[str | Sequence[str], AllowedValues("a text or a list of texts", partial(is_one_or_list_of, is_text))]
TextOrPath = Annotated[
    str | os.PathLike[str], AllowedValues("a text, or the path of an image", is_text_or_path, may_be_path=True)
]
PositiveIntegers = Annotated[
    Sequence[int],
    AllowedValues(
        "a list of whole numbers from 1 on", partial(is_list_of, _is_positive_integer), lambda many: [*map(int, many)]
    ),
]
Array = Annotated[ArrayLike, AllowedValues("an array of numbers, of numpy or torch, or a list of lists", is_array)]
ArrayOrPath = Annotated[
    ArrayLike | os.PathLike[str],
    AllowedValues("an array of numbers, or a path", lambda value: is_path(value) or is_array(value), may_be_path=True),
]
_ALLOWED_VALUES_BY_TYPE: dict[Any, Any] = {str: get_args(Text)[1], bool: get_args(Flag)[1]}


def check_arguments(function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
    """Decorate a function so that a wrong, missing or unknown argument raises a UserError with the name of the argument."""

    @wraps(function)
    def call(*arguments: _Parameters.args, **named: _Parameters.kwargs) -> _Returned:
        bound = bind_arguments(function, arguments, named)
        return function(*bound.args, **bound.kwargs)

    return call


def public_api(function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
    """Decorate a function or method of the Python interface.

    The decorator checks the arguments of a call, and records the call in the files that the function writes. In messages of
    UserError, it replaces command-line options by Python arguments. A call with ``force=True`` may replace files of any kind.
    """

    @wraps(function)
    def call(*arguments: _Parameters.args, **named: _Parameters.kwargs) -> _Returned:
        bound = bind_arguments(function, arguments, named)
        given = bound.arguments
        force = given.get("force") is True or getattr(given.get("options"), "force", False) is True
        try:
            with (
                record_command(_format_call(function, arguments, named)),
                explain_system_errors(),
                allow_replacing_other_kinds(force),
            ):
                return function(*bound.args, **bound.kwargs)
        except UserError as error:
            message = prefix_argument_name(replace_option_names(str(error)), function, given)
            raise UserError(message) from error.__cause__

    return call


def describe_arguments(*models: type[Options]) -> Callable[[_Function], _Function]:
    """Return a decorator that adds the descriptions of arguments to the docstring of a function.

    ``models`` are classes of command options. An argument that the docstring already describes keeps its description. For any
    other argument, the decorator adds the help of the option with the same name. Raises TypeError if no option has this name.
    """
    fields = {name: field for model in reversed(models) for name, field in _collect_nested_fields(model).items()}

    def description(name: str) -> str:
        if name not in fields:
            raise TypeError(f"no option describes the argument {name}")
        kind = fields[name].annotation
        if isinstance(kind, type) and issubclass(kind, Options):
            return f"{(inspect.getdoc(kind) or '').partition('.')[0]}: see [`vse.{kind.__name__}`][]."
        return " ".join(replace_option_names(fields[name].description).split())

    def decorate(function: _Function) -> _Function:
        text = inspect.cleandoc(function.__doc__ or "")
        if "\nArgs:\n" not in text:
            text = _ARGUMENTS_SECTION_END_PATTERN.sub("\nArgs:\n\n\\g<0>", f"{text}\n", count=1)
        before, _, rest = text.partition("\nArgs:\n")
        written, _, after = rest.partition("\n\n")
        entries = {entry[1]: entry[0] for entry in _DESCRIBED_ARGUMENT_PATTERN.finditer(written)}
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        lines = [entries.get(name) or f"    {name}: {description(name)}" for name in names]
        function.__doc__ = "\n".join([before, "Args:", *lines, "", after.lstrip("\n")]).rstrip()
        return function

    return decorate


def _collect_nested_fields(model: type[Options]) -> dict[str, Any]:
    """Return the fields of a class of options by name, including the fields of nested classes."""
    fields = dict(model.model_fields)
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Options):
            fields = {**_collect_nested_fields(field.annotation), **fields}
    return fields


def replace_option_names(message: str) -> str:
    """Return a message with command-line options, such as ``--skip-bad``, replaced by Python arguments (``skip_bad``)."""

    def argument(option: re.Match[str]) -> str:
        name = option[1].rstrip("-").replace("-", "_")
        return _ARGUMENT_BY_OPTION.get(name, name)

    return _OPTION_NAME_PATTERN.sub(argument, message)


def bind_arguments(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> inspect.BoundArguments:
    """Bind the arguments of a call to the parameters of ``function``, and convert them to plain Python values.

    Raises UserError if an argument is unknown, missing or not allowed. If the unknown argument is that of an earlier version,
    the message has the call that replaces it.
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")
    expected = [parameter for parameter in signature.parameters if parameter != "self"]
    for unknown in [argument for argument in named if argument not in expected]:
        if new_call := find_new_call(name, unknown):
            raise UserError(f"vse.{name}(..., {unknown}=...) is now {new_call}")
        hint = did_you_mean(unknown, expected)
        raise UserError(f"{unknown}={format_value(named[unknown])}: {name} has no such argument{hint}")
    try:
        bound = signature.bind(*arguments, **named)
    except TypeError as error:
        raise UserError(f"{name}: {error}; it takes {', '.join(expected)}") from None
    allowances = find_allowed_values(function)
    for argument in bound.arguments.keys() & allowances.keys():
        value, (allowed, may_be_none) = bound.arguments[argument], allowances[argument]
        if value is None and may_be_none:
            continue
        if not allowed.accepts(value):
            none = ", or None," if may_be_none else ""
            raise UserError(f"{argument}={format_value(value)}: {allowed.description}{none} is needed")
        bound.arguments[argument] = allowed.convert(value)
    return bound


def prefix_argument_name(message: str, function: Any, arguments: Mapping[str, Any]) -> str:
    """Return an error message, preceded by the name of the argument whose path is at the start of the message.

    For example, ``a.h5: no such file`` becomes ``out: a.h5: no such file`` if the argument ``out`` is ``a.h5``. A message that
    does not start with the path of an argument is returned unchanged. ``arguments`` has the arguments of a call of
    ``function`` by name. The fields of an :class:`Options` object count as arguments, too.
    """
    for argument, (allowed, _) in find_allowed_values(function).items():
        value = arguments.get(argument)
        if isinstance(value, Options):
            named = prefix_argument_name(message, type(value), dict(value))
            if named != message:
                return named
        for path in [value] if is_path(value) else value if isinstance(value, list | tuple) else []:
            text = str(Path(str(getattr(path, "path", path))))
            if allowed.may_be_path and message.startswith((f"{text}:", f"{text}/")):
                return f"{argument}: {message}"
    return message


@cache
def find_allowed_values(function: Any) -> dict[str, tuple[AllowedValues, bool]]:
    """Return a dict from the name of each argument or option to its allowed values, and whether None is allowed.

    ``function`` is a function or a class of options.
    """
    if isinstance(function, type) and issubclass(function, Options):
        hints = get_type_hints(function, include_extras=True)
        return {name: _parse_annotation(hints[name]) for name in function.model_fields}
    annotations = {name: hint for name, hint in inspect.unwrap(function).__annotations__.items() if name != "return"}
    namespace = types.SimpleNamespace(__annotations__=annotations)
    hints = get_type_hints(namespace, inspect.unwrap(function).__globals__, include_extras=True)
    return {name: _parse_annotation(hint) for name, hint in hints.items()}


@overload
def as_path(value: str | os.PathLike[str]) -> Path: ...
@overload
def as_path(value: str | os.PathLike[str] | None) -> Path | None: ...
def as_path(value: str | os.PathLike[str] | None) -> Path | None:
    """Return ``value`` as a ``pathlib`` path; None stays None. Raises UserError if the value is not a path."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"a path is needed, not {type(value).__name__} ({format_value(value)})")
    return Path(os.fspath(value))


def as_paths(value: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return one path or several paths as a list. Raises UserError if the list is empty."""
    paths = [value] if isinstance(value, str | os.PathLike) else list(value)
    if not paths:
        raise UserError("no file is given")
    return [as_path(path) for path in paths]


def as_paths_or_urls(value: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return paths or URLs as texts. A ``pathlib`` path would lose a slash of a URL. Raises UserError if the list is empty."""
    texts = [value] if isinstance(value, str | os.PathLike) else list(value)
    as_paths(texts)
    return [os.fspath(text) for text in texts]


def settings_as_texts(settings: Mapping[str, object] | Sequence[str] | None) -> list[str]:
    """Return settings as a list of texts ``key=value``, the form of the option ``--set``.

    In a mapping, a value that is not a text or path is written as YAML.
    """
    if settings is None:
        return []
    if isinstance(settings, str):
        return [settings]
    if not isinstance(settings, Mapping):
        return list(settings)
    return [f"{key}={_format_setting_value(key, value)}" for key, value in settings.items()]


def _format_setting_value(key: str, value: object) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    plain = value.item() if hasattr(value, "item") else value
    try:
        return yaml.safe_dump(plain, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
    except yaml.YAMLError:
        raise UserError(f"sets: {key}: a value of type {type(value).__name__} cannot be a setting") from None


def _parse_annotation(hint: Any) -> tuple[AllowedValues, bool]:
    """Return the allowed values that an annotation describes, and whether it allows None."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [part for part in get_args(hint) if part is not types.NoneType]
        return _parse_annotation(inner[0])[0], len(inner) < len(get_args(hint))
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, AllowedValues):
            return mark, False
    return _ALLOWED_VALUES_BY_TYPE.get(hint) or AllowedValues(
        f"a vse.{hint.__name__}", lambda value: isinstance(value, hint)
    ), False


def _format_call(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Return a call as Python code.

    The call of a method starts with the expression that returned its object, such as ``vse.load('runs/a')``.
    """
    target = "vse"
    if "self" in inspect.signature(function).parameters:
        target, arguments = arguments[0].expression, arguments[1:]
    texts = [*map(format_value, arguments), *(f"{name}={format_value(value)}" for name, value in named.items())]
    return f"{target}.{function.__name__}({', '.join(texts)})"
