"""Inputs whose SHA-256 is noted: the bytes that are hashed are those that were read, whatever happens meanwhile."""

from __future__ import annotations

import hashlib
import os
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from vse.pipeline.errors import UserError
from vse.pipeline.input_files import FileState, changed_while_read, check_input, file_state

_Content = TypeVar("_Content")


class ReadOnce:
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
            raise changed_while_read(self.path, "written to")
        self.__dict__["sha256"] = hashlib.sha256(content).hexdigest()
        return content

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of its bytes in hexadecimal; :class:`UserError` if they were written to since it was opened."""
        self.stream.seek(0)
        digest = hashlib.file_digest(self.stream, "sha256").hexdigest()
        if self.has_changed:
            raise changed_while_read(self.path, "written to")
        return digest

    @property
    def has_changed(self) -> bool:
        """Whether it was written to since it was opened."""
        now, then = self._now(), self.state
        return (now.size, now.written) != (then.size, then.written)

    def _now(self) -> FileState:
        return FileState.of(os.fstat(self.stream.fileno()))


def read_recorded(file: Path, record: object) -> tuple[bytes, str]:
    """Read a file of a run folder; returns its bytes and their SHA-256.

    :class:`UserError` if ``record``, the content of ``run.json``, has another SHA-256 for it.
    """
    opened = ReadOnce(file)
    content = opened.read()
    sums = record.get("files") if isinstance(record, Mapping) else None
    expected = sums.get(file.name) if isinstance(sums, Mapping) else None
    if expected not in (None, opened.sha256):
        raise UserError(
            f"{file}: not what the training wrote (its SHA-256 is not the one in run.json); restore it, or train again with "
            "--overwrite"
        )
    return content, opened.sha256


class ReadFiles:
    """Some plain files of a folder, each opened once; ``path`` is the folder."""

    def __init__(self, path: Path, files: Sequence[ReadOnce]) -> None:
        self.path = path
        self._files = {file.path.name: file for file in files}

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of a line ``<sha256>  <name>`` for each file, by their names, as ``sha256sum`` writes them."""
        lines = (f"{file.sha256}  {name}\n" for name, file in sorted(self._files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_by_name(path: Path, read: Callable[[Path], _Content]) -> tuple[_Content, str]:
    """What ``read`` makes of a file, and the file's SHA-256; :class:`UserError` if it was not the same file throughout."""
    watched = Watched(path) if path.is_file() else None
    content = read(path)
    if watched is None:
        raise UserError(f"{path}: no such file")
    watched.check()
    return content, watched.sha256


class Watched:
    """A file that a library reads by its name: :meth:`check` refuses it if it is no longer the file that was hashed.

    To be made before the file is read; :meth:`check` is called after that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = ReadOnce(path)
        self._place = self._named()

    @property
    def sha256(self) -> str:
        """SHA-256 of its bytes."""
        return self._opened.sha256

    def check(self) -> None:
        """:class:`UserError` if the file was replaced or written to since this object was made."""
        if self._named() != self._place:
            raise changed_while_read(self.path)

    def _named(self) -> FileState | None:
        state = file_state(self.path)
        return state and state._replace(changed=0)  # another name or mode is no other content
