"""Import a large source part by part, so that an interrupted import can continue.

A part is one file of the source, such as ``metadata_0.parquet``. Its rows are checked and written to a parquet file, and all
these files are then joined to a data set. Memory holds the ids, files and splits of all images, and the texts of a few parts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset.parquet_io import IMAGES_PER_GROUP, column_schema
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import open_atomic, read_json, sha256_file, write_json
from vse.pipeline.imports.rows import BadRowList

PART_KEY = b"vse-import-part"
_CACHED_PARTS = 4
_FIRST_ROW_NAMES = ("file", "split", "imgid", "cocoid", "sentid", "digest", "number")
_INTEGER_NAMES = ("number", "imgid", "cocoid", "sentid")
Indices = NDArray[np.int64]


class CaptionRow(NamedTuple):
    """A valid row: an image with one caption.

    number : the index of the row among all rows of its part (a file of the imported source)
    place : the source file and the line of the row, for messages
    file : the path of the image
    raw : the text of the caption
    digest : a hash of the data of the image, such as its vectors; all rows of an image must have the same hash
    """

    number: int
    place: str
    file: str
    split: str | None
    imgid: int | None
    cocoid: int | None
    sentid: int | None
    raw: str
    tokens: list[str]
    digest: bytes


RowFault = tuple[int, str, str]  # the index of an invalid row, its file and line, and its fault


class ImportedPart(NamedTuple):
    """A part of an import: the valid rows and the invalid rows of one file of the imported source.

    path : the parquet file with the valid rows
    n_rows : the number of valid rows
    bad_rows : the index, the place and the fault of each invalid row
    """

    path: Path
    n_rows: int
    bad_rows: list[RowFault]

    def read_columns(self, *names: str) -> Any:
        """Return the columns ``names`` as a table (pyarrow)."""
        return import_module("pyarrow.parquet").read_table(self.path, columns=list(names), use_threads=False)


def write_imported_part(path: Path, key: str, blocks: Iterable[list[CaptionRow]], bad_rows: list[RowFault]) -> ImportedPart:
    """Write the valid rows of a part (one file of the source) to ``path``. ``key`` is a hash of all inputs and settings.

    ``blocks`` is an iterator over lists of valid rows. The iterator may append invalid rows to ``bad_rows`` while it runs.
    """
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    types = dict.fromkeys(CaptionRow._fields, arrow.string()) | dict.fromkeys(_INTEGER_NAMES, arrow.int64())
    types |= {"tokens": arrow.list_(arrow.string()), "digest": arrow.binary()}
    n_rows = 0
    repeated = ["file", "split", "tokens.list.element"]  # columns whose values repeat
    options = {"compression": "lz4", "use_dictionary": repeated}
    with open_atomic(path) as stream, parquet.ParquetWriter(stream, arrow.schema(types.items()), **options) as writer:
        for rows in blocks:
            columns = zip(zip(*rows, strict=True), types.values(), strict=True)
            writer.write_table(arrow.table([arrow.array(values, kind) for values, kind in columns], names=list(types)))
            n_rows += len(rows)
        writer.add_key_value_metadata({PART_KEY: json.dumps({"key": key, "bad_rows": bad_rows})})
    return ImportedPart(path, n_rows, bad_rows)


def find_imported_part(path: Path, key: str) -> ImportedPart | None:
    """Return the part in ``path`` if an earlier import wrote it with the same ``key``; otherwise return None.

    A part has the rows of one file of the source. ``key`` is a hash of all inputs and settings of the rows. A file whose
    metadata cannot be read is ignored.
    """
    parquet = import_module("pyarrow.parquet")
    try:
        metadata = parquet.read_metadata(path)
        content = json.loads(metadata.metadata[PART_KEY])
        if content["key"] != key:
            return None
        return ImportedPart(path, metadata.num_rows, [(row, place, fault) for row, place, fault in content["bad_rows"]])
    except Exception:  # a file of another kind: pyarrow raises many kinds of errors
        return None


class _FirstRow(NamedTuple):
    """The values in the first row of an image, and the position of this row. A part is one file of the source.

    ``part`` : the index of the part that has the row.
    ``valid_index`` : the index of the row among the valid rows of the part.
    ``row_index`` : the index of the row among all rows of the part.
    """

    split: str | None
    imgid: int | None
    cocoid: int | None
    sentid: int | None
    digest: bytes
    part: int
    valid_index: int
    row_index: int


class CaptionOrigins(NamedTuple):
    """The ids of all images and captions, and the row from which each caption comes.

    Captions are in the order of their images. A part is one file of the source.

    imgids : (n_images,) the id of each image.
    caption_ends : (n_images,) the number of captions of this image and all images before it.
    sentids : (n_captions,) the id of each caption.
    part_index : (n_captions,) the index of the part that has the row.
    valid_index : (n_captions,) the index of the row among the valid rows of the part.
    row_index : (n_captions,) the index of the row among all rows of the part.
    """

    imgids: Indices
    caption_ends: Indices
    sentids: Indices
    part_index: Indices
    valid_index: Indices
    row_index: Indices


def release_unused_memory() -> None:
    """Return memory that pyarrow no longer uses to the operating system."""
    import_module("pyarrow").default_memory_pool().release_unused()


class RowsByImage:
    """The rows of all parts (files of the source), grouped by image. Images are in the order of their first rows.

    A row that contradicts an earlier row, for example with another split of the same image, is added to ``bad_rows``.

    describe_conflict : a function that returns the end of an error message. The message is about a row whose image data differ
        from those in the first row of the image. The arguments are the part and the ``row_index`` of this first row.
    origins : the ids of images and captions, and the row of each caption
    """

    def __init__(
        self, parts: Sequence[ImportedPart], bad_rows: BadRowList, describe_conflict: Callable[[int, int], str]
    ) -> None:
        self._parts, self._describe_conflict = parts, describe_conflict
        self._first_rows: dict[str, _FirstRow] = {}
        self._index_by_file: dict[str, int] = {}
        self._file_by_imgid: dict[int, str] = {}
        self._sentids: set[int] = set()
        self._bad_rows = bad_rows
        self._part_ends: Indices = np.cumsum([part.n_rows for part in parts], dtype=np.int64)
        self._read_places = lru_cache(_CACHED_PARTS)(lambda part: parts[part].read_columns("place").column(0))
        self._read_texts = lru_cache(_CACHED_PARTS)(lambda part: parts[part].read_columns("raw", "tokens").combine_chunks())
        image_of_row = np.concatenate([np.empty(0, np.int64), *(self._add_part(index) for index in range(len(parts)))])
        self._drop_incomplete_images(image_of_row)
        self.origins = self._order_captions(image_of_row)

    @property
    def files(self) -> list[str]:
        """The file of each image."""
        return list(self._first_rows)

    @property
    def has_splits(self) -> bool:
        return any(row.split is not None for row in self._first_rows.values())

    def count_images_per_split(self, sampled_splits: dict[str, str]) -> dict[str, int]:
        """Return the number of images of each split.

        ``sampled_splits`` maps each file to its split; it is only read if the source has no splits.
        """
        return dict(Counter(row.split or sampled_splits[file] for file, row in self._first_rows.items()))

    def build_tables(self, sampled_splits: dict[str, str]) -> Iterator[Any]:
        """Yield the images as tables (pyarrow) with the columns of a ``dataset.parquet``.

        ``sampled_splits`` maps each file to its split; it is only read if the source has no splits.
        """
        arrow = import_module("pyarrow")
        schema = column_schema()
        files, first_rows = self.files, list(self._first_rows.values())
        for first in range(0, len(files), IMAGES_PER_GROUP):
            last = min(first + IMAGES_PER_GROUP, len(files))
            start, end = self.origins.caption_ends[first - 1] if first else 0, self.origins.caption_ends[last - 1]
            texts = self._take_texts(slice(start, end))
            caption = schema.field("sentences").type.value_type
            values = [arrow.array(self.origins.sentids[start:end]), texts.column("raw"), texts.column("tokens")]
            values += [arrow.nulls(end - start, caption.field(name).type) for name in ("language", "phrases")]
            plain = [each.combine_chunks() if hasattr(each, "combine_chunks") else each for each in values]
            fields = [each.cast(one.type) for each, one in zip(plain, caption, strict=True)]
            ends = np.concatenate([[0], self.origins.caption_ends[first:last] - start]).astype(np.int32)
            sentences = arrow.ListArray.from_arrays(
                arrow.array(ends), arrow.StructArray.from_arrays(fields, fields=list(caption)), schema.field("sentences").type
            )
            splits = [
                one.split or sampled_splits[file] for file, one in zip(files[first:last], first_rows[first:last], strict=True)
            ]
            cocoids = arrow.array([one.cocoid for one in first_rows[first:last]], arrow.int64())
            imgids = arrow.array(self.origins.imgids[first:last])
            yield arrow.table([imgids, files[first:last], splits, cocoids, sentences], schema=schema)

    def _take_texts(self, captions: slice) -> Any:
        """Return the columns ``raw`` and ``tokens`` of consecutive captions, which may come from several parts, as a table."""
        arrow = import_module("pyarrow")
        parts, valid_indices = self.origins.part_index[captions], self.origins.valid_index[captions]
        order, tables = [], []
        for part in np.unique(parts).tolist():
            chosen = np.flatnonzero(parts == part)
            order.append(chosen)
            tables.append(self._read_texts(part).take(arrow.array(valid_indices[chosen])))
        back = np.argsort(np.concatenate(order), kind="stable")
        return tables[0] if len(tables) == 1 else arrow.concat_tables(tables).take(arrow.array(back))

    def _add_part(self, index: int) -> Indices:
        """Add the valid rows of a part (one file of the source), and record its bad rows.

        Return the index of the image of each valid row, or -1 for a row that contradicts an earlier row.
        """
        part = self._parts[index]
        faults: dict[int, str] = {}
        columns = part.read_columns(*_FIRST_ROW_NAMES)
        rows = zip(*(columns.column(name).to_pylist() for name in _FIRST_ROW_NAMES), strict=True)
        images = [self._add_row(valid_index, faults, index, *row) for valid_index, row in enumerate(rows)]
        if faults or part.bad_rows:
            places, numbers = (columns_list.to_pylist() for columns_list in part.read_columns("place", "number").columns)
            more = [(numbers[valid_index], places[valid_index], fault) for valid_index, fault in faults.items()]
            for _, place, fault in sorted([*part.bad_rows, *more]):
                self._bad_rows.add(place, fault)
        return np.asarray(images, np.int64)

    def _add_row(
        self, valid_index: int, faults: dict[int, str], part: int, file: str, split: str | None, imgid: int | None,
        cocoid: int | None, sentid: int | None, digest: bytes, row_index: int,
    ) -> int:  # fmt: skip
        """Add the row ``valid_index`` among the valid rows of ``part`` (a file's index), and return the index of its image.

        If the row contradicts an earlier row, for example with another split of the same image, add a message to ``faults``
        instead and return -1.
        """
        known = self._first_rows.get(file)
        fault = ""
        if known is not None:
            if digest != known.digest:
                fault = f"{file} {self._describe_conflict(known.part, known.row_index)}"
            for name, value, earlier in (("split", split, known.split), ("imgid", imgid, known.imgid)):
                if value != earlier and not fault:
                    place = self._read_place(known.part, known.valid_index)
                    fault = f"{file} has {name} {value}, but {name} {earlier} at {place}"
            if (sentid is None) != (known.sentid is None) and not fault:
                fault = f"{file} has captions with and without an id"
        if imgid is not None and not fault and self._file_by_imgid.get(imgid, file) != file:
            fault = f"{self._file_by_imgid[imgid]} also has imgid {imgid}"
        if sentid is not None and not fault and sentid in self._sentids:
            fault = f"an earlier caption also has sentid {sentid}"
        if fault:
            faults[valid_index] = fault
            return -1
        if known is None:
            self._first_rows[file] = _FirstRow(split, imgid, cocoid, sentid, digest, part, valid_index, row_index)
            self._index_by_file[file] = len(self._index_by_file)
        if imgid is not None:
            self._file_by_imgid[imgid] = file
        if sentid is not None:
            self._sentids.add(sentid)
        return self._index_by_file[file]

    def _read_place(self, part: int, valid_index: int) -> str:
        place: str = self._read_places(part)[valid_index].as_py()
        return place

    def _drop_incomplete_images(self, image_of_row: Indices) -> None:
        """Remove images that lack a split or an id if other images have one. Rows of removed images become bad rows.

        ``image_of_row`` has the index of the image of each row. It becomes -1 for the rows of a removed image.
        """
        for name in ("split", "imgid", "sentid"):
            lacking = {self._index_by_file[file]: file for file, row in self._first_rows.items() if getattr(row, name) is None}
            if len(lacking) == len(self._first_rows):
                continue
            rows = np.flatnonzero(np.isin(image_of_row, list(lacking)))
            for row in rows[np.argsort(image_of_row[rows], kind="stable")].tolist():
                part = int(np.searchsorted(self._part_ends, row, side="right"))
                file = lacking[int(image_of_row[row])]
                place = self._read_place(part, row - (int(self._part_ends[part - 1]) if part else 0))
                self._bad_rows.add(place, f"{file} has no {name}, although other images have one")
                image_of_row[row] = -1
                self._first_rows.pop(file, None)

    def _order_captions(self, image_of_row: Indices) -> CaptionOrigins:
        """Return the ids of images and captions, and the position of the row of each caption. Captions are grouped by image.

        ``image_of_row`` has the index of the image of each row; -1 for a bad row.
        """
        first_rows = list(self._first_rows.values())
        new_index = np.full(len(self._index_by_file) + 1, -1)  # the last entry is for rows without an image
        new_index[[self._index_by_file[file] for file in self._first_rows]] = np.arange(len(first_rows))
        image_of_row = new_index[image_of_row]
        order = np.argsort(image_of_row, kind="stable")[np.count_nonzero(image_of_row < 0) :]
        part_index = np.searchsorted(self._part_ends, order, side="right")
        numbers, sentids = (self._read_column(name)[order] for name in ("number", "sentid"))
        has_imgids, has_sentids = (
            bool(first_rows) and getattr(first_rows[0], name) is not None for name in ("imgid", "sentid")
        )
        return CaptionOrigins(
            imgids=np.asarray([one.imgid for one in first_rows] if has_imgids else np.arange(len(first_rows)), np.int64),
            caption_ends=np.cumsum(np.bincount(image_of_row[order], minlength=len(first_rows))),
            sentids=sentids if has_sentids else np.arange(len(order)),
            part_index=part_index,
            valid_index=order - np.concatenate([[0], self._part_ends])[part_index],
            row_index=numbers,
        )

    def _read_column(self, name: str) -> Indices:
        """Return an integer column of all parts, with -1 for null."""
        columns = [part.read_columns(name).column(0).fill_null(-1).to_numpy() for part in self._parts]
        return np.concatenate([np.empty(0, np.int64), *columns])


RECORD_NAME = ".import.json"


def is_import_finished(folder: Path, key: str) -> bool:
    """Return whether the last import to ``folder`` had this ``key``, and the files that it recorded are unchanged.

    ``key`` is a hash of all inputs and settings.
    """
    record = folder / RECORD_NAME
    if not record.is_file():
        return False
    try:
        content = read_json(record)
        files = {folder / path: sha256 for path, sha256 in content["files"].items()}
        return content["key"] == key and all(path.is_file() and sha256_file(path) == sha256 for path, sha256 in files.items())
    except (UserError, OSError, KeyError, TypeError, AttributeError):  # a damaged record
        return False


def write_import_record(folder: Path, key: str, files: Sequence[Path], known_hashes: Mapping[Path, str]) -> None:
    """Record the files of a finished import, so that the same import need not run again.

    ``key`` is a hash of all inputs and settings. ``files`` are hashed here. ``known_hashes`` has the SHA-256 of further files.
    """
    all_hashes = {**{path: sha256_file(path) for path in files}, **known_hashes}
    hashes = {str(path.absolute()): sha256 for path, sha256 in all_hashes.items()}
    write_json(folder / RECORD_NAME, {"key": key, "files": hashes})
