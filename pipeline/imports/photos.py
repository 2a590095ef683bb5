"""Photos that come inside archives or tables, written as files of a data set; a second try goes on where one ended.

Folders that image paths in somebody's table may lead to; no other file is opened.
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
from vse.pipeline.imports.rows import BadRow, GatheredRows, ImportedRow

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//|/)")
_HINT = "--images FOLDER allows another folder"


class ImageFolders:
    """The folders whose images a table may name.

    Parameters
    ----------
    folders : a relative path is looked up in each, in this order; symbolic links are followed only to a file in one of them
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def find(self, name: str) -> Path:
        """Return the image file of this name, its links resolved; Raises BadRow if it lies in none of the folders."""
        if _ADDRESS.match(name):
            raise BadRow(f"the image {name[:200]!r} is an address, and only paths of files are followed")
        if not is_path(name) or not name:
            raise BadRow("names no image file")
        targets = [Path(os.path.realpath(folder / name)) for folder in self._folders]
        inside = [target for target in targets if any(target.is_relative_to(folder) for folder in self._folders)]
        if not inside:
            folders = " or ".join(map(str, self._folders))
            raise BadRow(f"the image {name[:200]!r} is not inside {folders}; {_HINT}")
        return next((target for target in inside if target.is_file()), inside[0])


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
            read_image_size(Path(row.file), content)
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
