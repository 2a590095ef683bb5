"""The ladder: results side by side with what each cost, and the best trade-offs marked.

The picture of a ladder: rsum against what it costs, a point per row, the best trade-offs joined by a line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from vse.eval.defaults import LADDER_COSTS
from vse.eval.files.results import Result, check_one_dataset, drop_comparisons, read_result
from vse.eval.tables.summary import method_of, summary
from vse.eval.tables.table import MARKER, NO_REQUEST, Cells, TableKind, TableRequest, metric_cell, title_of
from vse.pipeline.errors import UserError, printable
from vse.pipeline.files.writing import write_bytes
from vse.pipeline.presets.schema import WORDS, parse_composed_name

log = logging.getLogger(__name__)
_PROTOCOL = "full"
_METRICS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum")
_SAME = ["dataset", "split", "protocol"]  # of rows that are compared
BEST = "best"


def ladder(results: Sequence[Path], cost: str = "total_s") -> pd.DataFrame:
    """A row per result, the highest rsum first: what was read, the metrics, the cost, and whether it is a best trade-off.

    Metrics are those of the whole split, with 95% intervals over its images (``_low``, ``_high``) and, with several seeds,
    the standard deviation over these (``_std``). Of the costs, in seconds and in MB, ``extraction_s`` is of both caches and
    ``train_s`` and ``eval_s`` are of one seed, the mean of all; ``total_s`` is their sum. Unknown ones are NaN. ``best`` is
    ``yes`` for rows on the Pareto front of rsum against ``cost``, one of :data:`vse.eval.defaults.LADDER_COSTS`, among
    those of one data set and split. :class:`UserError` if a result has no metrics of the whole split.
    """
    paths = drop_comparisons(results)
    if not paths:
        raise UserError("no result among the files, so there is no ladder")
    check_one_dataset([(path, read_result(path)) for path in paths])
    table = pd.concat([_row(path) for path in paths], ignore_index=True)
    table[BEST] = ""
    for _, rows in table.groupby(_SAME):
        front = pareto_front(rows[cost].to_numpy(float), rows["rsum"].to_numpy(float))
        table.loc[rows.index[front], BEST] = "yes"
    if not (table[BEST] == "yes").any():
        log.warning("no result says its %s, so no trade-off is marked; runs of earlier versions noted no costs", cost)
    return table.sort_values([*_SAME, "rsum"], ascending=[True, True, True, False], kind="stable", ignore_index=True)


def pareto_front(cost: NDArray[np.float64], value: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which points no other one beats: none costs at most as much and is worth at least as much, and is better in one.

    ``cost`` and ``value`` are (n,); a point of which one is NaN is not on the front and beats nobody. Equal points are on the
    front together.
    """
    known = np.isfinite(cost) & np.isfinite(value)
    front = np.zeros(len(cost), bool)
    best, best_cost = -math.inf, math.inf
    for k in np.lexsort((-value, cost)):  # the cheapest first, of equal cost the most valuable first
        if known[k] and (value[k] > best or (value[k] == best and cost[k] == best_cost)):
            front[k] = True
            best, best_cost = value[k], cost[k]
    return front


class LadderTable(TableKind):
    """``vse-table ladder``: a row for each result with its costs, or a picture (``.svg``, ``.png``)."""

    columns = ("method", "captions", "images", "experiment", "dataset", "split", "protocol", "total_s", "best")
    suffixes = (".csv", ".tex", ".svg", ".png")
    options = frozenset({"cost"})

    def frame(self, request: TableRequest) -> pd.DataFrame:
        """Return the table of :func:`ladder`."""
        return ladder(request.results, request.cost or "total_s")

    def cells(self, frame: pd.DataFrame, request: TableRequest) -> Cells:
        """Return the metrics and costs of each row, with a star for the best trade-offs."""
        return ladder_cells(frame, request.cost or "total_s")

    def write(self, frame: pd.DataFrame, out: Path, request: TableRequest = NO_REQUEST) -> Path:
        """Write the table, or the picture of rsum against the cost; returns ``out``."""
        if out.suffix in (".svg", ".png"):
            return write_chart(frame, out, request.cost or "total_s")
        return super().write(frame, out, request)


