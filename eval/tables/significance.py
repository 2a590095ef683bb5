"""Two tables of comparisons: ``significance`` lists the metrics of comparison files; ``compare`` compares pairs of results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vse.eval.files.results import (
    ComparedMetric,
    Comparison,
    check_consistent_data,
    drop_comparisons,
    drop_repeated_protocols,
    mean_and_std,
    read_comparison,
)
from vse.eval.options import PHRASE_PROTOCOL, TableRequest
from vse.eval.ranking.metrics import metric_title
from vse.eval.ranking.statistics import (
    SIGNIFICANCE_LEVEL,
    PairwiseTests,
    assign_letters,
    compare_all_pairs,
)
from vse.eval.tables.groups import ComparedSystem, read_and_rank_systems
from vse.eval.tables.summary import method_name
from vse.eval.tables.table import COMPARED_PROTOCOL, EMPTY_TABLE_REQUEST, PrintedTable, TableKind, metric_cell
from vse.pipeline.command import format_code_version
from vse.pipeline.errors import UserError


def build_significance_table(comparisons: Sequence[Path]) -> pd.DataFrame:
    """Return a row for each metric of each protocol in comparison files.

    The row has the values of both models, their difference, and its 95% interval and p-value. The last columns have the name
    of the comparison file, the seeds and files of both models, the facts in which the models differ, and the version and
    commit of the program.
    """
    rows = []
    contents = [(path, read_comparison(path)) for path in comparisons]
    check_consistent_data(contents)
    for path, comparison in contents:
        origin = _build_origin_columns(path, comparison)
        models = dict(zip("ab", _label_models(comparison), strict=True))
        for protocol, metrics in drop_repeated_protocols(comparison.comparisons, comparison.n_images).items():
            for direction, name, metric in _flatten_metrics(metrics):
                row: dict[str, Any] = {
                    "dataset": comparison.dataset,
                    "split": comparison.split,
                    "protocol": protocol,
                    **models,
                }
                row |= {"direction": direction, "metric": name, "a_value": metric.a, "b_value": metric.b}
                row |= {"difference": metric.difference, "low": metric.ci95[0], "high": metric.ci95[1], "p": metric.p}
                rows.append(row | {"significant": "yes" if metric.p < SIGNIFICANCE_LEVEL else "no", **origin})
    return pd.DataFrame(rows)


def _build_origin_columns(path: Path, comparison: Comparison) -> dict[str, str]:
    made = comparison.provenance.get("made")
    code = made.get("code") if isinstance(made, Mapping) else None
    origin = {"comparison": path.stem}
    for side, model in (("a", comparison.a), ("b", comparison.b)):
        origin[f"{side}_seeds"] = " ".join(map(str, model.seeds))
        origin[f"{side}_files"] = " ".join(os.path.normpath(path.parent / one["file"]) for one in model.embeddings)
    return {**origin, "differing": _describe_differing_facts(comparison), "code": format_code_version(code) or ""}


def _describe_differing_facts(comparison: Comparison) -> str:
    if comparison.differing_facts is None:
        return "not recorded"
    return "; ".join(f"{fact.name}: {fact.a} | {fact.b}" for fact in comparison.differing_facts)


class SignificanceTable(TableKind):
    """``vse-table significance``: a row per metric of comparison files. A LaTeX table can have only one pair of models."""

    first_columns = ("dataset", "split", "protocol", "a", "b", "difference", "low", "high", "p", "significant")

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        return build_significance_table(request.results)

    def build_printed_table(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        return build_printed_significance_table(frame)

    def write(self, frame: pd.DataFrame, out: Path, request: TableRequest = EMPTY_TABLE_REQUEST) -> Path:
        """Write the table and return ``out``. Raises UserError if LaTeX is requested for several pairs of models."""
        if out.suffix == ".tex" and len(frame[["dataset", "a", "b"]].drop_duplicates()) > 1:
            raise UserError(f"{out}: a LaTeX table has a single pair of models; give one comparison, or write .csv")
        if out.suffix == ".csv":
            frame = frame.assign(p=[f"{value:.4f}" for value in frame["p"]])
        return super().write(frame, out, request)


def build_printed_significance_table(table: pd.DataFrame) -> PrintedTable:
    """Return the printed columns of the table ``significance``; each line names its two models if there are several pairs."""
    models = table[["dataset", "a", "b"]].drop_duplicates()
    several = len(models) > 1
    a, b = ("a", "b") if several else (f"{side}: {models[side].iloc[0]}" for side in ("a", "b"))
    intervals = [f"[{low:+.1f}, {high:+.1f}]".replace("-", "−") for low, high in zip(table["low"], table["high"], strict=True)]
    printed = table[["protocol", "direction", "metric"]].copy()
    if several:
        printed.insert(0, "models", [f"{row.dataset} {row.a} - {row.b}" for row in table.itertuples()])
    printed[a] = [metric_cell(value, 1) for value in table["a_value"]]
    printed[b] = [metric_cell(value, 1) for value in table["b_value"]]
    signed = (metric_cell(value, 1, signed=True) for value in table["difference"])
    printed["a − b"] = [
        cell if significant == "yes" else f"({cell})" for cell, significant in zip(signed, table["significant"], strict=True)
    ]
    printed["95% interval"] = intervals
    printed["p"] = [f"{value:.4f}" if value >= 0.001 else "<0.001" for value in table["p"]]
    notes = [
        f"{', '.join(models['dataset'].unique())}: paired bootstrap (interval) and randomisation test (p, two-sided) "
        "over test images",
        f"(in parentheses): not significant, p is {SIGNIFICANCE_LEVEL} or more; not corrected for the number of metrics",
    ]
    return PrintedTable(printed.to_numpy().tolist(), [("", str(name)) for name in printed], 4 if several else 3, notes)


def format_difference_lines(comparison: Comparison) -> list[str]:
    """Return the lines that a comparison prints: a line per protocol, and the facts in which the models differ.

    The line of a protocol has the differences of R@1, rsum and mAP@R, each with its interval and p-value.
    """
    title = " - ".join(_label_models(comparison))
    lines = []
    for protocol, metrics in drop_repeated_protocols(comparison.comparisons, comparison.n_images).items():
        parts = [
            f"{f'{direction} ' if direction else ''}{name} {metric.difference:+.1f} "
            f"[{metric.ci95[0]:+.1f}, {metric.ci95[1]:+.1f}] p {metric.p:.2g}"
            for direction, name, metric in _flatten_metrics(metrics)
            if name in ("R@1", "rsum", "mAP@R")
        ]
        lines.append(f"{comparison.dataset} {title} {protocol}: {', '.join(parts)}")
    if comparison.differing_facts is not None:
        lines.append(f"{title} differ in: {_describe_differing_facts(comparison) or 'no recorded setting'}")
    return lines


def _label_models(comparison: Comparison) -> tuple[str, str]:
    """Return a name for each model. Equal names are told apart by the seeds or, if these are equal or unknown, by A and B."""
    a, b = (model.name or model.experiment for model in (comparison.a, comparison.b))
    seeds = comparison.a.seeds, comparison.b.seeds
    if a != b:
        return a, b
    if seeds[0] == seeds[1] or None in (*seeds[0], *seeds[1]):
        return f"{a} A", f"{b} B"
    return f"{a} seed {' '.join(map(str, seeds[0]))}", f"{b} seed {' '.join(map(str, seeds[1]))}"


def _flatten_metrics(
    metrics: Mapping[str, ComparedMetric | dict[str, ComparedMetric]],
) -> list[tuple[str, str, ComparedMetric]]:
    """Return the direction, name and values of every compared metric; rsum and mean recall have a blank direction."""
    leaves = []
    for key, value in metrics.items():
        if key == "per_type" and not isinstance(value, ComparedMetric):
            leaves += [(PHRASE_PROTOCOL, f"R@1 of {name}", metric) for name, metric in value.items()]
            continue
        direction, of_direction = ("", {key: value}) if isinstance(value, ComparedMetric) else (key, value)
        leaves += [(direction, metric_title(name), metric) for name, metric in of_direction.items()]
    return leaves


_DEFAULT_METRIC, _DEFAULT_FAMILY = "rsum", "holm"
_MIN_PRINTED_P = 0.0001


class PairwiseTable(TableKind):
    """``vse-table compare``: a row per pair of results in the CSV file, and a row per result on the terminal and in LaTeX."""

    first_columns = ("dataset", "split", "protocol", "metric", "a", "b")
    option_names = frozenset({"family", "metric"})

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        metric, family = request.metric or _DEFAULT_METRIC, request.family or _DEFAULT_FAMILY
        systems = read_and_rank_systems(drop_comparisons(request.results), metric)
        if len(systems) < 2:
            raise UserError("the table compare needs at least two results")
        keys = [metric] if metric in ("rsum", "mean_recall") else metric.split("_", 1)
        return _build_pairwise_frame(
            systems, compare_all_pairs([one.queries for one in systems], keys, family), metric, family
        )

    def build_printed_table(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        return build_printed_pairwise_table(frame)


def _build_pairwise_frame(systems: Sequence[ComparedSystem], family: PairwiseTests, metric: str, method: str) -> pd.DataFrame:
    differs = np.zeros((len(systems), len(systems)), bool)
    for pair in family.pairs:
        differs[pair.a, pair.b] = differs[pair.b, pair.a] = pair.is_significant
    letters = assign_letters(family.values, differs)
    names = _get_system_names(systems)
    rows: list[dict[str, Any]] = []
    for pair in family.pairs:
        first, second = systems[pair.a], systems[pair.b]
        row: dict[str, Any] = {
            "dataset": first.result.dataset,
            "split": first.result.split,
            "protocol": COMPARED_PROTOCOL,
            "metric": metric,
        }
        row |= {"a": names[pair.a], "b": names[pair.b], "difference": pair.difference}
        row |= {"low": pair.interval[0], "high": pair.interval[1]}
        row |= {"p": f"{pair.p:.2g}", "p_corrected": f"{pair.p_corrected:.2g}"}
        row |= {"significant": "yes" if pair.is_significant else "no", "family": method, "comparisons": len(family.pairs)}
        row |= {"smallest_visible": family.smallest_significant_difference}
        for side, index, system in (("a", pair.a, first), ("b", pair.b, second)):
            protocol = system.result.protocols[COMPARED_PROTOCOL]
            row |= {f"{side}_value": family.values[index], f"{side}_std": mean_and_std(protocol.metric(metric))[1]}
            row |= {f"{side}_letters": letters[index], f"{side}_seeds": len(system.queries), f"{side}_file": system.path.name}
        rows.append(row)
    return pd.DataFrame(rows)


def _get_system_names(systems: Sequence[ComparedSystem]) -> list[str]:
    """Return the name of each system's method, or the names of the result files if two systems have the same method."""
    names = [method_name(one.result) for one in systems]
    return [name if names.count(name) == 1 else one.path.stem for name, one in zip(names, systems, strict=True)]


