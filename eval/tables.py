"""Tables of result files, as CSV and LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vse.eval.metrics import FOLD, RECALLS
from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, write_text

TABLES = ("summary",)
_FIGURES = [f"{way}_{name}" for way in ("i2t", "t2i") for name in (*(f"r{k}" for k in RECALLS), "medr", "meanr")]


def summary(results: Sequence[Path]) -> pd.DataFrame:
    """A row per result and protocol: R@K, Med r and mean r both ways, rsum; with several seeds also standard deviations.

    A test set of one fold has one row, ``full``, since ``1k`` would repeat it.
    """
    rows = []
    for path in results:
        result = _read_result(path)
        for protocol, found in result["protocols"].items():
            if protocol != "1k" or result["n_images"] > FOLD or "full" not in result["protocols"]:
                rows.append(_row(result, protocol, found))
    return pd.DataFrame(rows)


def write_table(table: pd.DataFrame, out: Path) -> Path:
    """Write a table as ``.csv`` or, by its suffix, as ``.tex`` (booktabs); returns ``out``."""
    if out.suffix == ".csv":
        return write_text(out, table.to_csv(index=False, float_format="%.2f", lineterminator="\n"))
    if out.suffix == ".tex":
        names = {
            column: column.replace("_", " ").replace("2t r", "2t R@").replace("2i r", "2i R@") for column in map(str, table)
        }
        text = table.rename(columns=names).to_latex(index=False, float_format="%.1f", escape=True)
        return write_text(out, text)
    raise UserError(f"{out}: a table is written as .csv or .tex")


def _read_result(path: Path) -> dict[str, Any]:
    result = read_json(path)
    if not isinstance(result, dict) or result.get("version") != 1 or "protocols" not in result:
        raise UserError(f"{path}: not a result file of vse-eval")
    return result


def _row(result: Mapping[str, Any], protocol: str, found: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {name: result[name] for name in ("dataset", "experiment", "split")}
    row |= {"protocol": protocol, "n_images": result["n_images"], "n_captions": result["n_captions"]}
    row["seeds"] = len(result["seeds"])
    figures = {f"{way}_{name}": found[way][name] for way in ("i2t", "t2i") for name in found[way]}
    for name in (*_FIGURES, "rsum"):
        figure = figures[name] if name in figures else found[name]
        if isinstance(figure, Mapping):
            row[name], row[f"{name}_std"] = figure["mean"], figure["std"]
        else:
            row[name] = figure
    return row
