"""The phrase section of a report: R@1 by type of phrase, and captions with their phrases drawn on the photos."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.phrase_scores import MISSED_RANK, PhraseRanks, PhraseScores, rank_phrases, rowwise_iou
from vse.eval.files.results import ProtocolMetrics, mean_and_std
from vse.eval.options import DEFAULT_IOU_THRESHOLD, N_COMPARISON_BOOTSTRAP_SAMPLES, PHRASE_PROTOCOL
from vse.eval.protocols.phrase_evaluation import build_phrase_folds
from vse.eval.ranking.metrics import METRIC_TITLES
from vse.eval.ranking.statistics import compute_differences
from vse.eval.report.drawings import PhraseBox, PhrasePhoto, build_phrase_box, compute_bounding_size, phrase_colour
from vse.eval.report.pages import thumbnail_uri_and_size
from vse.eval.report.report_inputs import ReportInput, take_queries_of_new_images
from vse.eval.report.sections import ReportDifference, ReportMetric, build_report_difference
from vse.pipeline.dataset.dataset import Caption, Dataset, Mention, list_mentions
from vse.pipeline.dataset.identity import check_recorded_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage

log = logging.getLogger(__name__)
_PHOTO_SIDE = 420  # pixels of the longer side of a photo


class CaptionPiece(NamedTuple):
    """Consecutive words of a caption, with the number and the colour of the phrase to which they belong.

    For words outside of phrases, ``number`` is None and ``colour`` is blank.
    """

    text: str
    number: int | None
    colour: str


class PhraseOutcome(NamedTuple):
    """The outcome of a model for one phrase.

    ``number`` is the number of the phrase in its caption, from 1, and ``types`` lists its types, separated by commas.
    ``is_right`` is True if the highest-scoring box is right. ``iou`` is a text with the IoU of this box and the true box.
    ``first_right`` is a text such as ``right at rank 3`` or ``no right box``; blank if the highest-scoring box is right.
    """

    number: int
    colour: str
    text: str
    types: str
    is_right: bool
    iou: str
    first_right: str


class PhraseColumn(NamedTuple):
    """A photo with one model's highest-scoring box for each phrase of a caption, and the outcome of each phrase."""

    photo: PhrasePhoto
    phrases: Sequence[PhraseOutcome]

    @property
    def n_right(self) -> int:
        return sum(phrase.is_right for phrase in self.phrases)


class PhraseCard(NamedTuple):
    """A caption to display, with coloured phrases and a column per model."""

    pieces: Sequence[CaptionPiece]
    columns: Sequence[PhraseColumn]


class PhraseCardGroup(NamedTuple):
    """Phrase cards under a common title."""

    title: str
    cards: Sequence[PhraseCard]


@dataclass(frozen=True)
class PhraseGallery:
    """The captions of a phrase section. ``n_unreadable`` is the number of photos that cannot be read.

    For two models, ``comparison_counts`` has three numbers of phrases: those that only the first model localises, those that
    only the second model localises, and all others. It is None for one model.
    """

    groups: Sequence[PhraseCardGroup]
    n_unreadable: int
    comparison_counts: tuple[int, int, int] | None = None


class _CaptionStats(NamedTuple):
    """Statistics of the captions that have phrases with a true box. Every array is (n_captions,).

    ``n_phrases`` is the number of a caption's phrases with a true box. ``n_right`` has an array for each model: the number of
    phrases whose highest-scoring box is right. ``mean_iou`` has an array for each model: the IoU between the highest-scoring
    box and the true box, as a mean over the phrases of a caption.
    """

    caption_ids: NDArray[np.int64]
    image_ids: NDArray[np.int64]
    n_phrases: NDArray[np.int64]
    n_right: Sequence[NDArray[np.int64]]
    mean_iou: Sequence[NDArray[np.float64]]


def match_mentions(run: PhraseScores, dataset: Dataset) -> dict[int, Mention]:
    """Return a dict from the id of each phrase with scores in ``run`` to its mention, the phrase in the data set.

    Raises UserError if the scores belong to other data.
    """
    if run.dataset != dataset.name:
        raise UserError(f"{dataset.path} is the data set {dataset.name!r}, the phrases belong to {run.dataset!r}; see --data")
    check_recorded_data(dataset, run.identity)
    every = list_mentions(dataset)
    for phrase_id, imgid, sentid in zip(
        run.phrase_ids.tolist(), run.image_ids.tolist(), run.caption_ids.tolist(), strict=True
    ):
        known = every[phrase_id] if 0 <= phrase_id < len(every) else None
        if known is None or (known.image.imgid, known.caption.sentid) != (imgid, sentid):
            phrase = f"phrase {phrase_id} of caption {sentid} of image {imgid}"
            raise UserError(f"{dataset.path}: has no {phrase}, but there are scores for it; see --data")
    return {phrase_id: every[phrase_id] for phrase_id in run.phrase_ids.tolist()}


