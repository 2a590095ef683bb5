"""Options of commands: one field is the option, its help, its limits and its argument in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import numpy as np
import pytest
from click.testing import CliRunner
from pydantic import Field

from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import may_replace_other_kinds
from vse.pipeline.option_types import (
    CliOption,
    Device,
    FileOrFolderPath,
    Flag,
    Force,
    PositiveInteger,
    SettingChanges,
    Share,
    Text,
)
from vse.pipeline.options import Options, command


class Inner(Options):
    """Options within the options of a command."""

    share: Share = 0.5
    """How much."""
    device: Device = "auto"


class Outer(Options):
    """The options of a command."""

    files: Annotated[tuple[FileOrFolderPath, ...], CliOption(is_argument=True)]
    name: Text
    """The name."""
    sets: SettingChanges = ()
    """A change."""
    count: PositiveInteger | None = None
    """How many."""
    kind: Literal["image", "text"] = "image"
    """The kind."""
    check: Flag = True
    """Check all."""
    inner: Inner = Field(default_factory=Inner)
    force: Force = False


def test_options_with_their_defaults_are_not_displayed() -> None:
    displayed = repr(Outer(files=["a.h5"], name="x", inner=Inner(share=0.5)))
    assert displayed.endswith(", name='x')")
    assert "inner=vse.Inner(share=0.25)" in repr(Outer(files=["a.h5"], name="x", inner=Inner(share=0.25)))


def run(*arguments: str, **settings: Any) -> tuple[Outer, bool]:
    """Return the object that the command receives, and whether it may replace other kinds of files."""
    received: list[tuple[Outer, bool]] = []

    @command("try", **settings)
    def built(request: Outer) -> None:
        """Try it."""
        received.append((request, may_replace_other_kinds()))

    CliRunner().invoke(built, [*arguments], catch_exceptions=False, standalone_mode=False)
    return received[0]


def test_the_command_line_gives_the_object_that_python_gives() -> None:
    given = ("a.h5", "b.h5", "--name", "x", "--set", "k=1", "--set", "l=2", "--count", "3", "--no-check", "--share", "0.25")
    expected = Outer(
        files=["a.h5", Path("b.h5")], name="x", sets=["k=1", "l=2"], count=np.int64(3), check=False, inner=Inner(share=0.25)
    )
    assert run(*given) == (expected, False)
    assert (expected.files, expected.count) == ((Path("a.h5"), Path("b.h5")), 3)
    assert run("a.h5", "--name", "x", "--force")[1]
    assert run("a.h5", "--name", "x", "--kind", "text")[0].kind == "text"


def test_the_help_has_the_text_the_default_and_the_limits_of_each_field() -> None:
    @command("try", leave_out={"count"}, defaults={"name": "y", "kind": ...})
    def built(request: Outer) -> None:
        """Try it."""

    text = " ".join(CliRunner().invoke(built, ["--help"]).output.split())
    for part in (
        "Try it.",
        "--name TEXT The name. [default: y]",
        "How much. [default: 0.5; 0<=x<=1]",
        "--set KEY=VALUE A change.",
    ):
        assert part in text
    assert "[image|text] The kind. [required]" in text
    assert "--check / --no-check" in text
    assert "--count" not in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": 1}, "name=1: a text is needed"),
        ({"count": 0}, "count=0: a whole number from 1 on, or None, is needed"),
        ({"check": "no"}, "check='no': True or False is needed"),
        ({"cuont": 1}, "cuont=1: Outer has no such argument (did you mean 'count'?"),
        ({"files": 3}, "files=3: "),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        Outer(**{"files": ["a"], "name": "x", **values})
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(UserError, match="Outer: name is missing"):
        Outer(files=["a"])


def test_a_wrong_option_is_refused_before_the_command_runs() -> None:
    for arguments, option in (
        (["--count", "0"], "--count"),
        (["--share", "2"], "--share"),
        (["--share", "nan"], "--share nan"),
    ):
        with pytest.raises((click.UsageError, UserError)) as refused:
            run("a", "--name", "x", *arguments)
        value = refused.value
        assert option in (value.format_message() if isinstance(value, click.UsageError) else str(value))


def test_variables_of_the_environment_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSE_DEVICE", "cuda:1")
    assert run("a", "--name", "x")[0].inner.device == "cuda:1"
    assert Inner().with_environment().device == "cuda:1"
    assert Inner(device="cpu").with_environment().device == "cpu"
    assert Inner().with_environment("share").device == "auto"
