"""The rows of published tables with their printed metrics, and the experiments that reproduce them.

A table is a CSV file in ``config/published/``, named ``<paper>_<table>``; docs/tables.md describes its columns. The workflow
reads the rows each time that it reads its rules, so nothing heavy is imported here.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from vse.eval.defaults import published_folder, published_tables
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.presets.presets import known_presets, load_plan

_DESCRIPTION = ("row", "system", "setting", "dataset", "protocol", "images", "split", "source")


@dataclass(frozen=True)
class PublishedRow:
    """One row as printed.

    ``images`` is how many test images a query is compared with, and ``split`` the name of the test split
    (``config/published/splits.yaml``), where these are known. A split that nobody published is ``random``.
    """

    paper: str
    row: str
    system: str
    setting: str
    dataset: str
    protocol: str
    images: int | None
    split: str
    metrics: Mapping[str, float | None]
    source: str

    @property
    def key(self) -> str:
        """How the presets of experiments name the row: ``vsepp 1.6``."""
        return f"{self.paper} {self.row}"

    @property
    def datasets(self) -> tuple[str, str]:
        """The data sets that results of the row may be of: a split may have one of its own, such as ``f30k_entities``."""
        return self.dataset, f"{self.dataset}_{self.split}"


@cache
def published_rows(table: str) -> tuple[PublishedRow, ...]:
    """The rows of a table in the paper's order, those that it repeats from another table of the paper among them."""
    if table not in published_tables():
        raise UserError(f"unknown table {table!r}{did_you_mean(table, published_tables())}")
    paper, _, number = table.rpartition("_")
    with (published_folder() / f"{table}.csv").open(encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream))
    return tuple(
        _row(paper, line) if line["row"].startswith(f"{number}.") else _repeated(paper, line["row"]) for line in lines
    )


def experiments_of(table: str, dataset: str | None = None) -> list[tuple[str, str]]:
    """Data set (of the row, unless one is given) and experiment of every row that an experiment's preset names, each once."""
    rows = {row.key: row for row in published_rows(table)}
    named: dict[str, str] = {}
    for name in known_presets("experiments"):
        for key in load_plan(name).rows:
            if key in named and key in rows:
                raise UserError(
                    f"the row {key} is named by two experiments, {named[key]} and {name}; take it out of one's rows"
                )
            named[key] = name
    return list(dict.fromkeys((dataset or row.dataset, named[key]) for key, row in rows.items() if key in named))


def _row(paper: str, line: Mapping[str, str]) -> PublishedRow:
    metrics = {name: float(text) if text else None for name, text in line.items() if name not in _DESCRIPTION}
    described = {name: line[name] for name in _DESCRIPTION if name != "images"}
    return PublishedRow(paper=paper, images=int(line["images"]) if line["images"] else None, metrics=metrics, **described)


def _repeated(paper: str, row: str) -> PublishedRow:
    """A row that stands in another table, too, whose number it bears."""
    return next(printed for printed in published_rows(f"{paper}_{row.partition('.')[0]}") if printed.row == row)
