"""Find the photos that a table names by their paths, and write the photos that an archive or table contains.

``ImageFolders`` finds files only inside the allowed folders. ``PhotoWriter`` writes photos into the data set; an import that
was stopped continues with the photos that are missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, read_image_size
from vse.pipeline.files.inputs import is_path
from vse.pipeline.files.writing import clear_temporaries, write_bytes
from vse.pipeline.imports.rows import BadRow, ImportedRow, RowCollector

MAX_PHOTO_BYTES = 100_000_000
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//|/)")
_HINT = "--images FOLDER allows another folder"


class ImageFolders:
    """The folders in which a table may name images.

    A relative path is searched in each of ``folders``, in this order. A symbolic link must lead to a file in one of them.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def find(self, name: str) -> Path:
        """Return the image file of this name with links resolved. Raises BadRow if it is outside all folders."""
        if _ADDRESS.match(name):
            raise BadRow(f"the image {name[:200]!r} is an address; only paths of files are allowed")
        if not is_path(name) or not name:
            raise BadRow("names no image file")
        targets = [Path(os.path.realpath(folder / name)) for folder in self._folders]
        inside = [target for target in targets if any(target.is_relative_to(folder) for folder in self._folders)]
        if not inside:
            folders = " or ".join(map(str, self._folders))
            raise BadRow(f"the image {name[:200]!r} is outside {folders}; {_HINT}")
        return next((target for target in inside if target.is_file()), inside[0])


class PhotoWriter:
    """Writes imported photos into the folder ``images`` of a data set, and adds their rows to a collector.

    An interrupted import continues with the missing photos.
    """

    def __init__(self, out: Path, collector: RowCollector) -> None:
        self.folder = out / "images"
        if self.folder.is_symlink():
            raise UserError(f"{self.folder} is a link to another folder of images; give another --out")
        clear_temporaries(self.folder, recursive=True)
        self._collector = collector

    def add(self, row: ImportedRow, content: bytes) -> None:
        """Add a row and write its photo; count the row as bad if the photo cannot be read.

        After a bad row nothing more is written, unless bad rows are left out.
        """
        try:
            read_image_size(Path(row.file), content)
        except BadImage as fault:
            self._collector.refuse(row.place, fault)
            return
        file = self._collector.add(row)
        if file is None or not self._collector.can_succeed:
            return
        path = self.folder / file
        if not (path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content):
            if path.exists():
                raise UserError(f"{path} already exists and is another photo; move {self.folder} away, or give another --out")
            write_bytes(path, content, sync=False)
