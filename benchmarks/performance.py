"""The tables and plots of docs/performance.md, from the CSVs of benchmarks/results/.

Writes docs/results/performance.csv and .svg, growth.svg, and the page's blocks between ``<!-- generated: NAME -->`` and
``<!-- generated: end -->``; the rest of the page is written by hand. benchmarks/works.py says which CSV, row and column each
number comes from. What a CSV lacks is shown as a dash, and named on stderr.

    python -m benchmarks.performance
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike

from benchmarks.millions import millions_block
from benchmarks.works import machine_of, measured, ratio, table_of

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE = ROOT / "docs" / "performance.md"
_BLUE, _ORANGE, _GREEN, _INK, _QUIET = "#2a6f97", "#d9731a", "#4f772d", "#1d2733", "#8a949e"
_DASH = "–"


def number(value: float) -> str:
    """Three digits, and a dash for what is not known."""
    if np.isnan(value):
        return _DASH
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def work_block(table: pd.DataFrame) -> str:
    """The table of works as Markdown."""
    lines = [
        "| work | unit | before | now | peer | limit | now / limit | to reach | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table.to_dict("records"):
        named = [
            f"{number(row[key])}{f' ({row[of]})' if row[of] else ''}"
            for key, of in (("peer", "peer_is"), ("limit", "limit_is"))
        ]
        goal = f"{number(row['to_reach'])}{' (' + row['to_reach_is'] + ')' if row['to_reach_is'] else ''}"
        shown = [
            row["work"],
            row["unit"],
            number(row["before"]),
            f"**{number(row['now'])}**",
            *named,
            number(row["times_limit"]),
            goal,
        ]
        lines.append(f"| {' | '.join(shown)} | {_reached(row)} |")
    return "\n".join([*lines, "", _measured_on(table)])


def _named(value: float, name: str) -> str:
    return f"{number(value)} ({name})" if name else number(value)


def _reached(row: Mapping[Any, Any]) -> str:
    over = ratio(row["unit"], row["now"], row["to_reach"])
    return "" if np.isnan(over) else "reached" if over <= 1 else "not reached"


def _measured_on(table: pd.DataFrame) -> str:
    """The machine of most rows, and the rows of others."""
    machines = table[table["now"].notna()].groupby("machine")["work"].apply(list)
    most = max(machines.index, key=lambda machine: len(machines[machine]), default="")
    others = [f"on {machine}: {'; '.join(works)}" for machine, works in machines.items() if machine != most]
    return "; ".join([f"Measured on {most}, without a GPU", *others]) + "."


def draw_works(axes: Axes, table: pd.DataFrame) -> None:
    """A line per work, in multiples of its limit, or of what is to be reached if it has none; left is better."""
    table = table[np.isfinite(table["now"])]
    for place, row in enumerate(table.to_dict("records")):
        one = row["limit"] if np.isfinite(row["limit"]) else row["to_reach"]
        at = {key: ratio(row["unit"], row[key], one) for key in ("before", "now", "peer", "to_reach")}
        axes.plot([1, at["now"]], [place, place], color=_BLUE, linewidth=1.2, alpha=0.5, zorder=1)
        axes.plot(at["to_reach"], place, "|", color=_GREEN, markersize=16, markeredgewidth=2, zorder=2)
        axes.plot(at["before"], place, "o", color=_QUIET, markerfacecolor="white", markersize=7, zorder=3)
        axes.plot(at["peer"], place, "D", color=_ORANGE, markersize=6, zorder=3)
        axes.plot(at["now"], place, "o", color=_BLUE, markersize=8, zorder=4)
    labels = [
        f"{w.replace('`', '')}{'' if np.isfinite(x) else ' *'}" for w, x in zip(table["work"], table["limit"], strict=True)
    ]
    axes.set_yticks(range(len(table)), labels)
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1, color=_INK, linewidth=1)
    axes.set_xlabel("times the limit (*: no limit, times what is to be reached); left is better")
    looks = [
        ("o", _BLUE, _BLUE, "now"),
        ("o", _QUIET, "white", "before"),
        ("D", _ORANGE, _ORANGE, "peer"),
        ("|", _GREEN, _GREEN, "to reach"),
    ]
    handles = [
        Line2D(
            [],
            [],
            marker=m,
            linestyle="",
            color=c,
            markerfacecolor=f,
            markersize=7,
            markeredgewidth=2 if m == "|" else 1,
            label=name,
        )
        for m, c, f, name in looks
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def exponent(sizes: ArrayLike, values: ArrayLike) -> float:
    """The slope of the values over sizes, both as logarithms, by least squares over the last factor of ten; NaN of zeros."""
    n, y = np.asarray(sizes, float), np.asarray(values, float)
    last = (n >= n.max() / 10.01) & (y > 0)
    return float(np.polyfit(np.log(n[last]), np.log(y[last]), 1)[0]) if last.sum() > 1 else np.nan


def growth_points() -> Iterator[tuple[str, pd.DataFrame]]:
    """The points of each work of benchmarks/growth.py, with ``own_gb``: memory beyond that of the start."""
    table = table_of("growth")
    if not table.empty:
        for name, points in table.assign(own_gb=table["peak_gb"] - table["start_gb"]).groupby("work", sort=False):
            yield str(name), points.sort_values("size")


def growth_block() -> str:
    """What each work takes at its largest size, and the exponents."""
    lines = [
        "| work | sizes | processor time at the largest | exponent | memory of its own | exponent |",
        "|---|---|---|---|---|---|",
    ]
    for name, points in growth_points():
        first, last = points.iloc[0], points.iloc[-1]
        time, memory = (exponent(points["size"], points[column]) for column in ("cpu_s", "own_gb"))
        sizes = f"{first['size']:,} to {last['size']:,} {last['unit']}"
        shown = [name, sizes, f"{number(last['cpu_s'])} s", f"{time:.2f}", f"{number(last['own_gb'])} GB", f"{memory:.2f}"]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join([*lines, "", f"Measured on {machine_of('growth')}; one thread."])


def draw_growth(figure: Figure) -> None:
    """A panel per work: processor time, and memory of its own."""
    works = list(growth_points())
    panels = figure.subplots(2, max(1, -(-len(works) // 2)), squeeze=False).flat
    for axes, (name, points) in zip(panels, works, strict=False):
        slopes = []
        for column, unit, colour, marker in (("cpu_s", "s", _BLUE, "o"), ("own_gb", "GB", _ORANGE, "D")):
            axes.plot(
                points["size"], points[column].clip(lower=1e-3), marker=marker, markersize=4, color=colour, linewidth=1.2
            )
            slopes.append(f"{unit} ~ n^{exponent(points['size'], points[column]):.2f}")
        axes.set(xscale="log", yscale="log", xlabel=points["unit"].iloc[0])
        axes.set_title(f"{name}: {', '.join(slopes)}", fontsize=9, color=_INK)
    handles = [
        Line2D([], [], marker="o", color=_BLUE, label="processor seconds"),
        Line2D([], [], marker="D", color=_ORANGE, label="GB of memory of its own"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False)


def scripts_block() -> str:
    """A line per script, with what it says of itself, and how long it took in a run of all."""
    took = table_of("all")
    minutes = {} if took.empty else took.groupby("script")["minutes"].sum().to_dict()
    lines = ["| script | what it measures | minutes |", "|---|---|---|"]
    for path in sorted(HERE.glob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if f"python benchmarks/{path.name}" in said:
            what = " ".join(said.partition("\n\n")[0].split())
            lines.append(f"| `{path.name}` | {what.replace('|', '/')} | {number(minutes.get(path.name, np.nan))} |")
    return "\n".join(lines)


def gpu_block() -> str:
    """What benchmarks/gpu.py measured."""
    table = table_of("gpu")
    if table.empty:
        return "Not measured yet: no GPU could be had."
    lines = ["| work | precision | seconds | times the limit | busy | memory |", "|---|---|---|---|---|---|"]
    for row in table.to_dict("records"):
        shown = [number(row["s"]), number(row["times_limit"]), f"{row['busy']:.0%}", f"{number(row['gpu_gb'])} GB"]
        lines.append(f"| {' | '.join([row['work'], row['precision'], *shown])} |")
    return "\n".join([*lines, "", f"Measured on {', '.join(table['device'].unique())}."])


def blocks() -> dict[str, str]:
    """Each generated block of the page."""
    largest = {name: points.iloc[-1] for name, points in growth_points()}
    return {
        "works": work_block(measured()),
        "growth": growth_block(),
        "millions": millions_block(largest) if {"dataset.json", "search", "workflow"} <= set(largest) else _DASH,
        "gpu": gpu_block(),
        "scripts": scripts_block(),
    }


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with its generated blocks; ``ValueError`` unless each has its place."""
    for name, block in made.items():
        before, start, rest = page.partition(f"<!-- generated: {name} -->\n")
        _, end, after = rest.partition("<!-- generated: end -->")
        if not end:
            raise ValueError(f"no place of the block {name!r}")
        page = f"{before}{start}\n{block}\n\n{end}{after}"
    return page


def save(draw: Callable[[Figure], None], size: tuple[float, float], out: Path) -> None:
    """Draw on white, which is readable on a dark page, too; the same numbers make the same bytes."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": out.stem, "font.size": 9})
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        for axes in figure.axes:
            axes.grid(color="#e6e9ed")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(out, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))


def as_csv(table: pd.DataFrame) -> str:
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def main() -> None:
    results, table = ROOT / "docs" / "results", measured()
    for row in table.to_dict("records"):
        if missing := [key for key in ("before", "now", "peer", "limit") if np.isnan(row[key])]:
            print(f"{row['work']}: no {', '.join(missing)}", file=sys.stderr)
    (results / "performance.csv").write_text(as_csv(table), encoding="utf-8")
    height = 1.3 + 0.34 * int(np.isfinite(table["now"]).sum())
    save(lambda figure: draw_works(figure.add_subplot(), table), (8, height), results / "performance.svg")
    save(draw_growth, (9, 5.4), results / "growth.svg")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")


if __name__ == "__main__":
    main()
