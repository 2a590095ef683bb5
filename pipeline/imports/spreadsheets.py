"""Read spreadsheets that were saved as CSV: find their encoding, header and columns, and read their rows.

A stray quotation mark can merge several rows into one cell. This is reported as an error, so that no row is lost.
"""

from __future__ import annotations

import codecs
import csv
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.files.inputs import check_input, wrap_read_errors
from vse.pipeline.imports.photos import PHOTO_SUFFIXES, PhotoNameIndex

log = logging.getLogger(__name__)

CSV_DELIMITERS = ",;\t|"
N_SAMPLE_ROWS = 50
_NAMES_BY_DELIMITER = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_SAMPLE_BYTES = 1_000_000
_N_EXAMPLE_ROWS = 3
_MIN_PHOTO_SHARE = 0.5  # share of the cells of a column that must name photographs
_MIN_WORDS = 2  # mean number of words in a cell of a column of captions
_EIGHT_BIT_ENCODINGS = ("cp1252", "mac_roman")  # encodings on Windows and on older Macs; the first is chosen in a tie
_USUAL_CHARACTERS = set("äöüßéèêëàâçîïôûùñóíáúåøæœÄÖÜÉÈÀÇÅØ’‘“”„«»–—…€°")  # in western European captions
_ENCODING_BY_BOM = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_MAX_CELL_LENGTH = 60  # characters of a cell in the example rows


@dataclass(frozen=True)
class TableLayout:
    """The encoding, delimiter, header and columns of a table.

    Without a header, the columns are called ``column 1`` and so on. ``columns_by_field`` maps the fields ``file`` and
    ``caption`` to the columns whose contents fit; a field without such a column is left out. ``delimiter`` is empty for a
    table that is not CSV.
    """

    encoding: str
    delimiter: str
    has_header: bool
    column_names: tuple[str, ...]
    columns_by_field: Mapping[str, tuple[str, ...]]
    first_rows: Sequence[tuple[str, ...]]

    def log_summary(self, path: Path, columns: Mapping[str, tuple[str, ...]]) -> None:
        """Log the encoding and delimiter of the table, the ``columns`` of files and captions, and three example rows."""
        parted = f", cells separated by {_NAMES_BY_DELIMITER[self.delimiter]}" if self.delimiter else ""
        header = "with a header" if self.has_header else "without a header"
        log.info("%s: %s%s, %s", path, self.encoding.removesuffix("-sig"), parted, header)
        for field, title in (("file", "photographs"), ("caption", "captions")):
            log.info("%s: %s", title, ", ".join(f"column {name!r}" for name in columns[field]))
        places = [self.column_names.index(name) for name in (*columns["file"], *columns["caption"])]
        for row in self.first_rows[:_N_EXAMPLE_ROWS]:
            log.info("%s", " | ".join(to_printable_line(row[place])[:_MAX_CELL_LENGTH] for place in places))


def detect_encoding(path: Path) -> str:
    """Return the encoding of a text file: ``utf-8-sig``, one of UTF-16, ``cp1252`` or ``mac_roman``.

    UTF-16 is recognised by the first bytes, or by many zeros. Any other file counts as UTF-8 if it has no invalid sequences of
    UTF-8, or fewer invalid than valid sequences. Otherwise it is ``cp1252`` or ``mac_roman``, whichever gives more of the
    usual characters.
    """
    with path.open("rb") as stream:
        sample = stream.read(_SAMPLE_BYTES)
    for bom, encoding in _ENCODING_BY_BOM.items():
        if sample.startswith(bom):
            return encoding
    for encoding, high_bytes in (("utf-16-le", sample[1::2]), ("utf-16-be", sample[::2])):
        if high_bytes.count(0) > len(sample) // 4:
            return encoding
    text = sample.decode("utf-8", errors="surrogateescape")
    foreign = [character for character in text[:-3] if character > "\x7f"]
    n_invalid = sum("\udc80" <= character <= "\udcff" for character in foreign)
    if 2 * n_invalid < len(foreign) or not n_invalid:
        return "utf-8-sig"
    return max(_EIGHT_BIT_ENCODINGS, key=lambda encoding: _count_usual_characters(sample, encoding))


def _count_usual_characters(sample: bytes, encoding: str) -> int:
    return sum(character in _USUAL_CHARACTERS for character in sample.decode(encoding, errors="replace"))


def choose_decoding_error_handler(encoding: str) -> str:
    """Return the argument ``errors`` of :func:`open` for an encoding.

    For UTF-16, bytes that cannot be decoded are an error. For other encodings, they become lone surrogates.
    """
    return "strict" if encoding.startswith("utf-16") else "surrogateescape"