def build_phrase_gallery(runs: Sequence[PhraseScores], dataset: Dataset, iou: float, n: int, seed: int) -> PhraseGallery:
    """Return the gallery of ``n`` captions for one model, or for two models on the same phrases.

    A box is right if its IoU with the true box is at least ``iou``. For one model, the captions are the best, the worst and a
    random sample by ``seed``, a third each. For two models, the captions are those whose outcomes differ most.
    """
    mentions_by_id = match_mentions(runs[0], dataset)
    ranks_by_model = [rank_phrases(run.scores, run.boxes, run.offsets, run.truth, iou) for run in runs]
    captions = _compute_caption_stats(runs[0], ranks_by_model)
    selected = _select_contrasting_captions(captions, n) if len(runs) == 2 else _select_captions(captions, n, seed)
    groups, unreadable = [], set()
    for title, sentids in selected:
        cards = []
        for sentid in sentids:
            card = _build_phrase_card(sentid, runs, ranks_by_model, mentions_by_id, dataset)
            cards.append(card)
            unreadable |= {card.columns[0].photo.file} if card.columns[0].photo.source is None else set()
        groups.append(PhraseCardGroup(title, cards))
    return PhraseGallery(
        [group for group in groups if group.cards], len(unreadable), _count_differing_phrases(runs[0], ranks_by_model)
    )


def _count_differing_phrases(run: PhraseScores, ranks_by_model: Sequence[PhraseRanks]) -> tuple[int, int, int] | None:
    if len(ranks_by_model) < 2:
        return None
    first, second = (ranks.ranks[run.true_box_mask] == 0 for ranks in ranks_by_model)
    a, b = int(np.count_nonzero(first & ~second)), int(np.count_nonzero(second & ~first))
    return a, b, len(first) - a - b


def _compute_caption_stats(run: PhraseScores, ranks_by_model: Sequence[PhraseRanks]) -> _CaptionStats:
    rows = np.flatnonzero(run.true_box_mask)
    ids, first, which = np.unique(run.caption_ids[rows], return_index=True, return_inverse=True)
    n_phrases = np.bincount(which)
    n_right = [np.bincount(which, ranks.ranks[rows] == 0).astype(np.int64) for ranks in ranks_by_model]
    mean_iou = [np.bincount(which, ranks.best_iou[rows]) / n_phrases for ranks in ranks_by_model]
    return _CaptionStats(ids, run.image_ids[rows][first], n_phrases, n_right, mean_iou)


