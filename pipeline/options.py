"""Define the options of each command once, as the fields of a pydantic model.

A field gives an option its name, type, default and limits, and the text below the field is its help. :func:`command` turns the
fields into click options, from which ``--help`` and the documentation page of the command follow. The functions behind the
command, and the Python interface, take an object of the same model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from inspect import cleandoc, get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError, PydanticUndefined, core_schema

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.outputs import allow_replacing_other_kinds

MAX_SEED = 2**63 - 1
_MAX_VALUE_LENGTH = 200  # characters of a value in an error
_OptionsType = TypeVar("_OptionsType", bound="Options")


class Allowed(NamedTuple):
    """The allowed values of an option or an argument.

    Attributes
    ----------
    words : a description of the allowed values, for errors
    accepts : a function that returns whether a value is allowed
    convert : a function from an allowed value to a plain Python value
    may_be_path : whether the value may be a path
    click_type : the type that parses the value on the command line
    """

    words: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    may_be_path: bool = False
    click_type: Any = None

    def __get_pydantic_core_schema__(self, *_: Any) -> core_schema.CoreSchema:
        """Return the schema with which pydantic checks and converts a value."""

        def check(value: Any) -> Any:
            if self.accepts(value):
                return self.convert(value)
            raise PydanticCustomError("not_allowed", "{words}", {"words": self.words})

        return core_schema.no_info_plain_validator_function(check)


@dataclass(frozen=True)
class Cli:
    """Properties of a command-line option that do not follow from the type and default of the field.

    Attributes
    ----------
    names : the names of the option, by default one name derived from the name of the field
    metavar : the placeholder of the value in the help
    envvar : an environment variable that holds the default
    show_envvar : whether the help shows ``envvar``
    repeated : whether the user repeats the option for each value of a tuple
    argument : whether this is a positional argument
    click_type : the type that parses the value
    """

    names: tuple[str, ...] = ()
    metavar: str | None = None
    envvar: str | None = None
    show_envvar: bool = False
    repeated: bool = True
    argument: bool = False
    click_type: Any = None


def is_integer_from(value: object, low: int = 0) -> bool:
    """Return whether a value is an integer (Python or numpy) from ``low`` to 2^63 - 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "shape", ()) != ():
        return False
    return low <= int(value) <= MAX_SEED


def is_number_between(value: object, low: float, high: float) -> bool:
    """Return whether a value is a number (Python or numpy) from ``low`` to ``high``; False for NaN."""
    if isinstance(value, bool | str | bytes) or getattr(value, "shape", ()) != ():
        return False
    return hasattr(value, "__float__") and low <= float(value) <= high


def is_path(value: object) -> bool:
    """Return whether a value is a path object or a non-empty string without a null character."""
    if not isinstance(value, str | os.PathLike):
        return False
    text = str(getattr(value, "path", value))
    return text != "" and "\0" not in text


