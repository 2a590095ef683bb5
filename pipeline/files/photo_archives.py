"""Read photographs directly from tar archives, without unpacking.

The index ``images/archives.sqlite`` maps the file of an image, such as ``train-0001/a.jpg``, to the archive (a path or URL)
and the member with its offset and size. No image file exists: :func:`vse.pipeline.files.images.read_image_bytes` reads the
bytes from the archive instead.
"""

from __future__ import annotations

import os
import sqlite3
import tarfile
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from urllib.parse import quote

from vse.pipeline.errors import UserError
from vse.pipeline.files.archives import BLOCK_BYTES, MemberPosition, RemoteFile, is_remote, open_remote_file
from vse.pipeline.files.inputs import FileState, InputFile, error_reason, read_file_state
from vse.pipeline.files.writing import write_bytes

INDEX_NAME = "archives.sqlite"
MAX_PHOTO_BYTES = 100_000_000
_IMAGES_FOLDER = "/images/"
_INDEX_VERSION = 1
_MAX_OPEN_ARCHIVES = 16
_MAX_GAP_BYTES = 2**20  # skipped bytes between two reads of a remote archive that count as consecutive
_SCHEMA = f"""
CREATE TABLE archives (id INTEGER PRIMARY KEY, location TEXT NOT NULL, size INTEGER NOT NULL, version TEXT NOT NULL);
CREATE TABLE photos (
    file TEXT PRIMARY KEY, archive INTEGER NOT NULL, member TEXT NOT NULL, size INTEGER NOT NULL, offset INTEGER NOT NULL,
    header_crc32 INTEGER NOT NULL
) WITHOUT ROWID;
PRAGMA user_version = {_INDEX_VERSION};
"""
_FIND_PHOTO = """
SELECT location, archives.size, version, member, photos.size, offset, header_crc32
FROM photos JOIN archives ON archives.id = photos.archive WHERE file = ?
"""


@dataclass(frozen=True, slots=True)
class PhotoArchive:
    """A tar archive with photographs: its path or URL, and its size and version at the time of the import.

    ``version`` is the entity tag (ETag) of a remote file, or else the time of its last change; an empty text for a local file.
    """

    location: str
    size: int
    version: str

    @property
    def path(self) -> Path | None:
        """The path of a local archive; None for a URL."""
        return _to_local_path(self.location)

    def require_unchanged(self) -> FileState | RemoteFile:
        """Raise UserError if the archive is missing, or has another size or version than at the import.

        For an archive at a URL, returns the remote file. For a local archive, returns the state of the unopened file.
        """
        path = self.path
        if path is None:
            remote = open_remote_file(self.location)
            if (remote.size, remote.version) != (self.size, self.version):
                raise self.changed_error("another size, entity tag or time")
            return remote
        state = read_file_state(path)
        if state is None:
            raise UserError(f"{path}: no such archive; {INDEX_NAME} states where the archives of a data set are")
        if state.size != self.size:
            raise self.changed_error(f"{state.size} bytes instead of {self.size}")
        return state

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``. Raises UserError if the archive is missing or has changed."""
        found = self.require_unchanged()
        if isinstance(found, RemoteFile):
            return _open_remote_reader(found).read(start, stop)
        return _open_local_reader(self.location, found).read(start, stop)

    def changed_error(self, how: str) -> UserError:
        """Return the error for an archive whose content has changed since the import; ``how`` describes the change."""
        return UserError(f"{self.location}: has changed since the import ({how}); import the archives again")


@lru_cache(maxsize=_MAX_OPEN_ARCHIVES)
def _to_local_path(location: str) -> Path | None:
    return None if is_remote(location) else Path(location)


@dataclass(frozen=True, slots=True)
class ArchivedPhoto:
    """A photograph in a tar archive: ``size`` bytes from ``offset``, directly after the tar header of ``member``.

    ``header_crc32`` is the CRC-32 of this header.
    """

    archive: PhotoArchive
    member: str
    size: int
    offset: int
    header_crc32: int

    def read(self) -> bytes:
        """Return the bytes of the photograph.

        Raises UserError if the archive is missing or has changed, or if ``offset`` does not follow the member's header.
        """
        start = self.offset - tarfile.BLOCKSIZE
        if not (start >= 0 and 0 <= self.size <= MAX_PHOTO_BYTES and self.offset + self.size <= self.archive.size):
            raise UserError(f"{self.archive.location}: the index places member {self.member!r} outside the archive")
        block = self.archive.read(start, self.offset + self.size)
        if zlib.crc32(block[: tarfile.BLOCKSIZE]) != self.header_crc32 or len(block) != tarfile.BLOCKSIZE + self.size:
            raise self.archive.changed_error(f"member {self.member!r} is not at byte {self.offset}")
        return block[tarfile.BLOCKSIZE :]


def find_archived_photo(path: Path) -> ArchivedPhoto | None:
    """Return the archived photograph at a path such as ``data/pairs/images/train-0001/a.jpg``.

    Returns None if no folder ``images`` in the path has an index that lists this path. Raises UserError if an index is
    damaged.
    """
    # Paths are handled as texts, because Path objects would take longer than the read.
    folder, separator, file = path.as_posix().rpartition(_IMAGES_FOLDER)
    while separator:
        index_file = Path(folder + separator + INDEX_NAME)
        if (state := read_file_state(index_file)) is not None:
            index = _open_index(index_file, state, os.getpid())  # a connection does not survive a fork
            if (photo := index.find_photo(file)) is not None:
                return photo
        folder, separator, below = folder.rpartition(_IMAGES_FOLDER)
        file = f"{below}{_IMAGES_FOLDER}{file}"
    return None


class _PhotoIndex:
    """A reader of an index ``archives.sqlite``. The content is checked, because the file may come from someone else."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        with self._wrap_errors():
            uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"  # no locks, which shared disks may lack
            connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            weakref.finalize(self, connection.close)
            connection.execute("PRAGMA trusted_schema = OFF")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != _INDEX_VERSION:
                raise UserError(f"{path}: an index of version {version}, and this program reads {_INDEX_VERSION}")
            if connection.execute("SELECT 1 FROM sqlite_master WHERE type <> 'table'").fetchone():
                raise UserError(f"{path}: not an index of photographs; it has views or triggers")
        self._connection = connection

    def find_photo(self, file: str) -> ArchivedPhoto | None:
        with self._wrap_errors(), self._lock:
            row = self._connection.execute(_FIND_PHOTO, (file,)).fetchone()
        if row is None:
            return None
        if list(map(type, row)) != [str, int, str, str, int, int, int]:
            raise UserError(f"{self._path}: the place of {file} is damaged; import the archives again")
        return ArchivedPhoto(PhotoArchive(*row[:3]), *row[3:])

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise UserError(
                f"{self._path}: not a readable index of photographs ({error_reason(error)}); import the archives again"
            ) from None


