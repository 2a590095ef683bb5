"""Input files, which may be anything: what would hang is refused, and what cannot be read is said in one line."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, TypeGuard

from vse.pipeline.errors import Interrupted, UserError
from vse.pipeline.plain_text import printable

SETTLED = 2 * 10**9  # ns: the coarsest clock of a file system
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


class FileState(NamedTuple):
    """What differs once a file was replaced or written to; times are in nanoseconds."""

    device: int
    inode: int
    size: int
    written: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def is_settled(self, at: int) -> bool:
        """Whether whoever writes to the file after the time ``at`` gives it another state, however coarse its clock is."""
        return max(self.written, self.changed) < at - SETTLED


def file_state(path: Path) -> FileState | None:
    """The state of a file; None if it is not there."""
    try:
        return FileState.of(os.stat(path))
    except OSError:
        return None


_noted: ContextVar[dict[Path, FileState]] = ContextVar("_noted")


@contextmanager
def changes_named() -> Iterator[None]:
    """In this block an unexpected error is a :class:`UserError` if an input changed since it was checked.

    Its state is compared with that of the first :func:`check_input`. A file that the program itself writes counts no longer.
    """
    token = _noted.set({})
    try:
        yield
    except (UserError, Interrupted):
        raise
    except Exception as error:
        changed = next((path for path, state in _noted.get().items() if file_state(path) != state), None)
        if changed is None:
            raise
        raise changed_while_read(changed) from error
    finally:
        _noted.reset(token)


def changed_while_read(path: Path, how: str = "replaced or written to") -> UserError:
    """Return the error that a file was written to, or perhaps replaced, while it was read."""
    return UserError(f"{path}: was {how} while it was read; run the command again")


def forget_input(path: Path) -> None:
    """Note that the program itself wrote a file that it had read."""
    _noted.get({}).pop(path, None)


def check_input(path: Path) -> Path:
    """The path itself, if it is that of a plain file; :class:`UserError` if there is none, or what is there may never end."""
    try:
        status = path.stat()
        mode = status.st_mode
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {reason_of(error)}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: {_KINDS.get(stat.S_IFMT(mode), 'is no file')}, and only plain files are read")
    _noted.get({}).setdefault(path, FileState.of(status))
    return path


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """In this block whatever a file's content raises is a :class:`UserError`: it is not ``what`` it was read as, or changed.

    Libraries raise many kinds for a file that is something else, and a hostile one finds more.
    """
    before = file_state(path)
    try:
        yield
    except (UserError, Interrupted):
        raise
    except Exception as error:
        if file_state(path) != before:
            raise changed_while_read(path) from None
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
