"""Charts of a report as inline SVG.

A chart contains no names that a user chose. The HTML around the chart has these names, and escapes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from vse.eval.ranking.statistics import compute_random_hit_probability

RESULT_COLOURS = ("#2a6f97", "#d9731a")  # of the first and the second result, as in templates/report.html
_QUIET_COLOUR, _AXIS_COLOUR, _GRID_COLOUR, _INK_COLOUR = "#4a5560", "#8a949e", "#e6e9ed", "#1d2733"
_CSS_VARIABLES_BY_COLOUR = {
    RESULT_COLOURS[0]: "a",
    RESULT_COLOURS[1]: "b",
    _QUIET_COLOUR: "label",
    _AXIS_COLOUR: "axis",
    _GRID_COLOUR: "grid",
    _INK_COLOUR: "ink",
}
"""CSS variables by which the style of the report replaces colours in dark mode."""
_CHART_SIZE = (4.6, 2.7)  # inches; small, so that the text stays readable on a phone
_MATPLOTLIB_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _AXIS_COLOUR,
    "axes.labelcolor": _QUIET_COLOUR,
    "xtick.color": _QUIET_COLOUR,
    "ytick.color": _QUIET_COLOUR,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID_COLOUR,
    "axes.axisbelow": True,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


class Bars(NamedTuple):
    """The n bars of one result. ``lows`` and ``highs`` are the ends of the whiskers; NaN for a bar without a whisker."""

    values: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


class Curve(NamedTuple):
    """A line through the points ``x`` and ``y`` (n,), in the colour of the result with index ``result_index``.

    ``best_x`` is the x of the point with a ring; None draws no ring.
    """

    result_index: int
    x: Sequence[float]
    y: Sequence[float]
    best_x: float | None = None


def draw_recall_bars(
    label: str, groups: Sequence[tuple[str, Sequence[str]]], series: Sequence[Bars], chance: Sequence[float] = ()
) -> Markup:
    """Return a bar chart of recalls in percent, with the bars of all results next to each other.

    ``groups`` has the title of each group of bars and the names of its bars. ``series`` has the bars of each result.
    ``chance`` has, for each bar, the recall of a random order, drawn as a dotted line. ``label`` describes the chart for
    screen readers.
    """
    centers, middles, end = _compute_bar_positions([len(names) for _, names in groups])
    width = 0.8 / len(series)

    def draw(axes: Axes) -> None:
        for k, bars in enumerate(series):
            x = centers + (k - (len(series) - 1) / 2) * width
            values, ends = np.asarray(bars.values, float), np.asarray([bars.lows, bars.highs], float)
            axes.bar(x, values, width * 0.92, color=RESULT_COLOURS[k])
            if np.isfinite(ends).any():
                whiskers = np.nan_to_num(np.abs(ends - values))
                axes.errorbar(x, values, whiskers, fmt="none", ecolor=_INK_COLOUR, color=_INK_COLOUR, elinewidth=1, capsize=2)
            if len(centers) * len(series) <= 14:
                _write_values_above_bars(axes, x, np.fmax(values, ends[1]) + 1.5, values)
        if chance:
            axes.hlines(chance, centers - 0.46, centers + 0.46, colors=_INK_COLOUR, linestyles="dotted", linewidth=1.2)
        axes.set_xticks(centers, [name for _, names in groups for name in names])
        axes.tick_params(axis="x", length=0)
        for middle, (title, _) in zip(middles, groups, strict=True):
            axes.text(middle, -0.15, title, ha="center", va="top", transform=axes.get_xaxis_transform(), color=_QUIET_COLOUR)
        axes.set(xlim=(-0.6, end), ylim=(0, 109), yticks=range(0, 101, 20), ylabel="%")

    return _render_chart(label, draw, left=0.11, bottom=0.2)


def draw_training_curves(
    label: str,
    x_label: str,
    y_label: str,
    curves: Sequence[Curve],
    log: bool = False,
    warm_ups: Sequence[tuple[int, int]] = (),
    chance: float | None = None,
) -> Markup:
    """Return a chart of training curves, a line per seed. A ring marks the epoch whose weights were kept.

    ``log`` selects a logarithmic x axis. A warm-up is the first epochs of a training with another loss function. ``warm_ups``
    has pairs of the index of a result and the last epoch of its warm-up, which a dashed line marks. ``chance`` is the y of a
    random order, drawn as a dotted line; None draws no line.
    """

    def draw(axes: Axes) -> None:
        for curve in curves:
            colour = RESULT_COLOURS[curve.result_index]
            axes.plot(curve.x, curve.y, color=colour, linewidth=1.4, marker=".", markersize=4, alpha=0.85)
            for x, y in zip(curve.x, curve.y, strict=True):
                if x == curve.best_x:
                    axes.plot(x, y, "o", markersize=8, markerfacecolor="none", markeredgecolor=colour)
        for result, epochs in warm_ups:
            axes.axvline(epochs + 0.5, color=RESULT_COLOURS[result], linestyle="dashed", linewidth=1)
            across = axes.get_xaxis_transform()
            axes.text(epochs + 0.4, 0.99, "warm-up", ha="right", va="top", fontsize=8, color=_QUIET_COLOUR, transform=across)
        if chance is not None:
            axes.axhline(chance, color=_INK_COLOUR, linestyle="dotted", linewidth=1.2)
            along = axes.get_yaxis_transform()
            axes.text(0.99, chance, "chance", ha="right", va="bottom", fontsize=8, color=_QUIET_COLOUR, transform=along)
        axes.set(xlabel=x_label, ylabel=y_label)
        if log and all(x > 0 for curve in curves for x in curve.x):
            axes.set_xscale("log")
        elif not log:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(y=0.1)

    return _render_chart(label, draw, left=0.15, bottom=0.18)


def draw_rank_histogram(label: str, ranks: Sequence[NDArray[np.int64]], n_candidates: int, n_right: int = 1) -> Markup:
    """Return a chart of the share of queries by the rank of their first right answer, in bins of increasing width.

    ``ranks`` has the 0-based ranks (n_queries,) of each result; the chart has 1-based ranks. A dotted line marks the share in
    each bin for a random order, if each query has ``n_right`` right answers.
    """
    bins = list_rank_bin_ends(n_candidates)
    firsts = [1, *(last + 1 for last in bins[:-1])]
    names = [f"{a}" if a == b else f"{a:,}–{b:,}" for a, b in zip(firsts, bins, strict=True)]
    shares = [compute_shares_per_bin(of_model, bins) for of_model in ranks]
    width = 0.84 / len(ranks)
    chance = 100.0 * np.diff([compute_random_hit_probability(last, n_candidates, n_right) for last in bins], prepend=0.0)

    def draw(axes: Axes) -> None:
        for k, heights in enumerate(shares):
            x = np.arange(len(names)) + (k - (len(ranks) - 1) / 2) * width
            axes.bar(x, heights, width * 0.94, color=RESULT_COLOURS[k])
            if len(ranks) == 1:
                _write_values_above_bars(axes, x, heights + heights.max() * 0.015, heights)
        places = np.arange(len(names))
        axes.hlines(chance, places - 0.46, places + 0.46, colors=_INK_COLOUR, linestyles="dotted", linewidth=1.2)
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set(ylim=(0, 1.12 * max(heights.max() for heights in [*shares, chance])), ylabel="% of queries")

    return _render_chart(label, draw, left=0.12, bottom=0.27)


def compute_shares_per_bin(ranks: NDArray[np.int64], bins: Sequence[int]) -> NDArray[np.float64]:
    """Return the percentage of 0-based ``ranks`` (n_queries,) in each bin. ``bins`` has the last 1-based rank of each bin."""
    counts = np.bincount(np.searchsorted(bins, ranks + 1), minlength=len(bins))
    return 100.0 * counts / len(ranks)


def list_rank_bin_ends(n_candidates: int) -> list[int]:
    """Return the last 1-based rank of each bin: 1, 5, 10, 20, 50, 100, 200, 500, ..., and the number of candidates."""
    steps = [1, 5, 10, *(k * 10**n for n in range(1, 9) for k in (2, 5, 10))]
    return [*(step for step in steps if step < n_candidates), max(1, n_candidates)]


def _compute_bar_positions(sizes: Sequence[int]) -> tuple[NDArray[np.float64], list[float], float]:
    """Return the centre of each bar, the middle of each group, and the end of the axis. Group k has ``sizes[k]`` bars."""
    centers: list[float] = []
    middles: list[float] = []
    start = 0.0
    for size in sizes:
        centers += [start + k for k in range(size)]
        middles.append(start + (size - 1) / 2)
        start += size + 0.6
    return np.asarray(centers), middles, start - 1.0


def _write_values_above_bars(axes: Axes, x: NDArray[Any], y: NDArray[Any], values: NDArray[Any]) -> None:
    for position, height, value in zip(x, y, values, strict=True):
        if not np.isnan(value):
            axes.text(position, height, f"{value:.1f}", ha="center", va="bottom", fontsize=7)


def _render_chart(label: str, draw: Callable[[Axes], None], left: float, bottom: float) -> Markup:
    """Return the chart that ``draw`` draws on its axes, as SVG. Equal charts have equal bytes.

    The margins ``left`` and ``bottom`` are shares of the width and the height.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        matplotlib.rcParams.update({**_MATPLOTLIB_SETTINGS, "svg.hashsalt": label})
        figure = Figure(figsize=_CHART_SIZE)
        axes = figure.add_subplot()
        draw(axes)
        figure.subplots_adjust(left=left, right=0.985, top=0.97, bottom=bottom)
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    return _inline_svg(text.getvalue(), label)


def _inline_svg(svg: str, label: str) -> Markup:
    """Return an SVG of matplotlib in a form for HTML: with a label, but without the XML prolog and unused ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    for colour, variable in _CSS_VARIABLES_BY_COLOUR.items():  # the style sheet of the report may replace these colours
        svg = svg.replace(colour, f"var(--{variable}, {colour})")
    svg = re.sub(r' id="([^"]*)"', lambda attribute: attribute[0] if attribute[1] in used else "", svg)
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1))
