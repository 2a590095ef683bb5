"""Import a folder of images and a table of their captions in CSV, JSON lines or parquet."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from vse.pipeline.dataset.preparation import check_dataset_name
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.columnar import read_parquet_batches
from vse.pipeline.files.images import BadImage, read_image_size
from vse.pipeline.files.inputs import check_input, wrap_read_errors
from vse.pipeline.files.writing import parse_json
from vse.pipeline.imports.rows import (
    BadRow,
    ImageFolders,
    ImportedRow,
    ImportSettings,
    RowCollector,
    flatten_captions,
    log,
    write_imported_data,
)
from vse.pipeline.progress import progress_bar

QUOTING_MODES = ("minimal", "none")
_DELIMITERS = ",;\t|"
_PHOTO_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp"))
_SUFFIX_PATTERN = re.compile(r"\.\w{1,5}")
_QUOTING_HINT = "--quoting none reads quotation marks as text"
_OnBadRow = Callable[[str, object], None]


def read_csv_rows(
    path: Path, on_bad_row: _OnBadRow, find_file_column: Callable[[Mapping[str, None]], str], quoting: str = "minimal"
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place and the cells of each row of a CSV file whose first line has the names of the columns.

    The delimiter is the most frequent character of comma, semicolon, tab and bar in the first line. With the quoting
    "minimal" a cell may be quoted and span several lines; with "none" quotation marks are text. A stray quotation mark never
    hides another row: each line is blank, or belongs to the header, to a row that is yielded or to an unreadable row.

    Raises UserError if the header is missing or invalid, if a quoted cell contains another row's name of an image file, or if
    the end of an unreadable row is unclear: its first line has a quotation mark and no name of an image file.

    on_bad_row : a function that is called with the place and the reason of an unreadable row
    find_file_column : a function from the names of all columns to the name of the column of image files
    """
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        first = stream.readline(100_000)
        stream.seek(0)
        delimiter = max(_DELIMITERS, key=first.count)
        lines = _LineIterator(stream)
        rule: Any = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL
        cells_of_lines = csv.reader(lines, delimiter=delimiter, strict=True, quoting=rule)
        header = _read_header(path, cells_of_lines, lines)
        merged_rows = _MergedRowChecker(path, delimiter, header, header.index(find_file_column(dict.fromkeys(header))))
        n_rows = n_blank = 0
        while True:
            line_number = lines.n_taken + 1
            place = f"{path}: line {line_number}"
            lines.taken_lines.clear()
            try:
                cells = next(cells_of_lines)
            except StopIteration:
                break
            except csv.Error as error:
                fault: str | None = f"{error}; {_QUOTING_HINT}"
            else:
                if not cells:
                    n_blank += 1
                    continue
                fault = _find_row_fault(cells, len(header), lines.taken_lines)
            n_rows += 1
            if fault is not None:
                if '"' in lines.taken_lines[0] and quoting != "none":
                    merged_rows.check_line(place, lines.taken_lines[0], fault)
                lines.put_back(lines.taken_lines[1:])
                on_bad_row(place, fault)
                continue
            merged_rows.check_row(line_number, cells, lines.taken_lines)
            yield place, dict(zip(header, cells, strict=True))
        log.info("%s: %d lines: 1 header, %d blank, %d rows", path, lines.n_taken, n_blank, n_rows)


class _LineIterator:
    """An iterator over the lines of a text file; lines can be put back.

    ``n_taken`` is the number of lines that were taken. ``taken_lines`` lists these lines; the caller clears the list.
    """

    def __init__(self, stream: TextIO) -> None:
        self.n_taken = 0
        self.taken_lines: list[str] = []
        self._stream = stream
        self._put_back_lines: deque[str] = deque()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._put_back_lines.popleft() if self._put_back_lines else next(self._stream)
        self.n_taken += 1
        self.taken_lines.append(line)
        return line

    def put_back(self, lines: Sequence[str]) -> None:
        self._put_back_lines.extendleft(reversed(lines))
        self.n_taken -= len(lines)


def _read_header(path: Path, rows: Iterator[list[str]], lines: _LineIterator) -> list[str]:
    with wrap_read_errors(path, "a CSV file with the names of its columns in the first line"):
        header = [name.strip() for name in next(rows, [])]
        if lines.n_taken > 1:
            raise ValueError(f"a quotation mark in line 1 is open until line {lines.n_taken}; {_QUOTING_HINT}")
        if not any(header) or len(set(header)) < len(header):
            raise ValueError("names are missing or occur twice")
        "".join(header).encode()
        marked = next((name for name in header if '"' in name), None)
        if marked is not None:
            raise ValueError(f"the name {marked} has a quotation mark")
    return header


