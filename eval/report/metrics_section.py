"""The metrics of one or two results for a report: a chart and a table per protocol, and the few that matter most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vse.eval.defaults import COMPARISON_SAMPLES, PHRASE
from vse.eval.files.results import Metric, ProtocolMetrics, Result, distinct_protocols, mean_and_std
from vse.eval.ranking.bootstrap import ALPHA, differences
from vse.eval.ranking.metrics import DIRECTIONS, METRIC_TITLES, build_fold, metric_title
from vse.eval.ranking.ranks import Ranks
from vse.eval.report.charts import Bars, chance_recall, recall_bars

_TITLES = {"sentence": "captions query captions", "cxc": "Crisscrossed Captions (CxC)", "eccv": "ECCV Caption"}
_RECALLS = ("r1", "r5", "r10")
_BARS = (*_RECALLS, "bound")  # of a chart, as far as they are there


class ShownMetric(NamedTuple):
    """A metric as a report shows it, with its standard deviation over seeds and its interval; NaN is what is not known."""

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


_Directions = dict[str, dict[str, ShownMetric]]


class MetricRow(NamedTuple):
    """A row of a table: which direction, of which result (its number), and its metrics."""

    direction: str
    series: int
    cells: Sequence[ShownMetric]


@dataclass(frozen=True)
class ProtocolSection:
    """A protocol in a report; ``sums`` are the metrics of both directions together, ``chart`` is None without recalls.

    ``notes`` say what small print and whiskers mean, ``chance`` what the dotted lines.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[MetricRow]
    sums: Sequence[tuple[int, str, ShownMetric]]
    chart: Markup | None
    notes: str
    chance: str


class ShownDifference(NamedTuple):
    """How far two models are apart in a metric on the same queries, and whether the test images explain it."""

    name: str
    text: str
    interval: str
    p: str
    significant: bool


def paired_differences(image_of_caption: NDArray[np.int64], first: Ranks, second: Ranks) -> list[ShownDifference]:
    """First minus second, over the whole split: recalls each direction and rsum (see :mod:`vse.eval.ranking.bootstrap`)."""
    compared = differences(
        [[build_fold(first, image_of_caption)]], [[build_fold(second, image_of_caption)]], COMPARISON_SAMPLES
    )
    named = [
        (f"{DIRECTIONS[direction].title} {METRIC_TITLES[name]}", compared[direction][name])
        for direction in ("i2t", "t2i")
        for name in _RECALLS
    ]
    return [shown_difference(name, leaf) for name, leaf in [*named, ("rsum", compared["rsum"])]]


def shown_difference(name: str, leaf: Mapping[str, Any]) -> ShownDifference:
    """A metric's difference, as :func:`vse.eval.ranking.bootstrap.differences` returns it, for a table."""
    return ShownDifference(
        name,
        f"{leaf['difference']:+.1f}",
        f"{leaf['ci95'][0]:+.1f} to {leaf['ci95'][1]:+.1f}",
        f"{leaf['p']:.3f}" if leaf["p"] >= 0.001 else "below 0.001",
        leaf["p"] < ALPHA,
    )


def sections(results: Sequence[Result]) -> list[ProtocolSection]:
    """A section per protocol of any of the results; ``1k`` is left out where its one fold is the whole split."""
    shown = distinct_protocols({name: None for result in results for name in result.protocols}, results[0].n_images)
    return [_section(name, results) for name in shown]


def headline(result: Result) -> list[tuple[str, ShownMetric]]:
    """rsum, and R@1 and Med r of both directions, of the whole split or else of the first protocol that has them.

    Of phrases their recalls and the upper bound.
    """
    protocols = result.protocols
    if PHRASE in protocols:
        metrics = _directions(protocols[PHRASE]).get(PHRASE, {})
        return [(METRIC_TITLES[key], metrics[key]) for key in _BARS if key in metrics]
    for protocol in (protocols[name] for name in ("full", *protocols) if name in protocols):
        sums = _sums(protocol)
        if "rsum" in sums:
            directions = _directions(protocol)
            asked = [(key, direction) for key in ("r1", "medr") for direction in ("i2t", "t2i")]
            return [
                ("rsum", sums["rsum"]),
                *(
                    (f"{METRIC_TITLES[key]}, {DIRECTIONS[direction].title}", directions[direction][key])
                    for key, direction in asked
                    if key in directions.get(direction, {})
                ),
            ]
    return []


