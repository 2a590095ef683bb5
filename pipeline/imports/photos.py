"""Find the photographs of an import in folders and tar archives, match their names with those in a table, and write them."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import unquote

from vse.pipeline.errors import UserError
from vse.pipeline.files.archives import (
    ArchiveMember,
    RemoteFile,
    list_remote_files,
    open_archive,
    open_remote_file,
    open_tar,
    to_path_or_url,
)
from vse.pipeline.files.inputs import check_input, is_path_text
from vse.pipeline.files.photo_archives import PhotoArchive, PhotoIndexWriter
from vse.pipeline.files.writing import remove_temporary_files, write_bytes
from vse.pipeline.imports.rows import BadRow, ImportedRow, RowCollector

_UNCOMPRESSED_SUFFIX = ".tar"
ARCHIVE_SUFFIXES = (_UNCOMPRESSED_SUFFIX, ".tar.gz", ".tgz")
_TAR_BLOCK_BYTES = 512


@dataclass(frozen=True)
class SourceArchive:
    """A tar archive to import.

    file : the path of a local archive, or the file at a URL
    folder : the folder below ``images`` for its photos, named after the archive, e.g. ``train-0001`` for ``train-0001.tar``
    """

    file: Path | RemoteFile
    folder: str

    def __str__(self) -> str:
        return self.file.url if isinstance(self.file, RemoteFile) else str(self.file)

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def size(self) -> int:
        return self.file.size if isinstance(self.file, RemoteFile) else check_input(self.file).stat().st_size

    @property
    def is_compressed(self) -> bool:
        return not self.name.lower().endswith(_UNCOMPRESSED_SUFFIX)

    @property
    def index_entry(self) -> PhotoArchive:
        """The entry that describes this archive in ``archives.sqlite``, the index by which photos are found later."""
        if isinstance(self.file, RemoteFile):
            return PhotoArchive(self.file.url, self.file.size, self.file.version)
        return PhotoArchive(str(self.file.absolute()), self.size, "")

    @contextmanager
    def open(self, in_place: bool) -> Iterator[Iterator[ArchiveMember]]:
        """Yield an iterator over the members. With ``in_place``, each member has the position of its bytes in the archive."""
        with ExitStack() as stack:
            if isinstance(self.file, RemoteFile):
                yield stack.enter_context(open_tar(stack.enter_context(self.file.open()), in_place))
            elif in_place:
                yield stack.enter_context(open_tar(stack.enter_context(self.file.open("rb")), in_place))
            else:
                yield stack.enter_context(open_archive(self.file))

    def is_complete(self) -> bool:
        """Return whether the archive is complete. A complete tar file ends with zeros; readers do not report a missing end."""
        if self.is_compressed:
            return True  # decompression fails if a compressed file is cut
        start, stop = max(0, self.size - _TAR_BLOCK_BYTES), self.size
        if isinstance(self.file, RemoteFile):
            return not any(self.file.read(start, stop))
        with self.file.open("rb") as stream:
            stream.seek(start)
            return not any(stream.read(_TAR_BLOCK_BYTES))


def find_archives(source: str) -> list[SourceArchive]:
    """Return the archives in the folder ``source`` and its subfolders. If ``source`` is an archive, return only ``source``.

    ``source`` is a path or a URL. A URL that does not end in the suffix of an archive is the URL of a folder.
    """
    start = to_path_or_url(source)
    if isinstance(start, Path):
        paths = start.rglob("*") if start.is_dir() else [start]
        found = sorted(path for path in paths if path.name.lower().endswith(ARCHIVE_SUFFIXES) and path.is_file())
        return [
            SourceArchive(path, _build_photo_folder_name(path.relative_to(start) if start.is_dir() else Path(path.name)))
            for path in found
        ]
    if start.partition("?")[0].lower().endswith(ARCHIVE_SUFFIXES):
        return [
            SourceArchive(
                open_remote_file(start), _build_photo_folder_name(PurePosixPath(PurePosixPath(start.partition("?")[0]).name))
            )
        ]
    names = [name for name in list_remote_files(start) if name.lower().endswith(ARCHIVE_SUFFIXES)]
    return [
        SourceArchive(open_remote_file(f"{start.rstrip('/')}/{name}"), _build_photo_folder_name(PurePosixPath(name)))
        for name in names
    ]


def _build_photo_folder_name(path: PurePath) -> str:
    """Return the folder below ``images`` for the photos of an archive: its path without the suffix.

    ``path`` is relative to the imported folder.
    """
    ending = max((ending for ending in ARCHIVE_SUFFIXES if path.name.lower().endswith(ending)), key=len)
    return path.with_name(path.name[: -len(ending)] or path.name).as_posix()


_N_NEAREST = 10
_MIN_SIMILARITY = 0.6
PHOTO_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp"))


class PhotoNameIndex:
    """An index that finds the photographs of a folder even if a table spells their names differently.

    Differences in upper and lower case, in the normal form of Unicode, and ``%20`` for a blank are ignored. A name may begin
    with another folder, and may lack the suffix.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _files(self) -> list[str]:
        files = (path for path in self._folder.rglob("*") if path.suffix.lower() in PHOTO_SUFFIXES)
        return sorted(path.relative_to(self._folder).as_posix() for path in files)

    @cached_property
    def _files_by_key(self) -> dict[str, set[str]]:
        """The files by their normalised names: a file's path and base name, both with and without suffix."""
        files_by_key: dict[str, set[str]] = {}
        for file in self._files:
            for key in list_lookup_names(file):
                files_by_key.setdefault(key, set()).add(file)
        return files_by_key

    def find_photo(self, name: str) -> str:
        """Return the path of the photograph with this name, relative to the folder.

        If there is no such photograph, returns ``name`` unchanged; a later check of the file reports that it is missing.
        Raises BadRow if several photographs fit.
        """
        if not name or ".." in Path(name).parts or (self._folder / name).is_file():
            return name
        for key in list_lookup_names(name):
            found = self._files_by_key.get(key, set())
            if len(found) == 1:
                return next(iter(found))
            if found:
                some = " and ".join(sorted(found)[:2])
                raise BadRow(f"{name!r} fits {len(found)} photographs, such as {some}; name the folder, too")
        return name

    def is_photo(self, name: str) -> bool:
        """Return whether a photograph of the folder has this name."""
        return bool(name) and any(key in self._files_by_key for key in list_lookup_names(name))

    def list_nearest(self, name: str) -> list[str]:
        """Return the most similar names of photographs, at most ten."""
        keys = {_normalize(file): file for file in self._files}
        near = difflib.get_close_matches(_normalize(name), list(keys), n=_N_NEAREST, cutoff=_MIN_SIMILARITY)
        return [keys[key] for key in near]


