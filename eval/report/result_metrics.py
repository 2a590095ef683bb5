"""The figures of one or two results for a page: a chart and a table per protocol, and the few that matter most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vse.eval.files.results import distinct
from vse.eval.ranking.bootstrap import ALPHA, COMPARED, differences
from vse.eval.ranking.metrics import DIRECTIONS, NAMES, fold_of
from vse.eval.ranking.ranks import Ranks
from vse.eval.report.charts import Bars, recall_bars
from vse.pipeline.errors import UserError

_TITLES = {"sentence": "captions query captions", "cxc": "Crisscrossed Captions (CxC)", "eccv": "ECCV Caption"}
_RECALLS = ("r1", "r5", "r10")


class Figure(NamedTuple):
    """A figure, its standard deviation over seeds, and its interval; NaN is what is not known."""

    value: float
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def text(self) -> str:
        """To a decimal, as tables of the field print it."""
        if math.isnan(self.value):
            return "–"
        return f"{self.value:.1f}" if math.isnan(self.std) else f"{self.value:.1f} ± {self.std:.1f}"

    @property
    def interval(self) -> str:
        """Its ends; empty if it is not known."""
        return "" if math.isnan(self.low) else f"{self.low:.1f} – {self.high:.1f}"

    def whisker(self) -> tuple[float, float]:
        """From where to where to draw: the interval, or else a standard deviation each side."""
        return (self.value - self.std, self.value + self.std) if math.isnan(self.low) else (self.low, self.high)


class Row(NamedTuple):
    """A row of a table: which direction, of which result (its number), and its figures."""

    direction: str
    series: int
    cells: Sequence[Figure]


@dataclass(frozen=True)
class Section:
    """What a page shows of a protocol; ``sums`` are the figures of both directions together, ``chart`` is None without recalls."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    sums: Sequence[tuple[int, str, Figure]]
    chart: Markup | None
    notes: str


class Difference(NamedTuple):
    """How far two models are apart in a figure on the same queries, and whether that is more than chance."""

    name: str
    text: str
    interval: str
    p: str
    significant: bool


def paired_differences(image_of_caption: NDArray[np.int64], first: Ranks, second: Ranks) -> list[Difference]:
    """First minus second, over the whole split: recalls each direction and rsum (see :mod:`vse.eval.ranking.bootstrap`)."""
    found = differences([[fold_of(first, image_of_caption)]], [[fold_of(second, image_of_caption)]], COMPARED)
    named = [
        (f"{DIRECTIONS[direction]} {NAMES[name]}", found[direction][name]) for direction in ("i2t", "t2i") for name in _RECALLS
    ]
    return [
        Difference(
            name,
            f"{leaf['difference']:+.1f}",
            f"{leaf['ci95'][0]:+.1f} to {leaf['ci95'][1]:+.1f}",
            f"{leaf['p']:.3f}" if leaf["p"] >= 0.001 else "below 0.001",
            leaf["p"] < ALPHA,
        )
        for name, leaf in [*named, ("rsum", found["rsum"])]
    ]


def sections(results: Sequence[Mapping[str, Any]]) -> list[Section]:
    """A section per protocol of any of the results; ``1k`` is left out where its one fold is the whole split."""
    shown = distinct({name: None for result in results for name in result["protocols"]}, results[0]["n_images"])
    return [_section(name, results) for name in shown]


def headline(result: Mapping[str, Any]) -> list[tuple[str, Figure]]:
    """rsum, and R@1 and Med r of both directions, of the whole split or else of the first protocol that has them."""
    protocols = result["protocols"]
    for found in (_mapping(protocols.get(name)) for name in ("full", *protocols)):
        directions, sums = dict(_ways(found)), _sums(found)
        if "rsum" in sums:
            asked = [
                (key, direction)
                for key in ("r1", "medr")
                for direction in ("i2t", "t2i")
                if key in directions.get(direction, {})
            ]
            return [
                ("rsum", sums["rsum"]),
                *((f"{NAMES[key]}, {DIRECTIONS[direction]}", directions[direction][key]) for key, direction in asked),
            ]
    return []


