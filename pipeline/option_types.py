"""The types of command-line options and of Python arguments: a Python type, the allowed values, and a parser of the text."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import click
from pydantic import Field
from pydantic_core import PydanticCustomError, core_schema

from vse.pipeline.errors import did_you_mean

MAX_SEED = 2**63 - 1


class AllowedValues(NamedTuple):
    """The allowed values of an option or an argument.

    Attributes
    ----------
    description : the allowed values in words, for errors
    accepts : a function that returns whether a value is allowed
    convert : a function that converts an allowed value to a plain Python value, such as a numpy integer to an int
    may_be_path : whether the value may be a path
    click_type : the type that parses the value on the command line
    """

    description: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    may_be_path: bool = False
    click_type: Any = None

    def __get_pydantic_core_schema__(self, *_: Any) -> core_schema.CoreSchema:
        """Return the schema with which pydantic checks and converts a value."""

        def check(value: Any) -> Any:
            if self.accepts(value):
                return self.convert(value)
            raise PydanticCustomError("not_allowed", "{description}", {"description": self.description})

        return core_schema.no_info_plain_validator_function(check)


class NearestChoice(click.Choice[Any]):
    """A type for options with fixed choices. The error for any other word names the nearest choice."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        if Path(str(value)).is_file():
            return f"{value!r} is a file; one of these words comes before it: {', '.join(map(str, self.choices))}"
        return f"{value!r} is no choice{did_you_mean(str(value), map(str, self.choices))}"


@dataclass(frozen=True)
class CliOption:
    """The properties of a command-line option that the type and default of its pydantic field do not state.

    Attributes
    ----------
    names : the names of the option, by default one name derived from the name of the field
    metavar : the placeholder of the value in the help
    envvar : an environment variable that holds the default
    show_envvar : whether the help shows ``envvar``
    is_repeated : whether the user repeats the option for each value of a tuple
    is_argument : whether this is a positional argument
    click_type : the type that parses the value
    """

    names: tuple[str, ...] = ()
    metavar: str | None = None
    envvar: str | None = None
    show_envvar: bool = False
    is_repeated: bool = True
    is_argument: bool = False
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
    """Return whether a value is a text without a null character or a lone surrogate, so that it can be written to a file."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= sign <= "\udfff" for sign in value)


def is_flag(value: object) -> bool:
    """Return whether a value is a Boolean (Python or numpy)."""
    return isinstance(value, bool) or (type(value).__name__ in ("bool_", "bool") and getattr(value, "shape", None) == ())


def whole_number_from(low: int) -> AllowedValues:
    """Return the allowed values of an option that takes integers from ``low`` on."""
    return AllowedValues(
        f"a whole number from {low} on", lambda value: is_integer_from(value, low), int, click_type=click.IntRange(low)
    )


def number_between(low: float, high: float, low_excluded: bool = False) -> AllowedValues:
    """Return the allowed values of an option that takes numbers from ``low`` to ``high``.

    With ``low_excluded``, numbers must be above ``low``.
    """
    description = f"a number above {low:g}, at most {high:g}" if low_excluded else f"a number from {low:g} to {high:g}"
    return AllowedValues(
        description,
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


NonNegativeInteger = Annotated[int, whole_number_from(0)]
PositiveInteger = Annotated[int, whole_number_from(1)]
Share = Annotated[float, number_between(0, 1)]
Text = Annotated[str, AllowedValues("a text", is_text)]
Flag = Annotated[bool, AllowedValues("True or False", is_flag, bool)]
# The path of a file or a folder.
FileOrFolderPath = Annotated[
    Path, AllowedValues("a path", is_path, lambda value: Path(os.fspath(value)), True, click.Path(path_type=Path))
]
# The text of a path or URL; a path object would replace s3:// with s3:/.
PathOrUrl = Annotated[str, AllowedValues("a path or a URL", is_path, os.fspath, True)]
Seed = Annotated[int, whole_number_from(0)._replace(click_type=SeedType())]
SettingChanges = Annotated[tuple[Text, ...], CliOption(("--set",), metavar="KEY=VALUE")]

# Options that several commands have.
ThreadCount = Annotated[
    PositiveInteger | None, Field(description="Number of processor cores to use.  [default: all available]")
]
Device = Annotated[
    Text,
    CliOption(envvar="VSE_DEVICE"),
    Field(description="auto (a GPU if there is one), cpu, cuda or cuda:N."),
]
SkipBad = Annotated[
    Flag,
    CliOption(envvar="VSE_SKIP_BAD"),
    Field(
        description="Skip unreadable images and list them in OUT.failures.jsonl. Without this option, an unreadable image is "
        "an error."
    ),
]
WeightsDir = Annotated[
    FileOrFolderPath | None,
    CliOption(envvar="VSE_WEIGHTS_DIR"),
    Field(
        description="Folder of weights, to read instead of downloading: a file <model>.pth or <model>.safetensors for a "
        "CNN, a folder <model> for a text model. Weights that are not in the folder are downloaded."
    ),
]
WordVectorsFile = Annotated[
    FileOrFolderPath | None,
    CliOption(envvar="VSE_WORDS"),
    Field(
        description="Read the word vectors from this file (word2vec or GloVe).  [default: the file that the preset names; "
        "if it names none, word vectors are trained on the training captions]"
    ),
]
Force = Annotated[
    Flag,
    Field(
        description="Replace any existing file at an output path. Without this option, an existing file is replaced only if "
        "it has the format of the output; any other file is an error. Inputs are never replaced."
    ),
]
AllowCode = Annotated[
    Flag,
    CliOption(envvar="VSE_ALLOW_CODE"),
    Field(
        description="Run the Python files that a preset or a trained run names. Without this option, such a file is an "
        "error. Read the files first, because they can do anything on this machine."
    ),
]
