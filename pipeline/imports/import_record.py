"""Recognise an import that has finished, so that it is not repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import read_json, sha256_file, write_json

RECORD_NAME = ".import.json"


def is_finished(folder: Path, key: str) -> bool:
    """Return whether the last import to ``folder`` had this key, and all files that it wrote are unchanged."""
    record = folder / RECORD_NAME
    if not record.is_file():
        return False
    try:
        content = read_json(record)
        files = {folder / path: sha256 for path, sha256 in content["files"].items()}
        return content["key"] == key and all(path.is_file() and sha256_file(path) == sha256 for path, sha256 in files.items())
    except (UserError, OSError, KeyError, TypeError, AttributeError):  # a damaged record
        return False


def write_import_record(folder: Path, key: str, files: Sequence[Path], hashed: Mapping[Path, str]) -> None:
    """Record that an import with this key has written ``files``, and ``hashed`` files whose SHA-256 is known."""
    hashes = {
        str(path.absolute()): sha256 for path, sha256 in [*((path, sha256_file(path)) for path in files), *hashed.items()]
    }
    write_json(folder / RECORD_NAME, {"key": key, "files": hashes})
