"""The rows of published tables with their printed metrics, and the experiments that reproduce these rows.

A table is a CSV file in ``config/published/`` (docs/tables.md). This module imports no large library, because Snakemake reads
the rows each time it starts.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from vse.eval.options import published_folder, published_table_names
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.presets.preset_files import list_preset_names, read_own_values
from vse.pipeline.presets.presets import load_experiment_outline

_ROW_COLUMNS = ("row", "system", "setting", "dataset", "protocol", "images", "split", "source")


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table. ``row_number`` is 1.6 for row 6 of table 1.

    ``n_images`` is the number of test images that a query searches; None if unknown. ``split`` is the name of the test split
    (``config/published/splits.yaml``): blank if unknown, and ``random`` if the paper did not publish the split.
    """

    paper: str
    row_number: str
    system: str
    setting: str
    dataset: str
    protocol: str
    n_images: int | None
    split: str
    metrics: Mapping[str, float | None]
    source: str

    @property
    def key(self) -> str:
        """Key by which the presets of experiments refer to the row, such as ``vsepp 1.6``."""
        return f"{self.paper} {self.row_number}"

    @property
    def datasets(self) -> tuple[str, str]:
        """Data sets whose results may reproduce the row: ``dataset``, and ``<dataset>_<split>`` such as ``f30k_entities``."""
        return self.dataset, f"{self.dataset}_{self.split}"

    @property
    def default_dataset(self) -> str:
        """Data set on which the workflow trains for the row: ``<dataset>_<split>`` if it has a preset, else ``dataset``."""
        name, with_split = self.datasets
        return with_split if with_split in list_preset_names("datasets") else name


@cache
def published_rows(table: str) -> tuple[PublishedRow, ...]:
    """Return the rows of a table in the order of the paper, including rows that the paper repeats from another table.

    Raises UserError if there is no such table.
    """
    if table not in published_table_names():
        raise UserError(f"unknown table {table!r}{did_you_mean(table, published_table_names())}")
    paper, _, number = table.rpartition("_")
    with (published_folder() / f"{table}.csv").open(encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream))
    return tuple(_parse_published_row(paper, number, line) for line in lines)


def table_experiments(table: str, dataset: str | None = None) -> list[tuple[str, str]]:
    """Return pairs of a data set and an experiment whose training on this data set reproduces a row of the table.

    The preset of an experiment names the rows that it reproduces. ``dataset`` replaces the default data set of the rows.
    Raises UserError if two experiments name the same row, or if the rows of an experiment are not a list of texts.
    """
    rows = {row.key: row for row in published_rows(table)}
    experiments: dict[str, str] = {}
    for name, keys in read_own_values("experiments", "rows").items():
        is_valid = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        for key in keys if is_valid else load_experiment_outline(name).rows:
            if key in experiments and key in rows:
                raise UserError(
                    f"two experiments, {experiments[key]} and {name}, name the row {key}; remove it from the rows of one"
                )
            experiments[key] = name
    chosen = [(row, experiments[key]) for key, row in rows.items() if key in experiments]
    return list(dict.fromkeys((dataset or row.default_dataset, name) for row, name in chosen))


def _parse_published_row(paper: str, table_number: str, line: Mapping[str, str]) -> PublishedRow:
    """Parse a line of a table's CSV file as a row.

    If the paper repeats a row of another table, the line has only the number of that row, such as 1.6. The row of the other
    table is then returned.
    """
    if not line["row"].startswith(f"{table_number}."):
        others = published_rows(f"{paper}_{line['row'].partition('.')[0]}")
        return next(printed for printed in others if printed.row_number == line["row"])
    metrics = {name: float(text) if text else None for name, text in line.items() if name not in _ROW_COLUMNS}
    texts = {name: line[name] for name in _ROW_COLUMNS if name not in ("row", "images")}
    images = int(line["images"]) if line["images"] else None
    return PublishedRow(paper=paper, row_number=line["row"], n_images=images, metrics=metrics, **texts)
