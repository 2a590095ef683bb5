"""Read the rows of CSV files so that a stray quotation mark never hides another row."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import wrap_read_errors
from vse.pipeline.imports.rows import log

QUOTING = ("minimal", "none")
_DELIMITERS = ",;\t|"
_PHOTO_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp"))
_SUFFIX = re.compile(r"\.\w{1,5}")
_HINT = "--quoting none reads quotation marks as text"
_Refuse = Callable[[str, object], None]


def csv_rows(
    path: Path, refuse: _Refuse, file_column: Callable[[Mapping[str, None]], str], quoting: str = "minimal"
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place and the cells of each row of a CSV file; its first line has the names of the columns.

    The delimiter is the most frequent one of comma, semicolon, tab and bar in the first line. With the quoting "minimal" a
    cell may be quoted and span several lines; with "none" quotation marks are text. A stray quotation mark never hides another
    row: each line is blank, or belongs to the header or to one row that is yielded or refused.

    Raises UserError if the file has no proper header, or if it is unclear which lines are rows: if a quoted cell contains the
    image file of another row, or if the first line of a refused row has a quotation mark and no image file.

    refuse : called with the place and the reason of an unreadable row; after unbalanced quotation marks, reading continues at
        the next line
    file_column : function from the names of all columns to the name of the column of image files
    """
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        first = stream.readline(100_000)
        stream.seek(0)
        delimiter = max(_DELIMITERS, key=first.count)
        lines = _Lines(stream)
        rule: Any = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL
        cells_of_lines = csv.reader(lines, delimiter=delimiter, strict=True, quoting=rule)
        header = _header(path, cells_of_lines, lines)
        bounds = _RowBounds(path, delimiter, header, header.index(file_column(dict.fromkeys(header))))
        n_rows = n_blank = 0
        while True:
            line_number = lines.number + 1
            place = f"{path}: line {line_number}"
            lines.taken.clear()
            try:
                cells = next(cells_of_lines)
            except StopIteration:
                break
            except csv.Error as error:
                fault: str | None = f"{error}; {_HINT}"
            else:
                if not cells:
                    n_blank += 1
                    continue
                fault = _fault(cells, len(header), lines.taken)
            n_rows += 1
            if fault is not None:
                if '"' in lines.taken[0] and quoting != "none":
                    bounds.check_line(place, lines.taken[0], fault)
                lines.put_back(lines.taken[1:])
                refuse(place, fault)
                continue
            bounds.check_row(line_number, cells, lines.taken)
            yield place, dict(zip(header, cells, strict=True))
        log.info("%s: %d lines: 1 header, %d blank, %d rows", path, lines.number, n_blank, n_rows)


class _Lines:
    """The lines of a text file as an iterator; lines can be put back.

    ``number`` is the number of lines that were taken, and ``taken`` has the lines since the caller cleared it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.number = 0
        self.taken: list[str] = []
        self._stream = stream
        self._waiting: deque[str] = deque()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._waiting.popleft() if self._waiting else next(self._stream)
        self.number += 1
        self.taken.append(line)
        return line

    def put_back(self, lines: Sequence[str]) -> None:
        self._waiting.extendleft(reversed(lines))
        self.number -= len(lines)


def _header(path: Path, rows: Iterator[list[str]], lines: _Lines) -> list[str]:
    with wrap_read_errors(path, "a CSV file with the names of its columns in the first line"):
        header = [name.strip() for name in next(rows, [])]
        if lines.number > 1:
            raise ValueError(f"a quotation mark in line 1 is open until line {lines.number}; {_HINT}")
        if not any(header) or len(set(header)) < len(header):
            raise ValueError("names are missing or occur twice")
        "".join(header).encode()
        marked = next((name for name in header if '"' in name), None)
        if marked is not None:
            raise ValueError(f"the name {marked} has a quotation mark")
    return header


def _fault(cells: list[str], n_columns: int, taken: Sequence[str]) -> str | None:
    if len(cells) != n_columns:
        fault = f"{len(cells)} cells, but the header has {n_columns}"
        return fault if len(taken) == 1 else f"{fault}; a quotation mark is open for {len(taken)} lines; {_HINT}"
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return "not UTF-8"
    return None


class _RowBounds:
    """Checks that a stray quotation mark has not merged two rows.

    A quoted cell with the end of one row and the beginning of another one contains the image file of one of them. A file is
    recognised by the suffix of its name: the suffix of an image format, or of a file in another row. If the names have no
    suffix, a cell without blanks in the column of files counts as a file.
    """

    def __init__(self, path: Path, delimiter: str, header: Sequence[str], column: int) -> None:
        self._path, self._delimiter, self._names, self._column = path, delimiter, header, column
        self._suffixes, self._has_bare_names = set(_PHOTO_SUFFIXES), False

    def check_line(self, place: str, line: str, fault: str) -> None:
        """Raise UserError if ``line``, the first line of a refused row with a quotation mark, has no image file."""
        if not self._names_file(line):
            raise UserError(f"{place}: {fault}; it is unclear whether the row ends in this line; correct its quotation marks")

    def check_row(self, line_number: int, cells: Sequence[str], taken: Sequence[str]) -> None:
        """Raise UserError if a cell of the row that begins at ``line_number`` contains another row."""
        suffix = PurePosixPath(cells[self._column].strip()).suffix.lower()
        if _SUFFIX.fullmatch(suffix):
            self._suffixes.add(suffix)
        else:
            self._has_bare_names = True
        if len(taken) == 1:
            return
        for column, cell in enumerate(cells):
            pieces = re.split(r"\r\n|\r|\n", cell)
            if len(pieces) > 1 and (column == self._column or self._has_file(pieces, column)):
                raise UserError(
                    f"{self._path}: line {line_number}: a quotation mark in the column {self._names[column]} is open until a "
                    f"later line, up to line {line_number + len(taken) - 1}, and hides other rows. Remove it, or double it "
                    f"in a quoted cell; {_HINT}"
                )

    def _names_file(self, line: str) -> bool:
        cells = (cell.strip(' "\r\n') for cell in line.split(self._delimiter))
        return any(PurePosixPath(cell).suffix.lower() in self._suffixes for cell in cells)

    def _has_file(self, pieces: Sequence[str], column: int) -> bool:
        for index, piece in enumerate(pieces):
            parts = [part.strip(' "') for part in piece.split(self._delimiter)]
            if self._names_file(piece):
                return True
            position = self._column if index else self._column - column
            is_last = index == len(pieces) - 1
            is_inside = 0 <= position < len(parts) and not (is_last and self._column > column) and len(parts) > 1
            if self._has_bare_names and is_inside and parts[position] and " " not in parts[position]:
                return True
        return False
