"""The table and the chart ``ladder``, which compare combinations of features and models by metrics and costs."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from vse.eval.files.results import Result, check_consistent_data, drop_comparisons, read_result
from vse.eval.options import COST_NAMES, TableRequest
from vse.eval.tables.summary import BEST_GROUP_COLUMN, GROUP_COLUMN, method_name, summarise_results
from vse.eval.tables.table import (
    EMPTY_TABLE_REQUEST,
    PrintedTable,
    ResultGroups,
    TableKind,
    column_title,
    metric_cell,
    write_chart_file,
)
from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.presets.schema import WORDS_NAME, parse_composed_name

log = logging.getLogger(__name__)
_PROTOCOL = "full"
_METRIC_COLUMNS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum")
_COMPARISON_KEYS = ["dataset", "split", "protocol"]  # only rows with equal values in these columns are compared
BEST_COLUMN = "best"
CORRECTION_COLUMN = "correction"  # the method of ``vse-eval --correct``; blank without a correction


def build_ladder(results: Sequence[Path], cost: str = "total_s", family: str | None = None) -> pd.DataFrame:
    """Return the table ``ladder``: a row per result with features, metrics and costs, the highest rsum first.

    The metrics are from the complete split. Columns with ``_low`` and ``_high`` have their 95% intervals. With several seeds,
    columns with ``_std`` have standard deviations. ``cost`` is one of :data:`vse.eval.options.COST_NAMES`. The column ``best``
    is ``yes`` for rows on the Pareto front of rsum against this cost. Each data set and split has its own front, and results
    with corrected scores (:mod:`vse.eval.protocols.correction`) have a further one. The column ``group`` has letters: results
    that share a letter do not differ significantly in rsum. ``family`` names the correction of p-values for the letters, such
    as ``holm``; None leaves ``group`` out. Raises UserError if a result lacks metrics of the complete split.
    """
    paths = drop_comparisons(results)
    if not paths:
        raise UserError("no result among the files, so there is no ladder")
    check_consistent_data([(path, read_result(path)) for path in paths])
    groups = None
    if family is not None:
        from vse.eval.tables.groups import group_results  # lazy: imports torch

        groups = group_results(paths, family)
    table = pd.concat([_build_ladder_row(path, groups) for path in paths], ignore_index=True)
    table[BEST_COLUMN] = ""
    for _, rows in table.groupby([*_COMPARISON_KEYS, table[CORRECTION_COLUMN] != ""]):
        front = pareto_front(rows[cost].to_numpy(float), rows["rsum"].to_numpy(float))
        table.loc[rows.index[front], BEST_COLUMN] = "yes"
    if not (table[BEST_COLUMN] == "yes").any():
        log.warning("no result has the cost %s, so no trade-off is marked; earlier versions recorded no costs", cost)
    table = table.sort_values(
        [*_COMPARISON_KEYS, "rsum"], ascending=[True, True, True, False], kind="stable", ignore_index=True
    )
    table.attrs["note"] = "" if groups is None else groups.note
    return table


def pareto_front(cost: NDArray[np.float64], value: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask (n,) of the points on the Pareto front. A point has a number in ``cost`` (n,) and one in ``value`` (n,).

    A point is not on the front if another point has at most its cost and at least its value, and is better in one of them.
    Points with a NaN are never on the front. Two equal points are either both on the front, or both not.
    """
    known = np.isfinite(cost) & np.isfinite(value)
    front = np.zeros(len(cost), bool)
    best, best_cost = -math.inf, math.inf
    for k in np.lexsort((-value, cost)):  # by ascending cost; at equal cost, the highest value first
        if known[k] and (value[k] > best or (value[k] == best and cost[k] == best_cost)):
            front[k] = True
            best, best_cost = value[k], cost[k]
    return front


