"""Import a folder of images and a table of their captions in CSV, JSON lines or parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vse.pipeline.dataset.sources import check_dataset_name
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.columnar import parquet_batches
from vse.pipeline.files.images import BadImage, read_image_size
from vse.pipeline.files.inputs import check_input, wrap_read_errors
from vse.pipeline.files.writing import parse_json
from vse.pipeline.imports.csv_rows import QUOTING, csv_rows
from vse.pipeline.imports.photos import ImageFolders
from vse.pipeline.imports.rows import (
    BadRow,
    ImportedRow,
    ImportSettings,
    RowCollector,
    caption_texts,
    parse_id,
    write_imported_data,
)
from vse.pipeline.progress import progress_bar

# The usual names of the column of each field; the first one that exists is read.
COLUMNS = {
    "file": ("file", "file_name", "filename", "filepath", "image", "image_path", "path", "key"),
    "caption": ("caption", "captions", "text", "raw", "sentence", "sentences"),
    "split": ("split",),
    "imgid": ("imgid", "image_id"),
    "sentid": ("sentid", "sentids", "caption_id"),
    "cocoid": ("cocoid", "coco_id"),
}
REQUIRED = ("file", "caption")
_CSV, _JSON = (".csv", ".tsv", ".txt"), (".jsonl", ".ndjson")
TABLES = (*_CSV, *_JSON, ".parquet")
_Values = Mapping[str, Any]
_Refuse = Callable[[str, object], None]
_Choose = Callable[[Mapping[str, Any]], dict[str, tuple[str, ...]]]


def add_table(path: Path, collector: RowCollector, settings: ImportSettings) -> None:
    """Add all rows of a table. Raises UserError if it cannot be read, or has no column of files or of captions."""
    rows = table_rows(path, settings, collector.refuse)
    for place, row in progress_bar(rows, desc=f"read {path.name}", unit="row"):
        try:
            collector.add(build_row(place, row))
        except BadRow as reason:
            collector.refuse(place, reason)


def table_rows(path: Path, settings: ImportSettings, refuse: _Refuse) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Yield the place of each row and, by field, the values of its columns. Raises UserError if ``path`` is not a table.

    Calls ``refuse`` with the place and the reason of an unreadable row.
    """
    check_input(path)
    kind = path.suffix.lower()
    if kind not in TABLES:
        raise UserError(f"{path}: not a table; the name must end in {', '.join(TABLES)}")
    if settings.quoting is not None and (settings.quoting not in QUOTING or kind not in _CSV):
        allowed = f"is {' or '.join(QUOTING)}" if kind in _CSV else f"is for {', '.join(_CSV)}; leave it out"
        raise UserError(f"--quoting {settings.quoting}: {path.name}: it {allowed}")

    def choose(header: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        return choose_columns(path, header, settings.columns, REQUIRED)

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
        if tuple(values) != header:  # each line of JSON has its own names
            try:
                chosen = choose(values)
            except UserError as error:
                if kind not in _JSON:
                    raise
                refuse(place, str(error).removeprefix(f"{path}: "))
                continue
            header = tuple(values)
        yield place, {field: [values[name] for name in names] for field, names in chosen.items()}


def build_row(place: str, values: Mapping[str, list[Any]]) -> ImportedRow:
    """Return the row with these values of its fields. Raises BadRow if a value has the wrong type."""
    (file,), (split,) = values["file"], values.get("split", [None])
    if not isinstance(file, str):
        raise BadRow("names no image file")
    if split is not None and not isinstance(split, str):
        raise BadRow(f"the split {split!r:.50} is not a text")
    several = len(values["caption"]) > 1  # then columns of captions may be empty
    texts = caption_texts(text for text in values["caption"] if not several or (text is not None and str(text).strip()))
    sentids = [each for value in values.get("sentid", []) for each in (value if isinstance(value, list) else [value])]
    parsed = [number for sentid in sentids if (number := parse_id(sentid, "sentid")) is not None]
    (imgid,), (cocoid,) = values.get("imgid", [None]), values.get("cocoid", [None])
    return ImportedRow(place, file, texts, split, parse_id(imgid, "imgid"), tuple(parsed), parse_id(cocoid, "cocoid"))


def choose_columns(
    path: Path, header: Mapping[str, Any], given: Mapping[str, tuple[str, ...]], required: tuple[str, ...] = REQUIRED
) -> dict[str, tuple[str, ...]]:
    """Return the columns of each field: those ``given``, or else the first of the usual names that the header has.

    Raises UserError if a given field or column does not exist, or if a required field has no column.
    """
    unknown = next((field for field in given if field not in COLUMNS), None)
    if unknown is not None:
        raise UserError(f"--column {unknown}: no such field{did_you_mean(unknown, COLUMNS)}")
    chosen = dict(given)
    for names in given.values():
        for name in names:
            if name not in header:
                raise UserError(f"{path}: no column {name!r}{did_you_mean(name, header)}")
    for field, names in COLUMNS.items():
        usual = next((name for name in names if name in header), None)
        if field not in chosen and usual is not None:
            chosen[field] = (usual,)
    missing = next((field for field in required if field not in chosen), None)
    if missing is not None:
        raise UserError(
            f"{path}: no column {' or '.join(COLUMNS[missing])}; its columns are {', '.join(header)}; name the right one with "
            f"--column {missing}=NAME"
        )
    several = next((field for field in chosen if field != "caption" and len(chosen[field]) > 1), None)
    if several is not None:
        raise UserError(f"--column {several}: only captions may be in several columns")
    return chosen


def _json_rows(path: Path, refuse: _Refuse) -> Iterator[tuple[str, _Values]]:
    with path.open("rb") as stream:
        for line_number, line in enumerate(stream, 1):
            place = f"{path}: line {line_number}"
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
    def columns(names: list[str]) -> list[str]:
        return [name for chosen in choose(dict.fromkeys(names)).values() for name in chosen]

    row_number = 0
    with path.open("rb") as stream:
        for batch in parquet_batches(path, stream, columns):
            with wrap_read_errors(path, "a parquet file"):
                rows = batch.to_pylist()
            for row in rows:
                row_number += 1
                yield f"{path}: row {row_number}", row


_TABLE_NAMES = ("metadata", "captions")  # usual names of a table in the folder of images


def find_table(folder: Path) -> Path | None:
    """Return the table of captions with a usual name in a folder of images, or None. Raises UserError if there are several."""
    tables = [path for name in _TABLE_NAMES for end in TABLES if (path := folder / f"{name}{end}").is_file()]
    if len(tables) > 1:
        raise UserError(f"{folder}: has {' and '.join(path.name for path in tables)}; choose one with --captions FILE")
    return tables[0] if tables else None


def import_table(images: Path, table: Path, settings: ImportSettings, others: Path | None = None) -> Path:
    """Write ``dataset.json`` for the images in a CSV, JSON lines or parquet file, and link their folder; return its path.

    A row has the path of an image, relative to the folder ``images``, and one or more captions; an image may have several
    rows. Symbolic links may lead to files in this folder or in the folder ``others``. The header of each image file is
    checked.
    """
    if not images.is_dir():
        raise UserError(f"{images}: no such folder of images")
    check_dataset_name(settings.name)
    collector = RowCollector(settings, photo_checker(images, others))
    add_table(table, collector, settings)
    content = collector.content(format="table", files=[table.name])
    return write_imported_data(content, settings, images, [table])


def photo_checker(images: Path, others: Path | None = None) -> Callable[[str], None]:
    """Return a function that raises BadRow if a file in the folder ``images`` is missing or is not a readable image.

    It also raises BadRow if the file is a link that leads out of both folders.
    """
    folders = ImageFolders([folder for folder in (images, others) if folder is not None])

    def check(file: str) -> None:
        try:
            folders.find(file)
            read_image_size(images / file)
        except BadImage as fault:
            raise BadRow(fault) from None

    return check
