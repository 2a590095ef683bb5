"""Sections of a report: metrics, differences, choices between captions, and wrong answers that people accept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings, resolve_path
from vse.eval.files.judgements import Judgements, read_judgements
from vse.eval.files.results import Metric, ProtocolMetrics, Result, drop_repeated_protocols, mean_and_std
from vse.eval.options import CHOICES_PROTOCOL, JUDGED_PREFIX, N_COMPARISON_BOOTSTRAP_SAMPLES, PHRASE_PROTOCOL
from vse.eval.protocols.choices import rank_choices, read_choice_sets
from vse.eval.protocols.judged import rank_judged_queries
from vse.eval.ranking.metrics import DIRECTIONS, METRIC_TITLES, Floats, Ranks, build_fold, metric_title
from vse.eval.ranking.statistics import SIGNIFICANCE_LEVEL, chance_recall, compute_differences
from vse.eval.report.charts import Bars, draw_recall_bars
from vse.eval.report.pages import DatasetPhotos, Photo
from vse.eval.report.report_inputs import ReportInput
from vse.pipeline.errors import UserError

_PROTOCOL_TITLES = {
    "sentence": "captions query captions",
    "cxc": "Crisscrossed Captions (CxC)",
    "eccv": "ECCV Caption",
    "judged-expert": "judged by experts",
    "judged-crowd": "judged by a crowd",
    "judged-qrels": "judged (qrels)",
}
_RECALL_NAMES = ("r1", "r5", "r10")
_BAR_METRIC_NAMES = (*_RECALL_NAMES, "bound")  # bars of a chart, if the result has them


class ReportMetric(NamedTuple):
    """A metric in a report: its value, standard deviation over seeds and 95% interval. Unknown numbers are NaN."""

    value: float
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def text(self) -> str:
        """The value and the standard deviation with one decimal; a dash for an unknown value."""
        if math.isnan(self.value):
            return "–"
        return f"{self.value:.1f}" if math.isnan(self.std) else f"{self.value:.1f} ± {self.std:.1f}"

    @property
    def interval_text(self) -> str:
        return "" if math.isnan(self.low) else f"{self.low:.1f} – {self.high:.1f}"

    def whisker(self) -> tuple[float, float]:
        """Return the ends of the whisker: the interval or, without an interval, a standard deviation on each side."""
        return (self.value - self.std, self.value + self.std) if math.isnan(self.low) else (self.low, self.high)


_MetricsByDirection = dict[str, dict[str, ReportMetric]]


class MetricRow(NamedTuple):
    """A row of a table: the metrics of the result with index ``result_index`` in one direction."""

    direction_title: str
    result_index: int
    metrics: Sequence[ReportMetric]


@dataclass(frozen=True)
class ProtocolSection:
    """The section of a protocol in a report.

    ``overall_metrics`` : (index of the result, name, value) of each metric over both directions, such as rsum.
    ``chart`` displays the recalls; None without recalls. ``notes`` is a text on the whiskers, the small numbers and the
    phrases that are left out. ``chance_note`` explains the dotted lines.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[MetricRow]
    overall_metrics: Sequence[tuple[int, str, ReportMetric]]
    chart: Markup | None
    notes: str
    chance_note: str


class ReportDifference(NamedTuple):
    """The difference of two models in the metric ``name`` on the same queries, its 95% interval and its p-value, as texts."""

    name: str
    text: str
    interval: str
    p: str
    is_significant: bool


def compute_retrieval_differences(image_of_caption: NDArray[np.int64], first: Ranks, second: Ranks) -> list[ReportDifference]:
    """Return the differences of two models, first minus second, in the recalls of each direction and in rsum.

    See :mod:`vse.eval.ranking.statistics` for the intervals and p-values.
    """
    compared = compute_differences(
        [[build_fold(first, image_of_caption)]], [[build_fold(second, image_of_caption)]], N_COMPARISON_BOOTSTRAP_SAMPLES
    )
    metrics = [
        (f"{DIRECTIONS[direction].title} {METRIC_TITLES[name]}", compared[direction][name])
        for direction in ("i2t", "t2i")
        for name in _RECALL_NAMES
    ]
    return [build_report_difference(name, metric) for name, metric in [*metrics, ("rsum", compared["rsum"])]]


