"""Read untrusted input files, and detect files that change while they are read.

:class:`InputFile` keeps a file open, so that the SHA-256 belongs to the bytes that were read. :class:`WatchedFile` is for
libraries that open a file by path.
"""

from __future__ import annotations

import bz2
import difflib
import gzip
import hashlib
import io
import lzma
import os
import stat
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard, TypeVar

from vse.pipeline.errors import Interrupted, UserError, to_printable_line

COARSEST_CLOCK_NS = 2 * 10**9  # the time between two ticks of the coarsest clock of a file system
MAX_NAME_BYTES = 100  # bytes of the name of a data set or feature, which becomes a part of file names
_MAX_FILE_NAME_BYTES = 255
_MAX_REASON_LENGTH = 200
_FAULT_BY_FILE_TYPE = {
    stat.S_IFDIR: "is a folder",
    stat.S_IFIFO: "is a named pipe",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}


class FileState(NamedTuple):
    """The device, inode, size and times of a file. One of these changes if the file is replaced or written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def detects_writes_after(self, now: int) -> bool:
        """Return whether each write to the file after the time ``now`` (in ns) will change its state.

        Returns False for a file that was written shortly before ``now``: a file system with a coarse clock may give a second
        write the same time.
        """
        return max(self.mtime_ns, self.ctime_ns) < now - COARSEST_CLOCK_NS


def find_nearest_path(path: Path) -> Path | None:
    """Return the existing path that is most similar to ``path``, or None if a part of ``path`` resembles no existing name."""
    found = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        if not (found / part).exists():
            try:
                names = [entry.name for entry in found.iterdir()]
            except OSError:
                return None
            near = difflib.get_close_matches(part, names, n=1, cutoff=0.7)
            if not near:
                return None
            part = near[0]
        found /= part
    return found


def read_file_state(path: Path) -> FileState | None:
    """Return the state of a file; None if the file is missing."""
    try:
        return FileState.from_stat(os.stat(path))
    except OSError:
        return None


_input_states: ContextVar[dict[Path, FileState]] = ContextVar("_input_states")  # states of input files at their first check


@contextmanager
def report_changed_inputs() -> Iterator[None]:
    """Turn an unexpected error in the ``with`` block into a UserError if an input file has changed in the meantime.

    An input file is a file that :func:`check_input` has accepted in this block. UserError and Interrupted are not changed.
    """
    token = _input_states.set({})
    try:
        yield
    except (UserError, Interrupted):
        raise
    except Exception as error:
        changed = next((path for path, state in _input_states.get().items() if read_file_state(path) != state), None)
        if changed is None:
            raise
        raise changed_file_error(changed) from error
    finally:
        _input_states.reset(token)


def changed_file_error(path: Path, how: str = "replaced or written to") -> UserError:
    """Return the UserError for a file that changed while it was read; ``how`` describes the change."""
    return UserError(f"{path}: was {how} while it was read; run the command again")


def forget_input(path: Path) -> None:
    """Forget the state that :func:`check_input` recorded for a file. Call this after the program itself wrote the file."""
    _input_states.get({}).pop(path, None)


def check_input(path: Path) -> Path:
    """Return ``path``, and record the state of the file, so that a later change can be reported.

    Raises UserError if the path is not a plain file, for example if it is missing, a folder or a device.
    """
    try:
        status = path.stat()
        mode = status.st_mode
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error_reason(error)}") from None
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{path}: {_FAULT_BY_FILE_TYPE.get(stat.S_IFMT(mode), 'is not a file')}, and only plain files are read"
        )
    _input_states.get({}).setdefault(path, FileState.from_stat(status))
    return path


@contextmanager
def wrap_read_errors(path: Path, what: str) -> Iterator[None]:
    """Turn any error in the ``with`` block into a UserError: the file has changed, or is not ``what``, e.g. *valid JSON*."""
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
    """Return the reason of an error as a few words on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = to_printable_line(error) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"it lacks {text}"
    elif isinstance(error, MemoryError):
        text = f"it does not fit into memory: {text}"
    return text if len(text) <= _MAX_REASON_LENGTH else f"{text[:_MAX_REASON_LENGTH]}..."


