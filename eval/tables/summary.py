"""Tables of result files, as CSV and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vse.eval.files.results import (
    OverSeeds,
    ProtocolMetrics,
    Result,
    distinct,
    mean_and_std,
    read_result,
    without_comparisons,
)
from vse.eval.ranking.metrics import DIRECTIONS, NAMES, RECALLS
from vse.pipeline.errors import UserError
from vse.pipeline.files import write_text
from vse.pipeline.plain_text import csv_cell, printable

_DESCRIBED = ("dataset", "experiment", "split", "protocol", "n_images", "n_captions", "seeds")
_NOT_PRINTED = ("_std", "_low", "_high", "_meanr")
_DIRECTIONS = DIRECTIONS | {"phrase": "phrase to region"}  # of which papers have metrics
NO_INTERVAL = (math.nan, math.nan)
_METRICS = (*(f"r{k}" for k in RECALLS), "medr", "meanr")
_COLUMNS = (*(f"{direction}_{name}" for direction in ("i2t", "t2i") for name in _METRICS), "rsum")


def summary(results: Sequence[Path]) -> pd.DataFrame:
    """A row per result and protocol: R@K, Med r and mean r in both directions, and rsum.

    Each metric comes with its 95% interval (``_low``, ``_high``) where the result has one, and with several seeds with its
    standard deviation. A test set of one fold has one row, ``full``, since ``1k`` would repeat it. The metrics of captions
    that query captions stand in the row ``full``, too, which is also over the whole split; without one, in a row of their own.
    """
    rows = []
    for result in map(read_result, without_comparisons(results)):
        protocols = distinct(result.protocols, result.n_images)
        if {"full", "sentence"} <= set(protocols):
            full, sentence = protocols["full"], protocols.pop("sentence")
            added = {"s2s": sentence.s2s, "ci95": full.ci95 | sentence.ci95}
            protocols["full"] = full.model_copy(update=added)
        rows += [_row(result, name, protocol) for name, protocol in protocols.items()]
    if not rows:
        raise UserError("no result among the files, so there is no table")
    return pd.DataFrame(rows)


def write_summary(table: pd.DataFrame, out: Path) -> Path:
    """Write what :func:`summary` returned as ``.csv``, all of it, or as ``.tex``: recalls, Med r and rsum, each with its
    standard deviation if there is one; returns ``out``.
    """
    if out.suffix != ".tex":
        return write_table(table, out)
    metrics = [column for column in map(str, table) if column not in _DESCRIBED and not column.endswith(_NOT_PRINTED)]
    described = ["experiment", *(name for name in ("dataset", "protocol", "seeds") if table[name].nunique() > 1)]
    lines = []
    for row in table.to_dict("records"):
        cells = [metric_cell(row[name], 1, row.get(f"{name}_std", math.nan)) for name in metrics]
        lines.append([*(str(row[name]) for name in described), *cells])
    titles = [("", name) for name in described] + [title_of(name) for name in metrics]
    same = [f"{name} {table[name].iloc[0]}" for name in ("dataset", "split", "protocol") if table[name].nunique() == 1]
    return write_text(out, as_latex(lines, titles, len(described), [", ".join(same)]))


def write_table(table: pd.DataFrame, out: Path) -> Path:
    """Write a table as ``.csv``; returns ``out``. What a ``.tex`` shows of a table is another matter for each."""
    if out.suffix != ".csv":
        raise UserError(f"{out}: a table is written as .csv or .tex")
    texts = {str(name): column.map(csv_cell) for name, column in table.items() if not pd.api.types.is_numeric_dtype(column)}
    return write_text(out, table.assign(**texts).to_csv(index=False, float_format="%.2f", lineterminator="\n"))


def as_latex(lines: Sequence[Sequence[object]], titles: Sequence[tuple[str, str]], n_texts: int, notes: Sequence[str]) -> str:
    """Lines under two rows of titles (one if the first is blank), for booktabs; the first ``n_texts`` columns are texts.

    ``notes`` become comments above. Texts may come from data: each stays on its line, and is escaped.
    """
    lines = [[printable(cell) if isinstance(cell, str) else cell for cell in line] for line in lines]
    titles = [(printable(group), printable(title)) for group, title in titles]
    grouped = any(group for group, _ in titles)
    columns = pd.MultiIndex.from_tuples(titles) if grouped else pd.Index([title for _, title in titles])
    frame = pd.DataFrame(lines, columns=columns)
    aligned = "l" * n_texts + "r" * (len(titles) - n_texts)
    text = frame.to_latex(index=False, escape=True, multicolumn_format="c", column_format=aligned, float_format="%.1f")
    comments = [f"% {printable(note)}" for note in notes if note]
    for sign, latex in (("±", "$\\pm$"), ("−", "$-$"), ("<", "$<$")):
        text = text.replace(sign, latex)
    return "\n".join(["% \\usepackage{booktabs}", *comments, text])


def title_of(metric: str) -> tuple[str, str]:
    """A metric's column, e.g. ``i2t_r1``, as a table prints it: the direction, and the name."""
    direction, _, name = metric.partition("_")
    return (_DIRECTIONS[direction], NAMES.get(name, name)) if direction in _DIRECTIONS else ("", NAMES.get(metric, metric))


def metric_cell(value: float, digits: int, deviation: float = math.nan, sign: str = "-") -> str:
    """A metric as a table prints it, blank if it is NaN; ``±`` and ``−`` become LaTeX's in :func:`as_latex`."""
    if math.isnan(value):
        return ""
    text = f"{value:{sign}.{digits}f}".replace("-", "−")
    return text if math.isnan(deviation) else f"{text} ± {deviation:.{digits}f}"


def _row(result: Result, name: str, protocol: ProtocolMetrics) -> dict[str, Any]:
    row: dict[str, Any] = {"dataset": result.dataset, "experiment": result.experiment, "split": result.split}
    row |= {"protocol": name, "n_images": result.n_images, "n_captions": result.n_captions, "seeds": len(result.seeds)}
    of_directions = (f"{direction}_{metric}" for direction, metrics in protocol.directions.items() for metric in metrics)
    for column in dict.fromkeys([*_COLUMNS, *of_directions]):
        metric = protocol.metric(column)
        row[column], deviation = mean_and_std(metric)
        if isinstance(metric, OverSeeds):
            row[f"{column}_std"] = deviation
        if protocol.ci95:
            row[f"{column}_low"], row[f"{column}_high"] = protocol.interval(column) or NO_INTERVAL
    return row
