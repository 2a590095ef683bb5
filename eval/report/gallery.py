"""The gallery of a report: queries with the best answers of one or two models, as photos and captions."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.files.embeddings import Embeddings
from vse.eval.ranking.metrics import Ranks
from vse.eval.ranking.ranks import blocks_from_embeddings, shared_tensor
from vse.eval.report.drawings import AttentionDrawing, AttentionReader, DrawnWord, PairIds, draw_attention
from vse.eval.report.pages import DatasetPhotos, Photo
from vse.eval.report.report_inputs import select_query_groups
from vse.eval.search.top_k import Attention

N_DISPLAYED_CANDIDATES = 5  # number of candidates displayed for each query
_N_NEGATIVES = 4  # number of hard negatives displayed for image queries and for caption queries
_LAST_RANKS = (1, 10, 100)  # the last ranks of the first three ranges in _RANK_RANGES
_RANK_RANGES = ("1", "2 to 10", "11 to 100", "above 100")

DirectionName = Literal["i2t", "t2i"]


@dataclass(frozen=True)
class Candidate:
    """A caption (if the query is an image) or an image (if the query is a caption), with its row and its 0-based rank."""

    row: int
    rank: int
    score: float
    is_right: bool


@dataclass(frozen=True)
class QueryResult:
    """The best candidates for a query, and the best right candidate. ``query`` is the row of the query.

    If scores are equal, wrong candidates come first.
    """

    query: int
    candidates: tuple[Candidate, ...]
    best_right: Candidate

    @property
    def displayed_candidates(self) -> list[Candidate]:
        """The best candidates and, if no right answer is among them, the best right answer."""
        return [*self.candidates, *([] if self.best_right in self.candidates else [self.best_right])]


@dataclass(frozen=True)
class AnswerCard:
    """An answer to display: a caption if the query is a photo, or a photo with its first caption if the query is a caption.

    ``rank`` is 1-based. ``caption_words`` are the words of a returned caption, whose attention is drawn on the photo of the
    query. ``drawing`` is the attention of a query caption on the returned photo. Without attention, ``caption_words`` is empty
    and ``drawing`` is None.
    """

    rank: int
    score: str
    is_right: bool
    caption: str
    photo: Photo | None
    caption_words: Sequence[DrawnWord] = ()
    drawing: AttentionDrawing | None = None


@dataclass(frozen=True)
class ModelColumn:
    """The answers of one model to a query. ``rank`` is the 1-based rank of the best right answer.

    ``right_answer`` is the best right answer; None if it is among ``answers``.
    """

    rank: int
    answers: Sequence[AnswerCard]
    right_answer: AnswerCard | None

    @property
    def query_words(self) -> Sequence[DrawnWord]:
        """The words of a query caption, if its attention is drawn on the photo of an answer; else empty."""
        cards = [*self.answers, *([self.right_answer] if self.right_answer else [])]
        return next((card.drawing.words for card in cards if card.drawing), ())


@dataclass(frozen=True)
class QueryCard:
    """A query to display, either a photo or a caption, with a column per model.

    ``element_id`` identifies the card in links, e.g. ``image-7`` for the image with the id 7. ``drawings`` has the attention
    of the returned captions on the photo of the query.
    """

    element_id: str
    photo: Photo | None
    caption: str
    columns: Sequence[ModelColumn]
    drawings: Sequence[AttentionDrawing] = ()

    @property
    def rank_range(self) -> int:
        """The range of the first model's rank, as an index: 0 for rank 1, 1 for 2 to 10, 2 for 11 to 100, 3 for above 100."""
        return bisect_left(_LAST_RANKS, self.columns[0].rank)


@dataclass(frozen=True)
class CardGroup:
    """Query cards under a common title."""

    title: str
    cards: Sequence[QueryCard]


@dataclass(frozen=True)
class Gallery:
    """The displayed queries of one direction.

    For two models, ``comparison_counts`` has the numbers of queries that the first model, the second model and neither model
    ranks better; it is None for one model. ``attention_directions`` has the directions of the drawn attention: ``t2i`` from
    words to regions, ``i2t`` from regions to words. ``has_filters`` is True if the reader can select cards by their ranks.
    """

    direction: DirectionName
    groups: Sequence[CardGroup]
    comparison_counts: tuple[int, int, int] | None = None
    attention_directions: Sequence[str] = ()
    has_filters: bool = False

    @property
    def rank_filters(self) -> list[tuple[int, str, int]]:
        """The index, name and number of cards of each range of ranks with cards; empty if the gallery has no filters."""
        counts = Counter(card.rank_range for group in self.groups for card in group.cards)
        return [(index, _RANK_RANGES[index], counts[index]) for index in sorted(counts)] if self.has_filters else []

    @property
    def max_words(self) -> int:
        """The largest number of words that are drawn on a card."""
        cards = [card for group in self.groups for card in group.cards]
        on_photos = [sum(len(drawing.words) for drawing in card.drawings) for card in cards]
        return max([0, *on_photos, *(len(column.query_words) for card in cards for column in card.columns)])


