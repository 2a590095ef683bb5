"""Folders that image paths in somebody's table may lead to; no other file is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from vse.pipeline.imported_rows import BadRow
from vse.pipeline.input_files import is_path

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
