"""Read files at a URL (``https://``, ``s3://`` and other object stores) in ranges of bytes, through the library fsspec."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit

from vse.pipeline.errors import UserError, extra_install_command, import_extra
from vse.pipeline.files.inputs import error_reason

BLOCK_BYTES = 2**23  # bytes of a request that reads more than the caller needs now
_PROTOCOLS = ("https", "http", "s3", "gs", "az", "memory")  # without protocols that contain another URL or need a password
_URL_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")
_VERSION_KEYS = ("ETag", "etag", "Last-Modified", "LastModified", "updated", "mtime", "created")  # names in fsspec's metadata
_MAX_OPEN_FILES = 4096
_EXTRA = "remote"


def is_remote(text: str) -> bool:
    """Return whether a text is a URL, such as ``s3://bucket/a.tar``, rather than a path or a ``file://`` URL."""
    return not isinstance(to_path_or_url(text), Path)


def to_path_or_url(text: str) -> Path | str:
    """Return a URL unchanged, and the path of a local file as a path; ``file:///a.tar`` is the path ``/a.tar``.

    Raises UserError if this program does not read URLs of this kind.
    """
    match = _URL_PATTERN.match(text)
    if match is None:
        return Path(text)
    protocol = match[1].lower()
    if protocol == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise UserError(f"{text}: a file of another machine; file:///FOLDER/a.tar names a file of this one")
        return Path(unquote(parts.path))
    if protocol not in _PROTOCOLS:
        raise UserError(f"{text}: {protocol}:// cannot be read; known: file, {', '.join(_PROTOCOLS)}")
    return text


class RemoteFile:
    """A file at a URL, which several threads may read. Raises UserError if the server cannot state the size of the file.

    version : the entity tag of the file, or the time of its last change; an empty text if the server states neither
    """

    def __init__(self, url: str) -> None:
        self.url = url
        with _wrap_errors(url):
            system, path = _open_file_system(url)
            info = system.info(path)
            if info.get("type") == "directory" or not isinstance(info.get("size"), int):
                raise UserError(f"{url}: not a file whose size the server states")
            if info.get("partial") is False:
                raise UserError(f"{url}: the server sends complete files only, and ranges are needed; download the file")
            self.size: int = info["size"]
            self.version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
            self._stream, self._lock = system.open(path, "rb", cache_type="none"), Lock()

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``. Raises UserError if the server does not send exactly these bytes."""
        with _wrap_errors(self.url), self._lock:
            self._stream.seek(start)
            content: bytes = self._stream.read(stop - start)
        if len(content) != stop - start:
            raise UserError(f"{self.url}: the server sent {len(content)} bytes instead of the range {start}-{stop}")
        return content

    def open(self) -> io.BufferedReader:
        """Return a stream that reads the file in blocks of 8 MiB."""
        return io.BufferedReader(_RemoteStream(self), BLOCK_BYTES)


def open_remote_file(url: str) -> RemoteFile:
    """Return the file at a URL. The size and version are requested once in a process. Raises UserError if it is missing."""
    return _open_remote_file(url, os.getpid())  # the connections of fsspec do not survive a fork


@lru_cache(maxsize=_MAX_OPEN_FILES)
def _open_remote_file(url: str, process: int) -> RemoteFile:
    return RemoteFile(url)


def list_remote_files(url: str) -> list[str]:
    """Return the sorted paths of all files in the folder ``url``, relative to the folder. Raises UserError on any failure."""
    with _wrap_errors(url):
        system, path = _open_file_system(url)
        root = f"{path.rstrip('/')}/"
        return sorted(name.removeprefix(root) for name in system.find(path) if name.startswith(root))


def _open_file_system(url: str) -> tuple[Any, str]:
    """Return the file system of fsspec (cached by fsspec for each process and thread), and the path of the file in it."""
    if to_path_or_url(url) != url:
        raise UserError(f"{url}: a path of this machine; an index states it without file://")
    fsspec: Any = import_extra("fsspec.core", f"{url}:", _EXTRA)
    system, path = fsspec.url_to_fs(url)
    return system, path


@contextmanager
def _wrap_errors(url: str) -> Iterator[None]:
    """Turn any error in the block into a UserError, because each file system of fsspec has its own errors."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except ImportError as error:
        reason = str(error).rstrip(".")
        raise UserError(f"{url}: {reason}; for https:// and s3://, {extra_install_command(_EXTRA)}") from None
    except FileNotFoundError:
        raise UserError(f"{url}: no such file or folder") from None
    except Exception as error:
        raise UserError(f"{url}: cannot be read ({error_reason(error)})") from None


class _RemoteStream(io.RawIOBase):
    """The bytes of a remote file as a stream."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._file.size)
        if stop <= self._position:
            return 0
        content = self._file.read(self._position, stop)
        buffer[: len(content)] = content
        self._position = stop
        return len(content)
