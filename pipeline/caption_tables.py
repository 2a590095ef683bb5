"""Tables of captions in CSV, JSON lines or parquet, read row by row; what is wrong with a row is said with its line."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.extra_packages import extra_package
from vse.pipeline.files import parse_json
from vse.pipeline.imported_rows import BadRow, GatheredRows, ImportedRow, texts, whole_number
from vse.pipeline.input_files import check_input, reading
from vse.pipeline.progress import progress_bar

# What a column may be called, by what it holds; the first that is there is read.
COLUMNS = {
    "file": ("file", "file_name", "filename", "filepath", "image", "image_path", "path", "key"),
    "caption": ("caption", "captions", "text", "raw", "sentence", "sentences"),
    "split": ("split",),
    "imgid": ("imgid", "image_id"),
    "sentid": ("sentid", "sentids", "caption_id"),
    "cocoid": ("cocoid", "coco_id"),
}
NEEDED = ("file", "caption")
_BATCH = 1024
_Values = Mapping[str, Any]


def add_table(path: Path, gathered: GatheredRows, columns: Mapping[str, tuple[str, ...]]) -> None:
    """Take all rows of a table; :class:`UserError` if it is no table, or has no column of files or of captions."""
    rows = table_rows(path, columns, NEEDED, gathered.refuse)
    for place, row in progress_bar(rows, desc=f"read {path.name}", unit="row"):
        try:
            gathered.add(row_of(place, row))
        except BadRow as reason:
            gathered.refuse(place, reason)


def table_rows(
    path: Path, columns: Mapping[str, tuple[str, ...]], needed: tuple[str, ...], refuse: Callable[[str, object], None]
) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Each row's place and, by field, the values of its columns; rows that cannot be read are refused."""
    check_input(path)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise UserError(f"{path}: not a table that can be read; {', '.join(_READERS)} can")
    chosen: dict[str, tuple[str, ...]] = {}
    header: tuple[str, ...] = ()
    for place, values in read(path, refuse):
        if tuple(values) != header:  # each line of JSON has names of its own
            try:
                chosen = columns_read(path, values, columns, needed)
            except UserError as error:
                if read is not _json_rows:
                    raise
                refuse(place, str(error).removeprefix(f"{path}: "))
                continue
            header = tuple(values)
        yield place, {what: [values[name] for name in names] for what, names in chosen.items()}


def row_of(place: str, row: Mapping[str, list[Any]]) -> ImportedRow:
    """What is said in the fields of a row; :class:`BadRow` if one of them is something else."""
    (file,), (split,) = row["file"], row.get("split", [None])
    if not isinstance(file, str):
        raise BadRow("names no image file")
    if split is not None and not isinstance(split, str):
        raise BadRow(f"the split {split!r:.50} is no text")
    several = len(row["caption"]) > 1  # columns, of which some may be empty
    flat = texts(text for text in row["caption"] if not several or (text is not None and str(text).strip()))
    sentids = [each for value in row.get("sentid", []) for each in (value if isinstance(value, list) else [value])]
    numbers = [number for sentid in sentids if (number := whole_number(sentid, "sentid")) is not None]
    (imgid,), (cocoid,) = row.get("imgid", [None]), row.get("cocoid", [None])
    return ImportedRow(place, file, flat, split, whole_number(imgid, "imgid"), tuple(numbers), whole_number(cocoid, "cocoid"))


def columns_read(
    path: Path, header: Mapping[str, Any], given: Mapping[str, tuple[str, ...]], needed: tuple[str, ...] = NEEDED
) -> dict[str, tuple[str, ...]]:
    """The columns of each field: those ``given``, or the first of the usual names that the header has."""
    unknown = next((what for what in given if what not in COLUMNS), None)
    if unknown is not None:
        raise UserError(f"--column {unknown}: no such field{did_you_mean(unknown, COLUMNS)}")
    chosen = dict(given)
    for names in given.values():
        for name in names:
            if name not in header:
                raise UserError(f"{path}: no column {name!r}{did_you_mean(name, header)}")
    for what, names in COLUMNS.items():
        usual = next((name for name in names if name in header), None)
        if what not in chosen and usual is not None:
            chosen[what] = (usual,)
    lacking = next((what for what in needed if what not in chosen), None)
    if lacking is not None:
        raise UserError(
            f"{path}: no column {' or '.join(COLUMNS[lacking])}; its columns are {', '.join(header)}; name the one that "
            f"holds it with --column {lacking}=NAME"
        )
    several = next((what for what in chosen if what != "caption" and len(chosen[what]) > 1), None)
    if several is not None:
        raise UserError(f"--column {several}: only captions may lie in several columns")
    return chosen


def _csv_rows(path: Path, refuse: Callable[[str, object], None]) -> Iterator[tuple[str, _Values]]:
    """Rows of a CSV file with a header; commas, semicolons, tabs or bars separate cells, what the header has most."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        first = stream.readline(100_000)
        stream.seek(0)
        rows = csv.reader(stream, delimiter=max(",;\t|", key=first.count), strict=True)
        with reading(path, "a CSV file with the names of its columns in the first line"):
            header = [name.strip() for name in next(rows, [])]
            if not any(header) or len(set(header)) < len(header):
                raise ValueError("names that are missing or there twice")
            "".join(header).encode()
        while True:
            place = f"{path}: line {rows.line_num + 1}"
            try:
                cells = next(rows)
                if cells and len(cells) != len(header):
                    raise BadRow(f"{len(cells)} cells, where the header has {len(header)}")
                "".join(cells).encode()
            except StopIteration:
                return
            except (csv.Error, BadRow) as error:
                refuse(place, error)
            except UnicodeEncodeError:
                refuse(place, "not UTF-8")
            else:
                if cells:
                    yield place, dict(zip(header, cells, strict=True))


def _json_rows(path: Path, refuse: Callable[[str, object], None]) -> Iterator[tuple[str, _Values]]:
    """Rows of a file with a JSON object in each line."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            place = f"{path}: line {number}"
            if not line.strip():
                continue
            try:
                row = parse_json(path, line)
            except UserError as error:
                refuse(place, str(error).removeprefix(f"{path}: "))
                continue
            if isinstance(row, dict):
                yield place, row
            else:
                refuse(place, "not a JSON object")


def _parquet_rows(path: Path, refuse: Callable[[str, object], None]) -> Iterator[tuple[str, _Values]]:
    """Rows of a parquet file, a block at a time; they count from 1."""
    library = extra_package("pyarrow.parquet", str(path), "parquet")
    with reading(path, "a parquet file"), path.open("rb") as stream:
        number = 0
        for batch in library.ParquetFile(stream).iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row


_READERS: dict[str, Callable[[Path, Callable[[str, object], None]], Iterator[tuple[str, _Values]]]] = {
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".txt": _csv_rows,
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".parquet": _parquet_rows,
}
TABLES = tuple(_READERS)
