"""Read parts of files at a URL (with the library fsspec), and read or unpack archives from untrusted sources."""

from __future__ import annotations

import io
import lzma
import os
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BufferedReader
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from vse.pipeline.errors import UserError, extra_install_command, import_extra
from vse.pipeline.files.inputs import check_decoded_zip_size, error_reason, open_decoded_stream
from vse.pipeline.progress import progress_bar

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
    """Return a URL unchanged, and any other text as a path. ``file:///a.tar`` becomes the path ``/a.tar``.

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

    version : the entity tag (ETag) of the file, or else the time of its last change; empty if the server states neither
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
    """Return the file at a URL. Each process requests the size and version of a file only once.

    Raises UserError if the file is missing or the server does not state the size.
    """
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
    """Return the file system of fsspec (cached by fsspec for each process and thread), and the path of the URL in it."""
    if to_path_or_url(url) != url:
        raise UserError(f"{url}: a path of this machine; an index states it without file://")
    fsspec: Any = import_extra("fsspec.core", f"{url}:", _EXTRA)
    system, path = fsspec.url_to_fs(url)
    return system, path


@contextmanager
def _wrap_errors(url: str) -> Iterator[None]:
    """Turn any error in the ``with`` block into a UserError: each file system of fsspec raises other classes of errors."""
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


_CHUNK_BYTES = 1 << 20
ARCHIVE_ERRORS = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


class MemberPosition(NamedTuple):
    """The offset in bytes of a member's content in a tar archive, and the CRC-32 of the header in front of the content."""

    offset: int
    header_crc32: int


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A member of an archive: a file, a folder, or something else, such as a link.

    size : the number of bytes of the content
    open : a function that returns a stream of the content, or None for a member without content
    position : the position of the content in a tar archive, if :func:`open_tar` was called with ``in_place``; otherwise None.
        It is also None for a sparse file, whose bytes are scattered
    """

    name: str
    size: int
    is_file: bool
    is_folder: bool
    open: Callable[[], IO[bytes] | None]
    position: MemberPosition | None = None


def unpack_member(archive: Path, member: str, target: Path, max_bytes: int) -> Path:
    """Unpack the file or folder ``member`` of a zip or tar archive as ``target``, which must not exist; return ``target``.

    ``target`` appears when all files are complete; after an error nothing remains. Raises UserError if a member of the archive
    is neither a plain file nor a folder, has a path that leads out of the archive, or has the path of another member. Raises
    UserError if the files of ``member`` have more than ``max_bytes`` together, or if the archive is damaged.
    """
    temporary = _unpacking_folder(target)
    try:
        remove_partial_unpacking(target)
        with open_archive(archive) as members:
            wanted = _select_members(archive, members, PurePosixPath(member), max_bytes)
            for path, entry in progress_bar(wanted.items(), desc=f"unpack {archive.name}", unit="file"):
                _copy_member(archive, entry, temporary / "content" / path)
        (temporary / "content").rename(target)
    except ARCHIVE_ERRORS as error:
        raise UserError(
            f"{archive}: not a zip or tar archive, or damaged ({error}). Delete it and download it again"
        ) from None
    except OSError as error:
        raise UserError(f"cannot unpack {archive} as {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def remove_partial_unpacking(target: Path) -> None:
    """Remove the hidden folder that a killed :func:`unpack_member` of ``target`` has left."""
    shutil.rmtree(_unpacking_folder(target), ignore_errors=True)


def _unpacking_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.unpacking")


@contextmanager
def open_archive(path: Path) -> Iterator[Iterator[ArchiveMember]]:
    """Open a zip or tar archive and yield an iterator over its members, in the order of the archive.

    Raises UserError if the archive expands to over 1 GB and over 100 times its size
    (:func:`~vse.pipeline.files.inputs.max_decoded_bytes`).
    """
    if zipfile.is_zipfile(path):
        check_decoded_zip_size(path)
        with zipfile.ZipFile(path) as archive:
            yield (_build_zip_member(archive, info) for info in archive.infolist())
    else:
        with open_decoded_stream(path) as stream, open_tar(stream) as members:
            yield members


@contextmanager
def open_tar(stream: BufferedReader, in_place: bool = False) -> Iterator[Iterator[ArchiveMember]]:
    """Read an uncompressed tar archive from a stream, and yield an iterator over its members.

    With ``in_place``, each member states the ``position`` of its content in the stream. The stream must then be seekable.
    """
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        yield (_build_tar_member(tar, info, _find_position(stream, info) if in_place else None) for info in tar)


def _build_tar_member(tar: tarfile.TarFile, info: tarfile.TarInfo, position: MemberPosition | None) -> ArchiveMember:
    return ArchiveMember(info.name, info.size, info.isreg(), info.isdir(), partial(tar.extractfile, info), position)


def _find_position(stream: BufferedReader, info: tarfile.TarInfo) -> MemberPosition | None:
    if info.issparse():
        return None
    stream.seek(info.offset_data - tarfile.BLOCKSIZE)
    return MemberPosition(info.offset_data, zlib.crc32(stream.read(tarfile.BLOCKSIZE)))


def _build_zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> ArchiveMember:
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if the archive was not written on Unix
    is_folder = info.is_dir() and kind in (0, stat.S_IFDIR)
    is_file = not info.is_dir() and kind in (0, stat.S_IFREG)
    return ArchiveMember(info.orig_filename, info.file_size, is_file, is_folder, partial(archive.open, info))


def _select_members(
    archive: Path, members: Iterator[ArchiveMember], wanted: PurePosixPath, max_bytes: int
) -> dict[PurePosixPath, ArchiveMember]:
    """Return the files at or below the path ``wanted``, by their paths relative to ``wanted``.

    Raises UserError if a member is unsafe or repeated, if the files have more than ``max_bytes``, or if there is no file.
    """
    seen: set[PurePosixPath] = set()
    files: dict[PurePosixPath, ArchiveMember] = {}
    total = 0
    for member in members:
        path = PurePosixPath(member.name)
        fault = find_member_fault(member, path)
        if fault is None and path in seen:
            fault = "is a duplicate"
        if fault is None and member.is_file and path.is_relative_to(wanted):
            files[path.relative_to(wanted)] = member
            total += member.size
            if total > max_bytes:
                fault = f"exceeds the {max_bytes} bytes that {str(wanted)!r} may have"
        if fault is not None:
            raise UserError(f"{archive}: member {member.name!r} {fault}; nothing was unpacked")
        seen.add(path)
    if not files:
        raise UserError(f"{archive}: has no file {str(wanted)!r}, and no folder of that name with files in it")
    return files


def find_member_fault(member: ArchiveMember, path: PurePosixPath) -> str | None:
    """Return why a member must not be unpacked, such as ``is neither a plain file nor a folder``; None if it is harmless."""
    if not (member.is_file or member.is_folder):
        return "is neither a plain file nor a folder"
    if path.is_absolute() or ".." in path.parts or re.search(r"^[A-Za-z]:|[\\\0]", member.name):
        return "has a path that leads out of the archive or is not portable"
    return None


def _copy_member(archive: Path, member: ArchiveMember, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = member.open()
    assert source is not None, "a plain file can be read"
    remaining = member.size
    with source, path.open("xb") as stream:
        while chunk := source.read(min(remaining, _CHUNK_BYTES)):
            remaining -= stream.write(chunk)
    if remaining:
        raise UserError(f"{archive}: member {member.name!r} ends {remaining} bytes too early; nothing was unpacked")