def ladder_cells(table: pd.DataFrame, cost: str = "total_s") -> Cells:
    """What is shown of a ladder to people: the best trade-offs have a star."""
    texts = ["method", "captions", "images", *(name for name in _SAME if table[name].nunique() > 1)]
    lines = []
    for row in table.to_dict("records"):
        metrics = [metric_cell(row[name], 1, row.get(f"{name}_std", math.nan)) for name in _METRICS]
        costs = [cost_cell(row[name]) for name in LADDER_COSTS]
        lines.append(["*" if row[BEST] else "", *(str(row[name]) for name in texts), *metrics, *costs])
    titles = [("", name) for name in ("", *texts)] + [title_of(name) for name in _METRICS]
    titles += [("", name.replace("_", " ").replace("mb", "MB")) for name in LADDER_COSTS]
    same = ", ".join(f"{name} {table[name].iloc[0]}" for name in _SAME if table[name].nunique() == 1)
    notes = [same, f"* no other row has a higher rsum for as much or less {cost}"]
    return Cells(lines, titles, 1 + len(texts), notes)


def cost_cell(value: float) -> str:
    """A number of seconds or MB as a table prints it, to three digits; blank if it is not known."""
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _row(path: Path) -> pd.DataFrame:
    """The row of one result."""
    result = read_result(path)
    if _PROTOCOL not in result.protocols:
        raise UserError(f"{path}: has no metrics of the whole split, which a ladder compares (vse-eval --protocol full)")
    rows = summary([path])
    row = {str(name): value for name, value in rows[rows["protocol"] == _PROTOCOL].iloc[0].to_dict().items()}
    described = {name: row.pop(name) for name in [*_SAME, "n_images", "n_captions", "seeds", "run", "settings"]}
    metrics = {
        name: row[name] for name in row if name.removesuffix("_low").removesuffix("_high").removesuffix("_std") in _METRICS
    }
    images, captions = _read_by(result)
    named = {"method": method_of(result), "captions": captions, "images": images, "experiment": row["experiment"]}
    return pd.DataFrame([{**named, **described, **metrics, **costs_of(result)}])


def _read_by(result: Result) -> tuple[str, str]:
    """The features of images and of captions that a model reads."""
    config = result.provenance.get("config")
    config = config if isinstance(config, Mapping) else {}
    made = parse_composed_name(result.experiment)
    images = config.get("backbone") or config.get("feature") or (made.feature if made else "")
    captions = config.get("caption_feature") or (made.caption_feature if made else None)
    if not config and not made:
        return "", ""
    return str(images), str(captions or WORDS)


def costs_of(result: Result) -> dict[str, float]:
    """The costs of a result by their names; what is not known is NaN. Those of a seed are means over all seeds."""
    costs = result.provenance.get("costs")
    costs = [one if isinstance(one, Mapping) else {} for one in costs] if isinstance(costs, list) and costs else [{}]
    n_seeds = len(result.seeds)
    evaluation = _number(result.provenance.get("evaluation_s"))
    spent = {
        "extraction_s": _of_caches(costs, "extraction_s"),
        "train_s": sum(_number(one.get("train_s")) for one in costs) / n_seeds,
        "eval_s": (sum(_number(one.get("embed_s")) for one in costs) + evaluation) / n_seeds,
    }
    sizes = {
        "cache_mb": _of_caches(costs, "cache_mb"),
        "model_mb": sum(_number(one.get("model_mb")) for one in costs) / n_seeds,
    }
    return {**spent, "total_s": sum(spent.values()), **sizes}


def _of_caches(costs: Sequence[Mapping[str, Any]], name: str) -> float:
    """The sum over the caches that are read, each counted once, by the members of an ensemble, too."""
    by_feature: dict[str, float] = {}
    for one in costs:
        of_caches = one.get(name)
        for feature, value in of_caches.items() if isinstance(of_caches, Mapping) else [("", None)]:
            by_feature[str(feature)] = _number(value)
    return sum(by_feature.values())


def _number(value: object) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    return float(value) if known else math.nan  # type: ignore[arg-type]


_COLOURS = ("#2a6f97", "#d9731a", "#4f772d", "#7b2d8b", "#b5892e", "#5c677d", "#a4243b", "#1b998b")  # of features of images
_MARKERS = "osD^vP*X"  # of features of captions
_INK, _QUIET = "#1d2733", "#8a949e"
_SIZE = (8.0, 5.2)  # inches
_AXES = {"_s": "seconds", "_mb": "MB"}
_TITLES = {
    "extraction": "extraction of both features",
    "train": "training of a seed",
    "eval": "evaluation of a seed",
    "total": "extraction, training and evaluation",
    "cache": "caches of features",
    "model": "weights",
}
_METADATA = {"svg": {"Creator": MARKER, **dict.fromkeys(("Date", "Format", "Type"))}, "png": {"Software": MARKER}}
_LONGEST = 40  # characters of a name
_RIGHT = 0.85  # of the width, from which on a name stands left of its point