def _select_captions(captions: _CaptionStats, n: int, seed: int) -> list[tuple[str, list[int]]]:
    """Return the title and the caption ids of three groups: the best, random and worst captions, ``n`` in total.

    No photo is used twice.
    """
    share, mean_iou = captions.n_right[0] / captions.n_phrases, captions.mean_iou[0]
    rng = np.random.default_rng(seed)
    orders = {
        "Best cases: the most phrases, all right": np.lexsort((-mean_iou, -captions.n_phrases, -share)),
        "Sampled at random": rng.permutation(len(captions.caption_ids)),
        "Worst cases: the most phrases, all wrong": np.lexsort((mean_iou, -captions.n_phrases, share)),
    }
    sizes = dict(zip(orders, [n // 3 + (n % 3 > 0), n // 3, n // 3 + (n % 3 > 1)], strict=True))
    best, random, worst = orders
    selected: dict[str, list[int]] = {}
    used: set[int] = set()
    for title in (best, worst, random):  # random comes last, because it must not use up the photos of the others
        rows = take_queries_of_new_images(orders[title], captions.image_ids, sizes[title], used)
        selected[title] = captions.caption_ids[rows].tolist()
    return [(title, selected[title]) for title in orders]


def _select_contrasting_captions(captions: _CaptionStats, n: int) -> list[tuple[str, list[int]]]:
    """Return the title and the caption ids of two groups of captions.

    In the first group, the first model localises more phrases of a caption; in the second group, the second model does.
    """
    more = captions.n_right[0] - captions.n_right[1]
    nearer = captions.mean_iou[0] - captions.mean_iou[1]
    used: set[int] = set()
    groups = []
    for title, sign, size in (("A places more phrases right", 1, n - n // 2), ("B places more phrases right", -1, n // 2)):
        order = np.lexsort((-sign * nearer, -sign * more))
        rows = take_queries_of_new_images(order[sign * more[order] > 0], captions.image_ids, size, used)
        groups.append((title, captions.caption_ids[rows].tolist()))
    return groups


def _build_phrase_card(
    sentid: int,
    runs: Sequence[PhraseScores],
    ranks_by_model: Sequence[PhraseRanks],
    mentions_by_id: Mapping[int, Mention],
    dataset: Dataset,
) -> PhraseCard:
    rows = np.flatnonzero((runs[0].caption_ids == sentid) & runs[0].true_box_mask).tolist()
    phrases = [mentions_by_id[int(runs[0].phrase_ids[row])] for row in rows]
    truths = [build_phrase_box(runs[0].truth[row], number, truth=True) for number, row in enumerate(rows, 1)]
    boxes_of = [
        [*truths, *(box for number, row in enumerate(rows, 1) for box in _draw_best_box(run, row, number))] for run in runs
    ]
    source, size = _read_photo(phrases[0], dataset)
    size = size or compute_bounding_size([box for boxes in boxes_of for box in boxes])
    columns = []
    for number, (run, ranks, boxes) in enumerate(zip(runs, ranks_by_model, boxes_of, strict=True)):
        name = f"photo-{sentid}"
        photo = PhrasePhoto(name, source, phrases[0].image.file, size, boxes, earlier_element_id=name if number else "")
        outcomes = [_build_outcome(run, ranks, row, k, phrases[k - 1].text) for k, row in enumerate(rows, 1)]
        columns.append(PhraseColumn(photo, outcomes))
    return PhraseCard(_split_caption(phrases[0].caption, phrases), columns)


def _read_photo(mention: Mention, dataset: Dataset) -> tuple[str | None, tuple[int, int] | None]:
    if not dataset.has_image_files:
        return None, None
    try:
        return thumbnail_uri_and_size(dataset.image_path(mention.image), _PHOTO_SIDE)
    except BadImage as error:
        log.warning("%s", error)
        return None, None


def _draw_best_box(run: PhraseScores, row: int, number: int) -> list[PhraseBox]:
    """Return the drawing of the highest-scoring box of a phrase, in a list; empty if the phrase has no candidates.

    If several boxes have the highest score, the box with the lowest IoU is drawn, as ties count against the model.
    """
    candidates = run.candidate_slice(row)
    scores, boxes = run.scores[candidates], run.boxes[candidates]
    if not len(scores):
        return []
    overlaps = rowwise_iou(boxes, np.broadcast_to(run.truth[row], boxes.shape))
    best = np.where(scores == scores.max(), overlaps, np.inf).argmin()
    return [build_phrase_box(boxes[best], number)]


def _build_outcome(run: PhraseScores, ranks: PhraseRanks, row: int, number: int, text: str) -> PhraseOutcome:
    rank = int(ranks.ranks[row])
    first_right = "" if rank == 0 else "no right box" if rank == MISSED_RANK else f"right at rank {rank + 1:,}"
    types = str(run.types[row]).replace("/", ", ")
    return PhraseOutcome(number, phrase_colour(number), text, types, rank == 0, f"{ranks.best_iou[row]:.2f}", first_right)


def _split_caption(caption: Caption, phrases: Sequence[Mention]) -> list[CaptionPiece]:
    """Split a caption where phrases begin and end. A word in several phrases belongs to the first of these phrases."""
    numbers: list[int | None] = [None] * len(caption.tokens)
    for number, mention in enumerate(phrases, 1):
        for k in range(mention.phrase.start, mention.phrase.stop):
            numbers[k] = number if numbers[k] is None else numbers[k]
    pieces = []
    for number, words in groupby(zip(numbers, caption.tokens, strict=True), key=lambda word: word[0]):
        text = " ".join(token for _, token in words)
        pieces.append(CaptionPiece(text, number, "" if number is None else phrase_colour(number)))
    return pieces


class MetricBar(NamedTuple):
    """A metric that is displayed as a bar. The properties are lengths in percent of the full width."""

    metric: ReportMetric

    @property
    def bar_width(self) -> float:
        return 0.0 if math.isnan(self.metric.value) else min(max(self.metric.value, 0.0), 100.0)

    @property
    def whisker_left(self) -> float:
        low = self.metric.whisker()[0]
        return 0.0 if math.isnan(low) else min(max(low, 0.0), 100.0)

    @property
    def whisker_width(self) -> float:
        high = self.metric.whisker()[1]
        return 0.0 if math.isnan(high) else max(min(high, 100.0) - self.whisker_left, 0.0)


class PhraseTypeRow(NamedTuple):
    """A row for a type of phrases, such as people: the number of its phrases, and R@1 of each result."""

    name: str
    n_phrases: int
    metrics: Sequence[MetricBar]


class PhraseSection(NamedTuple):
    """The phrase section of a report. ``types`` has a row for each type of phrases, such as people.

    ``gallery`` is None if phrase scores or the data set are missing, or if no captions were requested.
    """

    iou_threshold: str
    types: Sequence[PhraseTypeRow]
    gallery: PhraseGallery | None


def are_phrase_results(inputs: Sequence[ReportInput]) -> bool:
    """Return whether all inputs are results of phrase localisation.

    Raises UserError if only some of them are, or if their IoU thresholds differ.
    """
    are_phrases = [PHRASE_PROTOCOL in one.result.protocols for one in inputs]
    if any(are_phrases) and not all(are_phrases):
        one, other = inputs[are_phrases.index(True)], inputs[are_phrases.index(False)]
        raise UserError(
            f"{one.path} evaluates phrases, {other.path} does not: results side by side must have the same queries"
        )
    if len({_get_iou_threshold(one) for one in inputs}) > 1 and all(are_phrases):
        raise UserError(f"{inputs[1].path} and {inputs[0].path} have different IoU thresholds; evaluate one again")
    return all(are_phrases)


def build_phrase_section(
    inputs: Sequence[ReportInput], dataset: Dataset | None, n_captions: int, seed: int, missing: list[str]
) -> PhraseSection:
    """Return the phrase section of a report.

    The section has ``n_captions`` captions if the data set and all phrase scores are available. If photos cannot be read, a
    sentence about them is appended to ``missing``.
    """
    iou, runs = _get_iou_threshold(inputs[0]), [one.phrase_scores for one in inputs if one.phrase_scores]
    gallery = None
    if dataset is not None and len(runs) == len(inputs) and n_captions:
        gallery = build_phrase_gallery(runs, dataset, iou, n_captions, seed)
        if gallery.n_unreadable:
            n = gallery.n_unreadable
            missing.append(f"{n} photo{'s' * (n > 1)} could not be read; their boxes are drawn on an empty area")
    return PhraseSection(f"{iou:g}", _build_type_rows([one.result.protocols[PHRASE_PROTOCOL] for one in inputs]), gallery)


def compute_phrase_metric_differences(inputs: Sequence[ReportInput]) -> list[ReportDifference]:
    """Return each phrase metric of the first result minus that of the second; empty without phrase scores of two results."""
    runs = [one.phrase_scores for one in inputs if one.phrase_scores]
    if len(runs) < 2:
        return []
    folds = build_phrase_folds([one.path for one in inputs], runs, _get_iou_threshold(inputs[0]))
    first, second = ([[{PHRASE_PROTOCOL: fold[PHRASE_PROTOCOL]}]] for fold in folds)
    return [
        build_report_difference(METRIC_TITLES[key], metric)
        for key, metric in compute_differences(first, second, N_COMPARISON_BOOTSTRAP_SAMPLES)[PHRASE_PROTOCOL].items()
    ]


def _get_iou_threshold(report_input: ReportInput) -> float:
    protocol = report_input.result.protocols.get(PHRASE_PROTOCOL)
    return protocol.iou if protocol and protocol.iou is not None else DEFAULT_IOU_THRESHOLD


def _build_type_rows(protocols: Sequence[ProtocolMetrics]) -> list[PhraseTypeRow]:
    names = dict.fromkeys(name for protocol in protocols for name in protocol.per_type)
    rows = []
    for name in names:
        counts = [mean_and_std(protocol.per_type.get(name, {}).get("n_phrases"))[0] for protocol in protocols]
        n_phrases = next((int(count) for count in counts if not math.isnan(count)), 0)
        rows.append(PhraseTypeRow(name, n_phrases, [MetricBar(_type_metric(protocol, name)) for protocol in protocols]))
    return sorted(rows, key=lambda row: -row.n_phrases)


def _type_metric(protocol: ProtocolMetrics, name: str) -> ReportMetric:
    metric = protocol.per_type.get(name, {}).get("r1")
    return ReportMetric(*mean_and_std(metric), *(protocol.type_interval(name, "r1") or (math.nan, math.nan)))
