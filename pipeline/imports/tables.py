"""Import a folder of images and a table of their captions: CSV, JSON lines, parquet or a spreadsheet (``.xlsx``)."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any

import click
import pandas as pd

from vse.pipeline.dataset.preparation import check_dataset_name
from vse.pipeline.errors import UserError, did_you_mean, import_extra
from vse.pipeline.files.columnar import list_values, read_parquet_batches
from vse.pipeline.files.images import BadImage, read_image_size
from vse.pipeline.files.inputs import check_input, wrap_read_errors
from vse.pipeline.files.writing import parse_json
from vse.pipeline.imports.photos import ImageFolders, PhotoNameIndex
from vse.pipeline.imports.rows import (
    BadRow,
    ImportedRow,
    ImportSettings,
    RowCollector,
    flatten_captions,
    write_imported_data,
)
from vse.pipeline.imports.spreadsheets import (
    N_SAMPLE_ROWS,
    QUOTING_MODES,
    OnBadRow,
    find_table_layout,
    read_csv_layout,
    read_csv_rows,
)
from vse.pipeline.progress import progress_bar

# The usual names of the column of each field; the first existing column is read.
USUAL_NAMES_BY_FIELD = {
    "file": ("file", "file_name", "filename", "filepath", "image", "image_path", "path", "key"),
    "caption": ("caption", "captions", "text", "raw", "sentence", "sentences"),
    "split": ("split",),
    "imgid": ("imgid", "image_id"),
    "sentid": ("sentid", "sentids", "caption_id"),
    "cocoid": ("cocoid", "coco_id"),
}
REQUIRED_FIELDS = ("file", "caption")
_TEXT_FIELDS = {"file", "caption", "split"}
_CSV_SUFFIXES, _JSON_SUFFIXES = (".csv", ".tsv", ".txt"), (".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_CSV_SUFFIXES, *_JSON_SUFFIXES, ".parquet", ".xlsx")
_MAX_XLSX_BYTES = 2_000_000_000  # size of an unpacked spreadsheet
_RowValues = Mapping[str, Any]
_ColumnFinder = Callable[[Mapping[str, Any]], dict[str, tuple[str, ...]]]


def add_table_rows(path: Path, collector: RowCollector, settings: ImportSettings, photos: PhotoNameIndex) -> None:
    """Add the rows of a table to ``collector``; ``photos`` finds files by their names in the table.

    Raises UserError if the table cannot be read, or lacks a column of files or captions.
    """
    rows = read_table_rows(path, settings, collector.add_bad_row)
    for place, values in progress_bar(rows, desc=f"read {path.name}", unit="row"):
        try:
            row = build_imported_row(place, values)
            collector.add(row._replace(file=photos.find_photo(row.file)))
        except BadRow as reason:
            collector.add_bad_row(place, reason)


def read_table_rows(path: Path, settings: ImportSettings, on_bad_row: OnBadRow) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Yield, for each row, its file and line, and a dictionary from fields to values.

    A field is ``file``, ``caption``, ``split`` or an id. The dictionary has a list of values for each field, because captions
    may be in several columns. For an unreadable row, ``on_bad_row`` is called with the file and line, and the reason. Raises
    UserError if ``path`` is not a table.
    """
    check_input(path)
    kind = path.suffix.lower()
    if kind not in TABLE_SUFFIXES:
        raise UserError(f"{path}: not a table; the name must end in {', '.join(TABLE_SUFFIXES)}")
    if settings.quoting is not None and (settings.quoting not in QUOTING_MODES or kind not in _CSV_SUFFIXES):
        allowed = (
            f"is {' or '.join(QUOTING_MODES)}" if kind in _CSV_SUFFIXES else f"is for {', '.join(_CSV_SUFFIXES)}; leave it out"
        )
        raise UserError(f"--quoting {settings.quoting}: {path.name}: it {allowed}")

    def find_columns(header: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        return choose_columns(path, header, settings.columns, REQUIRED_FIELDS)

    if kind in _CSV_SUFFIXES:
        rows: Iterator[tuple[str, _RowValues]]
        file_column: Callable[[Mapping[str, None]], str] = lambda header: find_columns(header)["file"][0]  # noqa: E731
        form = settings.quoting or QUOTING_MODES[0], settings.encoding or "utf-8-sig", settings.column_names
        rows = read_csv_rows(path, on_bad_row, file_column, *form)
    elif kind == ".xlsx":
        rows = _read_xlsx_rows(path)
    elif kind == ".parquet":
        rows = _read_parquet_rows(path, find_columns)
    else:
        rows = _read_json_rows(path, on_bad_row)
    chosen: dict[str, tuple[str, ...]] = {}
    header: tuple[str, ...] = ()
    for place, values in rows:
        if tuple(values) != header:  # each line of JSON has its own names
            try:
                chosen = find_columns(values)
            except UserError as error:
                if kind not in _JSON_SUFFIXES:
                    raise
                on_bad_row(place, str(error).removeprefix(f"{path}: "))
                continue
            header = tuple(values)
        yield place, {field: [values[name] for name in names] for field, names in chosen.items()}


def read_imported_rows(path: Path, settings: ImportSettings, on_bad_row: OnBadRow) -> Iterator[ImportedRow]:
    """Yield the rows of a table. For an unreadable or invalid row, call ``on_bad_row`` with its file and line and the reason.

    Raises UserError if ``path`` is not a table.
    """
    if path.suffix.lower() == ".parquet" and (columns := _find_text_columns(path, settings)):
        yield from _read_text_rows(path, columns, on_bad_row)
        return
    for place, values in read_table_rows(path, settings, on_bad_row):
        try:
            row = build_imported_row(place, values)
        except BadRow as reason:
            on_bad_row(place, reason)
            continue
        yield row


def _find_text_columns(path: Path, settings: ImportSettings) -> list[str] | None:
    """Return the columns of files, captions and (if there is one) splits of a parquet table, if these are columns of texts.

    Returns None if a column has another type than text, or if the table has ids or several columns of captions.
    """
    library, kinds = map(import_module, ("pyarrow.parquet", "pyarrow.types"))
    with wrap_read_errors(path, "a parquet file"):
        schema = library.read_schema(check_input(path))
    chosen = choose_columns(path, dict.fromkeys(schema.names), settings.columns, REQUIRED_FIELDS)
    columns = [*chosen["file"], *chosen["caption"], *chosen.get("split", ())]
    are_texts = all(kinds.is_string(schema.field(name).type) for name in columns if schema.names.count(name) == 1)
    return (
        columns if are_texts and len(set(columns)) == len(columns) == len(chosen) and chosen.keys() <= _TEXT_FIELDS else None
    )


def _read_text_rows(path: Path, names: list[str], on_bad_row: OnBadRow) -> Iterator[ImportedRow]:
    """Yield the rows of a parquet table from columns of texts. Call ``on_bad_row`` for a row without the path of an image.

    ``names`` holds the names of the columns of files and captions and, if there is one, of the column of splits.
    """
    row_number = 0
    with path.open("rb") as stream:
        for batch in read_parquet_batches(path, stream, lambda _: names):
            with wrap_read_errors(path, "a parquet file"):
                files, captions, *splits = (list_values(batch.column(name)) for name in names)
            for file, caption, split in zip(files, captions, splits[0] if splits else repeat(None, len(files)), strict=True):
                row_number += 1
                if file is None:
                    on_bad_row(f"{path}: row {row_number}", BadRow("names no image file"))
                else:
                    yield ImportedRow(f"{path}: row {row_number}", file, (caption or "",), split)


def build_imported_row(place: str, values: Mapping[str, list[Any]]) -> ImportedRow:
    """Return the row with these ``values``. Raises BadRow if a value has the wrong type.

    ``values`` has a list of values for each field, such as ``file`` or ``caption``. ``place`` is the file and line of the row.
    """
    file, split = values["file"][0], values["split"][0] if "split" in values else None
    if not isinstance(file, str):
        raise BadRow("names no image file")
    if split is not None and not isinstance(split, str):
        raise BadRow(f"the split {split!r:.50} is not a text")
    captions = values["caption"]
    if len(captions) > 1:  # some of several columns of captions may be empty
        captions = [text for text in captions if text is not None and str(text).strip()]
    imgid, cocoid = (parse_id(values[name][0], name) if name in values else None for name in ("imgid", "cocoid"))
    sentids: tuple[int, ...] = ()
    if "sentid" in values:
        several = [each for value in values["sentid"] for each in (value if isinstance(value, list) else [value])]
        sentids = tuple(number for sentid in several if (number := parse_id(sentid, "sentid")) is not None)
    return ImportedRow(place, file, flatten_captions(captions), split, imgid, sentids, cocoid)


def parse_id(value: object, field_name: str) -> int | None:
    """Return an id as an integer; None if ``value`` is None or "".

    Raises BadRow if ``value`` is not an integer or the text of an integer. The message contains ``field_name``.
    """
    if value is None or value == "":
        return None
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or abs(number) >= 2**63:
        raise BadRow(f"{field_name} {value!r} is not an integer")
    return number


def choose_columns(
    path: Path, header: Mapping[str, Any], given: Mapping[str, tuple[str, ...]], required: tuple[str, ...] = REQUIRED_FIELDS
) -> dict[str, tuple[str, ...]]:
    """Return the columns of each field, such as ``caption``: the ``given`` columns, or else the first with a usual name.

    Raises UserError if a field of ``given`` is unknown, if one of its columns is not in ``header``, if a ``required`` field
    has no column, or if a field other than ``caption`` has several columns.
    """
    unknown = next((field for field in given if field not in USUAL_NAMES_BY_FIELD), None)
    if unknown is not None:
        raise UserError(f"--column {unknown}: no such field{did_you_mean(unknown, USUAL_NAMES_BY_FIELD)}")
    chosen = dict(given)
    for names in given.values():
        for name in names:
            if name not in header:
                raise UserError(f"{path}: no column {name!r}{did_you_mean(name, header)}")
    for field, names in USUAL_NAMES_BY_FIELD.items():
        usual = next((name for name in names if name in header), None)
        if field not in chosen and usual is not None:
            chosen[field] = (usual,)
    missing = next((field for field in required if field not in chosen), None)
    if missing is not None:
        raise UserError(
            f"{path}: no column {' or '.join(USUAL_NAMES_BY_FIELD[missing])}; its columns are {', '.join(header)}; name the "
            f"right one with --column {missing}=NAME"
        )
    several = next((field for field in chosen if field != "caption" and len(chosen[field]) > 1), None)
    if several is not None:
        raise UserError(f"--column {several}: only captions may be in several columns")
    return chosen


def _read_xlsx_rows(path: Path) -> Iterator[tuple[str, _RowValues]]:
    for row_number, row in enumerate(read_xlsx(path).to_dict("records"), 2):
        yield f"{path}: row {row_number}", {str(name): value for name, value in row.items()}


def read_xlsx(path: Path, n_rows: int | None = None) -> pd.DataFrame:
    """Return the first ``n_rows`` rows (None: all rows) of a spreadsheet's first sheet as texts, without blank rows."""
    import_extra("openpyxl", path.name, "xlsx")
    with wrap_read_errors(path, "a spreadsheet (.xlsx)"):
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > _MAX_XLSX_BYTES:
                raise ValueError(f"it unpacks to more than {_MAX_XLSX_BYTES // 10**9} GB")
        table = pd.read_excel(path, dtype=str, keep_default_na=False, nrows=n_rows, engine="openpyxl")
    return table[(table != "").any(axis=1)]


def _read_json_rows(path: Path, on_bad_row: OnBadRow) -> Iterator[tuple[str, _RowValues]]:
    with path.open("rb") as stream:
        for line_number, line in enumerate(stream, 1):
            place = f"{path}: line {line_number}"
            if not line.strip():
                continue
            try:
                row = parse_json(path, line)
            except UserError as error:
                on_bad_row(place, str(error).removeprefix(f"{path}: "))
                continue
            if isinstance(row, dict):
                yield place, row
            else:
                on_bad_row(place, "not a JSON object")


def _read_parquet_rows(path: Path, find_columns: _ColumnFinder) -> Iterator[tuple[str, _RowValues]]:
    def list_needed_columns(names: list[str]) -> list[str]:
        return [name for chosen in find_columns(dict.fromkeys(names)).values() for name in chosen]

    row_number = 0
    with path.open("rb") as stream:
        for batch in read_parquet_batches(path, stream, list_needed_columns):
            with wrap_read_errors(path, "a parquet file"):
                columns_of_batch = list(map(list_values, batch.columns))
            for values in zip(*columns_of_batch, strict=True):
                row_number += 1
                yield f"{path}: row {row_number}", dict(zip(batch.schema.names, values, strict=True))


_TABLE_NAMES = ("metadata", "captions")  # usual names of a table in the folder of images


def find_captions_table(folder: Path) -> Path | None:
    """Return the table of captions (``metadata.*`` or ``captions.*``) in a folder of images; None if there is no such file.

    Raises UserError if there are several such files.
    """
    tables = [path for name in _TABLE_NAMES for end in TABLE_SUFFIXES if (path := folder / f"{name}{end}").is_file()]
    if len(tables) > 1:
        raise UserError(f"{folder}: has {' and '.join(path.name for path in tables)}; choose one with --captions FILE")
    return tables[0] if tables else None


def import_table(images: Path, table: Path, settings: ImportSettings, other_folder: Path | None = None) -> Path:
    """Write a data set from a table, link the folder ``images``, and return the path of the data set's file.

    A row has the path of an image, relative to the folder ``images``, and one or more captions. An image may have several
    rows. Symbolic links may lead to files in ``images`` or ``other_folder``. The header of each image file is checked.
    """
    if not images.is_dir():
        raise UserError(f"{images}: no such folder of images")
    check_dataset_name(settings.name)
    photos = PhotoNameIndex(images)
    settings = _detect_and_confirm_columns(table, photos, settings)
    collector = RowCollector(settings, build_photo_checker(images, other_folder, photos))
    add_table_rows(table, collector, settings, photos)
    content = collector.build_dataset_content(images, format="table", files=[table.name])
    return write_imported_data(content, settings, images, [table])


def _detect_and_confirm_columns(table: Path, photos: PhotoNameIndex, settings: ImportSettings) -> ImportSettings:
    """Return the settings with the encoding and columns of a CSV file or spreadsheet; log both and let the user confirm them.

    A field is read from the columns that the user chose, or else from a column with a usual name, or else from columns with
    fitting contents. Asks the user only if ``settings.needs_confirmation``. Raises click.Abort if the user declines.
    """
    kind = table.suffix.lower()
    if kind == ".xlsx":
        sheet = read_xlsx(table, N_SAMPLE_ROWS)
        layout = find_table_layout(
            "xlsx", tuple(map(str, sheet)), [tuple(row) for row in sheet.itertuples(index=False)], photos
        )
    elif kind in _CSV_SUFFIXES:
        layout = read_csv_layout(table, photos, settings.encoding)
    else:
        if settings.encoding is not None:
            raise UserError(f"--encoding {settings.encoding}: {table.name}: it is for CSV files; leave it out")
        return settings
    usual = {field for field, names in USUAL_NAMES_BY_FIELD.items() if any(name in layout.column_names for name in names)}
    guessed = {field: names for field, names in layout.columns_by_field.items() if field not in usual}
    settings = replace(
        settings,
        columns={**guessed, **settings.columns},
        encoding=layout.encoding,
        column_names=None if layout.has_header else layout.column_names,
    )
    try:
        columns = choose_columns(table, dict.fromkeys(layout.column_names), settings.columns)
    except UserError:
        return settings  # the reader of the rows will raise an error with a better explanation
    layout.log_summary(table, columns)
    if settings.needs_confirmation and not click.confirm("Import these rows?", default=True, err=True):
        raise click.Abort
    return settings


def build_photo_checker(
    images: Path, other_folder: Path | None = None, photos: PhotoNameIndex | None = None
) -> Callable[[str], None]:
    """Return a function that raises BadRow if a file in the folder ``images`` is not usable.

    The file must be an image with a valid header, and the target of a link must lie in ``images`` or ``other_folder``. If the
    file is missing, the message has the most similar names of ``photos``.
    """
    folders = ImageFolders([folder for folder in (images, other_folder) if folder is not None])

    def check(file: str) -> None:
        try:
            folders.find_image(file)
            read_image_size(images / file)
        except BadImage as fault:
            nearest = photos.list_nearest(file) if photos is not None and not (images / file).is_file() else []
            raise BadRow(f"{fault}; the nearest names are {', '.join(nearest)}" if nearest else fault) from None

    return check