def _normalize(name: str) -> str:
    path = re.sub(r"^[a-z]:", "", unquote(name).replace("\\", "/"), flags=re.IGNORECASE)
    return unicodedata.normalize("NFC", path).strip().strip("/").casefold()


def list_lookup_names(name: str) -> list[str]:
    """Return the normalised forms in which a name is looked up: the path and the base name, each with and without suffix."""
    path = _normalize(name)
    base = path.rpartition("/")[2]
    stems = [re.sub(r"\.(jpe?g|png|webp)$", "", text) for text in (path, base)]
    return list(dict.fromkeys(key for key in (path, stems[0], base, stems[1]) if key))


_URL_START_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//|/)")
_IMAGES_HINT = "--images FOLDER allows another folder"


class ImageFolders:
    """The folders in which the images of an import may lie.

    A relative path is looked up in each folder, in order. The target of a symbolic link must also lie in one of the folders.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def find_image(self, name: str) -> Path:
        """Return the path of the image ``name`` with links resolved; the file may be missing.

        Raises BadRow if the path is a URL or lies outside all folders.
        """
        if _URL_START_PATTERN.match(name):
            raise BadRow(f"the image {name[:200]!r} is an address; only paths of files are allowed")
        if not is_path_text(name) or not name:
            raise BadRow("names no image file")
        targets = [Path(os.path.realpath(folder / name)) for folder in self._folders]
        inside = [target for target in targets if any(target.is_relative_to(folder) for folder in self._folders)]
        if not inside:
            folders = " or ".join(map(str, self._folders))
            raise BadRow(f"the image {name[:200]!r} is outside {folders}; {_IMAGES_HINT}")
        return next((target for target in inside if target.is_file()), inside[0])


def find_output_images_folder(out: Path) -> Path:
    """Return ``out/images``. Raises UserError if this folder is a link to the images of another data set."""
    folder = out / "images"
    if folder.is_symlink():
        raise UserError(f"{folder} is a link to another folder of images; give another --out")
    return folder


class PhotoWriter:
    """A writer of photos to the folder ``images``. It also adds the rows of the photos to a :class:`RowCollector`.

    Photos that an interrupted import has written are kept.
    """

    def __init__(self, out: Path, collector: RowCollector) -> None:
        self.images_folder = find_output_images_folder(out)
        remove_temporary_files(self.images_folder, recursive=True)
        self._collector = collector

    def add(self, row: ImportedRow, content: bytes) -> None:
        """Add a row, and write ``content``, the bytes of its photo.

        If an earlier row is invalid, so that the import will fail, this row is checked but its photo is not written. Raises
        UserError if the folder of images has another photo at this path.
        """
        file = self._collector.add_row_with_photo(row, content)
        if file is None or not self._collector.can_succeed:
            return
        path = self.images_folder / file
        if not (path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content):
            if path.exists():
                raise UserError(
                    f"{path} already exists and is another photo; move {self.images_folder} away, or give another --out"
                )
            write_bytes(path, content, sync=False)


class PhotoPositionRecorder:
    """A recorder of the positions of photos that stay in tar archives. It also adds their rows to a :class:`RowCollector`."""

    def __init__(self, out: Path, collector: RowCollector) -> None:
        self.images_folder = find_output_images_folder(out)
        self._collector, self._index = collector, PhotoIndexWriter()
        self._number_by_archive: dict[SourceArchive, int] = {}

    def add(self, row: ImportedRow, content: bytes, archive: SourceArchive, member: ArchiveMember) -> None:
        """Add a row, and record the position of its photo in the archive. ``content`` holds the bytes of the photo.

        Raises BadRow if the archive does not store the bytes of ``member`` in one place (a sparse file). Raises UserError if
        the archive was unpacked before.
        """
        if member.position is None:
            raise BadRow(f"member {member.name!r} is sparse, so that its bytes do not lie in one place")
        if archive not in self._number_by_archive:
            unpacked = self.images_folder / archive.folder
            if unpacked.exists():
                raise UserError(
                    f"{unpacked} has unpacked photos, which would be read instead; move it away, or give another --out"
                )
            self._number_by_archive[archive] = self._index.add_archive(archive.index_entry)
        file = self._collector.add_row_with_photo(row, content)
        if file is not None:
            self._index.add_photo(file, self._number_by_archive[archive], member.name, member.size, member.position)

    def write(self) -> Path:
        """Write the index to the folder of images, and return its path."""
        return self._index.write(self.images_folder)
