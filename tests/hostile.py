"""Hostile input at a command: it must end with one line of error and exit 2, and neither hang nor show a traceback."""

from __future__ import annotations

import io
import json
import os
import signal
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.faults.suite import Suite

Command = Callable[[list[str]], None]
LONGEST = 2000  # characters of a line: a few lines of a terminal
PATIENCE = 120  # seconds, after which a command hangs
_suites: list[Suite] = []  # which count the outcomes


def refused(command: Command, *arguments: object) -> str:
    """The one line with which a command refuses what it is given; anything else fails the test."""
    error = refused_or_done(command, *arguments)
    assert error is not None, "the command takes it"
    return error


def refused_or_done(command: Command, *arguments: object) -> str | None:
    """The one line with which a command refuses what it is given, or None if it takes it; no third way is allowed."""
    try:
        error = _refused_or_done(command, arguments)
    except AssertionError as wrong:
        for suite in _suites:
            suite.record("wrong", f"{arguments}: {wrong}")
        raise
    for suite in _suites:
        suite.record("harmless" if error is None else "refused")
    return error


def _refused_or_done(command: Command, arguments: tuple[object, ...]) -> str | None:
    stdout, stderr = io.StringIO(), io.StringIO()
    with hanging_is_an_error(), redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as stop:
        command([str(argument) for argument in arguments])
    lines = stderr.getvalue().splitlines()
    if stop.value.code == 0:
        return None
    errors = [line for line in lines if "error:" in line]
    assert stop.value.code == 2, stderr.getvalue()[-LONGEST:]
    assert errors == lines[-1:], "there is one line of error, and it is the last"
    assert len(errors[0]) <= LONGEST
    assert not obeyed(errors[0]), "what was read is not obeyed by the terminal"
    assert not stdout.getvalue()
    return errors[0]


@contextmanager
def counted(suite: Suite) -> Iterator[None]:
    """Record the outcome of each command that is given hostile input."""
    _suites.append(suite)
    yield
    _suites.remove(suite)


def obeyed(line: str) -> list[str]:
    """The characters of a line that a terminal would obey."""
    return [c for c in line if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in "\u202a\u202b\u202d\u202e\u2066"]


@contextmanager
def hanging_is_an_error() -> Iterator[None]:

    def fail(*_: object) -> None:
        raise AssertionError("the command hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fifo(path: Path) -> Path:
    """A named pipe that nobody writes into; what is at ``path`` goes."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def loop(path: Path) -> Path:
    """A symbolic link to itself; what is at ``path`` goes."""
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)
    return path


def folder(path: Path) -> Path:
    """A folder where a file belongs; what is at ``path`` goes."""
    path.unlink(missing_ok=True)
    path.mkdir()
    return path


NOT_FILES: dict[str, Callable[[Path], Path]] = {"fifo": fifo, "loop": loop, "folder": folder}

HUGE = "9" * 5000
NOT_JSON = {
    "nothing": "", "half": '{"dataset": "demo", "images": [', "5,000 digits": HUGE, "5,000 digits in a list": f"[{HUGE}]",
    "1e400": "1e400", "infinity": '{"a": -Infinity}', "not a number": '{"a": NaN}', "a lone surrogate": '"\\ud800"',
    "a surrogate as a key": '{"\\udfff": 1}', "a surrogate deep inside": '{"a": [{"b": "x\\uD83Dx"}]}',
    "deep lists": "[" * 100_000, "deep closed lists": "[" * 100_000 + "]" * 100_000, "deep objects": '{"a":' * 50_000,
    "text": "not JSON", "bytes": b"\xff\xfe\x00\x01", "zeros": bytes(1000), "a control character": '"\x1b[2J"',
}  # fmt: skip
WRONG_VALUES: dict[str, Any] = {
    "null": None, "true": True, "a number": 7, "a fraction": 0.5, "a negative number": -1, "beyond int64": 2**63,
    "far beyond int64": 10**400, "an empty text": "", "a text": "x", "a long text": "x" * 5000,
    "an escape sequence": "\x1b[2J\x1b]0;x\x07", "a zero byte": "a\x00b", "a path": "../../../etc/passwd", "an empty list": [],
    "a list": [1, "x", None], "an empty object": {}, "an object": {"x": [1]},
}  # fmt: skip


def spoilt_json(path: Path, keys: tuple[str | int, ...], value: Any) -> Path:
    """Put ``value`` where ``keys`` lead in a JSON file; ``...`` takes the key out."""
    content = json.loads(path.read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    if value is ...:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    path.write_text(json.dumps(content))
    return path


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([*WRONG_VALUES.values()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(content: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The keys that lead to every value of JSON content."""
    if keys:
        yield keys
    inner = content.items() if isinstance(content, dict) else enumerate(content[:2]) if isinstance(content, list) else ()
    for key, value in inner:
        yield from places(value, (*keys, key))


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The content of a file with a few bytes changed, a piece taken out, or its end cut off."""
    how = draw(st.sampled_from(["change", "take out", "cut"]))
    start = draw(st.integers(0, len(content) - 1))
    if how == "cut":
        return content[:start]
    if how == "take out":
        return content[:start] + content[start + draw(st.integers(1, 64)) :]
    patch = draw(st.binary(min_size=1, max_size=8))
    return content[:start] + patch + content[start + len(patch) :]