class LadderTable(TableKind):
    """``vse-table ladder``: a table with a row per result and its costs, or a chart (``.svg``, ``.png``)."""

    first_columns = ("method", "captions", "images", "experiment", "dataset", "split", "protocol", "total_s", "best")
    file_suffixes = (".csv", ".tex", ".svg", ".png")
    option_names = frozenset({"cost", "family"})

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        return build_ladder(request.results, request.cost or "total_s", request.family)

    def build_printed_table(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        return build_printed_ladder(frame, request.cost or "total_s")

    def write(self, frame: pd.DataFrame, out: Path, request: TableRequest = EMPTY_TABLE_REQUEST) -> Path:
        if out.suffix in (".svg", ".png"):
            return write_ladder_chart(frame, out, request.cost or "total_s")
        return super().write(frame, out, request)


def build_printed_ladder(table: pd.DataFrame, cost: str = "total_s") -> PrintedTable:
    """Return the printed columns of the table ``ladder``; a star marks rows on the Pareto front of rsum against ``cost``."""
    texts = ["method", "captions", "images", *(name for name in _COMPARISON_KEYS if table[name].nunique() > 1)]
    has_groups = GROUP_COLUMN in table
    lines = []
    for row in table.to_dict("records"):
        metrics = [metric_cell(row[name], 1, row.get(f"{name}_std", math.nan)) for name in _METRIC_COLUMNS]
        if row.get(BEST_GROUP_COLUMN):
            metrics[-1] = f"**{metrics[-1]}**"
        metrics += [row[GROUP_COLUMN]] if has_groups else []
        costs = [cost_cell(row[name]) for name in COST_NAMES]
        lines.append(["*" if row[BEST_COLUMN] else "", *(str(row[name]) for name in texts), *metrics, *costs])
    titles = [("", name) for name in ("", *texts)] + [column_title(name) for name in _METRIC_COLUMNS]
    titles += [("", GROUP_COLUMN)] if has_groups else []
    titles += [("", name.replace("_", " ").replace("mb", "MB")) for name in COST_NAMES]
    same = ", ".join(f"{name} {table[name].iloc[0]}" for name in _COMPARISON_KEYS if table[name].nunique() == 1)
    notes = [same, f"* best trade-off: no other row has a higher rsum at the same or a lower {cost}"]
    if CORRECTION_COLUMN in table and table[CORRECTION_COLUMN].astype(bool).nunique() > 1:
        notes.append("plain rows are compared with plain rows, and corrected rows with corrected rows")
    notes.append(table.attrs.get("note", ""))
    return PrintedTable(lines, titles, 1 + len(texts), notes)


def cost_cell(value: float) -> str:
    """Return a number of seconds or MB as a text with at least three significant digits; blank for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _build_ladder_row(path: Path, groups: ResultGroups | None) -> pd.DataFrame:
    result = read_result(path)
    if _PROTOCOL not in result.protocols:
        raise UserError(f"{path}: has no metrics of the whole split, but a ladder needs them (vse-eval --protocol full)")
    rows = summarise_results([(path, result)], groups)
    row = {str(name): value for name, value in rows[rows["protocol"] == _PROTOCOL].iloc[0].to_dict().items()}
    described = {name: row.pop(name) for name in [*_COMPARISON_KEYS, "n_images", "n_captions", "seeds", "run", "settings"]}
    metrics = {
        name: row[name]
        for name in row
        if name.removesuffix("_low").removesuffix("_high").removesuffix("_std") in _METRIC_COLUMNS
    }
    images, captions = _get_feature_names(result)
    texts = {"method": method_name(result), "captions": captions, "images": images, "experiment": row["experiment"]}
    correction = result.correction["method"] if result.correction else ""
    letters = {name: row[name] for name in (GROUP_COLUMN, BEST_GROUP_COLUMN) if name in row}
    return pd.DataFrame([{**texts, CORRECTION_COLUMN: correction, **described, **metrics, **letters, **result_costs(result)}])


def _get_feature_names(result: Result) -> tuple[str, str]:
    config = result.config
    composed = parse_composed_name(result.experiment)
    images = config.get("backbone") or config.get("feature") or (composed.feature if composed else "")
    captions = config.get("caption_feature") or (composed.caption_feature if composed else None)
    if not config and not composed:
        return "", ""
    return str(images), str(captions or WORDS_NAME)


def result_costs(result: Result) -> dict[str, float]:
    """Return the costs of a result in a dict; unknown costs are NaN.

    Costs with ``_s`` are in seconds, costs with ``_mb`` in MB. ``extraction_s`` and ``cache_mb`` are totals over the feature
    caches. ``train_s``, ``eval_s`` and ``model_mb`` are means over the seeds. ``total_s`` is the sum of the other costs in
    seconds.
    """
    costs = result.provenance.get("costs")
    costs = [one if isinstance(one, Mapping) else {} for one in costs] if isinstance(costs, list) and costs else [{}]
    n_seeds = len(result.seeds)
    evaluation = _parse_cost(result.provenance.get("evaluation_s"))
    spent = {
        "extraction_s": _sum_over_caches(costs, "extraction_s"),
        "train_s": sum(_parse_cost(one.get("train_s")) for one in costs) / n_seeds,
        "eval_s": (sum(_parse_cost(one.get("embed_s")) for one in costs) + evaluation) / n_seeds,
    }
    sizes = {
        "cache_mb": _sum_over_caches(costs, "cache_mb"),
        "model_mb": sum(_parse_cost(one.get("model_mb")) for one in costs) / n_seeds,
    }
    return {**spent, "total_s": sum(spent.values()), **sizes}


def _sum_over_caches(costs: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the sum of a cost over all feature caches. A cache that several training runs share counts once."""
    by_feature: dict[str, float] = {}
    for one in costs:
        of_caches = one.get(name)
        for feature, value in of_caches.items() if isinstance(of_caches, Mapping) else [("", None)]:
            by_feature[str(feature)] = _parse_cost(value)
    return sum(by_feature.values())


def _parse_cost(value: object) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    return float(value) if known else math.nan  # type: ignore[arg-type]


_IMAGE_FEATURE_COLOURS = ("#2a6f97", "#d9731a", "#4f772d", "#7b2d8b", "#b5892e", "#5c677d", "#a4243b", "#1b998b")
_CAPTION_FEATURE_MARKERS = "osD^vP*X"
_INK_COLOUR, _QUIET_COLOUR = "#1d2733", "#8a949e"
_COST_UNITS = {"s": "seconds", "mb": "MB"}
_COST_TITLES = {
    "extraction": "extraction of both features",
    "train": "training of a seed",
    "eval": "evaluation of a seed",
    "total": "extraction, training and evaluation",
    "cache": "feature caches",
    "model": "weights",
}
_MAX_NAME_LENGTH = 40  # characters
_RIGHT_EDGE = 0.85  # share of the width beyond which a name is written to the left of its point


def write_ladder_chart(table: pd.DataFrame, out: Path, cost: str = "total_s") -> Path:
    """Write the chart of the table ``ladder`` as ``.svg`` or ``.png``, and return ``out``.

    Equal tables give files with equal bytes. Whiskers are 95% intervals over images or, without intervals, standard deviations
    over seeds. Rows with an unknown cost are left out. Raises UserError if no row is left, or if the rows have several data
    sets, splits or protocols.
    """
    several = next((name for name in ("dataset", "split", "protocol") if table[name].nunique() > 1), None)
    if several is not None:
        raise UserError(f"{out}: the results have several {several}s; draw one chart for each")
    known = table[np.isfinite(table[cost]) & np.isfinite(table["rsum"])]
    if known.empty:
        raise UserError(f"{out}: no result has the cost {cost}, so there is nothing to draw; write a .csv instead")
    return write_chart_file(out, lambda axes: _draw_chart(axes, known, cost), "ladder")


def _draw_chart(axes: Axes, table: pd.DataFrame, cost: str) -> None:
    image_features, caption_features = (list(dict.fromkeys(table[name])) for name in ("images", "captions"))
    _draw_points(axes, table, cost, image_features, caption_features)
    _draw_names(axes, table, cost)
    name, _, unit = cost.rpartition("_")
    axes.set(xlabel=f"{_COST_TITLES[name]}, {_COST_UNITS[unit]}", ylabel="rsum")
    first = table.iloc[0]
    title = f"{first['dataset']} {first['split']}: filled and joined, the best trade-offs; whiskers, 95% over images"
    axes.set_title(to_printable_line(title), fontsize=9, color=_INK_COLOUR)
    axes.grid(color="#e6e9ed")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _draw_legend(axes, image_features, caption_features)


def _draw_points(axes: Axes, table: pd.DataFrame, cost: str, image_features: list[str], caption_features: list[str]) -> None:
    """Draw a point with a whisker for each row, and a line through the points on the Pareto front.

    The colour of a point stands for the image feature, and its marker for the caption feature, in the order of the lists.
    """
    front = table[table[BEST_COLUMN] == "yes"].sort_values(cost)
    axes.plot(front[cost], front["rsum"], color=_QUIET_COLOUR, linewidth=1, zorder=1)
    for row in table.to_dict("records"):
        colour = _IMAGE_FEATURE_COLOURS[image_features.index(row["images"]) % len(_IMAGE_FEATURE_COLOURS)]
        marker = _CAPTION_FEATURE_MARKERS[caption_features.index(row["captions"]) % len(_CAPTION_FEATURE_MARKERS)]
        low, high = _get_whisker(row)
        whisker = [[max(row["rsum"] - low, 0.0)], [max(high - row["rsum"], 0.0)]]
        axes.errorbar(row[cost], row["rsum"], whisker, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2, alpha=0.6)
        face = colour if row[BEST_COLUMN] else "white"
        axes.plot(row[cost], row["rsum"], marker, color=colour, markerfacecolor=face, markersize=6, zorder=2)
    low, high = table[cost].min(), table[cost].max()
    if 0 < 10 * low < high:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.autoscale_view()


def _draw_names(axes: Axes, table: pd.DataFrame, cost: str) -> None:
    """Write the name of the method next to each point: to the right, or to the left of a point near the right edge."""
    for row in table.to_dict("records"):
        size, colour = (8, _INK_COLOUR) if row[BEST_COLUMN] else (6, _QUIET_COLOUR)
        point = (row[cost], row["rsum"])
        across = axes.transLimits.transform(axes.transScale.transform(point))[0]  # 0 at the left, 1 at the right
        offset, side = ((-5, 3), "right") if across > _RIGHT_EDGE else ((5, 3), "left")  # names must not overlap the legend
        style: dict[str, Any] = {"fontsize": size, "color": colour, "horizontalalignment": side}
        axes.annotate(_shorten_name(row["method"]), point, offset, textcoords="offset points", **style)


def _draw_legend(axes: Axes, image_features: list[str], caption_features: list[str]) -> None:
    image_entries = [
        Line2D(
            [],
            [],
            marker="s",
            linestyle="",
            color=_IMAGE_FEATURE_COLOURS[k % len(_IMAGE_FEATURE_COLOURS)],
            label=_shorten_name(name) or "?",
        )
        for k, name in enumerate(image_features)
    ]
    caption_entries = [
        Line2D(
            [],
            [],
            marker=_CAPTION_FEATURE_MARKERS[k % len(_CAPTION_FEATURE_MARKERS)],
            linestyle="",
            color=_QUIET_COLOUR,
            label=_shorten_name(name) or "?",
        )
        for k, name in enumerate(caption_features)
    ]
    style = {"fontsize": 8, "frameon": False, "alignment": "left"}
    image_legend = axes.legend(handles=image_entries, title="images", loc="lower left", bbox_to_anchor=(1.0, 0.5), **style)
    axes.legend(handles=caption_entries, title="captions", loc="upper left", bbox_to_anchor=(1.0, 0.48), **style)
    axes.add_artist(image_legend)  # the second call of legend removed the first legend


def _get_whisker(row: Mapping[Hashable, Any]) -> tuple[float, float]:
    low, high = row.get("rsum_low", np.nan), row.get("rsum_high", np.nan)
    if np.isfinite(low) and np.isfinite(high):
        return low, high
    spread = row.get("rsum_std", np.nan)
    spread = spread if np.isfinite(spread) else 0.0
    return row["rsum"] - spread, row["rsum"] + spread


def _shorten_name(name: str) -> str:
    text = to_printable_line(name)
    return text if len(text) <= _MAX_NAME_LENGTH else f"{text[: _MAX_NAME_LENGTH - 1]}…"
