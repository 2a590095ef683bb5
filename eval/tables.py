"""Tables of result files, as CSV and LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vse.eval.metrics import FOLD, RECALLS
from vse.eval.result_file import read_result
from vse.pipeline.errors import UserError
from vse.pipeline.files import write_text

TABLES = ("summary", "significance")
_NO_INTERVAL = (math.nan, math.nan)
_FIGURES = (*(f"r{k}" for k in RECALLS), "medr", "meanr")
_COLUMNS = (*(f"{way}_{name}" for way in ("i2t", "t2i") for name in _FIGURES), "rsum")


def summary(results: Sequence[Path]) -> pd.DataFrame:
    """A row per result and protocol: R@K, Med r and mean r both ways, rsum, each with its 95% interval (``_low``, ``_high``)
    where the result has one; with several seeds also standard deviations.

    A test set of one fold has one row, ``full``, since ``1k`` would repeat it. Of captions that query captions the
    figures stand in the row ``full``, too, which is also over the whole split; without one, in a row of their own.
    """
    rows = []
    for path in results:
        result = read_result(path)
        protocols = dict(result["protocols"])
        if {"full", "sentence"} <= set(protocols):
            sentence = protocols.pop("sentence")
            intervals = {"ci95": protocols["full"]["ci95"] | sentence["ci95"]} if "ci95" in sentence else {}
            protocols["full"] = protocols["full"] | {"s2s": sentence["s2s"]} | intervals
        for protocol, found in protocols.items():
            if protocol != "1k" or result["n_images"] > FOLD or "full" not in protocols:
                rows.append(_row(result, protocol, found))
    return pd.DataFrame(rows)


def write_table(table: pd.DataFrame, out: Path) -> Path:
    """Write a table as ``.csv`` or, by its suffix, as ``.tex`` (booktabs, without intervals); returns ``out``."""
    if out.suffix == ".csv":
        return write_text(out, table.to_csv(index=False, float_format="%.2f", lineterminator="\n"))
    if out.suffix == ".tex":
        table = table[[column for column in map(str, table) if not column.endswith(("_low", "_high"))]]
        names = {column: re.sub("2([its]) r(\\d)", r"2\1 R@\2", column.replace("_", " ")) for column in map(str, table)}
        text = table.rename(columns=names).to_latex(index=False, float_format="%.1f", escape=True, na_rep="")
        return write_text(out, text)
    raise UserError(f"{out}: a table is written as .csv or .tex")


def interval_of(found: Mapping[str, Any], name: str) -> tuple[float, float]:
    """The 95% interval of a figure of a protocol, ``i2t_r1`` say; NaN where the result has none."""
    way, _, rest = name.partition("_")
    intervals = found.get("ci95", {})
    low, high = intervals[name] if name in intervals else intervals.get(way, {}).get(rest, _NO_INTERVAL)
    return low, high


def _row(result: Mapping[str, Any], protocol: str, found: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {name: result[name] for name in ("dataset", "experiment", "split")}
    row |= {"protocol": protocol, "n_images": result["n_images"], "n_captions": result["n_captions"]}
    row["seeds"] = len(result["seeds"])
    figures = dict.fromkeys(_COLUMNS, math.nan)
    for way in ("i2t", "t2i", "s2s"):
        figures |= {f"{way}_{name}": figure for name, figure in found.get(way, {}).items()}
    figures |= {name: found[name] for name in ("rsum",) if name in found}
    for name, figure in figures.items():
        if isinstance(figure, Mapping):
            row[name], row[f"{name}_std"] = figure["mean"], figure["std"]
        else:
            row[name] = figure
        if "ci95" in found:
            row[f"{name}_low"], row[f"{name}_high"] = interval_of(found, name)
    return row
