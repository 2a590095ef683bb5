"""The table ``compare``: all pairs of systems on the same images. Systems that share a letter do not differ significantly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from vse.eval.files.results import drop_comparisons, mean_and_std
from vse.eval.options import TableRequest
from vse.eval.ranking.metrics import metric_title
from vse.eval.ranking.statistics import ComparedFamily, assign_letters, compare_all_pairs
from vse.eval.tables.groups import ComparedSystem, read_systems
from vse.eval.tables.summary import method_name
from vse.eval.tables.table import COMPARED_PROTOCOL, PrintedTable, TableKind, metric_cell
from vse.pipeline.errors import UserError

_DEFAULT_METRIC, _DEFAULT_FAMILY = "rsum", "holm"
_MIN_PRINTED_P = 0.0001


class ComparedTable(TableKind):
    """``vse-table compare``: a row per pair in the CSV file, and a row per system on the terminal and in LaTeX."""

    first_columns = ("dataset", "split", "protocol", "metric", "a", "b")
    option_names = frozenset({"family", "metric"})

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        metric, family = request.metric or _DEFAULT_METRIC, request.family or _DEFAULT_FAMILY
        systems = read_systems(drop_comparisons(request.results), metric)
        if len(systems) < 2:
            raise UserError("the table compare needs at least two results")
        keys = [metric] if metric in ("rsum", "mean_recall") else metric.split("_", 1)
        return _build_frame(systems, compare_all_pairs([one.queries for one in systems], keys, family), metric, family)

    def build_cells(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        return build_printed_comparison(frame)


def _build_frame(systems: Sequence[ComparedSystem], family: ComparedFamily, metric: str, method: str) -> pd.DataFrame:
    differs = np.zeros((len(systems), len(systems)), bool)
    for pair in family.pairs:
        differs[pair.a, pair.b] = differs[pair.b, pair.a] = pair.is_significant
    letters = assign_letters(family.values, differs)
    names = _name_systems(systems)
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
        row |= {"smallest_visible": family.smallest_visible}
        for side, index, system in (("a", pair.a, first), ("b", pair.b, second)):
            protocol = system.result.protocols[COMPARED_PROTOCOL]
            row |= {f"{side}_value": family.values[index], f"{side}_std": mean_and_std(protocol.metric(metric))[1]}
            row |= {f"{side}_letters": letters[index], f"{side}_seeds": len(system.queries), f"{side}_file": system.path.name}
        rows.append(row)
    return pd.DataFrame(rows)


def _name_systems(systems: Sequence[ComparedSystem]) -> list[str]:
    """Return the names of the systems: the methods, or the names of the files if two methods have the same name."""
    names = [method_name(one.result) for one in systems]
    return [name if names.count(name) == 1 else one.path.stem for name, one in zip(names, systems, strict=True)]


def build_printed_comparison(frame: pd.DataFrame) -> PrintedTable:
    """Return a row per system, the best first, with its letters, its difference to the best system and the p-value.

    The best system and the systems that do not differ significantly from it are bold.
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
    """Return two texts: the difference of a system to the best system with its interval, and the corrected p-value."""
    if name == best:
        return "", ""
    row = frame[((frame["a"] == name) & (frame["b"] == best)) | ((frame["a"] == best) & (frame["b"] == name))].iloc[0]
    sign = 1 if row["a"] == name else -1
    low, high = sorted((sign * row["low"], sign * row["high"]))
    text = f"{metric_cell(sign * row['difference'], 1, signed=True)} [{metric_cell(low, 1)}, {metric_cell(high, 1)}]"
    p = float(row["p_corrected"])
    return text, f"{p:.4f}" if p >= _MIN_PRINTED_P else f"below {_MIN_PRINTED_P}"