def write_chart(table: pd.DataFrame, out: Path, cost: str = "total_s") -> Path:
    """Write the picture of a ladder as ``.svg`` or ``.png``; returns ``out``. The same rows make the same bytes.

    Whiskers are 95% intervals over images, or without these the standard deviation over seeds. Rows of unknown cost are not
    drawn; :class:`UserError` if none is left, or if the rows are of several data sets or splits.
    """
    several = next((name for name in ("dataset", "split", "protocol") if table[name].nunique() > 1), None)
    if several is not None:
        raise UserError(f"{out}: the results are of several {several}s, which one picture cannot compare; draw each by itself")
    known = table[np.isfinite(table[cost]) & np.isfinite(table["rsum"])]
    if known.empty:
        raise UserError(f"{out}: no result says its {cost}, so there is nothing to draw; a .csv has all else")
    suffix = out.suffix.removeprefix(".")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ladder", "font.size": 9})
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, known, cost)
        for text in figure.findobj(matplotlib.text.Text):
            text.set_parse_math(False)  # names are data
        content = BytesIO()
        figure.savefig(content, format=suffix, dpi=150, metadata=_METADATA[suffix])
    return write_bytes(out, content.getvalue())


def _draw(axes: Axes, table: pd.DataFrame, cost: str) -> None:
    images, captions = (list(dict.fromkeys(table[name])) for name in ("images", "captions"))
    front = table[table[BEST] == "yes"].sort_values(cost)
    axes.plot(front[cost], front["rsum"], color=_QUIET, linewidth=1, zorder=1)
    for row in table.to_dict("records"):
        colour = _COLOURS[images.index(row["images"]) % len(_COLOURS)]
        marker = _MARKERS[captions.index(row["captions"]) % len(_MARKERS)]
        low, high = _ends(row)
        whisker = [[max(row["rsum"] - low, 0.0)], [max(high - row["rsum"], 0.0)]]
        axes.errorbar(row[cost], row["rsum"], whisker, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2, alpha=0.6)
        face = colour if row[BEST] else "white"
        axes.plot(row[cost], row["rsum"], marker, color=colour, markerfacecolor=face, markersize=6, zorder=2)
    low, high = table[cost].min(), table[cost].max()
    if 0 < 10 * low < high:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.autoscale_view()
    for row in table.to_dict("records"):
        size, colour = (8, _INK) if row[BEST] else (6, _QUIET)
        where = (row[cost], row["rsum"])
        across = axes.transLimits.transform(axes.transScale.transform(where))[0]  # 0 at the left, 1 at the right
        offset, side = ((-5, 3), "right") if across > _RIGHT else ((5, 3), "left")  # names do not run into the legend
        look: dict[str, Any] = {"fontsize": size, "color": colour, "horizontalalignment": side}
        axes.annotate(_short(row["method"]), where, offset, textcoords="offset points", **look)
    what, _, unit = cost.rpartition("_")
    axes.set(xlabel=f"{_TITLES[what]}, {_AXES['_' + unit]}", ylabel="rsum")
    facts = table.iloc[0]
    title = f"{facts['dataset']} {facts['split']}: filled and joined, the best trade-offs; whiskers, 95% over images"
    axes.set_title(printable(title), fontsize=9, color=_INK)
    axes.grid(color="#e6e9ed")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, images, captions)


def _legend(axes: Axes, images: list[str], captions: list[str]) -> None:
    """Colours are features of images, shapes those of captions."""
    of_images = [
        Line2D([], [], marker="s", linestyle="", color=_COLOURS[k % len(_COLOURS)], label=_short(name) or "?")
        for k, name in enumerate(images)
    ]
    of_captions = [
        Line2D([], [], marker=_MARKERS[k % len(_MARKERS)], linestyle="", color=_QUIET, label=_short(name) or "?")
        for k, name in enumerate(captions)
    ]
    look = {"fontsize": 8, "frameon": False, "alignment": "left"}
    of_axes = axes.legend(handles=of_images, title="images", loc="lower left", bbox_to_anchor=(1.0, 0.5), **look)
    axes.legend(handles=of_captions, title="captions", loc="upper left", bbox_to_anchor=(1.0, 0.48), **look)
    axes.add_artist(of_axes)  # which the second one replaced


def _ends(row: Mapping[Hashable, Any]) -> tuple[float, float]:
    """The ends of a row's whisker."""
    low, high = row.get("rsum_low", np.nan), row.get("rsum_high", np.nan)
    if np.isfinite(low) and np.isfinite(high):
        return low, high
    spread = row.get("rsum_std", np.nan)
    spread = spread if np.isfinite(spread) else 0.0
    return row["rsum"] - spread, row["rsum"] + spread


def _short(name: str) -> str:
    text = printable(name)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