@dataclass(frozen=True)
class HardNegative:
    """A photo and its caption in the training set, and a wrong image or caption (a negative) with a high loss, ``cost``."""

    cost: str
    positive: Photo
    caption: str
    negative: Photo
    negative_caption: str


def build_gallery(
    direction: DirectionName,
    embeddings: Sequence[Embeddings],
    ranks: Sequence[Ranks],
    photos: DatasetPhotos,
    n: int,
    seed: int,
    attention: Sequence[AttentionReader],
    extremes: bool = False,
) -> Gallery:
    """Return the gallery of one direction with up to ``n`` queries or, with ``extremes``, two groups of up to ``n`` queries.

    ``embeddings``, ``ranks`` and ``attention`` have an item for each model. The groups of queries are those of
    :func:`vse.eval.report.report_inputs.select_query_groups`.
    """
    image_of_caption = embeddings[0].image_of_caption()
    n_captions = len(image_of_caption)
    # An image without a caption is not a query.
    rows = np.unique(image_of_caption) if direction == "i2t" else np.arange(n_captions)
    images = rows if direction == "i2t" else image_of_caption
    titles, groups, counts = select_query_groups([getattr(one, direction) for one in ranks], images, n, seed, extremes)
    queries = [rows[group].tolist() for group in groups]
    all_queries = [query for group in queries for query in group]
    results = [dict(zip(all_queries, retrieve_candidates(one, direction, all_queries), strict=True)) for one in embeddings]
    scores = [
        {
            _find_pair_ids(direction, embeddings[0], one.query, each): each.score
            for one in of_run.values()
            for each in one.displayed_candidates
        }
        for of_run in results
    ]
    attentions = [of_model.read_attention_by_pair(of_run) for of_model, of_run in zip(attention, scores, strict=True)]
    cards = [
        CardGroup(
            title,
            [
                _build_query_card(direction, embeddings[0], photos, [one[query] for one in results], attentions)
                for query in group
            ],
        )
        for title, group in zip(titles, queries, strict=True)
    ]
    attention_directions = sorted({one.direction for of_model in attentions for one in of_model.values()}, reverse=True)
    return Gallery(direction, [group for group in cards if group.cards], counts, attention_directions, extremes)


def retrieve_candidates(
    run: Embeddings, direction: DirectionName, queries: Sequence[int], top: int = N_DISPLAYED_CANDIDATES
) -> list[QueryResult]:
    """Return for each query its ``top`` best candidates in the complete split.

    ``queries`` has rows of images (``i2t``) or of captions (``t2i``).
    """
    image_of_caption = run.image_of_caption()
    scores_of_queries = _score_image_queries(run, queries) if direction == "i2t" else _score_caption_queries(run, queries)
    results = []
    for query, scores in zip(queries, scores_of_queries, strict=True):
        right = image_of_caption == query if direction == "i2t" else np.arange(len(run.image_ids)) == image_of_caption[query]
        results.append(_build_query_result(query, scores, right, top))
    return results


def _build_query_result(query: int, scores: Tensor, right: NDArray[np.bool_], top: int) -> QueryResult:
    wrong_first = torch.from_numpy(np.argsort(right, kind="stable"))
    order = wrong_first[torch.argsort(scores[wrong_first], descending=True, stable=True)].numpy()

    def candidate(rank: int) -> Candidate:
        row = int(order[rank])
        return Candidate(row, rank, float(scores[row]), bool(right[row]))

    best = tuple(candidate(rank) for rank in range(min(top, len(order))))
    return QueryResult(query, best, candidate(int(np.argmax(right[order]))))


def _score_image_queries(run: Embeddings, queries: Sequence[int]) -> Iterator[Tensor]:
    scores = run.direction_scores("i2t")
    if scores is not None:
        yield from (torch.as_tensor(scores[query : query + 1])[0] for query in queries)
    elif queries and run.vectors is not None:
        images, captions = map(shared_tensor, run.vectors)
        image_of_caption = torch.zeros(len(captions), dtype=torch.int64)  # any values: they do not change the scores
        blocks = blocks_from_embeddings(images[list(queries)], captions, image_of_caption, run.similarity)
        for rows in blocks.row_slices:
            yield from blocks.score(rows, None)


