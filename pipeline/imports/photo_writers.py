"""Write the photos of an import to the folder ``images``, or an index of photos that stay in their archives."""

from __future__ import annotations

from pathlib import Path

from vse.pipeline.errors import UserError
from vse.pipeline.files.archives import ArchiveMember
from vse.pipeline.files.photo_archives import PhotoIndexWriter
from vse.pipeline.files.writing import remove_temporary_files, write_bytes
from vse.pipeline.imports.archive_sources import Archive
from vse.pipeline.imports.rows import BadRow, ImportedRow, RowCollector


def check_photo_output(out: Path) -> Path:
    """Return the folder ``images`` of a new data set. Raises UserError if it is a link to other images."""
    folder = out / "images"
    if folder.is_symlink():
        raise UserError(f"{folder} is a link to another folder of images; give another --out")
    return folder


class PhotoWriter:
    """A writer that adds rows to a collector, and writes the photos to the folder ``images``.

    Photos that an interrupted import has written are kept.
    """

    def __init__(self, out: Path, collector: RowCollector) -> None:
        self.images_folder = check_photo_output(out)
        remove_temporary_files(self.images_folder, recursive=True)
        self._collector = collector

    def add(self, row: ImportedRow, content: bytes) -> None:
        """Add a row, and write ``content``, the bytes of the photo. Once the import cannot succeed, no photo is written."""
        file = self._collector.add_photo(row, content)
        if file is None or not self._collector.can_succeed:
            return
        path = self.images_folder / file
        if not (path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content):
            if path.exists():
                raise UserError(
                    f"{path} already exists and is another photo; move {self.images_folder} away, or give another --out"
                )
            write_bytes(path, content, sync=False)


class PhotoIndexer:
    """The counterpart of :class:`PhotoWriter` for photos that stay in their archives: it records the place of each photo."""

    def __init__(self, out: Path, collector: RowCollector) -> None:
        self.images_folder = check_photo_output(out)
        self._collector, self._index = collector, PhotoIndexWriter()
        self._number_by_archive: dict[Archive, int] = {}

    def add(self, row: ImportedRow, content: bytes, archive: Archive, member: ArchiveMember) -> None:
        """Add a row, and record the place of the photo. ``content`` holds its bytes. Raises BadRow for a sparse member."""
        if member.place is None:
            raise BadRow(f"member {member.name!r} is sparse, so that its bytes do not lie in one place")
        if archive not in self._number_by_archive:
            unpacked = self.images_folder / archive.folder
            if unpacked.exists():
                raise UserError(
                    f"{unpacked} has unpacked photos, which would be read instead; move it away, or give another --out"
                )
            self._number_by_archive[archive] = self._index.add_archive(archive.location)
        file = self._collector.add_photo(row, content)
        if file is not None:
            self._index.add_photo(file, self._number_by_archive[archive], member.name, member.size, member.place)

    def write(self) -> Path:
        """Write the index to the folder of images, and return its path."""
        return self._index.write(self.images_folder)