@lru_cache(maxsize=_MAX_OPEN_ARCHIVES)
def _open_index(path: Path, state: FileState, process: int) -> _PhotoIndex:
    return _PhotoIndex(path)


class PhotoIndexWriter:
    """A writer of an index of archived photographs. The index is in memory until :meth:`write`."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)  # may be closed by any thread
        weakref.finalize(self, self._connection.close)
        self._connection.executescript(_SCHEMA)

    def add_archive(self, archive: PhotoArchive) -> int:
        """Add an archive, and return its id for :meth:`add_photo`."""
        values = (archive.location, archive.size, archive.version)
        number = self._connection.execute("INSERT INTO archives (location, size, version) VALUES (?, ?, ?)", values).lastrowid
        assert number is not None
        return number

    def add_photo(self, file: str, archive: int, member: str, size: int, position: MemberPosition) -> None:
        """Add a photograph of ``size`` bytes. ``file`` is the path of the image in the folder ``images``.

        ``archive`` is the id that :meth:`add_archive` returned for the archive of the photograph. ``member`` is the name of
        the photograph in the archive, and ``position`` is the position of its bytes there.
        """
        self._connection.execute("INSERT INTO photos VALUES (?, ?, ?, ?, ?, ?)", (file, archive, member, size, *position))

    def write(self, images_folder: Path) -> Path:
        """Write the index to the folder ``images`` of a data set, and return its path."""
        self._connection.commit()
        return write_bytes(images_folder / INDEX_NAME, self._connection.serialize())


class _LocalReader:
    """A reader of byte ranges of a local file, which several threads may use."""

    def __init__(self, path: Path) -> None:
        self._file, self._lock = InputFile(path), Lock()

    def read(self, start: int, stop: int) -> bytes:
        with self._lock:
            self._file.stream.seek(start)
            return self._file.stream.read(stop - start)


class _RemoteReader:
    """A reader of byte ranges of a remote file, which several threads may use.

    A request for each photograph would be slow. If a range begins shortly after the previous one, as for consecutive
    photographs, the reader therefore requests 8 MiB, and takes later ranges from these bytes.
    """

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._lock, self._start, self._block = file, Lock(), 0, b""

    def read(self, start: int, stop: int) -> bytes:
        with self._lock:
            end = self._start + len(self._block)
            if not self._start <= start <= stop <= end:
                follows = self._block != b"" and self._start <= start <= end + _MAX_GAP_BYTES
                content = self._file.read(start, min(max(stop, start + BLOCK_BYTES), self._file.size) if follows else stop)
                if 0 < self._start - start <= _MAX_GAP_BYTES:
                    return content  # another thread was faster with the next photograph
                self._start, self._block = start, content
            return self._block[start - self._start : stop - self._start]


@lru_cache(maxsize=_MAX_OPEN_ARCHIVES)
def _open_local_reader(location: str, state: FileState) -> _LocalReader:
    return _LocalReader(Path(location))


@lru_cache(maxsize=_MAX_OPEN_ARCHIVES)
def _open_remote_reader(remote: RemoteFile) -> _RemoteReader:
    return _RemoteReader(remote)
