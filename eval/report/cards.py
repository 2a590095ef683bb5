"""The gallery of a report: queries with what one or two models find for them, as photos and captions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from vse.eval.files.embeddings import Embeddings
from vse.eval.ranking.ranks import Ranks
from vse.eval.report.drawings import Attended, Drawing, DrawnWord, Pair, drawn
from vse.eval.report.gallery import NEAR, Candidate, Direction, Retrieved, retrieved, select_queries, select_queries_of_two
from vse.eval.report.pages import thumbnail
from vse.eval.search.top_k import Attention
from vse.pipeline.dataset.dataset import Dataset, Image
from vse.pipeline.dataset.identity import check_recorded_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage

log = logging.getLogger(__name__)
_SIDE = 208  # pixels of the longer side of a photo
_NEGATIVES = 4  # shown in each direction


@dataclass(frozen=True)
class Photo:
    """A photo to show, with a caption of its own; ``source`` is None if it cannot be read."""

    source: str | None
    file: str
    caption: str


@dataclass(frozen=True)
class ShownCandidate:
    """A candidate as it is shown: a caption, or a photo with one of its captions. ``rank`` is 1-based.

    ``words`` are those of a caption whose attention is drawn on the query; ``drawing`` is that of the query on a photo.
    """

    rank: int
    score: str
    right: bool
    caption: str
    photo: Photo | None
    words: Sequence[DrawnWord] = ()
    drawing: Drawing | None = None


@dataclass(frozen=True)
class ModelColumn:
    """What one model retrieves; ``answer`` is the best positive if it is not among ``answers``. ``rank`` is 1-based."""

    rank: int
    answers: Sequence[ShownCandidate]
    answer: ShownCandidate | None

    @property
    def words(self) -> Sequence[DrawnWord]:
        """Those of the query, if its attention is drawn on a candidate."""
        shown = [*self.answers, *([self.answer] if self.answer else [])]
        return next((one.drawing.words for one in shown if one.drawing), ())


@dataclass(frozen=True)
class QueryCard:
    """A query, which is a photo or a caption, and a column per model; ``drawings`` are those of captions on its photo."""

    photo: Photo | None
    caption: str
    columns: Sequence[ModelColumn]
    drawings: Sequence[Drawing] = ()


@dataclass(frozen=True)
class CardGroup:
    """Cards with something in common; none if there are no such queries."""

    title: str
    cards: Sequence[QueryCard]


@dataclass(frozen=True)
class Gallery:
    """The queries of one direction; of two models also ``counts``: how often the first, the second and neither is better.

    ``attends`` are the sides (``t2i``, ``i2t``) that attend to the other in drawings.
    """

    direction: Direction
    groups: Sequence[CardGroup]
    counts: tuple[int, int, int] | None = None
    attends: Sequence[str] = ()

    @property
    def n_words(self) -> int:
        """How many words a card has at most."""
        cards = [card for group in self.groups for card in group.cards]
        of_photos = [sum(len(drawing.words) for drawing in card.drawings) for card in cards]
        return max([0, *of_photos, *(len(column.words) for card in cards for column in card.columns)])


@dataclass(frozen=True)
class HardNegative:
    """A positive pair of the training set, and the negative candidate that cost it most."""

    cost: str
    positive: Photo
    caption: str
    negative: Photo
    negative_caption: str


@dataclass
class Photos:
    """The photos and captions of a data set, each photo read once; ``unreadable`` are the files that cannot be."""

    dataset: Dataset
    unreadable: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._sources: dict[int, str | None] = {}

    def check(self, run: Embeddings) -> None:
        """:class:`UserError` if the embeddings are not of this data set: its name, an id, or whose caption it is."""
        path = self.dataset.path
        if run.dataset != self.dataset.name:
            raise UserError(f"{path} is the data set {self.dataset.name!r}, the embeddings are of {run.dataset!r}; see --data")
        unknown = run.image_ids[self.dataset.image_rows(run.image_ids) < 0]
        if len(unknown):
            raise UserError(f"{path}: has no image {unknown[0]}, of which there is an embedding; see --data")
        rows, _ = self.dataset.caption_rows(run.caption_ids)
        wrong = np.flatnonzero((rows < 0) | (rows != self.dataset.image_rows(run.caption_image_ids)))
        if len(wrong):
            caption = f"caption {run.caption_ids[wrong[0]]} of image {run.caption_image_ids[wrong[0]]}"
            raise UserError(f"{path}: has no {caption}, of which there is an embedding; see --data")
        check_recorded_data(self.dataset, run.identity)

    def photo(self, imgid: int) -> Photo:
        """The photo of an image; without a source if the data set has no such image, either."""
        image = self.dataset.find_image(imgid)
        if image is None:
            return Photo(None, f"image {imgid}", "")
        if imgid not in self._sources:
            self._sources[imgid] = self._read(image)
        return Photo(self._sources[imgid], image.file, image.captions[0].raw)

    def caption(self, sentid: int) -> str:
        """A caption as it was written."""
        rows, numbers = self.dataset.caption_rows(np.asarray([sentid]))
        return self.dataset.images[int(rows[0])].captions[int(numbers[0])].raw

    def _read(self, image: Image) -> str | None:
        if not self.dataset.has_image_files:
            return None
        try:
            return thumbnail(self.dataset.image_path(image), _SIDE)
        except BadImage as error:
            log.warning("%s", error)
            self.unreadable.add(image.file)
            return None


def gallery(
    direction: Direction,
    runs: Sequence[Embeddings],
    ranks: Sequence[Ranks],
    photos: Photos,
    n: int,
    seed: int,
    attended: Sequence[Attended],
) -> Gallery:
    """``n`` queries of one model, or of two whose embeddings are in the same order; ``attended`` has an entry for each."""
    image_of_caption = runs[0].image_of_caption()
    asking = (
        np.unique(image_of_caption) if direction == "i2t" else np.arange(len(image_of_caption))
    )  # an image without a caption is no query
    images = asking if direction == "i2t" else image_of_caption
    of_models = [getattr(one, direction) for one in ranks]
    if len(of_models) == 1:
        titles = [
            "Right answer at rank 1",
            f"Near misses: right answer at rank 2 to {NEAR}",
            "Failures: the largest ranks of all",
        ]
        picked: Sequence[list[int]] = select_queries(of_models[0], images, n, seed)
        counts = None
    else:
        titles = ["A ranks the right answer higher", "B ranks the right answer higher"]
        picked = select_queries_of_two(of_models[0], of_models[1], images, n)
        better, worse = (int(np.count_nonzero(one)) for one in (of_models[0] < of_models[1], of_models[0] > of_models[1]))
        counts = (better, worse, len(asking) - better - worse)
    queries = [asking[group].tolist() for group in picked]
    everything = [query for group in queries for query in group]
    results = [dict(zip(everything, retrieved(run, direction, everything), strict=True)) for run in runs]
    seen = [one.of(_scores(direction, runs[0], found.values())) for one, found in zip(attended, results, strict=True)]
    groups = [
        CardGroup(title, [_card(direction, runs[0], photos, [one[query] for one in results], seen) for query in group])
        for title, group in zip(titles, queries, strict=True)
    ]
    sides = sorted({attention.side for one in seen for attention in one.values()}, reverse=True)
    return Gallery(direction, [group for group in groups if group.cards], counts, sides)


def hardest_negatives(table: pd.DataFrame, photos: Photos) -> tuple[int, dict[str, list[HardNegative]]]:
    """The last epoch, and the costliest negatives of it for queries that are an ``image`` or a ``caption``."""
    numbers = ["epoch", "cost", "imgid", "negative_imgid"]
    table = table.assign(**{name: pd.to_numeric(table[name], errors="coerce") for name in numbers}).dropna(subset=numbers)
    if table.empty:
        return 0, {}
    epoch = int(table["epoch"].max())
    table = table[table["epoch"] == epoch].sort_values("cost", ascending=False, kind="stable")
    costliest = {}
    for query in ("image", "caption"):
        rows = table[table["query"] == query].head(_NEGATIVES).to_dict("records")
        if rows:
            costliest[query] = [_negative(row, photos) for row in rows]
    return epoch, costliest


def _negative(row: Any, photos: Photos) -> HardNegative:
    positive, negative = photos.photo(int(row["imgid"])), photos.photo(int(row["negative_imgid"]))
    return HardNegative(f"{row['cost']:#.3g}", positive, str(row["caption"]), negative, str(row["negative_caption"]))


def _shown(result: Retrieved) -> list[Candidate]:
    """The best candidates and, if the best right one is not among them, that."""
    return [*result.candidates, *([] if result.answer in result.candidates else [result.answer])]


def _pair(direction: Direction, run: Embeddings, query: int, candidate: Candidate) -> Pair:
    image, caption = (query, candidate.row) if direction == "i2t" else (candidate.row, query)
    return int(run.image_ids[image]), int(run.caption_ids[caption])


def _scores(direction: Direction, run: Embeddings, results: Iterable[Retrieved]) -> dict[Pair, float]:
    """Of all pairs that are shown."""
    return {_pair(direction, run, result.query, one): one.score for result in results for one in _shown(result)}


def _card(
    direction: Direction,
    run: Embeddings,
    photos: Photos,
    results: Sequence[Retrieved],
    seen: Sequence[Mapping[Pair, Attention]],
) -> QueryCard:
    query = results[0].query
    photo = photos.photo(int(run.image_ids[query])) if direction == "i2t" else None
    columns: list[ModelColumn] = []
    drawings: list[Drawing] = []
    for number, (result, attention) in enumerate(zip(results, seen, strict=True)):
        pairs = [_pair(direction, run, query, candidate) for candidate in _shown(result)]
        name = f"{direction}-{query}-{number}"
        words: dict[Pair, Sequence[DrawnWord]] = {}
        if photo and photo.source and (drawable := [pair for pair in pairs if pair in attention]):
            first = sum(len(drawing.words) for drawing in drawings)
            drawings.append(drawn(name, [attention[pair] for pair in drawable], first))
            words = dict(zip(drawable, drawings[-1].captions, strict=True))
        answers = []
        for candidate, pair in zip(_shown(result), pairs, strict=True):
            answer = _answer(direction, run, photos, candidate)
            if answer.photo and answer.photo.source and pair in attention:
                answer = replace(answer, drawing=drawn(f"{name}-{candidate.row}", [attention[pair]]))
            answers.append(replace(answer, words=words.get(pair, ())))
        n_best = len(result.candidates)
        columns.append(ModelColumn(result.answer.rank + 1, answers[:n_best], next(iter(answers[n_best:]), None)))
    if photo:
        return QueryCard(photo, photo.caption, columns, drawings)
    return QueryCard(None, photos.caption(int(run.caption_ids[query])), columns)


def _answer(direction: Direction, run: Embeddings, photos: Photos, candidate: Candidate) -> ShownCandidate:
    score = f"{candidate.score + 0.0:#.3g}".replace("-", "−")
    if direction == "i2t":
        return ShownCandidate(
            candidate.rank + 1, score, candidate.right, photos.caption(int(run.caption_ids[candidate.row])), None
        )
    photo = photos.photo(int(run.image_ids[candidate.row]))
    return ShownCandidate(candidate.rank + 1, score, candidate.right, photo.caption, photo)
