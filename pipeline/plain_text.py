"""Text from data made safe where it is shown: one printable line for terminals and comments, no formula in a CSV cell."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

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


def csv_cell(value: Any) -> Any:
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