def build_printed_pairwise_table(frame: pd.DataFrame) -> PrintedTable:
    """Return a row per system (a compared model), the best first: metric, group letters, difference to the best, p-value.

    Two systems with a letter in common do not differ significantly. The metric is bold for the best system, and for the
    systems that do not differ significantly from it.
    """
    facts: dict[str, dict[str, Any]] = {}
    for row in frame.to_dict("records"):
        for side in ("a", "b"):
            facts[row[side]] = {name: row[f"{side}_{name}"] for name in ("value", "std", "letters", "seeds")}
    ordered = sorted(facts, key=lambda name: -facts[name]["value"])
    best = ordered[0]
    lines = []
    for name in ordered:
        of_system = facts[name]
        cell = metric_cell(of_system["value"], 1, of_system["std"])
        cell = f"**{cell}**" if set(of_system["letters"]) & set(facts[best]["letters"]) else cell
        difference, p = _describe_difference(frame, name, best)
        lines.append([name, of_system["seeds"], cell, of_system["letters"], difference, p])
    first = frame.iloc[0]
    titles = ["method", "seeds", metric_title(first["metric"].rpartition("_")[2]), "group", "difference to the best", "p"]
    direction, n_pairs = first["metric"].partition("_")[0], int(first["comparisons"])
    count = f"{n_pairs} comparisons" if n_pairs > 1 else "1 comparison"
    notes = [
        f"dataset {first['dataset']}, split {first['split']}, protocol {first['protocol']}"
        f"{f', direction {direction}' if direction in ('i2t', 't2i') else ''}",
        "methods that share a letter do not differ significantly; bold: the best, and those that share a letter with it",
        f"{count}: {first['family']} corrects the p-values; intervals are not corrected",
        f"differences below about {first['smallest_visible']:.1f} cannot be seen on this split",
    ]
    return PrintedTable(lines, [("", title) for title in titles], 1, notes)


def _describe_difference(frame: pd.DataFrame, name: str, best: str) -> tuple[str, str]:
    """Return the difference of a system to the best system with its interval, and the corrected p-value, as two texts.

    Both texts are blank for the best system.
    """
    if name == best:
        return "", ""
    row = frame[((frame["a"] == name) & (frame["b"] == best)) | ((frame["a"] == best) & (frame["b"] == name))].iloc[0]
    sign = 1 if row["a"] == name else -1
    low, high = sorted((sign * row["low"], sign * row["high"]))
    text = f"{metric_cell(sign * row['difference'], 1, signed=True)} [{metric_cell(low, 1)}, {metric_cell(high, 1)}]"
    p = float(row["p_corrected"])
    return text, f"{p:.4f}" if p >= _MIN_PRINTED_P else f"below {_MIN_PRINTED_P}"
