"""Define the options of each command once, as the fields of a pydantic model.

A field gives an option its name, type, default and limits. The text below the field is its help. :func:`command` turns the
fields into click options. They are the source of ``--help`` and of the command's page in the documentation. The functions
behind the command, and the Python interface, take an object of the same model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import cleandoc, get_annotations
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticUndefined

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.outputs import allow_replacing_other_kinds
from vse.pipeline.option_types import AllowedValues, CliOption, NearestChoice

_MAX_VALUE_LENGTH = 200  # characters of a value in an error
_OptionsType = TypeVar("_OptionsType", bound="Options")


class Options(BaseModel):
    """Options of a command. Raises UserError if an option is unknown, missing or not allowed.

    The text below a field is the help of its option.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_explain_invalid_option(type(self), values, error)) from None

    def with_environment(self, *names: str) -> Self:
        """Return a copy of these options in which environment variables replace the defaults of options that were not given.

        ``names`` are the options that may change; without ``names``, all may change. Boolean options never change.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        for name in names or type(self).model_fields:
            field = type(self).model_fields[name]
            cli = next((mark for mark in field.metadata if isinstance(mark, CliOption)), CliOption())
            if cli.envvar and _unwrap_annotation(field.annotation)[0] is not bool and os.environ.get(cli.envvar):
                given.setdefault(name, os.environ[cli.envvar])
        return type(self)(**given)

    def __repr__(self) -> str:
        defaults = {
            name: field.default if field.default_factory is None else field.get_default(call_default_factory=True)
            for name, field in type(self).model_fields.items()
        }
        texts = (f"{name}={format_value(value)}" for name, value in self if value != defaults[name])
        return f"vse.{type(self).__name__}({', '.join(texts)})"


def format_value(value: object) -> str:
    """Return a value as one line of text: the type and shape of an array, or the start of ``repr(value)`` for other values."""
    if isinstance(value, os.PathLike) and getattr(value, "path", value) is not None:
        text = repr(str(getattr(value, "path", value)))
    elif hasattr(value, "shape"):
        text = f"<{type(value).__name__} {' x '.join(map(str, value.shape))}>"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def command(
    name: str,
    *,
    group: click.Group | None = None,
    cls: type[click.Command] = click.Command,
    leave_out: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    text: str | None = None,
) -> Callable[[Callable[[Any], None]], click.Command]:
    """Return a decorator that turns a function of one :class:`Options` object into a click command.

    The fields of the model (the class of this object) become the options of the command, except the fields ``leave_out``. The
    docstring of the function, or ``text``, is the help. ``defaults`` replaces some defaults of the model; the value ``...``
    makes an option required. ``group`` is a group of commands to which the command is added. ``cls`` is the class of the
    command. With ``--force``, an output may replace a file of any kind. With ``--allow-code``, users' own code may run.
    """

    def decorate(function: Callable[[Any], None]) -> click.Command:
        (model,) = (kind for key, kind in get_annotations(function, eval_str=True).items() if key != "return")

        def run(**values: Any) -> None:
            context = click.get_current_context()
            if values.get("force"):
                context.with_resource(allow_replacing_other_kinds())
            if values.get("allow_code"):
                from vse.pipeline.presets.own_code import allow_own_code

                context.with_resource(allow_own_code())
            function(_build_options(model, values))

        parameters = list(build_click_parameters(model, leave_out, defaults or {}))
        built = cls(name, callback=run, params=parameters, help=cleandoc(text or function.__doc__ or ""))
        if group is not None:
            group.add_command(built)
        return built

    return decorate


def build_click_parameters(
    model: type[Options], leave_out: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Iterator[click.Parameter]:
    """Yield a click option or argument for each field of a model, including the fields of nested models."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Options):
            yield from build_click_parameters(field.annotation, leave_out, defaults)
        elif name not in leave_out:
            default = (defaults or {}).get(name, field.default)
            default = PydanticUndefined if default is ... else default
            yield _build_click_parameter(name, [field.annotation, *field.metadata], default, field.description)


def _build_click_parameter(name: str, hints: list[Any], default: Any, description: str | None) -> click.Parameter:
    marks = [mark for hint in hints for mark in _find_option_types(hint)]
    cli = next((mark for mark in marks if isinstance(mark, CliOption)), CliOption())
    click_type = cli.click_type or next((mark.click_type for mark in marks if isinstance(mark, AllowedValues)), None)
    kind, is_list = _unwrap_annotation(hints[0])
    required = default is PydanticUndefined
    if get_origin(kind) is Literal:
        click_type = NearestChoice(get_args(kind))
    settings: dict[str, Any] = {"type": click_type or kind, "required": required, "metavar": cli.metavar}
    if cli.envvar:
        settings["envvar"] = cli.envvar
    if cli.is_argument:
        return click.Argument([name], nargs=-1 if is_list else 1, **settings)
    if not required:
        settings["default"] = default
    option = f"--{name.replace('_', '-')}"
    names = list(cli.names)
    if kind is bool:
        settings = {**settings, "type": None, "is_flag": True}
        option = f"{option}/--no-{option[2:]}" if default else option
    return click.Option(
        [name, *(names or [option])],
        multiple=is_list and cli.is_repeated,
        show_default=not required and default is not None and default is not False and default not in ("", ()),
        show_envvar=cli.show_envvar,
        help=description,
        **settings,
    )


def _find_option_types(hint: Any) -> Iterator[Any]:
    """Yield the :class:`AllowedValues` and :class:`CliOption` objects at any depth of a type annotation."""
    if isinstance(hint, AllowedValues | CliOption):
        yield hint
    yield from (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, AllowedValues | CliOption))
    for part in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _find_option_types(part)


def _unwrap_annotation(hint: Any) -> tuple[Any, bool]:
    """Return the type in an annotation, without None, and whether the annotation is a tuple of values of this type."""
    if get_origin(hint) is Annotated:
        return _unwrap_annotation(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return _unwrap_annotation(next(part for part in get_args(hint) if part is not NoneType))
    if get_origin(hint) is tuple:
        return _unwrap_annotation(get_args(hint)[0])[0], True
    return hint, False


def _build_options(model: type[_OptionsType], values: Mapping[str, Any]) -> _OptionsType:
    given: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Options):
            given[name] = _build_options(field.annotation, values)
        elif name in values:
            given[name] = values[name]
    try:
        return model(**given)
    except UserError as error:
        option = re.sub(r"^(\w+)=", lambda name: f"--{name[1].replace('_', '-')} ", str(error))
        raise UserError(option.replace(", or None,", "")) from None


def _explain_invalid_option(model: type[Options], values: Mapping[str, Any], error: ValidationError) -> str:
    """Return the first error of a pydantic validation as one line."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{model.__name__}: {name} is missing; it takes {', '.join(model.model_fields)}"
    given = f"{name}={format_value(values[name])}"
    if first["type"] == "extra_forbidden":
        return f"{given}: {model.__name__} has no such argument{did_you_mean(name, model.model_fields)}"
    field = model.model_fields[name]
    words = next(
        (mark.description for mark in _find_option_types(field.annotation) if isinstance(mark, AllowedValues)), first["msg"]
    )
    if mark := next((mark for mark in field.metadata if isinstance(mark, AllowedValues)), None):
        words = mark.description
    none = ", or None," if NoneType in get_args(field.annotation) else ""
    return f"{given}: {words}{none} is needed"
