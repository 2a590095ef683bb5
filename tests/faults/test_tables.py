"""Stray quotation marks in a table of 100 rows: no row is lost without a word."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.faults.suite import Outcome, StartSuite
from tests.hostile import refused_or_done
from tests.pipeline.import_files import write_photos
from tests.pipeline.test_import_table import failures
from vse.cli import data_main as main
from vse.pipeline.dataset.dataset import load_dataset_file

pytestmark = pytest.mark.nightly

Row = tuple[str, str, str]
N_ROWS = 100
PLACES = ("before", "start", "middle", "end", "after")
LAYOUTS = [("file", "caption", "split"), ("caption", "file", "split"), ("split", "file", "caption")]


def caption(number: int) -> str:
    kinds = [
        "gull {}",
        "gull {}, flying",
        'a "white" gull {}',
        'a 5" gull {}',
        "gull {}\nof two lines",
        "gull {}, big,\nof two",
    ]
    return kinds[number % len(kinds)].format(number)


ROWS: list[Row] = [(f"{k // 5:02d}.jpg", caption(k), ("train", "val", "test")[k // 5 % 3]) for k in range(N_ROWS)]
FIELDS = ("file", "caption", "split")


def cells_of(row: Row, layout: tuple[str, ...], delimiter: str) -> list[str]:
    """The cells of a row as they stand in the file: quoted where they must be."""
    cells = [row[FIELDS.index(name)] for name in layout]
    bare = [cell.startswith("a 5") or not any(mark in cell for mark in (delimiter, '"', "\n")) for cell in cells]
    quoted = ['"' + cell.replace('"', '""') + '"' for cell in cells]
    return [cell if plain else other for cell, plain, other in zip(cells, bare, quoted, strict=True)]


def with_mark(cell: str, place: str) -> str:
    """A cell with one more quotation mark: before or after all of it, or inside its own marks."""
    at = {"before": 0, "start": min(1, len(cell)), "middle": len(cell) // 2, "end": len(cell) - 1, "after": len(cell)}[place]
    return f'{cell[:at]}"{cell[at:]}'


def write_marked(path: Path, marks: Iterable[tuple[int, int, str]], layout: tuple[str, ...]) -> Path:
    """The table of all rows, with quotation marks too many at (row, column, place)."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    table = [cells_of(row, layout, delimiter) for row in ROWS]
    for row, column, place in marks:
        table[row][column] = with_mark(table[row][column], place)
    path.write_text("\n".join(delimiter.join(cells) for cells in [list(layout), *table]) + "\n", encoding="utf-8", newline="")
    return path


def imported_rows(out: Path) -> Counter[Row]:
    images = load_dataset_file(out / "dataset.json").images
    return Counter((image.file, each.raw, image.split) for image in images for each in image.captions)


def without_marks(row: Row) -> Row:
    return (row[0], row[1].replace('"', ""), row[2])


def outcome(photos: Path, table: Path, out: Path, touched: set[int], *options: object) -> Outcome:
    """What became of an import of a table, in whose rows ``touched`` there is a mark too many."""
    error = refused_or_done(main, "import", photos, "--captions", table, "--out", out, *options)
    if error is not None:
        return "wrong" if (out / "dataset.json").exists() else "refused"
    taken = imported_rows(out)
    listed = failures(out) if "--skip-bad" in options and (out / "import.failures.jsonl").exists() else []
    untouched = Counter(row for number, row in enumerate(ROWS) if number not in touched)
    marked = Counter(without_marks(row) for number, row in enumerate(ROWS) if number in touched)
    rest = Counter(without_marks(row) for row in (taken - untouched).elements())
    if untouched - taken or rest - marked:
        return "silent"
    if not marked - rest:
        return "harmless"
    return "refused" if len(listed) >= (marked - rest).total() else "silent"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), sorted({row[0] for row in ROWS}))


@pytest.mark.parametrize("options", [(), ("--skip-bad",)], ids=["", "skip-bad"])
def test_a_stray_mark_loses_no_row(
    photos: Path, tmp_path: Path, suite_of_faults: StartSuite, options: tuple[str, ...]
) -> None:
    suite = suite_of_faults(", ".join(["CSV file with one stray quotation mark", *options]), 30)
    kinds = [(layout, column, place) for layout in LAYOUTS for place in PLACES for column in range(3)]
    for number in range(suite.n_tries):
        row = number % N_ROWS
        layout, column, place = kinds[(number // N_ROWS + row) % len(kinds)]
        table = write_marked(tmp_path / ("t.tsv" if number % 2 else "t.csv"), [(row, column, place)], layout)
        found = outcome(photos, table, tmp_path / f"{number}", {row}, *options)
        suite.record(found, f"row {row}, {layout[column]} of {layout}, {place}")


@pytest.mark.parametrize("options", [(), ("--skip-bad",)], ids=["", "skip-bad"])
def test_two_stray_marks_lose_no_row(
    photos: Path, tmp_path: Path, suite_of_faults: StartSuite, options: tuple[str, ...]
) -> None:
    suite = suite_of_faults(", ".join(["CSV file with two stray quotation marks", *options]), 30)
    for number in range(suite.n_tries):
        rng = random.Random(number)
        layout, column = rng.choice(LAYOUTS), rng.randrange(3)
        first, second = sorted(rng.sample(range(N_ROWS), 2))
        if number % 2:
            second = min(first + rng.randint(1, 3), N_ROWS - 1)
        other = column if number % 4 < 3 else rng.randrange(3)
        pairs = [("before", "after"), (rng.choice(PLACES), rng.choice(PLACES))]
        places = pairs[number % 3 == 2]
        marks = [(first, column, places[0]), (second, other, places[1])]
        table = write_marked(tmp_path / ("t.tsv" if number % 2 else "t.csv"), marks, layout)
        detail = f"{marks} of {layout}"
        suite.record(outcome(photos, table, tmp_path / f"{number}", {first, second}, *options), detail)


def test_without_a_stray_mark_all_rows_are_taken(photos: Path, tmp_path: Path) -> None:
    for number, (layout, kind) in enumerate(zip(LAYOUTS, ("csv", "tsv", "csv"), strict=True)):
        table = write_marked(tmp_path / f"t.{kind}", [], layout)
        assert outcome(photos, table, tmp_path / f"{number}", set()) == "harmless"