def build_report_difference(name: str, metric: Mapping[str, Any]) -> ReportDifference:
    """Return a difference of two models as texts. ``metric`` has its numbers: ``difference``, ``ci95`` and ``p``."""
    return ReportDifference(
        name,
        f"{metric['difference']:+.1f}",
        f"{metric['ci95'][0]:+.1f} to {metric['ci95'][1]:+.1f}",
        f"{metric['p']:.3f}" if metric["p"] >= 0.001 else "below 0.001",
        metric["p"] < SIGNIFICANCE_LEVEL,
    )


def build_sections(results: Sequence[Result]) -> list[ProtocolSection]:
    """Return a section for each protocol of the results, without the protocols that repeat the metrics of another protocol."""
    names = drop_repeated_protocols({name: None for result in results for name in result.protocols}, results[0].n_images)
    return [_build_section(name, results) for name in names]


def select_headline_metrics(result: Result) -> list[tuple[str, ReportMetric]]:
    """Return name and value of the metrics at the top of a report: rsum, and R@1 and Med r of both directions.

    The metrics are those of ``full`` or else of the first protocol with rsum; without rsum, the list is empty. For phrases,
    the recalls and the highest recall that the candidate boxes allow are returned. For choices between captions, the rates
    of right choices with the image, without it and by chance are returned.
    """
    protocols = result.protocols
    if PHRASE_PROTOCOL in protocols:
        metrics = _group_by_direction(protocols[PHRASE_PROTOCOL]).get(PHRASE_PROTOCOL, {})
        return [(METRIC_TITLES[key], metrics[key]) for key in _BAR_METRIC_NAMES if key in metrics]
    if CHOICES_PROTOCOL in protocols:
        metrics = _group_by_direction(protocols[CHOICES_PROTOCOL])["i2t"]
        return [(METRIC_TITLES[key], metrics[key]) for key in ("r1", "text_alone", "text_model", "chance") if key in metrics]
    for protocol in (protocols[name] for name in ("full", *protocols) if name in protocols):
        sums = _collect_overall_metrics(protocol)
        if "rsum" in sums:
            directions = _group_by_direction(protocol)
            selected = [(key, direction) for key in ("r1", "medr") for direction in ("i2t", "t2i")]
            return [
                ("rsum", sums["rsum"]),
                *(
                    (f"{METRIC_TITLES[key]}, {DIRECTIONS[direction].title}", directions[direction][key])
                    for key, direction in selected
                    if key in directions.get(direction, {})
                ),
            ]
    return []


def _build_section(name: str, results: Sequence[Result]) -> ProtocolSection:
    protocols = [result.protocols.get(name, ProtocolMetrics()) for result in results]
    metrics = [_group_by_direction(protocol) for protocol in protocols]
    directions = list(dict.fromkeys(direction for of_result in metrics for direction in of_result))
    keys = list(dict.fromkeys(key for of_result in metrics for one in of_result.values() for key in one))
    rows = [
        MetricRow(DIRECTIONS[direction].title, k, [of_result[direction].get(key, ReportMetric(math.nan)) for key in keys])
        for direction in directions
        for k, of_result in enumerate(metrics)
        if direction in of_result
    ]
    overall = [
        (k, metric_title(key), metric)
        for k, one in enumerate(protocols)
        for key, metric in _collect_overall_metrics(one).items()
    ]
    title = _format_protocol_title(
        name, results[0], next(result.protocols[name] for result in results if name in result.protocols)
    )
    columns = [metric_title(key) for key in keys]
    chance = _compute_chance_recalls(name, results[0], directions)
    chart = _draw_chart(title, directions, metrics, chance)
    notes = " ".join(
        filter(None, [_collect_whisker_notes(metrics), _exclusion_note(protocols[0]) if name == PHRASE_PROTOCOL else ""])
    )
    return ProtocolSection(title, columns, rows, overall, chart, notes, _chance_note(chance) if chart else "")


def _exclusion_note(protocol: ProtocolMetrics) -> str:
    """Return a note with the number of phrases without a true box (left out) and without a candidate (counted as missed)."""
    excluded = f"{protocol.n_without_box or 0:,} more phrases have no box and are left out."
    missed = protocol.n_without_candidate
    return excluded + (f" {missed:,} have no candidate, and count as missed." if missed else "")


