"""Files of word vectors: how they are recognised, whatever their format. Nothing here reads the vectors themselves."""

from __future__ import annotations

from pathlib import Path

from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file, sha256_json


def dictionary_of(table: Path) -> Path | None:
    """The file of words beside a table of vectors, such as Skip-Thought's ``utable.npy``; None of any other format."""
    return table.with_name("dictionary.txt") if table.suffix == ".npy" else None


def word_file_sha256(path: Path) -> str:
    """SHA-256 of a file of word vectors or, of a table, of those of the table and of its dictionary."""
    dictionary = dictionary_of(path)
    for file in (path, dictionary):
        if file is not None and not file.is_file():
            beside = f"; the words of {path.name} belong there, one a line" if file is dictionary else ""
            raise UserError(f"{file}: no such file of word vectors{beside}")
    return sha256_file(path) if dictionary is None else sha256_json([sha256_file(path), sha256_file(dictionary)])
