"""Input files, which may be anything: what would hang is refused, and what cannot be read is said in one line."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from vse.pipeline.errors import Interrupted, UserError
from vse.pipeline.plain_text import printable

LONGEST_NAME = 100  # bytes of the name of a data set or a feature, which become parts of file names
_LONGEST_FILE_NAME = 255
_LONGEST_REASON = 200
_KINDS = {
    stat.S_IFDIR: "is a folder",
    stat.S_IFIFO: "is a named pipe",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}


def check_input(path: Path) -> Path:
    """The path itself, if it is that of a plain file; :class:`UserError` if there is none, or what is there may never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {reason_of(error)}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: {_KINDS.get(stat.S_IFMT(mode), 'is no file')}, and only plain files are read")
    return path


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """In this block whatever a file's content raises is a :class:`UserError`: it is not ``what`` it was read as.

    Libraries raise many kinds for a file that is something else, and a hostile one finds more.
    """
    try:
        yield
    except (UserError, Interrupted):
        raise
    except Exception as error:
        raise UserError(f"{path}: not {what} ({reason_of(error)})") from None


def reason_of(error: Exception) -> str:
    """Why something failed, in a few words on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = printable(error) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"it lacks {text}"
    elif isinstance(error, MemoryError):
        text = f"it does not fit into memory: {text}"
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def is_name(value: object) -> TypeGuard[str]:
    """Whether ``value`` can be the name of a data set, a feature or an experiment, which becomes a part of file names."""
    return (
        isinstance(value, str)
        and value.isprintable()
        and 0 < len(value.encode()) <= LONGEST_NAME
        and not value.startswith((".", "~", " "))
        and not set("/\\") & set(value)
    )


def is_path(value: object) -> bool:
    """Whether ``value`` can be a path in a file system."""
    if not isinstance(value, str) or "\0" in value:
        return False
    parts = [os.fsencode(part) for part in Path(value).parts]
    return all(len(part) <= _LONGEST_FILE_NAME for part in parts)