def _compute_chance_recalls(name: str, result: Result, directions: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the recalls of a random order for each direction; empty unless the protocol ``name`` is ``1k`` or ``full``."""
    if name not in ("1k", "full"):
        return {}
    n_images = 1000 if name == "1k" else result.n_images
    n_captions = round(result.n_captions * n_images / max(1, result.n_images))
    known = [direction for direction in directions if direction in ("i2t", "t2i")]
    return {
        direction: {key: chance_recall(direction, int(key[1:]), n_images, n_captions) for key in _RECALL_NAMES}
        for direction in known
    }


def _chance_note(chance: dict[str, dict[str, float]]) -> str:
    levels = [
        f"{' / '.join(f'{level:.1f}' for level in recalls.values())} {DIRECTIONS[name].title}"
        for name, recalls in chance.items()
    ]
    return f"Dotted lines: chance, R@1 / 5 / 10 of {', '.join(levels)}." if levels else ""


def _format_protocol_title(name: str, result: Result, protocol: ProtocolMetrics) -> str:
    if name == "1k":
        return f"1,000 images, {f'mean of {protocol.folds} folds' if protocol.folds != 1 else 'one fold'}"
    if name == "full":
        return f"all {result.n_images:,} images and {result.n_captions:,} captions"
    if name == PHRASE_PROTOCOL:
        return f"{protocol.n_phrases or 0:,} phrases, right at an IoU of {protocol.iou or 0:g}"
    if name == "sentence-1k":
        return f"{_PROTOCOL_TITLES['sentence']}, {_format_protocol_title('1k', result, protocol)}"
    if name in result.choices:
        kind = name.removeprefix(CHOICES_PROTOCOL).removeprefix("-").replace("_", " ")
        return f"{result.choices[name].get('choices')} choices of a caption{f', {kind}' if kind else ''}"
    return _PROTOCOL_TITLES.get(name, name)


def _draw_chart(
    title: str, directions: Sequence[str], metrics: Sequence[_MetricsByDirection], chance: dict[str, dict[str, float]]
) -> Markup | None:
    bars = [
        (direction, key)
        for direction in directions
        for key in _BAR_METRIC_NAMES
        if any(key in one.get(direction, {}) for one in metrics)
    ]
    if not bars:
        return None
    groups = [
        (DIRECTIONS[direction].title, [METRIC_TITLES[key] for of_bar, key in bars if of_bar == direction])
        for direction in dict.fromkeys(of_bar for of_bar, _ in bars)
    ]
    series = []
    for of_result in metrics:
        of_bars = [of_result.get(direction, {}).get(key, ReportMetric(math.nan)) for direction, key in bars]
        lows, highs = zip(*(metric.whisker() for metric in of_bars), strict=True)
        series.append(Bars([metric.value for metric in of_bars], lows, highs))
    levels = [chance.get(direction, {}).get(key, math.nan) for direction, key in bars]
    return draw_recall_bars(f"Recalls, {title}", groups, series, levels if chance else ())


def _collect_whisker_notes(metrics: Sequence[_MetricsByDirection]) -> str:
    every = [metric for of_result in metrics for of_direction in of_result.values() for metric in of_direction.values()]
    notes = []
    if any(not math.isnan(metric.std) for metric in every):
        notes.append("±: standard deviation over seeds.")
    if any(metric.interval_text for metric in every):
        notes.append("Small numbers and whiskers: 95% intervals over the choice of test images.")
    elif notes:
        notes.append("Whiskers: one standard deviation on each side.")
    return " ".join(notes)


def _group_by_direction(protocol: ProtocolMetrics) -> _MetricsByDirection:
    return {
        direction: {key: _build_report_metric(protocol, metric, f"{direction}_{key}") for key, metric in metrics.items()}
        for direction, metrics in protocol.directions.items()
    }


def _collect_overall_metrics(protocol: ProtocolMetrics) -> dict[str, ReportMetric]:
    return {name: _build_report_metric(protocol, metric, name) for name, metric in protocol.metrics_over_directions.items()}


def _build_report_metric(protocol: ProtocolMetrics, metric: Metric, name: str) -> ReportMetric:
    return ReportMetric(*mean_and_std(metric), *(protocol.interval(name) or (math.nan, math.nan)))


class ChoiceCard(NamedTuple):
    """A choice between captions to display: the photo, the right caption and the wrong caption with the highest score.

    ``is_right`` is True if the model chose the right caption. ``kind`` names the way in which the wrong captions were written.
    """

    photo: Photo
    right_caption: str
    wrong_caption: str
    is_right: bool
    kind: str


def sample_choices(
    report_input: ReportInput, photos: DatasetPhotos, n: int, seed: int, missing: list[str]
) -> list[ChoiceCard]:
    """Return up to ``n`` wrong and then up to ``n`` right choices of a model between captions, sampled by ``seed``.

    The result names the file with the choices. If the embeddings are missing, or if this file cannot be read or has changed,
    the list is empty, and a sentence about it is added to ``missing``.
    """
    facts, run = report_input.result.choices.get(CHOICES_PROTOCOL, {}), report_input.embeddings
    file = resolve_path(report_input.path, str(facts.get("file")))
    try:
        if run is None:
            raise UserError("no embeddings")
        choice_set = read_choice_sets(file, run, report_input.path)[CHOICES_PROTOCOL]
        if choice_set.facts["sha256"] != facts.get("sha256"):
            raise UserError("changed")
    except UserError:
        missing.append(f"the choices {file.name} cannot be read, or have changed since the evaluation: none are shown")
        return []
    queries = rank_choices(run, choice_set)["i2t"]
    answers = queries.answers
    assert answers is not None
    is_right = queries.values_by_metric["r1"] > 0
    rng = np.random.default_rng(seed)
    cards = []
    for wanted in (False, True):
        for k in rng.permutation(np.flatnonzero(is_right == wanted))[:n].tolist():
            captions = (run.caption_ids[rows[k]] for rows in (answers.right_answers, answers.wrong_answers))
            right, wrong = (photos.find_caption(int(sentid)) for sentid in captions)
            photo = photos.find_photo(choice_set.choices[k].imgid)
            cards.append(ChoiceCard(photo, right, wrong, wanted, choice_set.choices[k].kind.replace("_", " ")))
    return cards


N_ACCEPTED_ANSWERS = 10  # number of accepted answers that are displayed for each kind of judgements


@dataclass(frozen=True)
class AcceptedAnswer:
    """A photo, the first caption that the model returned for it, the photo's own caption, and people's ratings as a text."""

    photo: Photo
    caption: str
    own_caption: str
    ratings: str


def find_accepted_answers(report_input: ReportInput, photos: DatasetPhotos, missing: list[str]) -> list[AcceptedAnswer]:
    """Return images for which the model ranks first a caption of another image that people accept; highest grades first.

    If embeddings, or a file of human judgements that the result names, are missing or changed, a sentence is added to
    ``missing``.
    """
    answers: list[AcceptedAnswer] = []
    run = report_input.embeddings
    for name, facts in report_input.result.judgements.items():
        file = resolve_path(report_input.path, str(facts.get("file")))
        try:
            if run is None:
                raise UserError("no embeddings")
            judgements = read_judgements(name.removeprefix(JUDGED_PREFIX), file, run, photos.dataset.path)
        except UserError:
            missing.append(f"the judgements {file.name} cannot be read: no answers that people accept")
            continue
        if judgements.facts["sha256"] != facts.get("sha256"):
            missing.append(f"the judgements {file.name} have changed since the evaluation: no answers that people accept")
            continue
        answers += _list_accepted_answers(run, judgements, photos)
    return answers


def _list_accepted_answers(run: Embeddings, judgements: Judgements, photos: DatasetPhotos) -> list[AcceptedAnswer]:
    queries = rank_judged_queries(run, judgements)["i2t"]
    assert queries.answers is not None
    wrong_but_accepted = (queries.values_by_metric["r1"] > 0) & (queries.values_by_metric["r1_own"] == 0)
    index_of = {
        pair: index
        for index, pair in enumerate(zip(judgements.image_ids.tolist(), judgements.caption_ids.tolist(), strict=True))
    }
    found = []
    for row in np.flatnonzero(wrong_but_accepted):
        image_row, caption_row = int(queries.answers.queries[row]), int(queries.answers.right_answers[row])
        found.append((index_of[int(run.image_ids[image_row]), int(run.caption_ids[caption_row])], image_row, caption_row))
    found.sort(key=lambda one: (-judgements.grades[one[0]], one[1]))
    answers = []
    for index, image_row, caption_row in found[:N_ACCEPTED_ANSWERS]:
        photo = photos.find_photo(int(run.image_ids[image_row]))
        caption = photos.find_caption(int(run.caption_ids[caption_row]))
        answers.append(
            AcceptedAnswer(photo, caption, photo.caption, _describe_ratings(judgements.kind, judgements.ratings[index]))
        )
    return answers


def _describe_ratings(kind: str, ratings: Floats) -> str:
    if kind == "expert":
        return f"experts: {', '.join(f'{rating:g}' for rating in ratings)} of 4"
    return f"{100 * ratings[0]:.0f}% of a crowd say yes" if kind == "crowd" else f"grade {ratings[0]:g}"
