"""Errors for the user, and functions that make untrusted names and captions safe for terminals and spreadsheets."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

_MAX_LIST_LENGTH = 1000  # characters; a longer list of names is cut to the nearest names
_MAX_NEAREST_NAMES = 5
_ESCAPE_SEQUENCE_PATTERN = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x9b[0-?]*[ -/]*[@-~]", re.DOTALL
)
_JOINER_CHARACTERS = "\u200c\u200d"  # words of some scripts and emoji need them
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\n")


class UserError(Exception):
    """An error that the user can fix. The message is one line: fault, place and remedy. Commands exit with code 2."""


class Interrupted(Exception):
    """Raised when a signal stops work that can be resumed. Commands exit with 128 + the number of the signal, as shells do."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for the end of an error message about an unknown name: the nearest ``known`` name, and a list.

    The list has all known names or, if there are too many, the five nearest.
    """
    names = sorted(known)
    name = name[:_MAX_LIST_LENGTH]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(names)
    if len(listed) <= _MAX_LIST_LENGTH:
        return f" ({hint}known: {listed})"
    nearest = difflib.get_close_matches(name, names, n=_MAX_NEAREST_NAMES, cutoff=0.0)
    return f" ({hint}nearest of {len(names)}: {', '.join(nearest)})"


def import_extra(module: str, needed_by: str, extra: str) -> Any:
    """Import ``module``, which belongs to a package of the optional dependencies ``extra``.

    ``needed_by`` names the feature or option that needs the package, for the error message. Raises UserError, with the command
    that installs the package, if the package is missing.
    """
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{needed_by} needs the package {package}: {extra_install_command(extra)}") from None


def extra_install_command(extra: str) -> str:
    """Return the shell command that installs this program with the optional dependencies ``extra``."""
    root = Path(__file__).resolve().parents[1]
    return f"pip install -e '{root}[{extra}]'" if (root / "setup.cfg").is_file() else f"pip install 'vse-pipeline[{extra}]'"


def to_printable_line(text: object) -> str:
    """Return ``text`` on one line, without characters that control a terminal or the direction of writing.

    White space becomes single spaces. A lone surrogate (an undecodable byte of a file name) becomes U+FFFD.
    """
    line = " ".join(_ESCAPE_SEQUENCE_PATTERN.sub("", str(text)).split())
    return line if line.isascii() and line.isprintable() else "".join(map(_printable_character, line))


def escape_csv_cell(value: Any) -> Any:
    """Return a CSV cell that no spreadsheet reads as a formula.

    A text like a formula gets a leading apostrophe. Carriage returns, which end a row in some programs, become line feeds.
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


def _printable_character(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "\ufffd"
    return "" if kind in ("Cc", "Cf", "Zl", "Zp") and character not in _JOINER_CHARACTERS else character