def _find_row_fault(cells: list[str], n_columns: int, taken: Sequence[str]) -> str | None:
    if len(cells) != n_columns:
        fault = f"{len(cells)} cells, but the header has {n_columns}"
        return fault if len(taken) == 1 else f"{fault}; a quotation mark is open for {len(taken)} lines; {_QUOTING_HINT}"
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return "not UTF-8"
    return None


class _MergedRowChecker:
    """A checker that finds rows of a CSV file that a stray quotation mark has merged.

    A quoted cell that extends from one row into the next row contains the file name of one of the two rows. A text counts as a
    file name if it ends in the suffix of an image format, or in a suffix that occurred in the column of files. If names in
    that column have no suffix, a text without blanks at the position of the column counts, too.
    """

    def __init__(self, path: Path, delimiter: str, header: Sequence[str], column: int) -> None:
        self._path, self._delimiter, self._column_names, self._file_column = path, delimiter, header, column
        self._file_suffixes, self._has_bare_names = set(_PHOTO_SUFFIXES), False

    def check_line(self, place: str, line: str, fault: str) -> None:
        """Raise UserError if ``line``, the first line of an unreadable row with a quotation mark, contains no file name."""
        if not self._has_file_name(line):
            raise UserError(f"{place}: {fault}; it is unclear whether the row ends in this line; correct its quotation marks")

    def check_row(self, line_number: int, cells: Sequence[str], taken: Sequence[str]) -> None:
        """Raise UserError if a cell of the row that begins at line ``line_number`` contains another row.

        ``taken`` are the lines from which the row was read.
        """
        suffix = PurePosixPath(cells[self._file_column].strip()).suffix.lower()
        if _SUFFIX_PATTERN.fullmatch(suffix):
            self._file_suffixes.add(suffix)
        else:
            self._has_bare_names = True
        if len(taken) == 1:
            return
        for column, cell in enumerate(cells):
            pieces = re.split(r"\r\n|\r|\n", cell)
            if len(pieces) > 1 and (column == self._file_column or self._has_other_row(pieces, column)):
                raise UserError(
                    f"{self._path}: line {line_number}: a quotation mark in the column {self._column_names[column]} is open "
                    f"until a later line, up to line {line_number + len(taken) - 1}, and hides other rows. Remove it, or "
                    f"double it in a quoted cell; {_QUOTING_HINT}"
                )

    def _has_file_name(self, line: str) -> bool:
        cells = (cell.strip(' "\r\n') for cell in line.split(self._delimiter))
        return any(PurePosixPath(cell).suffix.lower() in self._file_suffixes for cell in cells)

    def _has_other_row(self, pieces: Sequence[str], column: int) -> bool:
        for index, piece in enumerate(pieces):
            parts = [part.strip(' "') for part in piece.split(self._delimiter)]
            if self._has_file_name(piece):
                return True
            position = self._file_column if index else self._file_column - column
            is_last = index == len(pieces) - 1
            is_inside = 0 <= position < len(parts) and not (is_last and self._file_column > column) and len(parts) > 1
            if self._has_bare_names and is_inside and parts[position] and " " not in parts[position]:
                return True
        return False


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
_CSV_SUFFIXES, _JSON_SUFFIXES = (".csv", ".tsv", ".txt"), (".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_CSV_SUFFIXES, *_JSON_SUFFIXES, ".parquet")
_RowValues = Mapping[str, Any]
_ColumnChooser = Callable[[Mapping[str, Any]], dict[str, tuple[str, ...]]]


def add_table(path: Path, collector: RowCollector, settings: ImportSettings) -> None:
    """Add all rows of a table. Raises UserError if the table cannot be read, or lacks a column of files or captions."""
    rows = read_table_rows(path, settings, collector.add_bad_row)
    for place, row in progress_bar(rows, desc=f"read {path.name}", unit="row"):
        try:
            collector.add(build_row(place, row))
        except BadRow as reason:
            collector.add_bad_row(place, reason)


def read_table_rows(path: Path, settings: ImportSettings, on_bad_row: _OnBadRow) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Yield the place of each row, and a dictionary from each field to the values in one or several columns.

    Calls ``on_bad_row`` with the place and the reason of an unreadable row. Raises UserError if ``path`` is not a table.
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

    def choose(header: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        return choose_columns(path, header, settings.columns, REQUIRED_FIELDS)

    if kind in _CSV_SUFFIXES:
        rows: Iterator[tuple[str, _RowValues]]
        rows = read_csv_rows(path, on_bad_row, lambda header: choose(header)["file"][0], settings.quoting or QUOTING_MODES[0])
    elif kind == ".parquet":
        rows = _read_parquet_rows(path, choose)
    else:
        rows = _read_json_rows(path, on_bad_row)
    chosen: dict[str, tuple[str, ...]] = {}
    header: tuple[str, ...] = ()
    for place, values in rows:
        if tuple(values) != header:  # each line of JSON has its own names
            try:
                chosen = choose(values)
            except UserError as error:
                if kind not in _JSON_SUFFIXES:
                    raise
                on_bad_row(place, str(error).removeprefix(f"{path}: "))
                continue
            header = tuple(values)
        yield place, {field: [values[name] for name in names] for field, names in chosen.items()}


def build_row(place: str, values: Mapping[str, list[Any]]) -> ImportedRow:
    """Return a row with ``values`` by field. Raises BadRow if a value has the wrong type."""
    (file,), (split,) = values["file"], values.get("split", [None])
    if not isinstance(file, str):
        raise BadRow("names no image file")
    if split is not None and not isinstance(split, str):
        raise BadRow(f"the split {split!r:.50} is not a text")
    several = len(values["caption"]) > 1  # then columns of captions may be empty
    texts = flatten_captions(text for text in values["caption"] if not several or (text is not None and str(text).strip()))
    sentids = [each for value in values.get("sentid", []) for each in (value if isinstance(value, list) else [value])]
    parsed = [number for sentid in sentids if (number := parse_id(sentid, "sentid")) is not None]
    (imgid,), (cocoid,) = values.get("imgid", [None]), values.get("cocoid", [None])
    return ImportedRow(place, file, texts, split, parse_id(imgid, "imgid"), tuple(parsed), parse_id(cocoid, "cocoid"))


def parse_id(value: object, field_name: str) -> int | None:
    """Return an id as an integer; None if ``value`` is None or "".

    Raises BadRow, which contains ``field_name``, if ``value`` is not an integer or the text of an integer.
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
    """Return the names of the columns of each field: the ``given`` names, or else the first usual name in the header.

    Raises UserError if a given field or column does not exist, or if a required field has no column.
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


def _read_json_rows(path: Path, on_bad_row: _OnBadRow) -> Iterator[tuple[str, _RowValues]]:
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


def _read_parquet_rows(path: Path, choose: _ColumnChooser) -> Iterator[tuple[str, _RowValues]]:
    def columns(names: list[str]) -> list[str]:
        return [name for chosen in choose(dict.fromkeys(names)).values() for name in chosen]

    row_number = 0
    with path.open("rb") as stream:
        for batch in read_parquet_batches(path, stream, columns):
            with wrap_read_errors(path, "a parquet file"):
                rows = batch.to_pylist()
            for row in rows:
                row_number += 1
                yield f"{path}: row {row_number}", row


_TABLE_NAMES = ("metadata", "captions")  # usual names of a table in the folder of images


def find_table(folder: Path) -> Path | None:
    """Return the table of captions (``metadata.*`` or ``captions.*``) in a folder of images; None without such a file.

    Raises UserError if there are several tables.
    """
    tables = [path for name in _TABLE_NAMES for end in TABLE_SUFFIXES if (path := folder / f"{name}{end}").is_file()]
    if len(tables) > 1:
        raise UserError(f"{folder}: has {' and '.join(path.name for path in tables)}; choose one with --captions FILE")
    return tables[0] if tables else None


def import_table(images: Path, table: Path, settings: ImportSettings, other_folder: Path | None = None) -> Path:
    """Write ``dataset.json`` from a table, link the folder ``images``, and return the path of ``dataset.json``.

    A row has the path of an image, relative to the folder ``images``, and one or more captions. An image may have several
    rows. Symbolic links may lead to files in ``images`` or ``other_folder``. The header of each image file is checked.
    """
    if not images.is_dir():
        raise UserError(f"{images}: no such folder of images")
    check_dataset_name(settings.name)
    collector = RowCollector(settings, build_photo_checker(images, other_folder))
    add_table(table, collector, settings)
    content = collector.build_dataset_content(format="table", files=[table.name])
    return write_imported_data(content, settings, images, [table])


def build_photo_checker(images: Path, other_folder: Path | None = None) -> Callable[[str], None]:
    """Return a function that raises BadRow if a file in the folder ``images`` cannot be used.

    The file must be a readable image, and the target of a link must lie in ``images`` or ``other_folder``.
    """
    folders = ImageFolders([folder for folder in (images, other_folder) if folder is not None])

    def check(file: str) -> None:
        try:
            folders.find_image(file)
            read_image_size(images / file)
        except BadImage as fault:
            raise BadRow(fault) from None

    return check
