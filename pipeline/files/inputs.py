"""Inputs whose SHA-256 is noted: the bytes that are hashed are those that were read, whatever happens meanwhile.

Input files, which may be anything: what would hang is refused, and what cannot be read is said in one line.
"""

from __future__ import annotations

import hashlib
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, TypeGuard, TypeVar

from vse.pipeline.errors import Interrupted, UserError, printable

COARSEST_CLOCK = 2 * 10**9  # ns: the coarsest clock of a file system
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
        return max(self.written, self.changed) < at - COARSEST_CLOCK


def read_file_state(path: Path) -> FileState | None:
    """The state of a file; None if it is not there."""
    try:
        return FileState.of(os.stat(path))
    except OSError:
        return None


_noted: ContextVar[dict[Path, FileState]] = ContextVar("_noted")


@contextmanager
def report_changed_inputs() -> Iterator[None]:
    """In this block an unexpected error is a :class:`UserError` if an input changed since it was checked.

    Its state is compared with that of the first :func:`check_input`. A file that the program itself writes counts no longer.
    """
    token = _noted.set({})
    try:
        yield
    except (UserError, Interrupted):
        raise
    except Exception as error:
        changed = next((path for path, state in _noted.get().items() if read_file_state(path) != state), None)
        if changed is None:
            raise
        raise changed_file_error(changed) from error
    finally:
        _noted.reset(token)


def changed_file_error(path: Path, how: str = "replaced or written to") -> UserError:
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
        raise UserError(f"{path}: {error_reason(error)}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: {_KINDS.get(stat.S_IFMT(mode), 'is no file')}, and only plain files are read")
    _noted.get({}).setdefault(path, FileState.of(status))
    return path


@contextmanager
def wrap_read_errors(path: Path, what: str) -> Iterator[None]:
    """In this block whatever a file's content raises is a :class:`UserError`: it is not ``what`` it was read as, or changed.

    Libraries raise many kinds for a file that is something else, and a hostile one finds more.
    """
    before = read_file_state(path)
    try:
        yield
    except (UserError, Interrupted):
        raise
    except Exception as error:
        if read_file_state(path) != before:
            raise changed_file_error(path) from None
        raise UserError(f"{path}: not {what} ({error_reason(error)})") from None


def error_reason(error: Exception) -> str:
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


_Content = TypeVar("_Content")


class InputFile:
    """A plain file, opened once: whatever is renamed over its path later is another file and is not read.

    Parameters
    ----------
    path : the file; :class:`UserError` if it is missing, or a folder, a FIFO or a device
    """

    def __init__(self, path: Path) -> None:
        self.path = check_input(path)
        try:  # without waiting: a FIFO would have it wait for a writer
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        weakref.finalize(self, os.close, handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UserError(f"{path}: not a plain file")
        self.stream: BufferedReader = os.fdopen(handle, "rb", closefd=False)
        self.state = self._now()

    @property
    def name(self) -> Path:
        """A name for libraries that open files themselves: of this very file, where the system has such names."""
        opened = Path(f"/dev/fd/{self.stream.fileno()}")
        return opened if opened.exists() else self.path

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self._now().size

    def read(self) -> bytes:
        """Return all its bytes, which from then on are those that :attr:`sha256` is of.

        Raises UserError if they were written to since the file was opened.
        """
        self.stream.seek(0)
        content = self.stream.read()
        if self.has_changed:
            raise changed_file_error(self.path, "written to")
        self.__dict__["sha256"] = hashlib.sha256(content).hexdigest()
        return content

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of its bytes in hexadecimal; :class:`UserError` if they were written to since it was opened."""
        self.stream.seek(0)
        digest = hashlib.file_digest(self.stream, "sha256").hexdigest()
        if self.has_changed:
            raise changed_file_error(self.path, "written to")
        return digest

    @property
    def has_changed(self) -> bool:
        """Whether it was written to since it was opened."""
        now, then = self._now(), self.state
        return (now.size, now.written) != (then.size, then.written)

    def _now(self) -> FileState:
        return FileState.of(os.fstat(self.stream.fileno()))


def read_run_file(file: Path, record: object) -> tuple[bytes, str]:
    """Read a file of a run folder; returns its bytes and their SHA-256.

    :class:`UserError` if ``record``, the content of ``run.json``, has another SHA-256 for it.
    """
    opened = InputFile(file)
    content = opened.read()
    sums = record.get("files") if isinstance(record, Mapping) else None
    expected = sums.get(file.name) if isinstance(sums, Mapping) else None
    if expected not in (None, opened.sha256):
        raise UserError(
            f"{file}: not what the training wrote (its SHA-256 is not the one in run.json); restore it, or train again with "
            "--overwrite"
        )
    return content, opened.sha256


class InputFolder:
    """Some plain files of a folder, each opened once; ``path`` is the folder."""

    def __init__(self, path: Path, files: Sequence[InputFile]) -> None:
        self.path = path
        self._files = {file.path.name: file for file in files}

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of a line ``<sha256>  <name>`` for each file, by their names, as ``sha256sum`` writes them."""
        lines = (f"{file.sha256}  {name}\n" for name, file in sorted(self._files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_and_hash(path: Path, read: Callable[[Path], _Content]) -> tuple[_Content, str]:
    """What ``read`` makes of a file, and the file's SHA-256; :class:`UserError` if it was not the same file throughout."""
    watched = WatchedFile(path) if path.is_file() else None
    content = read(path)
    if watched is None:
        raise UserError(f"{path}: no such file")
    watched.check()
    return content, watched.sha256


class WatchedFile:
    """A file that a library reads by its name: :meth:`check` refuses it if it is no longer the file that was hashed.

    To be made before the file is read; :meth:`check` is called after that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = InputFile(path)
        self._place = self._named()

    @property
    def sha256(self) -> str:
        """SHA-256 of its bytes."""
        return self._opened.sha256

    def check(self) -> None:
        """:class:`UserError` if the file was replaced or written to since this object was made."""
        if self._named() != self._place:
            raise changed_file_error(self.path)

    def _named(self) -> FileState | None:
        state = read_file_state(self.path)
        return state and state._replace(changed=0)  # another name or mode is no other content
