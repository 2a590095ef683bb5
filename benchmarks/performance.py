"""Tables and plots of docs/performance.md, from the CSVs of benchmarks/results/.

The script writes docs/results/performance.csv and .svg, growth.svg, large_data.svg, and the blocks of the page between
``<!-- generated: NAME -->`` and ``<!-- generated: end -->``; the rest of the page is written by hand. benchmarks/works.py
defines the CSV, row and column of each number. A number that no CSV has becomes a dash, and a line on stderr names it.

    python -m benchmarks.performance
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from numpy.typing import ArrayLike

from benchmarks.millions import millions_block
from benchmarks.works import machine_of, measured, ratio, table_of

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGE = DOCS / "performance.md"
_BLUE, _ORANGE, _GREEN, _INK, _QUIET = "#2a6f97", "#d9731a", "#4f772d", "#1d2733", "#8a949e"
_DASH = "–"
_MILLION = 1_000_000
# Targets of benchmarks/large_data.py at a million pairs: processor seconds, and GB without mapped files.
_LARGE_DATA_TARGETS = {
    "import": (40, 1),
    "check": (1.5, np.nan),
    "tfidf": (np.nan, 1),
    "tfidf again": (2, np.nan),
    "InfoNCE, one epoch": (np.nan, 1),
}
_LABELS = {"to_reach": "target", "peer": "alternative", "now": "vse"}  # columns in plot and table


def number(value: float) -> str:
    """Return a number with three digits, or a dash for NaN."""
    if np.isnan(value):
        return _DASH
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(titles: str, rows: list[list[str]], below: str = "") -> str:
    """Return a table with ``titles``, which bars separate, and a paragraph below it."""
    lines = [f"| {titles} |", "|---" * (1 + titles.count("|")) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, "", below]).rstrip()


def work_block(table: pd.DataFrame) -> str:
    """Return the table of :data:`benchmarks.works.WORKS`."""
    rows = []
    for row in table.to_dict("records"):
        now, times = (number(row[key]) for key in ("now", "times_limit"))
        peer, limit, goal = (_named(row[key], row[f"{key}_is"]) for key in ("peer", "limit", "to_reach"))
        bold = now if now == _DASH else f"**{now}**"
        rows.append([f"{row['work']} ({row['unit']})", bold, peer, limit, times, goal + _reached(row)])
    titles = "benchmark | vse | alternative | limit | times the limit | target"
    return markdown(titles, rows, _measured_on(table))


def _named(value: float, name: str) -> str:
    return f"{number(value)} ({name})" if name and not np.isnan(value) else number(value)


def _reached(row: Mapping[Any, Any]) -> str:
    over = ratio(row["unit"], row["now"], row["to_reach"])
    return "" if np.isnan(over) else ": reached" if over <= 1 else ": not reached"


def _measured_on(table: pd.DataFrame) -> str:
    """Return the machine of most rows, the load, the versions of other programs, and a list of the rows of other machines."""
    machines = table[table["now"].notna()].groupby("machine")["work"].apply(list)
    most = max(machines.index, key=lambda machine: len(machines[machine]), default="")
    said, rows = f"Measured on {most}, without a GPU.", table[table["machine"] == most]
    if not (running := rows["running_threads"].dropna()).empty:
        low, high = (f"{value:.1f}" for value in (running.min(), running.max()))
        said += f" On average, {low if low == high else f'{low} to {high}'} threads were running."
    if peers := sorted({peer for peers in rows["peers"] for peer in peers.split(", ") if peer}):
        said += f" Versions: {', '.join(peers)}."
    others = [f"- {machine}: {'; '.join(works)}" for machine, works in machines.items() if machine != most]
    if others:
        said = "\n".join([f"{said} These rows were measured on other machines or with other versions:", "", *others])
    return said


def drawn(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the plot, with a column ``one``: the limit or, without a limit, the target."""
    table = table.assign(one=table["limit"].fillna(table["to_reach"]))
    return table[table["now"].notna() & table["one"].notna()]


