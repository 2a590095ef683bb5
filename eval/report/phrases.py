"""Captions whose phrases a report shows in their photos: with what one or two models took each for, best and worst cases.

What a report of phrases has that others have not: R@1 by type, and phrases in their photos.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.eval.defaults import COMPARISON_SAMPLES, IOU, PHRASE
from vse.eval.files.phrase_scores import PhraseScores
from vse.eval.files.results import ProtocolMetrics, mean_and_std
from vse.eval.protocols.phrase_evaluation import phrase_folds
from vse.eval.ranking.bootstrap import differences
from vse.eval.ranking.localisation import MISSED, PhraseRanks, pairwise_iou, phrase_ranks
from vse.eval.ranking.metrics import METRIC_TITLES
from vse.eval.report.drawings import PlacedBox, PlacedPhoto, colour_of, placed_box, size_around
from vse.eval.report.metrics_section import ShownDifference, ShownMetric, shown_difference
from vse.eval.report.pages import sized_thumbnail
from vse.eval.report.report_inputs import ReportedResult
from vse.pipeline.dataset.dataset import Caption, Dataset, Mention, mentions
from vse.pipeline.dataset.identity import check_recorded_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage

log = logging.getLogger(__name__)
_SIDE = 420  # pixels of the longer side of a photo


class CaptionPiece(NamedTuple):
    """Some words of a caption, with number and colour of the phrase that they are; None and blank between phrases."""

    text: str
    number: int | None
    colour: str


class PlacedPhrase(NamedTuple):
    """What a model took a phrase for: whether that is right, its IoU, and, if not, at which rank (from 1) a right box is."""

    number: int
    colour: str
    text: str
    types: str
    right: bool
    iou: str
    answer: str


class PhraseColumn(NamedTuple):
    """A photo with the boxes that one model gives to the phrases of a caption, and each in words."""

    photo: PlacedPhoto
    phrases: Sequence[PlacedPhrase]

    @property
    def n_right(self) -> int:
        """How many phrases the model places right."""
        return sum(phrase.right for phrase in self.phrases)


class PhraseCard(NamedTuple):
    """A caption with its phrases in colours, and a column per model."""

    pieces: Sequence[CaptionPiece]
    columns: Sequence[PhraseColumn]


class PhraseGroup(NamedTuple):
    """Cards with something in common."""

    title: str
    cards: Sequence[PhraseCard]


@dataclass(frozen=True)
class PhraseGallery:
    """Cards in groups; of two models also ``counts``: of how many phrases the first, the second and neither is right alone."""

    groups: Sequence[PhraseGroup]
    unreadable: int
    counts: tuple[int, int, int] | None = None


class _Captions(NamedTuple):
    """The captions that have phrases with a box, by their first such row: how many there are, and of each model how many are
    right, and the mean IoU; all (n_captions,).
    """

    ids: NDArray[np.int64]
    images: NDArray[np.int64]
    n_phrases: NDArray[np.int64]
    n_right: Sequence[NDArray[np.int64]]
    mean_iou: Sequence[NDArray[np.float64]]


def mentions_of(run: PhraseScores, dataset: Dataset) -> dict[int, Mention]:
    """The phrases of a file by their ids; :class:`UserError` if they are not those of the data set."""
    if run.dataset != dataset.name:
        raise UserError(f"{dataset.path} is the data set {dataset.name!r}, the phrases are of {run.dataset!r}; see --data")
    check_recorded_data(dataset, run.identity)
    every = mentions(dataset)
    for number, imgid, sentid in zip(run.phrase_ids.tolist(), run.image_ids.tolist(), run.caption_ids.tolist(), strict=True):
        known = every[number] if 0 <= number < len(every) else None
        if known is None or (known.image.imgid, known.caption.sentid) != (imgid, sentid):
            of = f"phrase {number} of caption {sentid} of image {imgid}"
            raise UserError(f"{dataset.path}: has no {of}, of which there are scores; see --data")
    return {number: every[number] for number in run.phrase_ids.tolist()}


def phrase_gallery(runs: Sequence[PhraseScores], dataset: Dataset, iou: float, n: int, seed: int) -> PhraseGallery:
    """``n`` captions of one model's phrases, or of two models' of the same phrases; ``seed`` draws those that are drawn."""
    known = mentions_of(runs[0], dataset)
    outcomes = [phrase_ranks(run.scores, run.boxes, run.offsets, run.truth, iou) for run in runs]
    captions = _captions(runs[0], outcomes)
    groups = _select_of_two(captions, n) if len(runs) == 2 else _select(captions, n, seed)
    shown, unreadable = [], set()
    for title, picked in groups:
        cards = []
        for sentid in picked:
            card = _card(sentid, runs, outcomes, known, dataset)
            cards.append(card)
            unreadable |= {card.columns[0].photo.file} if card.columns[0].photo.source is None else set()
        shown.append(PhraseGroup(title, cards))
    return PhraseGallery([group for group in shown if group.cards], len(unreadable), _counts(runs[0], outcomes))


def _counts(run: PhraseScores, outcomes: Sequence[PhraseRanks]) -> tuple[int, int, int] | None:
    if len(outcomes) < 2:
        return None
    first, second = (outcome.ranks[run.has_box] == 0 for outcome in outcomes)
    a, b = int(np.count_nonzero(first & ~second)), int(np.count_nonzero(second & ~first))
    return a, b, len(first) - a - b


def _captions(run: PhraseScores, outcomes: Sequence[PhraseRanks]) -> _Captions:
    rows = np.flatnonzero(run.has_box)
    ids, first, which = np.unique(run.caption_ids[rows], return_index=True, return_inverse=True)
    n_phrases = np.bincount(which)
    n_right = [np.bincount(which, outcome.ranks[rows] == 0).astype(np.int64) for outcome in outcomes]
    mean_iou = [np.bincount(which, outcome.best_iou[rows]) / n_phrases for outcome in outcomes]
    return _Captions(ids, run.image_ids[rows][first], n_phrases, n_right, mean_iou)


def _select(captions: _Captions, n: int, seed: int) -> list[tuple[str, list[int]]]:
    """Best cases, some drawn at random, and worst cases, a third each; a photo is shown once."""
    share, mean_iou = captions.n_right[0] / captions.n_phrases, captions.mean_iou[0]
    rng = np.random.default_rng(seed)
    orders = {
        "Best cases: the most phrases, all right": np.lexsort((-mean_iou, -captions.n_phrases, -share)),
        "Drawn at random": rng.permutation(len(captions.ids)),
        "Worst cases: the most phrases, all wrong": np.lexsort((mean_iou, -captions.n_phrases, share)),
    }
    sizes = dict(zip(orders, [n // 3 + (n % 3 > 0), n // 3, n // 3 + (n % 3 > 1)], strict=True))
    best, drawn, worst = orders
    picked: dict[str, list[int]] = {}
    shown: set[int] = set()
    for title in (best, worst, drawn):  # best and worst come first
        picked[title] = _pick(captions, orders[title], sizes[title], shown)
    return [(title, picked[title]) for title in orders]


def _select_of_two(captions: _Captions, n: int) -> list[tuple[str, list[int]]]:
    """The captions of which one model places most phrases more than the other, half of them for each."""
    more = captions.n_right[0] - captions.n_right[1]
    nearer = captions.mean_iou[0] - captions.mean_iou[1]
    shown: set[int] = set()
    groups = []
    for title, sign, size in (("A places more phrases right", 1, n - n // 2), ("B places more phrases right", -1, n // 2)):
        order = np.lexsort((-sign * nearer, -sign * more))
        groups.append((title, _pick(captions, order[sign * more[order] > 0], size, shown)))
    return groups


def _pick(captions: _Captions, order: NDArray[np.int64], size: int, shown: set[int]) -> list[int]:
    """The ids of the first captions in an order, each of another photo than those that are ``shown``."""
    picked: list[int] = []
    for row in order.tolist():
        if len(picked) == size:
            break
        if int(captions.images[row]) not in shown:
            shown.add(int(captions.images[row]))
            picked.append(int(captions.ids[row]))
    return picked


def _card(
    sentid: int,
    runs: Sequence[PhraseScores],
    outcomes: Sequence[PhraseRanks],
    known: Mapping[int, Mention],
    dataset: Dataset,
) -> PhraseCard:
    rows = np.flatnonzero((runs[0].caption_ids == sentid) & runs[0].has_box).tolist()
    spoken = [known[int(runs[0].phrase_ids[row])] for row in rows]
    truths = [placed_box(runs[0].truth[row], number, truth=True) for number, row in enumerate(rows, 1)]
    drawn = [[*truths, *(box for number, row in enumerate(rows, 1) for box in _best(run, row, number))] for run in runs]
    source, size = _photo(spoken[0], dataset)
    size = size or size_around([box for boxes in drawn for box in boxes])
    columns = []
    for number, (run, outcome, boxes) in enumerate(zip(runs, outcomes, drawn, strict=True)):
        name = f"photo-{sentid}"
        photo = PlacedPhoto(name, source, spoken[0].image.file, size, boxes, again=name if number else "")
        columns.append(PhraseColumn(photo, [_placed(run, outcome, row, k, known) for k, row in enumerate(rows, 1)]))
    return PhraseCard(_pieces(spoken[0].caption, spoken), columns)


def _photo(mention: Mention, dataset: Dataset) -> tuple[str | None, tuple[int, int] | None]:
    """The photo of a phrase with its size; None and None if it cannot be read."""
    if not dataset.has_image_files:
        return None, None
    try:
        return sized_thumbnail(dataset.image_path(mention.image), _SIDE)
    except BadImage as error:
        log.warning("%s", error)
        return None, None


def _best(run: PhraseScores, row: int, number: int) -> list[PlacedBox]:
    """The best-scoring candidate of a phrase, of several that score alike the one that lies worst; none without candidates."""
    of = run.candidates(row)
    scores, boxes = run.scores[of], run.boxes[of]
    if not len(scores):
        return []
    overlaps = pairwise_iou(boxes, np.broadcast_to(run.truth[row], boxes.shape))
    best = np.where(scores == scores.max(), overlaps, np.inf).argmin()
    return [placed_box(boxes[best], number)]


def _placed(run: PhraseScores, outcome: PhraseRanks, row: int, number: int, known: Mapping[int, Mention]) -> PlacedPhrase:
    rank = int(outcome.ranks[row])
    answer = "" if rank == 0 else "no right box" if rank == MISSED else f"right at rank {rank + 1:,}"
    text, types = known[int(run.phrase_ids[row])].text, str(run.types[row]).replace("/", ", ")
    return PlacedPhrase(number, colour_of(number), text, types, rank == 0, f"{outcome.best_iou[row]:.2f}", answer)


def _pieces(caption: Caption, spoken: Sequence[Mention]) -> list[CaptionPiece]:
    """The words of a caption, cut where phrases begin and end; of phrases that overlap the first has the words."""
    numbers: list[int | None] = [None] * len(caption.tokens)
    for number, mention in enumerate(spoken, 1):
        for place in range(mention.phrase.start, mention.phrase.stop):
            numbers[place] = number if numbers[place] is None else numbers[place]
    pieces = []
    for number, words in groupby(zip(numbers, caption.tokens, strict=True), key=lambda word: word[0]):
        text = " ".join(token for _, token in words)
        pieces.append(CaptionPiece(text, number, "" if number is None else colour_of(number)))
    return pieces


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
    return [
        shown_difference(METRIC_TITLES[key], leaf)
        for key, leaf in differences(first, second, COMPARISON_SAMPLES)[PHRASE].items()
    ]


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
    return ShownMetric(*mean_and_std(metric), *(protocol.type_interval(name, "r1") or (math.nan, math.nan)))
