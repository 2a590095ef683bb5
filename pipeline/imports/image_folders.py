"""Find the images of a table in folders, and nowhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from vse.pipeline.files.inputs import is_path_text
from vse.pipeline.imports.rows import BadRow

_URL_START_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//|/)")
_IMAGES_HINT = "--images FOLDER allows another folder"


class ImageFolders:
    """The folders in which the images of a table may lie.

    A relative path is looked up in each folder, in order. The target of a symbolic link must lie in one of the folders.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def find_image(self, name: str) -> Path:
        """Return the path of the image ``name`` with links resolved. Raises BadRow if the path is outside all folders."""
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
