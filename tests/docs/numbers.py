"""Numbers on pages of results, each followed by a comment that names its place in a committed CSV file.

``2.4 [1.5, 3.4]<!-- number: comparisons.csv row network_vs_embedding column phrase R@1 -->`` is the difference and its
interval of that comparison and metric, in ``docs/results/<page>/comparisons.csv``, a table ``vse-table significance``. In any
other file, the row is that of the experiment with this name, and ``column`` is a column of the file. If a file has rows of
several protocols, the number is that of the complete split, ``full``, unless the row is ``<experiment> by <protocol>``. The
rows of a table ``vse-table compression`` are called ``<method> <codec>``, and ``<method> <codec> rescored``. The rows of
``performance.csv`` are the benchmarks on a processor without AVX-512.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

INTERVAL = r"\[-?[\d.]+, -?[\d.]+\]"
_MARKER = re.compile(
    rf"(?P<text>-?[\d.,]*\d(?: {INTERVAL})?)\s*<!-- number: (?P<file>\S+) row (?P<row>.+?) column (?P<column>.+?) -->"
)
_NUMBER = re.compile(r"-?[\d.,]*\d")


@dataclass(frozen=True)
class PageNumber:
    """A number as the page prints it, with or without an interval, and its place in a CSV file."""

    text: str
    file: Path
    row: str
    column: str

    def recompute(self) -> str:
        """Return the number from the file, with the decimals and the interval of the page's text."""
        table = pd.read_csv(self.file, keep_default_na=False)
        if "codec" in table:  # a table ``vse-table compression``
            again = table["rescored"].map(lambda number: " rescored" if number else "")
            table["experiment"] = table["method"] + " " + table["codec"] + again
        if "work" in table:  # performance.csv
            table = table[table["machine"].str.contains("AVX2")].rename(columns={"work": "experiment"})
        row, _, protocol = self.row.partition(" by ")
        if "protocol" in table and (table["protocol"] == (protocol or "full")).any():
            table = table[table["protocol"] == (protocol or "full")]
        values = _of_comparison(table, row, self.column) if "comparison" in table else _of_result(table, row, self.column)
        printed = _NUMBER.findall(self.text)
        texts = [f"{value:,.{len(one.partition('.')[2])}f}" for one, value in zip(printed, values, strict=False)]
        assert len(texts) == len(printed), f"{self.file}: the row {self.row!r} has no interval"
        return texts[0] if len(texts) == 1 else f"{texts[0]} [{texts[1]}, {texts[2]}]"


def page_numbers(page: Path) -> list[PageNumber]:
    """Return the numbers of a page that have a place in a file, in the page's own folder of results or in that of all."""
    folder = page.parent / "results" / page.stem
    folder = folder if folder.is_dir() else folder.parent
    found = _MARKER.finditer(page.read_text(encoding="utf-8"))
    return [PageNumber(one["text"], folder / one["file"], one["row"], one["column"]) for one in found]


def unmarked_intervals(page: Path) -> list[str]:
    """Return the intervals on a page without a comment that names their file; tables and blocks of code are left out."""
    text = re.sub(r"^```.*?^```", "", _MARKER.sub("", page.read_text(encoding="utf-8")), flags=re.DOTALL | re.MULTILINE)
    return [one for line in text.splitlines() if not line.startswith("|") for one in re.findall(INTERVAL, line)]


def _of_comparison(table: pd.DataFrame, row: str, column: str) -> list[float]:
    names = (table["direction"] + " " + table["metric"]).str.strip()
    chosen = table[(table["comparison"] == row) & (names == column)]
    assert len(chosen) == 1, f"{len(chosen)} rows of the comparison {row!r} have the metric {column!r}"
    return [float(chosen[name].iloc[0]) for name in ("difference", "low", "high")]


def _of_result(table: pd.DataFrame, row: str, column: str) -> list[float]:
    chosen = table[table["experiment"] == row]
    assert len(chosen) == 1, f"{len(chosen)} rows have the experiment {row!r}"
    names = [name for name in (column, f"{column}_low", f"{column}_high") if name in table]
    return [float(chosen[name].iloc[0]) for name in names]
