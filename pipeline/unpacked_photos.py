"""Photos that come inside archives or tables, written as files of a data set; a second try goes on where one ended."""

from __future__ import annotations

from pathlib import Path

from vse.pipeline.errors import UserError
from vse.pipeline.files import clear_temporaries, write_bytes
from vse.pipeline.image_files import BadImage, image_size
from vse.pipeline.imported_rows import BadRow, GatheredRows, ImportedRow

MOST_BYTES = 100_000_000  # of one photo


class UnpackedPhotos:
    """The folder ``images`` of a data set that is being imported, and the rows of those photos that are sound."""

    def __init__(self, out: Path, gathered: GatheredRows) -> None:
        self.folder = out / "images"
        if self.folder.is_symlink():
            raise UserError(f"{self.folder} is a link to a folder of other images; give another --out")
        clear_temporaries(self.folder, recursive=True)
        self._gathered = gathered

    def add(self, row: ImportedRow, content: bytes) -> None:
        """Take a row and write its photo; after a bad row, which is counted, only if such rows are skipped."""
        try:
            image_size(Path(row.file), content)
        except BadImage as fault:
            self._gathered.refuse(row.place, fault)
            return
        file = self._gathered.add(row)
        if file is None or not self._gathered.ok:
            return
        path = self.folder / file
        if not (path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content):
            if path.exists():
                raise UserError(f"{path} is there and is another photo; move {self.folder} away, or give another --out")
            write_bytes(path, content, sync=False)

    def once(self, seen: set[str], key: str) -> None:
        """:class:`BadRow` if a photo of this name came before."""
        if key in seen:
            raise BadRow(f"{key} is there already")
        seen.add(key)
