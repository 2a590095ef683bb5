"""The table ``compression``: recalls and bytes per vector of each codec (a method of compression; ``vse-eval --compress``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from vse.eval.files.results import (
    ProtocolMetrics,
    SeedStatistics,
    check_consistent_data,
    drop_comparisons,
    mean_and_std,
    read_result,
)
from vse.eval.options import TableRequest
from vse.eval.tables.summary import UNKNOWN_INTERVAL, method_name
from vse.eval.tables.table import EMPTY_TABLE_REQUEST, PrintedTable, TableKind, column_title, metric_cell, write_chart_file
from vse.pipeline.errors import UserError, to_printable_line

_METRIC_COLUMNS = ("i2t_r1", "i2t_r10", "t2i_r1", "t2i_r10", "rsum")
_COLOURS = ("#2a6f97", "#d9731a", "#4f772d", "#7b2d8b", "#b5892e", "#5c677d")
_SHARED_LABEL_DISTANCE = 12.0  # two points of one codec with a smaller difference of rsum share a label


class CompressionTable(TableKind):
    """``vse-table compression``: a table with a row for each result and codec, or a chart (``.svg``, ``.png``)."""

    first_columns = ("method", "codec", "bytes", "fitted_on", "dataset", "split", "n_images", "seeds")
    file_suffixes = (".csv", ".tex", ".svg", ".png")

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        """Return one or two rows for each codec of each result, sorted by method and then by bytes, most bytes first.

        The second row has the metrics after the uncompressed vectors ranked the codec's best candidates again, if this was
        measured.
        """
        rows: list[dict[str, Any]] = []
        results = [(path, read_result(path)) for path in drop_comparisons(request.results)]
        check_consistent_data(results)
        for path, result in results:
            if not result.compression:
                raise UserError(f"{path}: has no compressed embeddings; evaluate them with vse-eval --compress")
            for entry in result.compression:
                facts = {name: entry[name] for name in ("codec", "bytes", "fitted_on")}
                about = {"dataset": result.dataset, "split": result.split, "n_images": result.n_images}
                row = {"method": method_name(result), **facts, **about, "seeds": len(result.seeds)}
                search = entry["search_s"]
                seconds = {f"{name}_search_s": mean_and_std(_parse_metric(search[name]))[0] for name in ("i2t", "t2i")}
                rows.append({**row, "rescored": 0, **_read_metrics(entry), **seconds})
                if again := entry.get("rescored"):
                    rows.append({**row, "rescored": again["candidates"], **_read_metrics(again)})
        return pd.DataFrame(rows).sort_values(["method", "bytes", "codec"], ascending=[True, False, True], kind="stable")

    def build_printed_table(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        """Return the codecs with their bytes and metrics."""
        texts = [*(["method"] if frame["method"].nunique() > 1 else []), "codec"]
        lines = []
        for row in frame.to_dict("records"):
            again = str(row["rescored"]) if row["rescored"] else ""
            metrics = [metric_cell(row[name], 1, row.get(f"{name}_std", math.nan)) for name in _METRIC_COLUMNS]
            lines.append([*(str(row[name]) for name in texts), f"{row['bytes']:,}", again, *metrics])
        titles = [("", name) for name in (*texts, "bytes", "rescored")] + [column_title(name) for name in _METRIC_COLUMNS]
        first = frame.iloc[0]
        notes = [f"{first['dataset']} {first['split']}, {first['n_images']:,} images; bytes of one vector"]
        return PrintedTable(lines, titles, len(texts), notes)

    def write(self, frame: pd.DataFrame, out: Path, request: TableRequest = EMPTY_TABLE_REQUEST) -> Path:
        if out.suffix in (".svg", ".png"):
            return write_chart_file(out, lambda axes: _draw_chart(axes, frame), self.name)
        return super().write(frame, out, request)


def _parse_metric(value: Any) -> Any:
    return SeedStatistics(**value) if isinstance(value, Mapping) else value


def _read_metrics(entry: Mapping[str, Any]) -> dict[str, float]:
    measured, row = ProtocolMetrics.model_validate(entry), dict[str, float]()
    for name in _METRIC_COLUMNS:
        metric = measured.metric(name)
        row[name], deviation = mean_and_std(metric)
        if isinstance(metric, SeedStatistics):
            row[f"{name}_std"] = deviation
        if measured.ci95:
            row[f"{name}_low"], row[f"{name}_high"] = measured.interval(name) or UNKNOWN_INTERVAL
    return row


def _draw_chart(axes: Axes, frame: pd.DataFrame) -> None:
    """Draw rsum against the bytes of a vector, with a filled point for each codec (a method of compression).

    An open point has the rsum after the best candidates of the codec were ranked again by the uncompressed vectors. The points
    of several models for one codec are drawn next to each other. Points with nearly the same rsum share a label.
    """
    methods = list(frame.groupby("method", sort=False))
    labels: list[tuple[str, float]] = []
    for number, (method, rows) in enumerate(methods):
        colour = _COLOURS[number % len(_COLOURS)]
        for row in rows.assign(bytes=rows["bytes"] * 2 ** (0.08 * (number - (len(methods) - 1) / 2))).to_dict("records"):
            face = "white" if row["rescored"] else colour
            low, high = row.get("rsum_low", row["rsum"]), row.get("rsum_high", row["rsum"])
            whisker = [[max(row["rsum"] - low, 0.0)], [max(high - row["rsum"], 0.0)]]
            axes.errorbar(row["bytes"], row["rsum"], whisker, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2, alpha=0.6)
            axes.plot(row["bytes"], row["rsum"], "o", color=colour, markerfacecolor=face, markersize=6)
            is_near = any(codec == row["codec"] and abs(rsum - row["rsum"]) < _SHARED_LABEL_DISTANCE for codec, rsum in labels)
            if not row["rescored"] and not is_near:
                labels.append((row["codec"], row["rsum"]))
                style: dict[str, Any] = {"fontsize": 8, "color": "#444444", "verticalalignment": "top"}
                axes.annotate(row["codec"], (row["bytes"], row["rsum"]), (7, -4), textcoords="offset points", **style)
        axes.plot([], [], "o", color=colour, label=to_printable_line(method))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="bytes of a stored vector", ylabel="rsum")
    first = frame.iloc[0]
    title = (
        f"{first['dataset']} {first['split']}: filled, ranked by the codes; open, the best rescored; whiskers, 95% over images"
    )
    axes.set_title(to_printable_line(title), fontsize=9)
    axes.grid(color="#e6e9ed")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
