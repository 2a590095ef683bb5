"""The picture of a ladder: rsum against what it costs, a point per row, the best trade-offs joined by a line."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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

from vse.eval.tables.ladder import BEST
from vse.eval.tables.summary import MARKER
from vse.pipeline.errors import UserError
from vse.pipeline.files import write_bytes
from vse.pipeline.plain_text import printable

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
