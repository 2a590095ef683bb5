"""Find out how a spreadsheet was saved: its encoding, whether it has a header, and which columns have files and captions."""

from __future__ import annotations

import codecs
import csv
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.files.inputs import check_input
from vse.pipeline.imports.photo_names import PhotoNames

log = logging.getLogger(__name__)

CSV_DELIMITERS = ",;\t|"
N_SAMPLE_ROWS = 50
_NAMES_BY_DELIMITER = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_SAMPLE_BYTES = 1_000_000
_N_EXAMPLE_ROWS = 3
_MIN_PHOTO_SHARE = 0.5  # share of the cells of a column that must name photographs
_MIN_WORDS = 2  # mean number of words in a cell of a column of captions
_EIGHT_BIT_ENCODINGS = ("cp1252", "mac_roman")  # of spreadsheets on Windows and on older Macs; the first wins a tie
_USUAL_CHARACTERS = set("äöüßéèêëàâçîïôûùñóíáúåøæœÄÖÜÉÈÀÇÅØ’‘“”„«»–—…€°")  # of captions in the languages of western Europe
_ENCODING_BY_BOM = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_MAX_CELL_LENGTH = 60  # characters of a cell in the example rows


@dataclass(frozen=True)
class TableLayout:
    """How a table was saved.

    ``names`` are the names of the columns: those of the header or, without one, ``column 1`` and so on. ``columns`` are the
    columns of the fields ``file`` and ``caption``, as far as their contents show them. ``rows`` are the first rows.
    ``delimiter`` is blank for a table that is not CSV.
    """

    encoding: str
    delimiter: str
    has_header: bool
    names: tuple[str, ...]
    columns: Mapping[str, tuple[str, ...]]
    rows: Sequence[tuple[str, ...]]

    def log_summary(self, path: Path, columns: Mapping[str, tuple[str, ...]]) -> None:
        """Log in six lines what was understood: the form of the table, the ``columns`` of fields, and three rows."""
        parted = f", cells separated by {_NAMES_BY_DELIMITER[self.delimiter]}" if self.delimiter else ""
        header = "with a header" if self.has_header else "without a header"
        log.info("%s: %s%s, %s", path, self.encoding.removesuffix("-sig"), parted, header)
        for field, title in (("file", "photographs"), ("caption", "captions")):
            log.info("%s: %s", title, ", ".join(f"column {name!r}" for name in columns[field]))
        places = [self.names.index(name) for name in (*columns["file"], *columns["caption"])]
        for row in self.rows[:_N_EXAMPLE_ROWS]:
            log.info("%s", " | ".join(to_printable_line(row[place])[:_MAX_CELL_LENGTH] for place in places))


def detect_encoding(path: Path) -> str:
    """Return the encoding of a text file: ``utf-8-sig``, one of UTF-16, ``cp1252`` or ``mac_roman``.

    A file that decodes as UTF-8, or has more valid than invalid sequences of UTF-8, is UTF-8. UTF-16 is known by its first
    bytes or by its zeros.
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


def decoding_errors(encoding: str) -> str:
    """Return the error handler of a decoder that keeps undecodable bytes as lone surrogates, if the encoding has them."""
    return "strict" if encoding.startswith("utf-16") else "surrogateescape"


def read_csv_layout(path: Path, photos: PhotoNames, encoding: str | None = None) -> TableLayout:
    """Return the layout of a CSV file. ``encoding`` overrules the detected one. Raises UserError if it does not fit."""
    check_input(path)
    encoding = encoding or detect_encoding(path)
    try:
        with path.open(encoding=encoding, errors=decoding_errors(encoding), newline="") as stream:
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
        return find_layout(encoding, names, rows, photos, delimiter, has_header=False)
    return find_layout(encoding, rows[0] if rows else (), rows[1:], photos, delimiter)


def find_layout(
    encoding: str,
    names: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    photos: PhotoNames,
    delimiter: str = "",
    has_header: bool = True,
) -> TableLayout:
    """Return the layout of a table from its first rows.

    The column of files has the most names of photographs. The columns of captions are all others with several words in a cell.
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
