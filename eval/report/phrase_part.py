"""What a report of phrases has that others have not: R@1 by type, and phrases in their photos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from vse.eval.defaults import COMPARED, IOU, PHRASE
from vse.eval.files.results import ProtocolMetrics, mean_and_std
from vse.eval.protocols.phrase_evaluation import phrase_folds
from vse.eval.ranking.bootstrap import differences
from vse.eval.ranking.metric_names import NAMES
from vse.eval.report.phrase_cards import PhraseGallery, phrase_gallery
from vse.eval.report.reported import ReportedResult
from vse.eval.report.result_metrics import ShownDifference, ShownMetric, shown_difference
from vse.pipeline.dataset import Dataset
from vse.pipeline.errors import UserError


class TypeBar(NamedTuple):
    """A metric as a bar, in percent of its full width."""

    shown: ShownMetric

    @property
    def share(self) -> float:
        """How long the bar is."""
        return 0.0 if math.isnan(self.shown.value) else min(max(self.shown.value, 0.0), 100.0)

    @property
    def whisker_left(self) -> float:
        """Where its whisker begins."""
        low = self.shown.whisker()[0]
        return 0.0 if math.isnan(low) else min(max(low, 0.0), 100.0)

    @property
    def whisker_width(self) -> float:
        """How long its whisker is; 0 without one."""
        high = self.shown.whisker()[1]
        return 0.0 if math.isnan(high) else max(min(high, 100.0) - self.whisker_left, 0.0)


class TypeRow(NamedTuple):
    """A type of phrases, how many there are, and R@1 of each result."""

    name: str
    n_phrases: int
    metrics: Sequence[TypeBar]


class PhrasePart(NamedTuple):
    """The part of a report that is of phrases; ``gallery`` is None without phrase scores, photos or captions."""

    iou: str
    types: Sequence[TypeRow]
    gallery: PhraseGallery | None


def is_of_phrases(reported: Sequence[ReportedResult]) -> bool:
    """Whether results are of phrases; :class:`UserError` if one is and the other is not, or at another threshold."""
    of_phrases = [PHRASE in one.result.protocols for one in reported]
    if any(of_phrases) and not all(of_phrases):
        one, other = reported[of_phrases.index(True)], reported[of_phrases.index(False)]
        raise UserError(f"{one.path} is of phrases, {other.path} is not: results side by side must be on the same queries")
    if len({_threshold(one) for one in reported}) > 1 and all(of_phrases):
        raise UserError(f"{reported[1].path} and {reported[0].path} are at different IoU; evaluate one again")
    return all(of_phrases)


def phrase_part(
    reported: Sequence[ReportedResult], dataset: Dataset | None, queries: int, seed: int, missing: list[str]
) -> PhrasePart:
    """The part of phrases, with ``queries`` captions in photos if phrase scores of all results and a data set are there.

    What is not shown, and why, is added to ``missing``.
    """
    iou, runs = _threshold(reported[0]), [one.phrases for one in reported if one.phrases]
    gallery = None
    if dataset is not None and len(runs) == len(reported) and queries:
        gallery = phrase_gallery(runs, dataset, iou, queries, seed)
        if gallery.unreadable:
            n = gallery.unreadable
            missing.append(f"{n} photo{'s' * (n > 1)} could not be read, and boxes stand on a blank there")
    return PhrasePart(f"{iou:g}", _types([one.result.protocols[PHRASE] for one in reported]), gallery)


def phrase_paired_differences(reported: Sequence[ReportedResult]) -> list[ShownDifference]:
    """First minus second in every metric of all phrases; empty without the phrase scores of two results."""
    runs = [one.phrases for one in reported if one.phrases]
    if len(runs) < 2:
        return []
    folds = phrase_folds([one.path for one in reported], runs, _threshold(reported[0]))
    first, second = ([[{PHRASE: fold[PHRASE]}]] for fold in folds)
    return [shown_difference(NAMES[key], leaf) for key, leaf in differences(first, second, COMPARED)[PHRASE].items()]


def _threshold(reported: ReportedResult) -> float:
    protocol = reported.result.protocols.get(PHRASE)
    return protocol.iou if protocol and protocol.iou is not None else IOU


def _types(protocols: Sequence[ProtocolMetrics]) -> list[TypeRow]:
    names = dict.fromkeys(name for protocol in protocols for name in protocol.per_type)
    rows = []
    for name in names:
        counts = [mean_and_std(protocol.per_type.get(name, {}).get("n_phrases"))[0] for protocol in protocols]
        n_phrases = next((int(count) for count in counts if not math.isnan(count)), 0)
        rows.append(TypeRow(name, n_phrases, [TypeBar(_of_type(protocol, name)) for protocol in protocols]))
    return sorted(rows, key=lambda row: -row.n_phrases)


def _of_type(protocol: ProtocolMetrics, name: str) -> ShownMetric:
    metric = protocol.per_type.get(name, {}).get("r1")
    return ShownMetric(*mean_and_std(metric), *(protocol.interval_of_type(name, "r1") or (math.nan, math.nan)))