def _section(name: str, results: Sequence[Mapping[str, Any]]) -> Section:
    protocols = [result["protocols"].get(name, {}) for result in results]
    if not all(isinstance(found, Mapping) for found in protocols):
        raise UserError(f"the protocol {name} of a result is no mapping of figures")
    found = [dict(_ways(protocol)) for protocol in protocols]
    directions = list(dict.fromkeys(direction for one in found for direction in one))
    keys = list(dict.fromkeys(key for one in found for direction in one.values() for key in direction))
    rows = [
        Row(DIRECTIONS.get(direction, direction), series, [one[direction].get(key, Figure(math.nan)) for key in keys])
        for direction in directions
        for series, one in enumerate(found)
        if direction in one
    ]
    sums = [
        (series, NAMES.get(key, key), figure) for series, one in enumerate(protocols) for key, figure in _sums(one).items()
    ]
    title = _title(name, results[0], next((one for one in protocols if one), {}))
    columns = [NAMES.get(key, key) for key in keys]
    return Section(title, columns, rows, sums, _chart(title, directions, found), _notes(found))


def _title(name: str, result: Mapping[str, Any], protocol: Mapping[str, Any]) -> str:
    if name == "1k":
        folds = protocol.get("folds", 1)
        return f"1,000 images, {f'mean of {folds} folds' if folds != 1 else 'one fold'}"
    if name == "full":
        return f"all {result['n_images']:,} images and {result['n_captions']:,} captions"
    return _TITLES.get(name, name)


def _chart(title: str, directions: Sequence[str], found: Sequence[Mapping[str, Mapping[str, Figure]]]) -> Markup | None:
    bars = [
        (direction, key) for direction in directions for key in _RECALLS if any(key in one.get(direction, {}) for one in found)
    ]
    if not bars:
        return None
    groups = [
        (DIRECTIONS.get(direction, direction), [NAMES.get(key, key) for w, key in bars if w == direction])
        for direction in dict.fromkeys(w for w, _ in bars)
    ]
    series = []
    for one in found:
        figures = [one.get(direction, {}).get(key, Figure(math.nan)) for direction, key in bars]
        lows, highs = zip(*(figure.whisker() for figure in figures), strict=True)
        series.append(Bars([figure.value for figure in figures], lows, highs))
    return recall_bars(f"Recalls, {title}", groups, series)


def _notes(found: Sequence[Mapping[str, Mapping[str, Figure]]]) -> str:
    """What the small print of figures means, and the whiskers of bars."""
    figures = [figure for one in found for direction in one.values() for figure in direction.values()]
    notes = []
    if any(not math.isnan(figure.std) for figure in figures):
        notes.append("±: standard deviation over seeds.")
    if any(figure.interval for figure in figures):
        notes.append("Small figures and whiskers: 95% intervals over the choice of test images.")
    elif notes:
        notes.append("Whiskers are as long.")
    return " ".join(notes)


def _ways(protocol: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Figure]]]:
    """Each direction's figures; a direction is what has figures of its own."""
    intervals = _mapping(protocol.get("ci95"))
    for direction, found in protocol.items():
        if direction in ("ci95", "n_queries") or not isinstance(found, Mapping) or "mean" in found:
            continue
        figures = {key: figure for key, value in found.items() if (figure := _figure(value, intervals.get(direction), key))}
        if figures:
            yield direction, figures


def _sums(protocol: Mapping[str, Any]) -> dict[str, Figure]:
    found = {key: _figure(protocol.get(key), protocol.get("ci95"), key) for key in ("rsum", "mean_recall")}
    return {key: figure for key, figure in found.items() if figure}


def _figure(value: Any, intervals: Any, key: str) -> Figure | None:
    """A number, or mean and standard deviation of several; None if it is something else."""
    mean, std = (value.get("mean"), value.get("std")) if isinstance(value, Mapping) else (value, math.nan)
    if not _is_number(mean) or not _is_number(std):
        return None
    interval = _mapping(intervals).get(key)
    if isinstance(interval, list) and len(interval) == 2 and all(map(_is_number, interval)):
        return Figure(mean, std, *interval)
    return Figure(mean, std)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
