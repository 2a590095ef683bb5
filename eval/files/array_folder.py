"""Reader of embeddings in a folder of ``.npy`` files and tables of ids, or of parquet tables with ids and vectors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset.languages import build_language_fields
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.columnar import read_parquet_batches
from vse.pipeline.files.inputs import InputFile, InputFolder, wrap_read_errors
from vse.pipeline.files.writing import parse_json

ABOUT_FILE = "about.json"
_TABLE_COLUMNS = {
    "images": {"image_id": "image_ids", "coco_id": "coco_ids"},
    "captions": {"caption_id": "caption_ids", "image_id": "caption_image_ids", "language": "caption_languages"},
}  # for each table, the array in an embeddings file that corresponds to each column
_VECTOR_COLUMNS = ("vector", "embedding")  # accepted names for a column of vectors
# Files up to this size are read into memory. Larger files are mapped; if another program truncates a mapped file, we crash.
MAX_IN_MEMORY_BYTES = 2**27


class FolderArrays(NamedTuple):
    """The content of a folder of embeddings.

    ``arrays`` and ``attributes`` have the same keys as an embeddings file: for example, ``image_ids`` is an array, and
    ``dataset`` is an attribute. ``source`` lists the files that were read.
    """

    arrays: dict[str, NDArray[Any]]
    attributes: dict[str, Any]
    source: InputFolder


def read_array_folder(folder: Path, names: Sequence[str], attribute_names: Sequence[str]) -> FolderArrays:
    """Read the arrays and attributes of embeddings or scores from a folder.

    ``names`` are the names of the arrays to look for, such as ``images``. The array is in the file ``<name>.npy``. Ids may
    also be in two tables, CSV or parquet files. The table ``images`` has the columns ``image_id`` and ``coco_id``. The table
    ``captions`` has ``caption_id``, ``image_id`` (the id of the caption's image) and ``language``. Without ids the rows are
    numbered from 0. A parquet table may also have a column ``vector`` or ``embedding``, with a list of numbers in each row.

    The optional file ``about.json`` has the attributes; its allowed keys are ``attribute_names``. By default, ``dataset`` is
    the name of the folder, ``split`` is ``test``, and ``similarity`` is ``cosine`` (``scores`` if the folder has scores).

    No file is unpickled. Scores and large matrices of float32 in C order are memory-mapped. The caller checks the values.
    Raises UserError if a file cannot be read as described.
    """
    files: dict[str, InputFile] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for name in names:
        if (path := folder / f"{name}.npy").exists():
            files[path.name] = InputFile(path)
            arrays[name] = _read_array(files[path.name])
    for table, columns in _TABLE_COLUMNS.items():
        for path in (folder / f"{table}{suffix}" for suffix in (".csv", ".parquet")):
            if path.exists():
                files[path.name] = InputFile(path)
                for name, values in _read_table(files[path.name], table, columns).items():
                    if name in arrays:
                        raise UserError(f"{path}: {name} are in another file of the folder, too; remove one of them")
                    arrays[name] = values
    if not arrays:
        raise UserError(
            f"{folder}: without images.npy, captions.npy or scores.npy a folder has no embeddings (docs/formats.md)"
        )
    similarity = "scores" if any(name.startswith("scores") for name in arrays) else "cosine"
    stored: dict[str, Any] = {"dataset": folder.resolve().name, "split": "test", "similarity": similarity}
    if (path := folder / ABOUT_FILE).exists():
        files[path.name] = InputFile(path)
        stored |= _read_about(files[path.name], attribute_names)
    if "caption_languages" in arrays and arrays["caption_languages"].dtype.kind == "U":
        encoded = build_language_fields(arrays["caption_languages"].tolist())
        arrays["caption_languages"], stored["languages"] = encoded["caption_languages"], encoded["languages"]
    for ids, counted in (("image_ids", ("images", "scores", "scores_i2t")), ("caption_ids", ("caption_image_ids",))):
        rows = next((len(arrays[name]) for name in counted if name in arrays and arrays[name].ndim), None)
        if rows is not None:
            arrays.setdefault(ids, np.arange(rows))
    return FolderArrays(arrays, stored, InputFolder(folder, list(files.values())))


def _read_array(file: InputFile) -> NDArray[Any]:
    """Return the array of a ``.npy`` file without unpickling. Large matrices and scores are memory-mapped if possible."""
    stream = file.stream
    with wrap_read_errors(file.path, "an array of numbers as numpy.save writes it"):
        version = np.lib.format.read_magic(stream)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read_header(stream)
        if dtype.hasobject:
            raise ValueError("it contains Python objects")
        start, size = stream.tell(), math.prod(shape) * dtype.itemsize
        available = stream.seek(0, 2) - start
        if available < size:
            raise ValueError(f"it has only {available:,} of {size:,} bytes")
        large = size > MAX_IN_MEMORY_BYTES or file.path.name.startswith("scores")
        if large and dtype == np.float32 and dtype.isnative and len(shape) == 2 and size and not fortran:
            return np.memmap(stream, dtype, "r", start, shape)
        stream.seek(0)
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def _read_table(file: InputFile, vector_key: str, columns: dict[str, str]) -> dict[str, NDArray[Any]]:
    """Return the columns of a CSV or parquet table as arrays.

    ``columns`` maps the names of the columns with ids or languages to keys of the result. ``vector_key`` is the key of the
    result for the column with vectors. Only a parquet table may have such a column.
    """
    import pandas as pd

    if file.path.suffix == ".parquet":
        library = import_module("pyarrow")

        def list_known_columns(names: Sequence[str]) -> list[str]:
            return [column for column in (*columns, *_VECTOR_COLUMNS) if column in names]

        batches = list(read_parquet_batches(file.path, file.stream, list_known_columns))
        with wrap_read_errors(file.path, "a parquet file"):
            arrow = library.Table.from_batches(batches)
            present = arrow.column_names
            table = arrow.select([column for column in present if column in columns]).to_pandas()
    else:
        with wrap_read_errors(file.path, "a CSV file with a header"):
            table = pd.read_csv(file.stream, dtype=str, keep_default_na=False, encoding="utf-8-sig", index_col=False)
            present = [column for column in columns if column in table]
    if not present:
        raise UserError(f"{file.path}: has none of the columns {', '.join(columns)}")
    found: dict[str, NDArray[Any]] = {
        name: _parse_column(file.path, column, table[column].tolist()) for column, name in columns.items() if column in present
    }
    vector_columns = [column for column in present if column in _VECTOR_COLUMNS]
    if len(vector_columns) > 1:
        raise UserError(f"{file.path}: has the columns {' and '.join(vector_columns)}; remove one of them")
    for column in vector_columns:
        found[vector_key] = _parse_vector_column(file.path, column, arrow[column])
    return found


def _parse_vector_column(path: Path, name: str, column: Any) -> NDArray[Any]:
    """Return the lists of a pyarrow column as the rows of a matrix.

    Raises UserError if the column does not have lists of numbers, or if a list is empty, lacks a number, or differs in length.
    """
    lists = column.combine_chunks()
    inner = getattr(column.type, "value_type", None)
    with wrap_read_errors(path, f"a parquet file whose column {name} has lists of numbers"):
        if str(inner) not in ("halffloat", "float", "double"):
            raise ValueError(f"it has {column.type}")
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    wrong = np.flatnonzero((lengths != lengths[:1]) | (lengths < 1))
    if len(wrong):
        row = int(wrong[0])
        raise UserError(f"{path}: row {row + 1}: {name} has {lengths[row]:,} numbers, but row 1 has {lengths[0]:,}")
    values = lists.flatten()
    if values.null_count:
        row = int(np.flatnonzero(np.asarray(values.is_null()))[0] // lengths[0])
        raise UserError(f"{path}: row {row + 1}: {name} lacks a number")
    return np.array(values).reshape(len(lists), -1)  # a copy, because it must be writable


def _parse_column(path: Path, column: str, cells: Sequence[Any]) -> NDArray[Any]:
    """Return the cells of a column as integers, or as texts for the column ``language``."""
    if column != "language":
        return _parse_integer_column(path, column, cells)
    if empty := next((row for row, cell in enumerate(cells, 1) if not isinstance(cell, str) or not cell), None):
        raise UserError(f"{path}: row {empty}: has no language")
    return np.asarray(cells, str)


def _parse_integer_column(path: Path, column: str, cells: Sequence[Any]) -> NDArray[np.int64]:
    numbers = np.empty(len(cells), np.int64)
    for row, cell in enumerate(cells):
        try:
            numbers[row] = int(cell) if isinstance(cell, str) else cell.__index__()
        except (ValueError, TypeError, OverflowError, AttributeError):
            raise UserError(f"{path}: row {row + 1}: {column} {str(cell)[:50]!r} is not an integer of 64 bits") from None
    return numbers


def _read_about(file: InputFile, names: Sequence[str]) -> dict[str, Any]:
    stored = parse_json(file.path, file.read())
    if not isinstance(stored, dict):
        raise UserError(f"{file.path}: not an object with {', '.join(names)}")
    for name in stored:
        if name not in names:
            raise UserError(f"{file.path}: unknown key {name!r}{did_you_mean(name, names)}")
    if "provenance" in stored and not isinstance(stored["provenance"], str):
        stored["provenance"] = json.dumps(stored["provenance"])
    return {name: value for name, value in stored.items() if value is not None}
