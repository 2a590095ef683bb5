"""Embeddings as a folder of plain arrays: ``.npy`` files with ids beside them, or parquet tables of ids and vectors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError, did_you_mean, import_extra
from vse.pipeline.files.inputs import InputFile, InputFolder, wrap_read_errors
from vse.pipeline.files.parquet import parquet_batches
from vse.pipeline.files.writing import parse_json

ABOUT = "about.json"
_TABLES = {
    "images": {"image_id": "image_ids", "coco_id": "coco_ids"},
    "captions": {"caption_id": "caption_ids", "image_id": "caption_image_ids"},
}  # what the columns of a table are called elsewhere
_VECTORS = ("vector", "embedding")  # what a column of vectors may be called
HELD_BYTES = 2**27  # of a file that is read at once: a mapped one that is cut while it is read ends the process


class FolderArrays(NamedTuple):
    """The arrays and attributes of a folder by their names in an embeddings file, and the files that they were read from."""

    arrays: dict[str, NDArray[Any]]
    attributes: dict[str, Any]
    source: InputFolder


def read_array_folder(folder: Path, names: Sequence[str], attributes: Sequence[str]) -> FolderArrays:
    """What a folder has of the arrays and attributes of an embeddings file of these names; the caller checks what they hold.

    An array lies in ``<name>.npy``. The ids may be columns of ``images.csv`` or ``.parquet`` (``image_id``, ``coco_id``) and
    ``captions.csv`` or ``.parquet`` (``caption_id`` and ``image_id``, that of the caption's image); without ``image_ids`` or
    ``caption_ids`` the rows are numbered from 0. A parquet table may have the vectors, too, a list of numbers in each row of
    ``vector`` or ``embedding``. ``about.json`` has the attributes; without it, ``dataset`` is the folder's name, ``split`` is
    ``test``, and ``similarity`` is ``cosine``, or of scores ``scores``. Nothing is unpickled. A matrix of float32 in C order
    is mapped. :class:`UserError` names the file that is not what it should be.
    """
    files: dict[str, InputFile] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for name in names:
        if (path := folder / f"{name}.npy").exists():
            files[path.name] = InputFile(path)
            arrays[name] = _array(files[path.name])
    for table, columns in _TABLES.items():
        for path in (folder / f"{table}{suffix}" for suffix in (".csv", ".parquet")):
            if path.exists():
                files[path.name] = InputFile(path)
                for name, values in _table(files[path.name], table, columns).items():
                    if name in arrays:
                        raise UserError(f"{path}: {name} are in another file of the folder, too; remove one of them")
                    arrays[name] = values
    if not arrays:
        raise UserError(
            f"{folder}: without images.npy, captions.npy or scores.npy a folder has no embeddings (docs/formats.md)"
        )
    similarity = "scores" if any(name.startswith("scores") for name in arrays) else "cosine"
    said: dict[str, Any] = {"dataset": folder.resolve().name, "split": "test", "similarity": similarity}
    if (path := folder / ABOUT).exists():
        files[path.name] = InputFile(path)
        said |= _about(files[path.name], attributes)
    for numbered, counted in (("image_ids", ("images", "scores", "scores_i2t")), ("caption_ids", ("caption_image_ids",))):
        rows = next((len(arrays[name]) for name in counted if name in arrays and arrays[name].ndim), None)
        if rows is not None:
            arrays.setdefault(numbered, np.arange(rows))
    return FolderArrays(arrays, said, InputFolder(folder, list(files.values())))


def _array(file: InputFile) -> NDArray[Any]:
    """Return the array of a ``.npy`` file; never a pickle. Large ones and scores are mapped where that is possible."""
    stream = file.stream
    with wrap_read_errors(file.path, "an array of numbers as numpy.save writes it"):
        version = np.lib.format.read_magic(stream)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read_header(stream)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        start, size = stream.tell(), math.prod(shape) * dtype.itemsize
        there = stream.seek(0, 2) - start
        if there < size:
            raise ValueError(f"{there:,} of {size:,} bytes are there")
        large = size > HELD_BYTES or file.path.name.startswith("scores")
        if large and dtype == np.float32 and dtype.isnative and len(shape) == 2 and size and not fortran:
            return np.memmap(stream, dtype, "r", start, shape)
        stream.seek(0)
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def _table(file: InputFile, vectors: str, columns: dict[str, str]) -> dict[str, NDArray[Any]]:
    """The ids in a table, by their names in an embeddings file, and its vectors, if it has any, as ``vectors``."""
    import pandas as pd

    if file.path.suffix == ".parquet":
        library = import_extra("pyarrow", str(file.path), "parquet")

        def choose(names: Sequence[str]) -> list[str]:
            return [column for column in (*columns, *_VECTORS) if column in names]

        batches = list(parquet_batches(file.path, file.stream, choose))
        with wrap_read_errors(file.path, "a parquet file"):
            arrow = library.Table.from_batches(batches)
            there = arrow.column_names
            table = arrow.select([column for column in there if column in columns]).to_pandas()
    else:
        with wrap_read_errors(file.path, "a CSV file with a header"):
            table = pd.read_csv(file.stream, dtype=str, keep_default_na=False, encoding="utf-8-sig", index_col=False)
            there = [column for column in columns if column in table]
    if not there:
        raise UserError(f"{file.path}: has no column {' or '.join(columns)}")
    found: dict[str, NDArray[Any]] = {
        name: _integers(file.path, column, table[column].tolist()) for column, name in columns.items() if column in there
    }
    named = [column for column in there if column in _VECTORS]
    if len(named) > 1:
        raise UserError(f"{file.path}: has the columns {' and '.join(named)}; remove one of them")
    for column in named:
        found[vectors] = _vectors(file.path, column, arrow[column])
    return found


def _vectors(path: Path, name: str, column: Any) -> NDArray[Any]:
    """The matrix of a parquet column of lists (pyarrow); :class:`UserError` names the first row that does not fit."""
    lists = column.combine_chunks()
    inner = getattr(column.type, "value_type", None)
    with wrap_read_errors(path, f"a parquet file whose column {name} has lists of numbers"):
        if str(inner) not in ("halffloat", "float", "double"):
            raise ValueError(f"it has {column.type}")
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    wrong = np.flatnonzero((lengths != lengths[:1]) | (lengths < 1))
    if len(wrong):
        row = int(wrong[0])
        raise UserError(f"{path}: row {row + 1}: {name} has {lengths[row]:,} numbers, that of row 1 {lengths[0]:,}")
    values = lists.flatten()
    if values.null_count:
        row = int(np.flatnonzero(np.asarray(values.is_null()))[0] // lengths[0])
        raise UserError(f"{path}: row {row + 1}: {name} lacks a number")
    return np.array(values).reshape(len(lists), -1)  # a copy, which may be written to


def _integers(path: Path, column: str, cells: Sequence[Any]) -> NDArray[np.int64]:
    """The integers of a column; :class:`UserError` names the first cell that is none, by its row below the header."""
    numbers = np.empty(len(cells), np.int64)
    for row, cell in enumerate(cells):
        try:
            numbers[row] = int(cell) if isinstance(cell, str) else cell.__index__()
        except (ValueError, TypeError, OverflowError, AttributeError):
            raise UserError(f"{path}: row {row + 1}: {column} {str(cell)[:50]!r} is no integer (64 bits)") from None
    return numbers


def _about(file: InputFile, names: Sequence[str]) -> dict[str, Any]:
    """The attributes in ``about.json``; ``provenance`` may be any JSON."""
    said = parse_json(file.path, file.read())
    if not isinstance(said, dict):
        raise UserError(f"{file.path}: not an object with {', '.join(names)}")
    for name in said:
        if name not in names:
            raise UserError(f"{file.path}: unknown key {name!r}{did_you_mean(name, names)}")
    if "provenance" in said and not isinstance(said["provenance"], str):
        said["provenance"] = json.dumps(said["provenance"])
    return {name: value for name, value in said.items() if value is not None}