def is_valid_name(value: object) -> TypeGuard[str]:
    """Return whether ``value`` can be the name of a data set, feature or experiment, and so a part of file names."""
    return (
        isinstance(value, str)
        and value.isprintable()
        and 0 < len(value.encode()) <= MAX_NAME_BYTES
        and not value.startswith((".", "~", " "))
        and not set("/\\") & set(value)
    )


def is_path_text(value: object) -> bool:
    """Return whether ``value`` can be a path in a file system."""
    if not isinstance(value, str) or "\0" in value:
        return False
    return all(len(part) <= _MAX_FILE_NAME_BYTES for part in os.fsencode(value).split(b"/"))


_Content = TypeVar("_Content")


class InputFile:
    """A plain file that is opened once and kept open, so that a new file at the same path is not read instead.

    Raises UserError if the path is not a plain file.
    """

    def __init__(self, path: Path) -> None:
        self.path = check_input(path)
        try:  # O_NONBLOCK: opening a FIFO would wait for a writer
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        weakref.finalize(self, os.close, handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UserError(f"{path}: not a plain file")
        self.stream: BufferedReader = os.fdopen(handle, "rb", closefd=False)
        self.state = self._current_state()

    @property
    def descriptor_path(self) -> Path:
        """A path by which libraries can open the same open file (``/dev/fd/3``); ``path`` on systems without such paths."""
        descriptor = Path(f"/dev/fd/{self.stream.fileno()}")
        return descriptor if descriptor.exists() else self.path

    @property
    def size(self) -> int:
        return self._current_state().size

    def read(self) -> bytes:
        """Return all bytes and set :attr:`sha256`. Raises UserError if the file was written to since it was opened."""
        self.stream.seek(0)
        content = self.stream.read()
        if self.has_changed:
            raise changed_file_error(self.path, "written to")
        self.__dict__["sha256"] = hashlib.sha256(content).hexdigest()
        return content

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the bytes in hexadecimal. Raises UserError if the file was written to since it was opened."""
        self.stream.seek(0)
        digest = hashlib.file_digest(self.stream, "sha256").hexdigest()
        if self.has_changed:
            raise changed_file_error(self.path, "written to")
        return digest

    @property
    def has_changed(self) -> bool:
        """True if the file was written to since it was opened."""
        now, then = self._current_state(), self.state
        return (now.size, now.mtime_ns) != (then.size, then.mtime_ns)

    def _current_state(self) -> FileState:
        return FileState.from_stat(os.fstat(self.stream.fileno()))


def read_run_file(file: Path, record: object) -> tuple[bytes, str]:
    """Return the bytes and the SHA-256 of a file in the folder of a training run.

    ``record`` is the content of the run's ``run.json``. Raises UserError if ``record`` states another SHA-256 for the file.
    """
    source = InputFile(file)
    content = source.read()
    checksums = record.get("files") if isinstance(record, Mapping) else None
    expected = checksums.get(file.name) if isinstance(checksums, Mapping) else None
    if expected not in (None, source.sha256):
        raise UserError(
            f"{file}: not what the training wrote (its SHA-256 is not the one in run.json); restore it, or train again with "
            "--overwrite"
        )
    return content, source.sha256


class InputFolder:
    """Some plain files of a folder, each opened once."""

    def __init__(self, path: Path, files: Sequence[InputFile]) -> None:
        self.path = path
        self._file_by_name = {file.path.name: file for file in files}

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the output of ``sha256sum`` for the files: a line ``<sha256>  <name>`` for each file, sorted by name."""
        lines = (f"{file.sha256}  {name}\n" for name, file in sorted(self._file_by_name.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_and_hash(path: Path, read: Callable[[Path], _Content]) -> tuple[_Content, str]:
    """Return ``read(path)`` and the SHA-256 of the file. Raises UserError if the file is missing or changes in between."""
    watched = WatchedFile(path) if path.is_file() else None
    content = read(path)
    if watched is None:
        raise UserError(f"{path}: no such file")
    watched.check_unchanged()
    return content, watched.sha256


class WatchedFile:
    """A file that a library opens by path.

    Create this object before the library reads the file, and call :meth:`check_unchanged` afterwards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = InputFile(path)
        self._state = self._current_state()

    @property
    def sha256(self) -> str:
        return self._file.sha256

    def check_unchanged(self) -> None:
        """Raise UserError if the file was replaced or written to since this object was created."""
        if self._current_state() != self._state:
            raise changed_file_error(self.path)

    def _current_state(self) -> FileState | None:
        state = read_file_state(self.path)
        return state and state._replace(ctime_ns=0)  # a rename or another mode changes this time, but not the content


_DECODED_GB_VARIABLE = "VSE_MAX_DECODED_GB"
_DEFAULT_DECODED_GB = 1.0
_MAX_DECODED_RATIO = 100  # decoded bytes per compressed byte; real data hardly compress better
_CHUNK_BYTES = 1 << 20
_OPENER_BY_MAGIC: dict[bytes, Callable[[BinaryIO], Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open}


def max_decoded_bytes(n_stored: int) -> int:
    """Return the largest allowed decoded size of ``n_stored`` compressed bytes: 100 times ``n_stored``, but at least 1 GB.

    The environment variable VSE_MAX_DECODED_GB replaces the 1 GB. Raises UserError if its value is not a positive number.
    """
    text = os.environ.get(_DECODED_GB_VARIABLE, "")
    try:
        n_gb = float(text) if text else _DEFAULT_DECODED_GB
        if not 0 < n_gb < 1e9:
            raise ValueError
    except ValueError:
        raise UserError(f"{_DECODED_GB_VARIABLE}={text[:50]}: not a positive number of gigabytes") from None
    return max(int(n_gb * 1e9), _MAX_DECODED_RATIO * n_stored)


def check_decoded_size(path: Path | str, n_decoded: int, n_stored: int) -> None:
    """Raise UserError if ``n_decoded``, the decoded size of ``n_stored`` bytes, is above :func:`max_decoded_bytes`."""
    limit = max_decoded_bytes(n_stored)
    if n_decoded > limit:
        raise UserError(
            f"{path}: {n_stored:,} bytes decode to {n_decoded:,} or more, and the limit is {limit:,}; if you trust the file, "
            f"set {_DECODED_GB_VARIABLE} to a larger number of gigabytes"
        )


@contextmanager
def open_decoded_stream(path: Path) -> Iterator[io.BufferedReader]:
    """Open a plain, gzip, xz or bzip2 file as decoded bytes. A read beyond :func:`max_decoded_bytes` raises UserError."""
    with ExitStack() as stack:
        stream = stack.enter_context(check_input(path).open("rb"))
        start = stream.read(6)
        stream.seek(0)
        opener = next((opener for magic, opener in _OPENER_BY_MAGIC.items() if start.startswith(magic)), None)
        if opener is not None:
            decoder = stack.enter_context(opener(stream))
            stream = stack.enter_context(io.BufferedReader(_LimitedStream(path, decoder), _CHUNK_BYTES))
        yield stream


def check_decoded_gzip_xz_bz2_size(path: Path) -> None:
    """Raise UserError if a gzip, xz or bzip2 file expands to more bytes than :func:`max_decoded_bytes`."""
    with open_decoded_stream(path) as stream:
        if isinstance(stream.raw, _LimitedStream):
            while stream.read(_CHUNK_BYTES):
                pass


def check_decoded_zip_size(path: Path) -> None:
    """Raise UserError if a zip file expands to over 1 GB and over 100 times its size (:func:`max_decoded_bytes`).

    The sizes in the list of members are summed. Nothing is decoded, because Python never decodes a member beyond its listed
    size.
    """
    with zipfile.ZipFile(check_input(path)) as archive:
        check_decoded_size(path, sum(member.file_size for member in archive.infolist()), path.stat().st_size)


class _LimitedStream(io.RawIOBase):
    """A stream of the decoded bytes of a compressed file. A read beyond :func:`max_decoded_bytes` raises UserError."""

    def __init__(self, path: Path, stream: io.BufferedIOBase) -> None:
        self._path, self._stream = path, stream
        self._n_stored = path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = self._stream.seek(offset, whence)
        check_decoded_size(self._path, position, self._n_stored)
        return position

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(min(len(buffer), _CHUNK_BYTES))
        check_decoded_size(self._path, self._stream.tell(), self._n_stored)
        buffer[: len(content)] = content
        return len(content)
