"""Read the rows of CSV files so that a stray quotation mark never hides a row."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import wrap_read_errors
from vse.pipeline.imports.photo_names import PHOTO_SUFFIXES
from vse.pipeline.imports.rows import log
from vse.pipeline.imports.table_layout import CSV_DELIMITERS, decoding_errors

QUOTING_MODES = ("minimal", "none")
_SUFFIX_PATTERN = re.compile(r"\.\w{1,5}")
_QUOTING_HINT = "--quoting none reads quotation marks as text"
OnBadRow = Callable[[str, object], None]


def read_csv_rows(
    path: Path,
    on_bad_row: OnBadRow,
    find_file_column: Callable[[Mapping[str, None]], str],
    quoting: str = "minimal",
    encoding: str = "utf-8-sig",
    names: Sequence[str] | None = None,
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place and the cells of each row of a CSV file.

    The first line has the names of the columns, unless ``names`` has them.

    The delimiter is the most frequent character of comma, semicolon, tab and bar in the first line. With the quoting
    "minimal" a cell may be quoted and span several lines; with "none" quotation marks are text. A stray quotation mark never
    hides another row: each line is blank, or belongs to the header, to a row that is yielded or to an unreadable row.

    Raises UserError if the header is missing or invalid, if a quoted cell contains another row's name of an image file, or if
    the end of an unreadable row is unclear: its first line has a quotation mark and no name of an image file.

    on_bad_row : a function that is called with the place and the reason of an unreadable row
    find_file_column : a function from the names of all columns to the name of the column of image files
    """
    with path.open(encoding=encoding, errors=decoding_errors(encoding), newline="") as stream:
        first = stream.readline(100_000)
        stream.seek(0)
        delimiter = max(CSV_DELIMITERS, key=first.count)
        lines = _LineIterator(stream)
        rule: Any = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL
        cells_of_lines = csv.reader(lines, delimiter=delimiter, strict=True, quoting=rule)
        header = _read_header(path, cells_of_lines, lines) if names is None else list(names)
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
        log.info("%s: %d lines: %d header, %d blank, %d rows", path, lines.n_taken, names is None, n_blank, n_rows)


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
        return "its letters do not fit the encoding of the file; name another one with --encoding"
    return None


class _MergedRowChecker:
    """A checker that finds rows of a CSV file that a stray quotation mark has merged.

    A quoted cell that extends from one row into the next row contains the file name of one of the two rows. A text counts as a
    file name if it ends in the suffix of an image format, or in a suffix that occurred in the column of files. If names in
    that column have no suffix, a text without blanks at the position of the column counts, too.
    """

    def __init__(self, path: Path, delimiter: str, header: Sequence[str], column: int) -> None:
        self._path, self._delimiter, self._column_names, self._file_column = path, delimiter, header, column
        self._file_suffixes, self._has_bare_names = set(PHOTO_SUFFIXES), False

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
