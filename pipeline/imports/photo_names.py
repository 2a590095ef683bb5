"""Match the names of photographs in a spreadsheet with the files of a folder."""

from __future__ import annotations

import difflib
import re
import unicodedata
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

from vse.pipeline.imports.rows import BadRow

_N_NEAREST = 10
_MIN_SIMILARITY = 0.6
PHOTO_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp"))


class PhotoNames:
    """The photographs of a folder, found by names that may differ in spelling.

    A name may differ from the file's in upper and lower case, in the normal form of Unicode, in ``%20`` for a blank, in the
    folder in front of it, and it may lack the suffix.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _files(self) -> list[str]:
        files = (path for path in self._folder.rglob("*") if path.suffix.lower() in PHOTO_SUFFIXES)
        return sorted(path.relative_to(self._folder).as_posix() for path in files)

    @cached_property
    def _files_by_key(self) -> dict[str, set[str]]:
        """All files by each of their keys: the path, the name, and both without the suffix."""
        files_by_key: dict[str, set[str]] = {}
        for file in self._files:
            for key in list_name_keys(file):
                files_by_key.setdefault(key, set()).add(file)
        return files_by_key

    def find(self, name: str) -> str:
        """Return the path of the photograph with this name, relative to the folder.

        A name without any photograph is returned unchanged, for the message of the check of files. Raises BadRow if several
        photographs fit.
        """
        if not name or ".." in Path(name).parts or (self._folder / name).is_file():
            return name
        for key in list_name_keys(name):
            found = self._files_by_key.get(key, set())
            if len(found) == 1:
                return next(iter(found))
            if found:
                some = " and ".join(sorted(found)[:2])
                raise BadRow(f"{name!r} fits {len(found)} photographs, such as {some}; name the folder, too")
        return name

    def is_photo(self, name: str) -> bool:
        """Return whether a photograph of the folder has this name."""
        return bool(name) and any(key in self._files_by_key for key in list_name_keys(name))

    def list_nearest(self, name: str) -> list[str]:
        """Return the most similar names of photographs, at most ten."""
        keys = {_normalize(file): file for file in self._files}
        near = difflib.get_close_matches(_normalize(name), list(keys), n=_N_NEAREST, cutoff=_MIN_SIMILARITY)
        return [keys[key] for key in near]


def _normalize(name: str) -> str:
    path = re.sub(r"^[a-z]:", "", unquote(name).replace("\\", "/"), flags=re.IGNORECASE)
    return unicodedata.normalize("NFC", path).strip().strip("/").casefold()


def list_name_keys(name: str) -> list[str]:
    """Return the keys of a name, the most specific first."""
    path = _normalize(name)
    base = path.rpartition("/")[2]
    stems = [re.sub(r"\.(jpe?g|png|webp)$", "", text) for text in (path, base)]
    return list(dict.fromkeys(key for key in (path, stems[0], base, stems[1]) if key))
