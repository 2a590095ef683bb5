"""Errors that are the user's to fix, and interruption by a signal."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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
