"""Read and unpack untrusted zip and tar archives. Every member is checked before anything is written."""

from __future__ import annotations

import lzma
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import check_zip, open_decoded_stream
from vse.pipeline.progress import progress_bar

_CHUNK_BYTES = 1 << 20
ARCHIVE_ERRORS = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


class MemberPlace(NamedTuple):
    """The offset in bytes of a member's content in a tar archive, and the CRC-32 of the header in front of the content."""

    offset: int
    header_crc32: int


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A member of an archive.

    size : the number of bytes of the content
    open : a function that returns a stream of the content, or None for a member without content
    place : the position of the content in a tar archive, if :func:`open_tar` was called with ``in_place``; None otherwise,
        and for a sparse file, whose bytes do not lie in one place
    """

    name: str
    size: int
    is_file: bool
    is_folder: bool
    open: Callable[[], IO[bytes] | None]
    place: MemberPlace | None = None


def unpack_member(archive: Path, member: str, target: Path, max_bytes: int) -> Path:
    """Unpack the file or folder ``member`` of a zip or tar archive as ``target``, which must not exist; return ``target``.

    Every member must be a plain file or a folder. Every path must stay inside the archive and be unique. The files of
    ``member`` may have at most ``max_bytes`` together. ``target`` appears when all files are complete; after an error nothing
    remains. Raises UserError, which names the archive and the member, if a check fails.
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

    Raises UserError if the archive decodes to more bytes than :func:`~vse.pipeline.files.inputs.max_decoded_bytes` allows.
    """
    if zipfile.is_zipfile(path):
        check_zip(path)
        with zipfile.ZipFile(path) as archive:
            yield (_build_zip_member(archive, info) for info in archive.infolist())
    else:
        with open_decoded_stream(path) as stream, open_tar(stream) as members:
            yield members


@contextmanager
def open_tar(stream: BufferedReader, in_place: bool = False) -> Iterator[Iterator[ArchiveMember]]:
    """Read an uncompressed tar archive from a stream, and yield an iterator over its members.

    With ``in_place``, the members have a ``place``; the stream must then be seekable.
    """
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        yield (_build_tar_member(tar, info, _find_place(stream, info) if in_place else None) for info in tar)


def _build_tar_member(tar: tarfile.TarFile, info: tarfile.TarInfo, place: MemberPlace | None) -> ArchiveMember:
    return ArchiveMember(info.name, info.size, info.isreg(), info.isdir(), partial(tar.extractfile, info), place)


def _find_place(stream: BufferedReader, info: tarfile.TarInfo) -> MemberPlace | None:
    if info.issparse():
        return None
    stream.seek(info.offset_data - tarfile.BLOCKSIZE)
    return MemberPlace(info.offset_data, zlib.crc32(stream.read(tarfile.BLOCKSIZE)))


def _build_zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> ArchiveMember:
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if the archive was not written on Unix
    is_folder = info.is_dir() and kind in (0, stat.S_IFDIR)
    is_file = not info.is_dir() and kind in (0, stat.S_IFREG)
    return ArchiveMember(info.orig_filename, info.file_size, is_file, is_folder, partial(archive.open, info))


def _select_members(
    archive: Path, members: Iterator[ArchiveMember], wanted: PurePosixPath, max_bytes: int
) -> dict[PurePosixPath, ArchiveMember]:
    """Check all members. Return the files at or below the path ``wanted``, by their paths relative to ``wanted``."""
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
    """Return the reason not to unpack a member, as the end of a message; None if the member is harmless."""
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