def _score_caption_queries(run: Embeddings, queries: Sequence[int]) -> Iterator[Tensor]:
    i2t, t2i = run.score_blocks()
    blocks = t2i or i2t
    columns = torch.tensor(list(queries), dtype=torch.int64)
    parts = [blocks.score(rows, columns).clone() for rows in blocks.row_slices]  # a block may overwrite the previous one
    yield from torch.cat(parts).T


def _find_pair_ids(direction: DirectionName, run: Embeddings, query: int, candidate: Candidate) -> PairIds:
    image, caption = (query, candidate.row) if direction == "i2t" else (candidate.row, query)
    return int(run.image_ids[image]), int(run.caption_ids[caption])


def _build_query_card(
    direction: DirectionName,
    run: Embeddings,
    photos: DatasetPhotos,
    results: Sequence[QueryResult],
    attentions: Sequence[Mapping[PairIds, Attention]],
) -> QueryCard:
    query = results[0].query
    photo = photos.find_photo(int(run.image_ids[query])) if direction == "i2t" else None
    columns: list[ModelColumn] = []
    drawings: list[AttentionDrawing] = []
    for number, (result, attention) in enumerate(zip(results, attentions, strict=True)):
        pairs = [_find_pair_ids(direction, run, query, candidate) for candidate in result.displayed_candidates]
        name = f"{direction}-{query}-{number}"
        words: dict[PairIds, Sequence[DrawnWord]] = {}
        if photo and photo.source and (drawable := [pair for pair in pairs if pair in attention]):
            first = sum(len(drawing.words) for drawing in drawings)
            drawings.append(draw_attention(name, [attention[pair] for pair in drawable], first))
            words = dict(zip(drawable, drawings[-1].captions, strict=True))
        answers = []
        for candidate, pair in zip(result.displayed_candidates, pairs, strict=True):
            answer = _build_answer_card(direction, run, photos, candidate)
            if answer.photo and answer.photo.source and pair in attention:
                answer = replace(answer, drawing=draw_attention(f"{name}-{candidate.row}", [attention[pair]]))
            answers.append(replace(answer, caption_words=words.get(pair, ())))
        n_best = len(result.candidates)
        columns.append(ModelColumn(result.best_right.rank + 1, answers[:n_best], next(iter(answers[n_best:]), None)))
    if photo:
        return QueryCard(f"image-{run.image_ids[query]}", photo, photo.caption, columns, drawings)
    caption_id = int(run.caption_ids[query])
    return QueryCard(f"caption-{caption_id}", None, photos.find_caption(caption_id), columns)


def _build_answer_card(direction: DirectionName, run: Embeddings, photos: DatasetPhotos, candidate: Candidate) -> AnswerCard:
    score = f"{candidate.score + 0.0:#.3g}".replace("-", "−")
    if direction == "i2t":
        caption = photos.find_caption(int(run.caption_ids[candidate.row]))
        return AnswerCard(candidate.rank + 1, score, candidate.is_right, caption, None)
    photo = photos.find_photo(int(run.image_ids[candidate.row]))
    return AnswerCard(candidate.rank + 1, score, candidate.is_right, photo.caption, photo)


def find_hardest_negatives(table: pd.DataFrame, photos: DatasetPhotos) -> tuple[int, dict[str, list[HardNegative]]]:
    """Return the last epoch in ``table``, and the negatives (wrong answers) with the highest loss in this epoch.

    ``table`` is the content of ``negatives.csv`` in a run folder; if it is empty, return 0 and an empty dict. The negatives
    are a dict with a key for each kind of query, ``image`` and ``caption``.
    """
    numbers = ["epoch", "cost", "imgid", "negative_imgid"]
    table = table.assign(**{name: pd.to_numeric(table[name], errors="coerce") for name in numbers}).dropna(subset=numbers)
    if table.empty:
        return 0, {}
    epoch = int(table["epoch"].max())
    table = table[table["epoch"] == epoch].sort_values("cost", ascending=False, kind="stable")
    costliest = {}
    for query in ("image", "caption"):
        rows = table[table["query"] == query].head(_N_NEGATIVES).to_dict("records")
        if rows:
            costliest[query] = [
                HardNegative(
                    f"{row['cost']:#.3g}",
                    photos.find_photo(int(row["imgid"])),
                    str(row["caption"]),
                    photos.find_photo(int(row["negative_imgid"])),
                    str(row["negative_caption"]),
                )
                for row in rows
            ]
    return epoch, costliest
