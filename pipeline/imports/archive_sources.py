"""Find the tar archives of an import, in folders or at URLs, and read their members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from vse.pipeline.files.archives import ArchiveMember, open_archive, open_tar
from vse.pipeline.files.inputs import check_input
from vse.pipeline.files.photo_archives import PhotoArchive
from vse.pipeline.files.remote import RemoteFile, list_remote_files, open_remote_file, to_path_or_url

_PLAIN_SUFFIX = ".tar"
ARCHIVE_SUFFIXES = (_PLAIN_SUFFIX, ".tar.gz", ".tgz")
_TAR_BLOCK_BYTES = 512


@dataclass(frozen=True)
class Archive:
    """An archive to import.

    file : the path of a local archive, or the file at a URL
    folder : the folder of the photos in ``images``: the path of the archive in the source, without the suffix
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
        return not self.name.lower().endswith(_PLAIN_SUFFIX)

    @property
    def location(self) -> PhotoArchive:
        """The entry of the archive in an index of photos."""
        if isinstance(self.file, RemoteFile):
            return PhotoArchive(self.file.url, self.file.size, self.file.version)
        return PhotoArchive(str(self.file.absolute()), self.size, "")

    @contextmanager
    def open(self, in_place: bool) -> Iterator[Iterator[ArchiveMember]]:
        """Yield an iterator over the members; ``in_place`` if their positions in the archive are needed."""
        with ExitStack() as stack:
            if isinstance(self.file, RemoteFile):
                yield stack.enter_context(open_tar(stack.enter_context(self.file.open()), in_place))
            elif in_place:
                yield stack.enter_context(open_tar(stack.enter_context(self.file.open("rb")), in_place))
            else:
                yield stack.enter_context(open_archive(self.file))

    def has_end(self) -> bool:
        """Return whether a tar file ends with zeros, as all complete tar files do. Readers do not report a missing end."""
        if self.is_compressed:
            return True  # decompression fails if a compressed file is cut
        start, stop = max(0, self.size - _TAR_BLOCK_BYTES), self.size
        if isinstance(self.file, RemoteFile):
            return not any(self.file.read(start, stop))
        with self.file.open("rb") as stream:
            stream.seek(start)
            return not any(stream.read(_TAR_BLOCK_BYTES))


def find_archives(source: str) -> list[Archive]:
    """Return the archives in a folder and all subfolders, sorted by name. If ``source`` is a file, return this file.

    ``source`` is a path or a URL; the URL of a folder does not end in .tar.
    """
    start = to_path_or_url(source)
    if isinstance(start, Path):
        paths = start.rglob("*") if start.is_dir() else [start]
        found = sorted(path for path in paths if path.name.lower().endswith(ARCHIVE_SUFFIXES) and path.is_file())
        return [Archive(path, _photo_folder(path.relative_to(start) if start.is_dir() else Path(path.name))) for path in found]
    if start.partition("?")[0].lower().endswith(ARCHIVE_SUFFIXES):
        return [Archive(open_remote_file(start), _photo_folder(PurePosixPath(PurePosixPath(start.partition("?")[0]).name)))]
    names = [name for name in list_remote_files(start) if name.lower().endswith(ARCHIVE_SUFFIXES)]
    return [Archive(open_remote_file(f"{start.rstrip('/')}/{name}"), _photo_folder(PurePosixPath(name))) for name in names]


def _photo_folder(path: PurePath) -> str:
    """Return the folder for the photos of an archive: the path of the archive in the source, without the suffix."""
    ending = max((ending for ending in ARCHIVE_SUFFIXES if path.name.lower().endswith(ending)), key=len)
    return path.with_name(path.name[: -len(ending)] or path.name).as_posix()