def read_csv_layout(path: Path, photos: PhotoNameIndex, encoding: str | None = None) -> TableLayout:
    """Return the layout of a CSV file. ``photos`` recognises the names of photographs in the cells.

    ``encoding`` replaces the detected encoding. Raises UserError if the file cannot be decoded with this encoding.
    """
    check_input(path)
    encoding = encoding or detect_encoding(path)
    try:
        with path.open(encoding=encoding, errors=choose_decoding_error_handler(encoding), newline="") as stream:
            first = stream.readline(100_000)
            stream.seek(0)
            delimiter = max(CSV_DELIMITERS, key=first.count)
            found = (row for row in csv.reader(stream, delimiter=delimiter) if row)
            rows = [tuple(cell.strip() for cell in row) for row in islice(found, N_SAMPLE_ROWS + 1)]
    except LookupError:
        raise UserError(f"--encoding {encoding}: no such encoding") from None
    except (UnicodeError, csv.Error) as error:
        fault = f"not a CSV file with the names of its columns in {encoding} ({error})"
        raise UserError(f"{path}: {fault}; name its encoding with --encoding") from None
    if rows and any(photos.is_photo(cell) for cell in rows[0]):
        names = tuple(f"column {number}" for number in range(1, len(rows[0]) + 1))
        return find_table_layout(encoding, names, rows, photos, delimiter, has_header=False)
    return find_table_layout(encoding, rows[0] if rows else (), rows[1:], photos, delimiter)


def find_table_layout(
    encoding: str,
    names: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    photos: PhotoNameIndex,
    delimiter: str = "",
    has_header: bool = True,
) -> TableLayout:
    """Return the layout of a table from its first rows. ``photos`` recognises the names of photographs in the cells.

    The column of files is the column with the most names of photographs, if at least half of its cells are such names. The
    columns of captions are all other columns whose cells have two words or more on average.
    """
    rows = [row for row in rows if len(row) == len(names)]
    cells = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    photo_counts = {name: sum(map(photos.is_photo, texts)) for name, texts in cells.items()}
    file = max(photo_counts, key=lambda name: photo_counts[name], default="")
    columns: dict[str, tuple[str, ...]] = {}
    if rows and photo_counts[file] >= _MIN_PHOTO_SHARE * len(rows):
        words = {name: [len(text.split()) for text in texts if text] for name, texts in cells.items() if name != file}
        captions = tuple(name for name, counts in words.items() if counts and sum(counts) >= _MIN_WORDS * len(counts))
        columns = {"file": (file,), **({"caption": captions} if captions else {})}
    return TableLayout(encoding, delimiter, has_header, names, columns, rows)


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
    """Yield, for each row of a CSV file, its file and line, and a dictionary from the names of columns to cells.

    The first line has the names of the columns, unless ``names`` has them. The delimiter is the most frequent character of
    comma, semicolon, tab and bar in the first line. With the quoting "minimal" a cell may be quoted and span several lines;
    with "none" quotation marks are text.

    No line is lost: each line is blank, or belongs to the header, to a row that is yielded, or to an unreadable row. Raises
    UserError if the header is missing or invalid, or if a stray quotation mark seems to have merged rows
    (:class:`_MergedRowChecker`).

    on_bad_row : a function that is called with the file and line of an unreadable row, and the reason
    find_file_column : a function from the names of all columns to the name of the column of image files
    """
    with path.open(encoding=encoding, errors=choose_decoding_error_handler(encoding), newline="") as stream:
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

    ``n_taken`` is the number of lines that the iterator has returned. ``taken_lines`` holds the lines returned since the
    caller last cleared this list.
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

    A cell that swallowed a row contains the name of this row's image file. A text counts as such a name if it ends in the
    suffix of an image format, or in a suffix from the column of image files. If the names in this column have no suffix, a
    text without blanks at the position of the column counts, too.
    """

    def __init__(self, path: Path, delimiter: str, header: Sequence[str], column: int) -> None:
        self._path, self._delimiter, self._column_names, self._file_column = path, delimiter, header, column
        self._file_suffixes, self._has_bare_names = set(PHOTO_SUFFIXES), False

    def check_line(self, place: str, line: str, fault: str) -> None:
        """Raise UserError if the first ``line`` of an unreadable row names no image file.

        Then it is not known whether the row ends in this line or in a later line.
        """
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
            if len(pieces) > 1 and (column == self._file_column or self._contains_swallowed_row(pieces, column)):
                raise UserError(
                    f"{self._path}: line {line_number}: a quotation mark in the column {self._column_names[column]} is open "
                    f"until a later line, up to line {line_number + len(taken) - 1}, and hides other rows. Remove it, or "
                    f"double it in a quoted cell; {_QUOTING_HINT}"
                )

    def _has_file_name(self, line: str) -> bool:
        cells = (cell.strip(' "\r\n') for cell in line.split(self._delimiter))
        return any(PurePosixPath(cell).suffix.lower() in self._file_suffixes for cell in cells)

    def _contains_swallowed_row(self, pieces: Sequence[str], column: int) -> bool:
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
