"""Published tables with our metrics beside the printed ones, as CSV and LaTeX."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from vse.eval.defaults import FOLD, FOLDED_PROTOCOLS, PHRASE
from vse.eval.files.results import ProtocolMetrics, Result, check_one_dataset, drop_comparisons, mean_and_std, read_result
from vse.eval.files.split import split_name
from vse.eval.tables.published_rows import PublishedRow, experiments_of, published_rows
from vse.eval.tables.summary import NO_INTERVAL, described
from vse.eval.tables.table import Cells, TableKind, TableRequest, metric_cell, title_of
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import is_experiment, load_plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """What a result says of a published row; ``changed`` are the settings in which it is not that row's preset."""

    path: Path
    result: Result
    row: PublishedRow
    changed: Sequence[str]

    @property
    def protocol(self) -> str:
        """The protocol of the row as the result file names it: a single fold is one of those of ``1k``."""
        return "1k" if self.row.protocol == "1k-single" else self.row.protocol

    @property
    def images(self) -> int | None:
        """How many images a query was compared with; None of phrases, which are compared with boxes of their own image."""
        if self.protocol == PHRASE:
            return None
        return FOLD if self.protocol in FOLDED_PROTOCOLS else self.result.n_images

    @property
    def split(self) -> str:
        """Which images ours are of: the split's name or, without one, the first digits of the hash of their ids."""
        identity = self.result.split_identity
        if identity is None:
            return ""
        return split_name(self.result.dataset, identity.sha256) or identity.sha256[:12]

    @property
    def comparable(self) -> bool:
        """Whether a difference from the printed metrics has a meaning: of the same test images, among as many of them."""
        same_split = self.result.dataset in self.row.datasets and bool(self.row.split) and self.split == self.row.split
        return same_split and self.images == self.row.images

    def interval(self, name: str) -> tuple[float, float]:
        """The 95% interval of a metric's mean, NaN where there is none: one fold of several has no interval of its own."""
        protocol = self.result.protocols[self.protocol]
        single = self.row.protocol == "1k-single" and protocol.folds > 1
        return NO_INTERVAL if single else protocol.interval(name) or NO_INTERVAL

    def metric(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds; NaN is the deviation of one seed."""
        protocol = self.result.protocols[self.protocol]
        if self.row.protocol == "1k-single":
            protocol = ProtocolMetrics.model_validate(protocol.per_fold[0])
        return mean_and_std(protocol.metric(name))


def compared(table: str, results: Sequence[Path], dataset: str | None = None) -> pd.DataFrame:
    """A published table, row by row: of each metric what was printed, ours, its deviation over seeds, its 95% interval, the
    difference, and whether that is significant: whether the printed value lies outside of our interval.

    A result is of the rows that its experiment names, if its data set is theirs or, where one is given, ``dataset``. What
    was not measured is NaN or blank, and so is a difference between unlike test splits or numbers of images.
    """
    rows = published_rows(table)
    measured = _by_row(table, rows, results, dataset)
    lines = [_line(row, measured.get(row.key)) for row in rows]
    return pd.DataFrame(lines).astype({"images": "Int64", "our_images": "Int64"})


class PublishedTable(TableKind):
    """``vse-table <paper>_<table>``: the printed metrics of a published table, with ours next to them."""

    columns = ("row", "method", "images", "our_images")
    options = frozenset({"dataset"})
    needs_results = False

    def frame(self, request: TableRequest) -> pd.DataFrame:
        """Return the table of :func:`compared`."""
        return compared(self.name, request.results, request.dataset)

    def cells(self, frame: pd.DataFrame, request: TableRequest) -> Cells:
        """Return each printed row, with ours and the difference below it."""
        return compared_cells(frame)


def _by_row(table: str, rows: Sequence[PublishedRow], results: Sequence[Path], dataset: str | None) -> dict[str, Measured]:
    by_row: dict[str, Measured] = {}
    read = [(path, read_result(path)) for path in drop_comparisons(results)]
    check_one_dataset(read)
    for path, result in read:
        if result.sha256 is None:
            raise UserError(f"{path}: has no sha256, so whether it was edited cannot be told; remove it and evaluate again")
        if result.trained_on or result.unfinished:
            why = f"was trained on {result.trained_on}" if result.trained_on else "is of a run that did not finish"
            log.warning("%s is left out: it %s, and no published row is", path, why)
            continue
        keys, changed = _rows_of(result)
        own = [row for row in rows if row.key in keys]
        if not own:
            log.warning("%s is left out: no row of %s is the experiment %s", path, table, result.experiment)
        for measured in [Measured(path, result, row, changed) for row in _of_dataset(path, result, own, dataset)]:
            _of_test_split(measured)
            other = by_row.setdefault(measured.row.key, measured)
            if other is not measured:
                raise UserError(f"{path} and {other.path} are both of the row {measured.row.key}; give one of them")
        _warn_of_split([measured for measured in by_row.values() if measured.path == path])
    if results and not by_row:
        names = ", ".join(name for _, name in experiments_of(table))
        raise UserError(f"no result is of a row of {table}; its rows are the experiments {names}")
    return by_row


def _rows_of(result: Result) -> tuple[set[str], list[str]]:
    """The rows that a result's experiment is, by its own settings or its preset, and where these two differ.

    Only the writer of the embeddings knows all settings and their defaults, and notes the ``changed_settings``.
    """
    preset = load_plan(result.experiment, result.dataset) if is_experiment(result.experiment) else None
    config = result.provenance.get("config")
    if not isinstance(config, Mapping) or not isinstance(config.get("rows"), list):
        return set(preset.rows if preset else ()), []
    noted = result.provenance.get("changed_settings")
    changed = [] if not preset else list(map(str, noted)) if isinstance(noted, list) else ["settings of another version"]
    # A run may be older than a row's name in its preset.
    return {*map(str, config["rows"]), *(preset.rows if preset and not changed else ())}, changed


def _of_dataset(path: Path, result: Result, rows: Sequence[PublishedRow], dataset: str | None) -> list[PublishedRow]:
    """Those of a result's rows that are of its data set, of which there must be one if there are rows at all."""
    asked = list(dict.fromkeys(dataset or row.dataset for row in rows))
    own = [row for row in rows if result.dataset in ([dataset] if dataset else row.datasets)]
    if rows and not own:
        of = f"{', '.join(row.key for row in rows)} of {' and '.join(asked)}"
        hint = "" if dataset else f" (--dataset {result.dataset} makes a table of that instead)"
        raise UserError(f"{path}: made from the data set {result.dataset!r}, and the table asks for {of}{hint}")
    return own


def _warn_of_split(of_result: Sequence[Measured]) -> None:
    """A line for the rows of a result whose differences are left blank because the test images are others."""
    for measured in of_result:
        row, ours = measured.row, measured.split
        if measured.comparable or measured.result.dataset not in row.datasets or measured.images != row.images:
            continue
        theirs = {"": "not known", "random": "drawn at random and not published"}.get(row.split, f"the split {row.split!r}")
        known = f"split {ours!r}" if ours else "not recorded; evaluate again"
        log.warning("%s: no difference from %s: its test images are %s, ours %s", measured.path, row.key, theirs, known)


def _of_test_split(measured: Measured) -> None:
    path, result, protocol = measured.path, measured.result, measured.protocol
    if result.split != "test":
        raise UserError(f"{path}: made from the split {result.split!r}, and the table asks for the test split")
    if protocol not in result.protocols:
        few = protocol in FOLDED_PROTOCOLS and result.n_images < FOLD
        what = f"it takes {FOLD} images, not {result.n_images}" if few else f"evaluate again with --protocol {protocol}"
        there = ", ".join(result.protocols)
        raise UserError(f"{path}: lacks the protocol {protocol}, which {measured.row.key} asks for (there is {there}); {what}")


def _line(row: PublishedRow, measured: Measured | None) -> dict[str, Any]:
    line: dict[str, Any] = {"row": row.key, "system": row.system, "setting": row.setting}
    line |= {"dataset": row.dataset, "protocol": row.protocol, "images": row.images, "split": row.split}
    line |= {"experiment": "", "seeds": "", "our_dataset": "", "our_images": None, "our_split": ""}
    line |= {"method": "", "feature": "", "run": "", "changed": ""}
    if measured:
        about = described(measured.path, measured.result)
        line |= {
            **{name: about[name] for name in ("experiment", "method", "feature", "run")},
            "seeds": " ".join("?" if seed is None else str(seed) for seed in measured.result.seeds),
        }
        line |= {"our_dataset": measured.result.dataset, "our_images": measured.images, "our_split": measured.split}
        line["changed"] = "; ".join(measured.changed)
    for name, printed in row.metrics.items():
        mean, deviation = measured.metric(name) if measured else (math.nan, math.nan)
        published = math.nan if printed is None else printed
        low, high = measured.interval(name) if measured else (math.nan, math.nan)
        difference = mean - published if measured and measured.comparable else math.nan
        line |= {f"{name}_published": published, f"{name}_ours": mean, f"{name}_std": deviation}
        line |= {f"{name}_low": low, f"{name}_high": high, f"{name}_difference": difference}
        line[f"{name}_significant"] = _significant(published, low, high) if not math.isnan(difference) else ""
    return {**line, "source": row.source}


def _significant(published: float, low: float, high: float) -> str:
    """Whether a printed value lies outside of our interval; blank if there is none."""
    if math.isnan(low) or math.isnan(high):
        return ""
    return "no" if low <= published <= high else "yes"


def compared_cells(table: pd.DataFrame) -> Cells:
    """What is shown of :func:`compared` to people.

    A printed row, under it ours if there is one, and under that the difference if it has a meaning, in parentheses where the
    printed value lies within our 95% interval.
    """
    metrics = [name.removesuffix("_published") for name in map(str, table) if name.endswith("_published")]
    tenths = table[[f"{name}_published" for name in metrics]] * 10
    digits = 2 if (tenths - tenths.round()).abs().gt(1e-6).any(axis=None) else 1
    lines = []
    for row in table.to_dict("records"):
        texts = [row["row"].partition(" ")[2], *(row[name] for name in ("system", "setting", "dataset", "protocol"))]
        lines.append([*texts, *(metric_cell(row[f"{name}_published"], digits) for name in metrics)])
        if row["experiment"]:
            ours = (metric_cell(row[f"{name}_ours"], digits, row[f"{name}_std"]) for name in metrics)
            lines.append([*_described(row), *ours])
        differences = [_difference(row, name, digits) for name in metrics]
        if any(differences):
            lines.append(["", "difference", "", "", "", *differences])
    titles = [("", title) for title in ("row", "system", "setting", "data set", "protocol")]
    notes = [f"{row}: {source}" for row, source in zip(table["row"], table["source"], strict=True)]
    if (table[[f"{name}_significant" for name in metrics]] == "no").any(axis=None):
        notes.append("(in parentheses): a difference whose printed value lies within our 95% interval")
    return Cells(lines, titles + [title_of(name) for name in metrics], len(titles), notes)


def _difference(row: Mapping[Hashable, Any], name: str, digits: int) -> str:
    text = metric_cell(row[f"{name}_difference"], digits, sign="+")
    return f"({text})" if text and row[f"{name}_significant"] == "no" else text


def _described(row: Mapping[Hashable, Any]) -> list[str]:
    """What our line of a row says before its metrics."""
    seeds = f"{'seeds' if ' ' in row['seeds'] else 'seed'} {row['seeds']}"
    setting = f"{seeds}, changed settings" if row["changed"] else seeds
    as_many = str(row["our_images"]) == str(row["images"])
    protocol = row["protocol"] if as_many else f"{row['protocol']}, {row['our_images']} images"
    return ["", f"ours: {row['method']}", setting, row["our_dataset"], protocol]