def is_text(value: object) -> bool:
    """Return whether a value is a text that can be written to a file."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= sign <= "\udfff" for sign in value)


def is_flag(value: object) -> bool:
    """Return whether a value is a Boolean (Python or numpy)."""
    return isinstance(value, bool) or (type(value).__name__ in ("bool_", "bool") and getattr(value, "shape", None) == ())


def whole_number_from(low: int) -> Allowed:
    """Allow the whole numbers from ``low`` on."""
    return Allowed(
        f"a whole number from {low} on", lambda value: is_integer_from(value, low), int, click_type=click.IntRange(low)
    )


def number_between(low: float, high: float, low_excluded: bool = False) -> Allowed:
    """Allow the numbers from ``low`` to ``high``, or above ``low`` if ``low_excluded``."""
    words = f"a number above {low:g}, at most {high:g}" if low_excluded else f"a number from {low:g} to {high:g}"
    return Allowed(
        words,
        lambda value: is_number_between(value, low, high) and not (low_excluded and float(value) == low),
        float,
        click_type=click.FloatRange(low, high, min_open=low_excluded),
    )


class SeedType(click.types.IntParamType):
    """The command-line type of a seed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the seed. Raises a usage error if the seed is negative or above 2^63 - 1."""
        seed: int = super().convert(value, param, ctx)
        if not 0 <= seed <= MAX_SEED:
            self.fail(f"{seed} is not a seed: seeds are from 0 to 2^63 - 1", param, ctx)
        return seed


From0 = Annotated[int, whole_number_from(0)]
From1 = Annotated[int, whole_number_from(1)]
Share = Annotated[float, number_between(0, 1)]
Text = Annotated[str, Allowed("a text", is_text)]
Flag = Annotated[bool, Allowed("True or False", is_flag, bool)]
# The path of a file or a folder.
File = Annotated[Path, Allowed("a path", is_path, lambda value: Path(os.fspath(value)), True, click.Path(path_type=Path))]
Seed = Annotated[int, whole_number_from(0)._replace(click_type=SeedType())]
Changes = Annotated[tuple[Text, ...], Cli(("--set",), metavar="KEY=VALUE")]

# Options that several commands have.
Threads = Annotated[From1 | None, Field(description="Number of processor cores to use.  [default: all available]")]
Device = Annotated[Text, Cli(envvar="VSE_DEVICE"), Field(description="auto, cpu, cuda or cuda:N.")]
SkipBad = Annotated[
    Flag, Cli(envvar="VSE_SKIP_BAD"), Field(description="Skip unreadable images and list them in OUT.failures.jsonl.")
]
WeightsDir = Annotated[
    File | None,
    Cli(envvar="VSE_WEIGHTS_DIR"),
    Field(description="Folder with weights to use instead of downloads: <model>.pth files, or model folders for text."),
]
Words = Annotated[
    File | None,
    Cli(envvar="VSE_WORDS"),
    Field(description="File of word vectors, word2vec or GloVe.  [default: vectors trained on the training captions]"),
]
Force = Annotated[
    Flag,
    Field(description="Also replace a file of a kind that this command does not write. Inputs are never replaced."),
]
AllowCode = Annotated[
    Flag,
    Cli(envvar="VSE_ALLOW_CODE"),
    Field(description="Allow Python files that a preset or a trained run names to be executed. Look at them first."),
]


class Options(BaseModel):
    """Options of a command. Raises UserError if an option is unknown, missing or not allowed.

    The text below a field is the help of its option.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_explain_invalid_option(type(self), values, error)) from None

    def with_environment(self, *names: str) -> Self:
        """Return a copy of these options in which environment variables replace defaults.

        ``names`` lists the options to replace; empty stands for all options.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        for name in names or type(self).model_fields:
            field = type(self).model_fields[name]
            cli = next((mark for mark in field.metadata if isinstance(mark, Cli)), Cli())
            if cli.envvar and _type_and_is_tuple(field.annotation)[0] is not bool and os.environ.get(cli.envvar):
                given.setdefault(name, os.environ[cli.envvar])
        return type(self)(**given)

    def __repr__(self) -> str:
        texts = (f"{name}={format_value(value)}" for name, value in self if value != type(self).model_fields[name].default)
        return f"vse.{type(self).__name__}({', '.join(texts)})"


def format_value(value: object) -> str:
    """Return a value as one line of text: the shape of an array, or the start of the repr of another value."""
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

    The docstring of the function, or ``text``, is the help of the command. The command has no options for the fields
    ``leave_out``. ``defaults`` replaces some defaults of the model; the value ``...`` makes an option required. While the
    function runs, ``force`` allows outputs to replace files of other kinds, and ``allow_code`` allows users' own code.
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

        parameters = list(click_parameters(model, leave_out, defaults or {}))
        built = cls(name, callback=run, params=parameters, help=cleandoc(text or function.__doc__ or ""))
        if group is not None:
            group.add_command(built)
        return built

    return decorate


def click_parameters(
    model: type[Options], leave_out: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Iterator[click.Parameter]:
    """Yield a click option or argument for each field of a model, including the fields of nested models."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Options):
            yield from click_parameters(field.annotation, leave_out, defaults)
        elif name not in leave_out:
            default = (defaults or {}).get(name, field.default)
            default = PydanticUndefined if default is ... else default
            yield _parameter(name, [field.annotation, *field.metadata], default, field.description)


def _parameter(name: str, hints: list[Any], default: Any, description: str | None) -> click.Parameter:
    marks = [mark for hint in hints for mark in _find_allowed_and_cli(hint)]
    cli = next((mark for mark in marks if isinstance(mark, Cli)), Cli())
    click_type = cli.click_type or next((mark.click_type for mark in marks if isinstance(mark, Allowed)), None)
    kind, is_list = _type_and_is_tuple(hints[0])
    required = default is PydanticUndefined
    if get_origin(kind) is Literal:
        click_type = click.Choice(get_args(kind))
    settings: dict[str, Any] = {"type": click_type or kind, "required": required, "metavar": cli.metavar}
    if cli.envvar:
        settings["envvar"] = cli.envvar
    if cli.argument:
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
        multiple=is_list and cli.repeated,
        show_default=not required and default is not None and default is not False and default not in ("", ()),
        show_envvar=cli.show_envvar,
        help=description,
        **settings,
    )


def _find_allowed_and_cli(hint: Any) -> Iterator[Any]:
    """Yield the :class:`Allowed` and :class:`Cli` objects at any depth of a type annotation."""
    if isinstance(hint, Allowed | Cli):
        yield hint
    yield from (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Allowed | Cli))
    for part in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _find_allowed_and_cli(part)


def _type_and_is_tuple(hint: Any) -> tuple[Any, bool]:
    """Return the type of a value that an annotation describes, and whether the annotation is a tuple of this type."""
    if get_origin(hint) is Annotated:
        return _type_and_is_tuple(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return _type_and_is_tuple(next(part for part in get_args(hint) if part is not NoneType))
    if get_origin(hint) is tuple:
        return _type_and_is_tuple(get_args(hint)[0])[0], True
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
    words = next((mark.words for mark in _find_allowed_and_cli(field.annotation) if isinstance(mark, Allowed)), first["msg"])
    if mark := next((mark for mark in field.metadata if isinstance(mark, Allowed)), None):
        words = mark.words
    none = ", or None," if NoneType in get_args(field.annotation) else ""
    return f"{given}: {words}{none} is needed"