def draw_works(figure: Figure) -> None:
    """Draw a line for each benchmark, in multiples of its limit or, without a limit, of its target; left is better."""
    axes, table = figure.add_subplot(), drawn(measured())
    looks = {"to_reach": ("|", _GREEN, 16), "peer": ("D", _ORANGE, 6), "now": ("o", _BLUE, 8)}
    for place, row in enumerate(table.to_dict("records")):
        at = {key: ratio(row["unit"], row[key], row["one"]) for key in looks}
        axes.plot([1, at["now"]], [place, place], color=_BLUE, linewidth=1.2, alpha=0.5)
        axes.annotate(number(at["now"]), (at["now"], place), (0, 6), textcoords="offset points", ha="center", color=_BLUE)
        for key, (marker, colour, size) in looks.items():
            edge = 2 if marker == "|" else 1
            axes.plot(at[key], place, marker, color=colour, markersize=size, markeredgewidth=edge)
    stars = ["" if np.isfinite(limit) else " *" for limit in table["limit"]]
    axes.set_yticks(range(len(table)), [work.replace("`", "") + star for work, star in zip(table["work"], stars, strict=True)])
    axes.set(xscale="log", ylim=(len(table) - 0.5, -0.7))
    axes.set_xlabel("times the limit (*: times the target); left is better")
    axes.xaxis.set_major_locator(FixedLocator([2.0**k for k in range(-4, 10)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1, color=_INK, linewidth=1, zorder=0)
    handles = [
        Line2D([], [], marker=marker, linestyle="", color=colour, label=_LABELS[key])
        for key, (marker, colour, _) in reversed(looks.items())
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(looks), frameon=False)


def exponent(sizes: ArrayLike, values: ArrayLike) -> float:
    """Return the power of the size with which a value grows.

    The value at the smallest size, mostly the cost of a start, is subtracted first. The power is the slope of the logarithm of
    the added value over that of the added size, by least squares over the last factor of ten; NaN if nothing is added.
    """
    n, y = np.asarray(sizes, float), np.asarray(values, float)
    added = (n >= n.max() / 10.01) & (n > n.min()) & (y > y[n.argmin()])
    if added.sum() < 2:
        return np.nan
    return float(np.polyfit(np.log(n[added] - n.min()), np.log(y[added] - y[n.argmin()]), 1)[0])


def growth_points() -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the points of each program of benchmarks/growth.py, with ``own_gb``, the memory beyond that of the start."""
    table = table_of("growth", avx2=True)
    if not table.empty:
        for name, points in table.assign(own_gb=table["peak_gb"] - table["start_gb"]).groupby("work", sort=False):
            yield str(name), points.sort_values("size")


def _power(points: pd.DataFrame, column: str) -> str:
    power = exponent(points["size"], points[column])
    return _DASH if np.isnan(power) else f"{power:.2f}"


def growth_block() -> str:
    """Return the table of time and memory at the largest size, with their exponents."""
    rows = []
    for name, points in growth_points():
        first, last = points.iloc[0], points.iloc[-1]
        time, memory = (_power(points, column) for column in ("cpu_s", "own_gb"))
        sizes = f"{first['size']:,} to {last['size']:,} {last['unit']}"
        rows.append([name, sizes, f"{number(last['cpu_s'])} s", time, f"{number(last['own_gb'])} GB", memory])
    titles = "benchmark | sizes | processor time, largest size | power of time | memory, largest size | power of memory"
    return markdown(titles, rows, f"Measured on {machine_of('growth', avx2=True)}, with one thread.")


def draw_growth(figure: Figure) -> None:
    """Draw a panel for each program: processor time, and memory beyond the start."""
    works = list(growth_points())
    panels = [*figure.subplots(2, max(1, -(-len(works) // 2)), squeeze=False).flat]
    looks = {"cpu_s": ("s", "o", _BLUE, "processor seconds"), "own_gb": ("GB", "D", _ORANGE, "GB of memory beyond the start")}
    for axes in panels[len(works) :]:  # the last panel may be empty
        axes.set_axis_off()
    for axes, (name, points) in zip(panels, works, strict=False):
        slopes = []
        for column, (unit, marker, colour, _) in looks.items():
            axes.plot(
                points["size"], points[column].clip(lower=1e-3), marker=marker, markersize=4, color=colour, linewidth=1.2
            )
            slopes.append(f"{unit} ~ n^{_power(points, column)}")
        axes.set(xscale="log", yscale="log", xlabel=points["unit"].iloc[0])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{name}\n{', '.join(slopes)}", fontsize=9, color=_INK)
    handles = [Line2D([], [], marker=marker, color=colour, label=label) for _, marker, colour, label in looks.values()]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False)


def gpu_block() -> str:
    """Return the table of benchmarks/gpu.py."""
    table = table_of("gpu")
    if table.empty:
        return "Not measured yet."
    rows = [
        [
            row["work"],
            row["precision"],
            number(row["s"]),
            number(row["times_limit"]),
            f"{row['busy']:.0%}",
            number(row["gpu_gb"]),
        ]
        for row in table.to_dict("records")
    ]
    titles = "benchmark | precision | seconds | times the limit | busy | GB"
    return markdown(titles, rows, f"Measured on {', '.join(table['device'].unique())}.")


def planning_block() -> str:
    """Return the table of benchmarks/planning.py."""
    rows = [
        [number(row["photos"]), row["state"], number(row["cpu_s"]), number(row["peak_gb"]), number(row["photos_opened"])]
        for row in table_of("planning").to_dict("records")
    ]
    return markdown("photographs | state | processor time, s | memory, GB | photographs opened", rows)


def processes_block() -> str:
    """Return the table of benchmarks/processes.py."""
    columns = ("pairs_per_s", "speed_up", "mb_per_step", "least_mb_per_step")
    rows = [
        [row["training"], str(row["processes"]), *(number(row[name]) for name in columns), f"{row['loss_difference']:.1g}"]
        for row in table_of("processes").to_dict("records")
    ]
    return markdown(
        "training | processes | pairs per s | speed-up | MB per step | least MB per step | difference of loss", rows
    )


def clients_block() -> str:
    """Return the table of benchmarks/clients.py."""
    rows = []
    table = table_of("clients", avx2=True)
    for row in table[table["when"] == "now"].to_dict("records"):
        clients = f", {row['clients']} client{'s' * (row['clients'] > 1)}" if row["clients"] else ""
        columns = ("cpu_ms", "times_one_read", "median_ms", "p95_ms", "per_s", "times_one_client")
        rows.append([f"{row['what']}{clients}", *(number(row[name]) for name in columns)])
    titles = "query | processor time, ms | times one read | median, ms | 95th percentile, ms | per s | times one client"
    return markdown(titles, rows, f"Measured on {machine_of('clients', avx2=True)}, without a GPU.")


def precision_block() -> str:
    """Return the table of the indexes of benchmarks/clients.py."""
    rows = []
    for row in table_of("clients_precision", avx2=True).to_dict("records"):
        recalls = [f"{row[f'{direction}_{name}']:.4g}" for direction in ("i2t", "t2i") for name in ("r10", "exact_top_10")]
        times = [number(row[f"cpu_ms_{clients}"]) for clients in (1, 32)]
        rows.append([f"`{row['index']}`", number(row["bytes"]), *recalls, *times])
    titles = "index | bytes | R@10, i2t | found, i2t | R@10, t2i | found, t2i | ms, 1 client | ms, 32 clients"
    return markdown(titles, rows)


def large_data_block() -> str:
    """Return the table of benchmarks/large_data.py, with the numbers of an earlier version for the largest size."""
    table, before = table_of("large_data"), table_of("before_large_data").set_index(["step", "pairs"])
    sizes = sorted(table["pairs"].unique())
    rows = []
    for step in table["step"].unique():
        points = table[table["step"] == step].set_index("pairs")
        same_format = points[points.index <= _MILLION]  # a larger import writes dataset.parquet
        power = exponent(same_format.index, same_format["cpu_s"])
        memory = (number(points[name].get(_MILLION, np.nan)) for name in ("peak_gb", "own_gb"))
        row = [*(number(points["cpu_s"].get(size, np.nan)) for size in sizes), *memory]
        row.append(_DASH if np.isnan(power) else f"{power:.2f}")
        earlier = (step, _MILLION)
        known = [number(before[name][earlier]) if earlier in before.index else _DASH for name in ("cpu_s", "peak_gb")]
        rows.append([step, *row, *known, _large_data_target(step, points.loc[_MILLION])])
    titles = [
        "step",
        *(f"{size:,} pairs, s" for size in sizes),
        "GB",
        "GB without mapped files",
        "power of time",
        "before, s",
        "before, GB",
        "target",
    ]
    return markdown(" | ".join(titles), rows)


def _large_data_target(step: str, largest: pd.Series) -> str:
    seconds, gb = _LARGE_DATA_TARGETS.get(step, (np.nan, np.nan))
    said = [f"{number(value)} {unit}" for value, unit in ((seconds, "s"), (gb, "GB")) if not np.isnan(value)]
    if not said:
        return _DASH
    is_missed = largest["cpu_s"] > seconds or largest["own_gb"] > gb
    return f"{', '.join(said)}: {'not reached' if is_missed else 'reached'}"


def draw_large_data(figure: Figure) -> None:
    """Draw processor time and memory without mapped files of each step of benchmarks/large_data.py by the number of pairs."""
    table = table_of("large_data")
    panels = figure.subplots(1, 2)
    for axes, column, label in zip(panels, ("cpu_s", "own_gb"), ("processor seconds", "GB without mapped files"), strict=True):
        for k, (step, points) in enumerate(table.groupby("step", sort=False)):
            axes.plot(points["pairs"], points[column], marker="os^vD"[k // 2], markersize=5, color=f"C{k}", label=step)
        axes.set(xscale="log", yscale="log", xlabel="pairs", ylabel=label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=5, frameon=False)


def blocks() -> dict[str, str]:
    """Return the generated blocks of the page, by name."""
    growth = dict(growth_points())
    tables = (measured(avx2=avx2).dropna(subset="now") for avx2 in (False, True))
    works, works_avx2 = ("Not measured yet." if table.empty else work_block(table) for table in tables)
    return {
        "works": works,
        "works_avx2": works_avx2,
        "growth": growth_block(),
        "millions": millions_block(growth) if {"search", "workflow"} <= set(growth) else _DASH,
        "planning": planning_block(),
        "processes": processes_block(),
        "large_data": large_data_block(),
        "clients": clients_block(),
        "clients_precision": precision_block(),
        "gpu": gpu_block(),
    }


def filled(page: str, made: Mapping[str, str]) -> str:
    """Return the page with its generated blocks. Raises ``ValueError`` if the page has no place for a block."""
    for name, block in made.items():
        before, start, rest = page.partition(f"<!-- generated: {name} -->\n")
        _, end, after = rest.partition("<!-- generated: end -->")
        if not end:
            raise ValueError(f"no place of the block {name!r}")
        page = f"{before}{start}\n{block}\n\n{end}{after}"
    return page


def as_csv(table: pd.DataFrame) -> str:
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def save(draw: Callable[[Figure], None], size: tuple[float, float], out: Path) -> None:
    """Save a plot on white, to be readable on a dark page too. The same numbers give the same bytes."""
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


def main() -> None:
    results, tables = DOCS / "results", [measured(avx2=avx2) for avx2 in (False, True)]
    for row in pd.concat(tables).to_dict("records"):
        if np.isnan(row["now"]):
            print(f"{row['work']}: not measured ({row['machine'] or 'no CSV'})", file=sys.stderr)
    table, without_avx512 = (table.dropna(subset="now") for table in tables)
    (results / "performance.csv").write_text(as_csv(pd.concat([table, without_avx512])), encoding="utf-8")
    save(draw_works, (8, 1.2 + 0.42 * len(drawn(table))), results / "performance.svg")
    save(draw_growth, (9, 5.4), results / "growth.svg")
    save(draw_large_data, (9, 4.2), results / "large_data.svg")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")


if __name__ == "__main__":
    main()
