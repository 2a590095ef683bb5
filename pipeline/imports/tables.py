"""Tables of captions in CSV, JSON lines or parquet, read row by row; what is wrong with a row is said with its line.

A folder of images and a table that says what is on them, as a data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.columnar import parquet_batches
from vse.pipeline.files.images import BadImage, read_image_size
from vse.pipeline.files.inputs import check_input, wrap_read_errors
from vse.pipeline.files.writing import parse_json
from vse.pipeline.imports.csv_rows import QUOTING, csv_rows
from vse.pipeline.imports.photos import ImageFolders
from vse.pipeline.imports.rows import (
    BadRow,
    GatheredRows,
    ImportedRow,
    ImportSettings,
    check_name,
    texts,
    whole_number,
    write_imported_data,
)
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
_CSV, _JSON = (".csv", ".tsv", ".txt"), (".jsonl", ".ndjson")
TABLES = (*_CSV, *_JSON, ".parquet")
_Values = Mapping[str, Any]
_Refuse = Callable[[str, object], None]
_Choose = Callable[[Mapping[str, Any]], dict[str, tuple[str, ...]]]


def add_table(path: Path, gathered: GatheredRows, settings: ImportSettings) -> None:
    """Take all rows of a table; :class:`UserError` if it is no table, or has no column of files or of captions."""
    rows = table_rows(path, settings, gathered.refuse)
    for place, row in progress_bar(rows, desc=f"read {path.name}", unit="row"):
        try:
            gathered.add(row_of(place, row))
        except BadRow as reason:
            gathered.refuse(place, reason)


def table_rows(path: Path, settings: ImportSettings, refuse: _Refuse) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Yield each row's place and, by field, the values of its columns; rows that cannot be read are refused."""
    check_input(path)
    kind = path.suffix.lower()
    if kind not in TABLES:
        raise UserError(f"{path}: not a table that can be read; {', '.join(TABLES)} can")
    if settings.quoting is not None and (settings.quoting not in QUOTING or kind not in _CSV):
        allowed = f"is {' or '.join(QUOTING)}" if kind in _CSV else f"is for {', '.join(_CSV)}; leave it out"
        raise UserError(f"--quoting {settings.quoting}: {path.name}: it {allowed}")

    def choose(header: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        return columns_read(path, header, settings.columns, NEEDED)

    if kind in _CSV:
        rows: Iterator[tuple[str, _Values]]
        rows = csv_rows(path, refuse, lambda header: choose(header)["file"][0], settings.quoting or QUOTING[0])
    elif kind == ".parquet":
        rows = _parquet_rows(path, choose)
    else:
        rows = _json_rows(path, refuse)
    chosen: dict[str, tuple[str, ...]] = {}
    header: tuple[str, ...] = ()
    for place, values in rows:
        if tuple(values) != header:  # each line of JSON has names of its own
            try:
                chosen = choose(values)
            except UserError as error:
                if kind not in _JSON:
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


def _json_rows(path: Path, refuse: _Refuse) -> Iterator[tuple[str, _Values]]:
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


def _parquet_rows(path: Path, choose: _Choose) -> Iterator[tuple[str, _Values]]:
    """Rows of a parquet file, a batch at a time; they count from 1."""

    def columns(names: list[str]) -> list[str]:
        return [name for chosen in choose(dict.fromkeys(names)).values() for name in chosen]

    number = 0
    with path.open("rb") as stream:
        for batch in parquet_batches(path, stream, columns):
            with wrap_read_errors(path, "a parquet file"):
                rows = batch.to_pylist()
            for row in rows:
                number += 1
                yield f"{path}: row {number}", row


_USUAL = ("metadata", "captions")  # what such a table in the folder of images is called


def table_in(folder: Path) -> Path | None:
    """The table of captions in a folder of images; None if there is none by a usual name, :class:`UserError` if several."""
    tables = [path for name in _USUAL for end in TABLES if (path := folder / f"{name}{end}").is_file()]
    if len(tables) > 1:
        raise UserError(f"{folder}: has {' and '.join(path.name for path in tables)}; say which one with --captions FILE")
    return tables[0] if tables else None


def import_table(images: Path, table: Path, settings: ImportSettings, others: Path | None = None) -> Path:
    """Write ``dataset.json`` of the images that a CSV, JSON lines or parquet file names, with a link to their folder.

    A row names an image, relative to the folder ``images``, and one or more captions; an image may have several rows. Symbolic
    links in that folder may lead to files in it or in the folder ``others``. The header of each image is read. Returns the
    path of ``dataset.json``.
    """
    if not images.is_dir():
        raise UserError(f"{images}: no such folder of images")
    check_name(settings.name)
    gathered = GatheredRows(settings, check_photo(images, others))
    add_table(table, gathered, settings)
    content = gathered.content(format="table", files=[table.name])
    return write_imported_data(content, settings, images, [table])


def check_photo(images: Path, others: Path | None = None) -> Callable[[str], None]:
    """Return a check of a file in the folder ``images``.

    It raises BadRow if the file is missing, is no image that can be read, or is a link that leads to neither of the folders.
    """
    folders = ImageFolders([folder for folder in (images, others) if folder is not None])

    def check(file: str) -> None:
        try:
            folders.find(file)
            read_image_size(images / file)
        except BadImage as fault:
            raise BadRow(fault) from None

    return check
