"""Text from data made safe where it is shown: one printable line for terminals and comments, no formula in a CSV cell.

Errors that are the user's to fix, and interruption by a signal.

Packages that are extras of this one: imported when they are needed, and one clear line if one is missing.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable
from importlib import import_module
from typing import Any

_LONGEST = 1000  # characters of a list of names
_NEAREST = 5


class UserError(Exception):
    """Bad input or usage: one line that tells what is wrong, where, and what to do. Commands exit with 2."""


class Interrupted(Exception):
    """The work was stopped by a signal and can be resumed. Commands exit with 128 + the signal's number, as shells do."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message, `` (did you mean 'vsepp'? known: ...)``: the nearest valid name, then all of them.

    Of more names than a line or two hold, the nearest five.
    """
    names = sorted(known)
    name = name[:_LONGEST]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = ", ".join(names)
    if len(shown) <= _LONGEST:
        return f" ({hint}known: {shown})"
    nearest = difflib.get_close_matches(name, names, n=_NEAREST, cutoff=0.0)
    return f" ({hint}nearest of {len(names)}: {', '.join(nearest)})"


def import_extra(module: str, what: str, extra: str) -> Any:
    """The module; :class:`UserError` says that ``what`` needs it, and which extra of this package installs it."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{what} needs the package {package}: pip install 'vse-pipeline[{extra}]'") from None


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x9b[0-?]*[ -/]*[@-~]", re.DOTALL)
_JOINERS = "\u200c\u200d"  # which words of some scripts, and emoji, need
_FORMULA = ("=", "+", "-", "@", "\t", "\n")


def printable(text: object) -> str:
    """``text`` on one line, without what a terminal or an editor would obey.

    Escape sequences and control characters go, among them those that turn the direction of writing, and every run of white
    space, line ends and tabs included, becomes one blank. What is no Unicode character (a file name's undecodable byte)
    becomes U+FFFD.
    """
    line = " ".join(_ESCAPES.sub("", str(text)).split())
    return line if line.isascii() and line.isprintable() else "".join(map(_shown, line))


def escape_csv_cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: a text that begins like one gets an apostrophe in front.

    A carriage return, at which readers would end the row, becomes a line feed, which is quoted. Numbers stay as they are.
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(_FORMULA) else text


def _shown(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "\ufffd"
    return "" if kind in ("Cc", "Cf", "Zl", "Zp") and character not in _JOINERS else character
