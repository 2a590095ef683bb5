"""Errors for the user, and the safe text that they and other outputs are built from.

Names and texts of data sets are untrusted: :func:`printable` makes them safe for a terminal, and :func:`escape_csv_cell` for a
spreadsheet.
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
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x9b[0-?]*[ -/]*[@-~]", re.DOTALL)
_JOINERS = "\u200c\u200d"  # words of some scripts and emoji need them
_FORMULA = ("=", "+", "-", "@", "\t", "\n")


class UserError(Exception):
    """An error that the user can fix, such as bad input. Its message is one line: what is wrong, where, and what to do.

    Commands exit with 2.
    """


class Interrupted(Exception):
    """A signal stopped the work, which can be resumed. Commands exit with 128 + the number of the signal, as shells do."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message, `` (did you mean 'vsepp'? known: ...)``, with the nearest and all valid names.

    If the names are longer than a line or two, only the nearest five are listed.
    """
    names = sorted(known)
    name = name[:_LONGEST]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(names)
    if len(listed) <= _LONGEST:
        return f" ({hint}known: {listed})"
    nearest = difflib.get_close_matches(name, names, n=_NEAREST, cutoff=0.0)
    return f" ({hint}nearest of {len(names)}: {', '.join(nearest)})"


def import_extra(module: str, what: str, extra: str) -> Any:
    """Import a module that an extra of this package installs.

    Raises UserError if the module is missing. The message says that ``what`` needs it, and how to install the ``extra``.
    """
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{what} needs the package {package}: pip install 'vse-pipeline[{extra}]'") from None


def printable(text: object) -> str:
    """Return ``text`` on one line, without characters that control a terminal or an editor.

    Escape sequences and control characters are removed, also those that change the direction of writing. Each run of white
    space, line ends and tabs included, becomes one space. A lone surrogate (an undecodable byte of a file name) becomes
    U+FFFD.
    """
    line = " ".join(_ESCAPES.sub("", str(text)).split())
    return line if line.isascii() and line.isprintable() else "".join(map(_printable_character, line))


def escape_csv_cell(value: Any) -> Any:
    """Return a CSV cell that no spreadsheet reads as a formula: a text that begins like one gets a leading apostrophe.

    Readers would end the row at a carriage return, so it becomes a line feed, which CSV quotes. Numbers stay as they are.
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(_FORMULA) else text


def _printable_character(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "\ufffd"
    return "" if kind in ("Cc", "Cf", "Zl", "Zp") and character not in _JOINERS else character
