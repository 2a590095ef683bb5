"""Published tables: the printed metrics of a paper, next to the metrics of our results."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from vse.eval.files.results import (
    ProtocolMetrics,
    Result,
    check_consistent_data,
    drop_comparisons,
    find_split_name,
    mean_and_std,
    read_result,
)
from vse.eval.options import FOLDED_PROTOCOLS, N_IMAGES_PER_FOLD, PHRASE_PROTOCOL, TableRequest
from vse.eval.tables.published_rows import PublishedRow, published_rows, table_experiments
from vse.eval.tables.summary import GROUP_COLUMN, UNKNOWN_INTERVAL, build_result_columns
from vse.eval.tables.table import PrintedTable, ResultGroups, TableKind, column_title, metric_cell
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import is_experiment, list_preset_names, load_experiment_outline, read_preset_settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredRow:
    """A row of a published table, with our result that reproduces this row.

    ``path`` is the file of the ``result``. ``changed_settings`` lists the settings in which the result's experiment differs
    from its preset.
    """

    path: Path
    result: Result
    published_row: PublishedRow
    changed_settings: Sequence[str]

    @property
    def protocol(self) -> str:
        """Name of the row's protocol in the result file. The protocol ``1k-single`` of a paper is the first fold of ``1k``."""
        return "1k" if self.published_row.protocol == "1k-single" else self.published_row.protocol

    @property
    def n_images(self) -> int | None:
        """Number of images that a query of our result searches; None for phrases, which search the boxes of one image."""
        if self.protocol == PHRASE_PROTOCOL:
            return None
        return N_IMAGES_PER_FOLD if self.protocol in FOLDED_PROTOCOLS else self.result.n_images

    @property
    def split(self) -> str:
        """Name of our result's split; without a name, the first digits of the hash of the image ids; blank if unknown."""
        identity = self.result.split_identity
        if identity is None:
            return ""
        return find_split_name(self.result.dataset, identity.sha256) or identity.sha256[:12]

    @property
    def leaking_feature(self) -> str | None:
        """Name of a feature of our result whose weights were trained on the row's test images; None without such a feature."""
        members = [member.experiment for member in self.result.ensemble if is_experiment(member.experiment)]
        features = [load_experiment_outline(name, self.result.dataset).feature for name in members]
        for name in (self.result.config.get("feature"), self.result.config.get("eval_feature"), *features):
            if name in list_preset_names("features"):
                trained_on = read_preset_settings("features", str(name)).get("trained_on", [])
                if self.published_row.dataset in trained_on:
                    return str(name)
        return None

    @property
    def is_comparable(self) -> bool:
        """True if we and the paper tested on the same images, and no feature was trained on the test images."""
        same_split = (
            self.result.dataset in self.published_row.datasets
            and bool(self.published_row.split)
            and self.split == self.published_row.split
        )
        return same_split and self.n_images == self.published_row.n_images and self.leaking_feature is None

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95% interval of a metric, or a pair of NaN if there is no interval.

        A row with the protocol ``1k-single`` has an interval only if our result has a single fold of 1,000 images; otherwise
        the result has only the interval over all folds.
        """
        protocol = self.result.protocols[self.protocol]
        single = self.published_row.protocol == "1k-single" and protocol.folds > 1
        return UNKNOWN_INTERVAL if single else protocol.interval(name) or UNKNOWN_INTERVAL

    def metric(self, name: str) -> tuple[float, float]:
        """Return the mean and the standard deviation of a metric over seeds; the deviation is NaN for a single seed."""
        protocol = self.result.protocols[self.protocol]
        if self.published_row.protocol == "1k-single":
            protocol = ProtocolMetrics.model_validate(protocol.per_fold[0])
        return mean_and_std(protocol.metric(name))


def compare_published(
    table: str, results: Sequence[Path], dataset: str | None = None, family: str | None = None
) -> pd.DataFrame:
    """Return a published table with our results.

    For each metric there are columns with the printed value, our value with its standard deviation over seeds and its 95%
    interval, and the difference. The difference is significant if the printed value lies outside our interval. Our values are
    NaN or blank in rows without a result. Differences are NaN if the paper tested on other images, or if a feature was trained
    on the test images.

    The preset of an experiment lists the rows to which its result belongs. The data set of a result must be one of the row's
    data sets or, if given, ``dataset``. ``family`` is a correction of p-values such as ``holm``, or None. With ``family``, the
    column ``group`` has letters: our results that share a letter do not differ significantly in rsum.
    """
    rows = published_rows(table)
    measured = _match_results(table, rows, results, dataset)
    groups = None
    if family is not None:
        from vse.eval.tables.groups import group_results  # lazy: imports torch

        groups = group_results(list(dict.fromkeys(one.path for one in measured.values())), family)
    lines = [_build_table_line(row, measured.get(row.key), groups) for row in rows]
    frame = pd.DataFrame(lines).astype({"images": "Int64", "our_images": "Int64"})
    frame.attrs["note"] = "" if groups is None else groups.note
    return frame


class PublishedTable(TableKind):
    """``vse-table <paper>_<table>``: the printed metrics of a published table, next to the metrics of our results."""

    first_columns = ("row", "method", "images", "our_images")
    option_names = frozenset({"dataset", "family"})
    needs_results = False

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        return compare_published(self.name, request.results, request.dataset, request.family)

    def build_printed_table(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        return build_printed_published_table(frame)


def _match_results(
    table: str, rows: Sequence[PublishedRow], results: Sequence[Path], dataset: str | None
) -> dict[str, MeasuredRow]:
    """Return the published rows that a result of ours reproduces, by their keys, such as ``vsepp 1.6``.

    Raises UserError if two results belong to one row.
    """
    by_row: dict[str, MeasuredRow] = {}
    contents = [(path, read_result(path)) for path in drop_comparisons(results)]
    check_consistent_data(contents)
    for path, result in contents:
        if result.sha256 is None:
            raise UserError(f"{path}: has no sha256 to check whether it was edited; remove it and evaluate again")
        if result.trained_on or result.unfinished:
            reason = f"was trained on {result.trained_on}" if result.trained_on else "comes from a run that did not finish"
            log.warning("%s is left out: it %s, unlike the published rows", path, reason)
            continue
        keys, changed = _find_rows_and_changes(result)
        own = [row for row in rows if row.key in keys]
        if not own:
            log.warning("%s is left out: no row of %s is the experiment %s", path, table, result.experiment)
        for measured in [MeasuredRow(path, result, row, changed) for row in _select_rows(path, result, own, dataset)]:
            _check_split_and_protocol(measured)
            other = by_row.setdefault(measured.published_row.key, measured)
            if other is not measured:
                raise UserError(
                    f"{path} and {other.path} both belong to the row {measured.published_row.key}; give one of them"
                )
        _warn_of_rows_without_differences([measured for measured in by_row.values() if measured.path == path])
    if results and not by_row:
        names = ", ".join(name for _, name in table_experiments(table))
        raise UserError(f"no result belongs to a row of {table}; its rows are the experiments {names}")
    return by_row


def _find_rows_and_changes(result: Result) -> tuple[set[str], list[str]]:
    """Return the keys of the rows that a result reproduces, such as ``vsepp 1.6``, and the changed settings as texts.

    A changed setting is one that differs from the preset of the result's experiment.
    """
    preset = load_experiment_outline(result.experiment, result.dataset) if is_experiment(result.experiment) else None
    if not isinstance(result.config.get("rows"), list):
        return set(preset.rows if preset else ()), []
    recorded = result.provenance.get("changed_settings")
    changed = [] if not preset else list(map(str, recorded)) if isinstance(recorded, list) else ["settings of another version"]
    # The preset may name more rows now than when the run was trained.
    return {*map(str, result.config["rows"]), *(preset.rows if preset and not changed else ())}, changed


def _select_rows(path: Path, result: Result, rows: Sequence[PublishedRow], dataset: str | None) -> list[PublishedRow]:
    """Return the ``rows`` whose published numbers this result may reproduce.

    A row is returned if the result was measured on one of the row's data sets or, if given, on ``dataset``. Raises UserError
    if no row is left.
    """
    own = [row for row in rows if result.dataset in ([dataset] if dataset else row.datasets)]
    if rows and not own:
        wanted = " and ".join(dict.fromkeys(dataset or row.dataset for row in rows))
        keys = ", ".join(row.key for row in rows)
        hint = "" if dataset else f" (--dataset {result.dataset} uses results on that data set)"
        raise UserError(f"{path}: evaluated on the data set {result.dataset!r}, but {keys} needs {wanted}{hint}")
    return own


def _warn_of_rows_without_differences(rows: Sequence[MeasuredRow]) -> None:
    """Log a warning for each row that the paper tested on other images, or whose test images a feature was trained on.

    The table has no differences in such a row.
    """
    for measured in rows:
        row, ours = measured.published_row, measured.split
        if measured.is_comparable or measured.result.dataset not in row.datasets or measured.n_images != row.n_images:
            continue
        if measured.leaking_feature is not None:
            seen = "%s: no difference from %s: the weights of the feature %s were trained on test images of %s"
            log.warning(seen, measured.path, row.key, measured.leaking_feature, row.dataset)
            continue
        theirs = {"": "not known", "random": "a random sample that was not published"}.get(
            row.split, f"the split {row.split!r}"
        )
        known = f"split {ours!r}" if ours else "not recorded; evaluate again"
        log.warning("%s: no difference from %s: its test images are %s, ours are %s", measured.path, row.key, theirs, known)


def _check_split_and_protocol(measured: MeasuredRow) -> None:
    path, result, protocol = measured.path, measured.result, measured.protocol
    if result.split != "test":
        raise UserError(f"{path}: evaluated on the split {result.split!r}, but the table needs the test split")
    if protocol not in result.protocols:
        too_few = protocol in FOLDED_PROTOCOLS and result.n_images < N_IMAGES_PER_FOLD
        remedy = (
            f"it needs {N_IMAGES_PER_FOLD} images, there are {result.n_images}"
            if too_few
            else f"evaluate again with --protocol {protocol}"
        )
        present = ", ".join(result.protocols)
        raise UserError(
            f"{path}: lacks the protocol {protocol} of the row {measured.published_row.key} (it has {present}); {remedy}"
        )


def _build_table_line(row: PublishedRow, measured: MeasuredRow | None, groups: ResultGroups | None) -> dict[str, Any]:
    line: dict[str, Any] = {"row": row.key, "system": row.system, "setting": row.setting}
    line |= {"dataset": row.dataset, "protocol": row.protocol, "images": row.n_images, "split": row.split}
    line |= {"experiment": "", "seeds": "", "our_dataset": "", "our_images": None, "our_split": ""}
    line |= {"method": "", "feature": "", "run": "", "changed": ""}
    if measured:
        about = build_result_columns(measured.path, measured.result)
        line |= {
            **{name: about[name] for name in ("experiment", "method", "feature", "run")},
            "seeds": " ".join("?" if seed is None else str(seed) for seed in measured.result.seeds),
        }
        line |= {"our_dataset": measured.result.dataset, "our_images": measured.n_images, "our_split": measured.split}
        leaking = measured.leaking_feature
        seen = [] if leaking is None else [f"{leaking}: trained on test images of {row.dataset}"]
        line["changed"] = "; ".join([*measured.changed_settings, *seen])
    for name, printed in row.metrics.items():
        mean, deviation = measured.metric(name) if measured else (math.nan, math.nan)
        published = math.nan if printed is None else printed
        low, high = measured.interval(name) if measured else (math.nan, math.nan)
        difference = mean - published if measured and measured.is_comparable else math.nan
        line |= {f"{name}_published": published, f"{name}_ours": mean, f"{name}_std": deviation}
        line |= {f"{name}_low": low, f"{name}_high": high, f"{name}_difference": difference}
        line[f"{name}_significant"] = _describe_significance(published, low, high) if not math.isnan(difference) else ""
    if groups is not None:
        line[GROUP_COLUMN] = groups.letters_by_path[measured.path] if measured else ""
    return {**line, "source": row.source}


def _describe_significance(published: float, low: float, high: float) -> str:
    """Return ``yes`` if a printed value lies outside our interval, else ``no``; a blank without an interval."""
    if math.isnan(low) or math.isnan(high):
        return ""
    return "no" if low <= published <= high else "yes"


def build_printed_published_table(table: pd.DataFrame) -> PrintedTable:
    """Return a published table with our results as cells for the terminal and LaTeX.

    Below each published row are a row with our values, if there is a result, and a row with the differences, if the two can be
    compared. A difference is in parentheses if the published value lies within our 95% interval.
    """
    metrics = [name.removesuffix("_published") for name in map(str, table) if name.endswith("_published")]
    tenths = table[[f"{name}_published" for name in metrics]] * 10
    digits = 2 if (tenths - tenths.round()).abs().gt(1e-6).any(axis=None) else 1
    no_group = [""] if GROUP_COLUMN in table else []
    lines = []
    for row in table.to_dict("records"):
        texts = [row["row"].partition(" ")[2], *(row[name] for name in ("system", "setting", "dataset", "protocol"))]
        lines.append([*texts, *(metric_cell(row[f"{name}_published"], digits) for name in metrics), *no_group])
        if row["experiment"]:
            ours = (metric_cell(row[f"{name}_ours"], digits, row[f"{name}_std"]) for name in metrics)
            lines.append([*_format_our_text_cells(row), *ours, *([row[GROUP_COLUMN]] if no_group else [])])
        differences = [_format_difference(row, name, digits) for name in metrics]
        if any(differences):
            lines.append(["", "difference", "", "", "", *differences, *no_group])
    titles = [("", title) for title in ("row", "system", "setting", "data set", "protocol")]
    notes = [f"{row}: {source}" for row, source in zip(table["row"], table["source"], strict=True)]
    if (table[[f"{name}_significant" for name in metrics]] == "no").any(axis=None):
        notes.append("(in parentheses): a difference whose printed value lies within our 95% interval")
    notes.append(table.attrs.get("note", ""))
    numbers = [column_title(name) for name in metrics] + [("", GROUP_COLUMN) for _ in no_group]
    return PrintedTable(lines, titles + numbers, len(titles), notes)


def _format_difference(row: Mapping[Hashable, Any], name: str, digits: int) -> str:
    text = metric_cell(row[f"{name}_difference"], digits, signed=True)
    return f"({text})" if text and row[f"{name}_significant"] == "no" else text


def _format_our_text_cells(row: Mapping[Hashable, Any]) -> list[str]:
    seeds = f"{'seeds' if ' ' in row['seeds'] else 'seed'} {row['seeds']}"
    setting = f"{seeds}, changed settings" if row["changed"] else seeds
    same_number = str(row["our_images"]) == str(row["images"])
    protocol = row["protocol"] if same_number else f"{row['protocol']}, {row['our_images']} images"
    return ["", f"ours: {row['method']}", setting, row["our_dataset"], protocol]