def _section(name: str, results: Sequence[Result]) -> ProtocolSection:
    protocols = [result.protocols.get(name, ProtocolMetrics()) for result in results]
    shown = [_directions(protocol) for protocol in protocols]
    directions = list(dict.fromkeys(direction for one in shown for direction in one))
    keys = list(dict.fromkeys(key for one in shown for metrics in one.values() for key in metrics))
    rows = [
        MetricRow(DIRECTIONS[direction].title, series, [one[direction].get(key, ShownMetric(math.nan)) for key in keys])
        for direction in directions
        for series, one in enumerate(shown)
        if direction in one
    ]
    sums = [(series, metric_title(key), metric) for series, one in enumerate(protocols) for key, metric in _sums(one).items()]
    title = _title(name, results[0], next(result.protocols[name] for result in results if name in result.protocols))
    columns = [metric_title(key) for key in keys]
    chance = _chance(name, results[0], directions)
    chart = _chart(title, directions, shown, chance)
    notes = " ".join(filter(None, [_notes(shown), left_out(protocols[0]) if name == PHRASE else ""]))
    return ProtocolSection(title, columns, rows, sums, chart, notes, _chance_note(chance) if chart else "")


def left_out(protocol: ProtocolMetrics) -> str:
    """How many phrases are not evaluated, or cannot be right."""
    without = f"{protocol.n_without_box or 0:,} more phrases have no box and are left out."
    missed = protocol.n_without_candidate
    return without + (f" {missed:,} have no candidate, and count as missed." if missed else "")


def _chance(name: str, result: Result, directions: Sequence[str]) -> dict[str, dict[str, float]]:
    """Recalls of a random order, by direction; none of protocols whose candidates or right answers are others."""
    if name not in ("1k", "full"):
        return {}
    n_images = 1000 if name == "1k" else result.n_images
    n_captions = round(result.n_captions * n_images / max(1, result.n_images))
    known = [direction for direction in directions if direction in ("i2t", "t2i")]
    return {of: {key: chance_recall(of, int(key[1:]), n_images, n_captions) for key in _RECALLS} for of in known}


def _chance_note(chance: dict[str, dict[str, float]]) -> str:
    """The chance level in numbers."""
    levels = [f"{' / '.join(f'{level:.1f}' for level in of.values())} {DIRECTIONS[name].title}" for name, of in chance.items()]
    return f"Dotted lines: chance, R@1 / 5 / 10 of {', '.join(levels)}." if levels else ""


def _title(name: str, result: Result, protocol: ProtocolMetrics) -> str:
    if name == "1k":
        return f"1,000 images, {f'mean of {protocol.folds} folds' if protocol.folds != 1 else 'one fold'}"
    if name == "full":
        return f"all {result.n_images:,} images and {result.n_captions:,} captions"
    if name == PHRASE:
        return f"{protocol.n_phrases or 0:,} phrases, right at an IoU of {protocol.iou or 0:g}"
    if name == "sentence-1k":
        return f"{_TITLES['sentence']}, {_title('1k', result, protocol)}"
    return _TITLES.get(name, name)


def _chart(
    title: str, directions: Sequence[str], shown: Sequence[_Directions], chance: dict[str, dict[str, float]]
) -> Markup | None:
    bars = [
        (direction, key) for direction in directions for key in _BARS if any(key in one.get(direction, {}) for one in shown)
    ]
    if not bars:
        return None
    groups = [
        (DIRECTIONS[direction].title, [METRIC_TITLES[key] for of, key in bars if of == direction])
        for direction in dict.fromkeys(of for of, _ in bars)
    ]
    series = []
    for one in shown:
        metrics = [one.get(direction, {}).get(key, ShownMetric(math.nan)) for direction, key in bars]
        lows, highs = zip(*(metric.whisker() for metric in metrics), strict=True)
        series.append(Bars([metric.value for metric in metrics], lows, highs))
    levels = [chance.get(direction, {}).get(key, math.nan) for direction, key in bars]
    return recall_bars(f"Recalls, {title}", groups, series, levels if chance else ())


def _notes(shown: Sequence[_Directions]) -> str:
    """What the small print of metrics means, and the whiskers of bars."""
    metrics = [metric for one in shown for of_direction in one.values() for metric in of_direction.values()]
    notes = []
    if any(not math.isnan(metric.std) for metric in metrics):
        notes.append("±: standard deviation over seeds.")
    if any(metric.interval for metric in metrics):
        notes.append("Small numbers and whiskers: 95% intervals over the choice of test images.")
    elif notes:
        notes.append("Whiskers are as long.")
    return " ".join(notes)


def _directions(protocol: ProtocolMetrics) -> _Directions:
    return {
        direction: {key: _shown(protocol, metric, f"{direction}_{key}") for key, metric in metrics.items()}
        for direction, metrics in protocol.directions.items()
    }


def _sums(protocol: ProtocolMetrics) -> dict[str, ShownMetric]:
    return {name: _shown(protocol, metric, name) for name, metric in protocol.sums.items()}


def _shown(protocol: ProtocolMetrics, metric: Metric, name: str) -> ShownMetric:
    return ShownMetric(*mean_and_std(metric), *(protocol.interval(name) or (math.nan, math.nan)))
