"""Which queries a report shows, and what a model retrieves for them: its best candidates, by exact scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.files.embeddings import Embeddings
from vse.eval.ranking.ranks import Ranks, blocks_from_embeddings, ranks_from_blocks, shared_tensor

TOP = 5  # candidates shown of each query
NEAR = 10  # a right answer up to this (1-based) rank is a near miss

Direction = Literal["i2t", "t2i"]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Candidate:
    """A candidate: its ``row`` among captions (i2t) or images (t2i), its 0-based ``rank``, and whether it is ``right``."""

    row: int
    rank: int
    score: float
    right: bool


@dataclass(frozen=True)
class Retrieved:
    """What a model retrieves for a query, a row of images or captions: its best candidates, and the ``answer``, the positive
    that it ranks first.

    Of equal scores a negative candidate comes first, as the ranks count them.
    """

    query: int
    candidates: tuple[Candidate, ...]
    answer: Candidate


def all_ranks(run: Embeddings) -> Ranks:
    """The ranks of all queries of a split, in both directions."""
    return ranks_from_blocks(*run.score_blocks())


def retrieved(run: Embeddings, direction: Direction, queries: Sequence[int], top: int = TOP) -> list[Retrieved]:
    """What the model retrieves for some rows of images (``i2t``) or of captions (``t2i``) among the whole split."""
    image_of_caption = run.image_of_caption()
    rows_of_scores = _scores_of_images(run, queries) if direction == "i2t" else _scores_of_captions(run, queries)
    results = []
    for query, scores in zip(queries, rows_of_scores, strict=True):
        right = image_of_caption == query if direction == "i2t" else np.arange(len(run.image_ids)) == image_of_caption[query]
        results.append(_retrieved(query, scores, right, top))
    return results


def select_queries(ranks: Rows, images: Rows, n: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Up to ``n`` queries, in thirds: successes, near misses, failures.

    Successes (rank 0) and near misses (below :data:`NEAR`) are drawn with ``seed``, failures are the largest ranks. Of an
    image, whose row each query has in ``images`` (n_queries,), one query is shown.
    """
    parts = [n // 3 + (part < n % 3) for part in range(3)]
    drawn = np.random.default_rng(seed).permutation(len(ranks))
    worst = np.argsort(-ranks, kind="stable")
    shown: set[int] = set()
    failures = _of_new_images(worst[ranks[worst] > 0], images, parts[2], shown)
    near = drawn[(ranks[drawn] > 0) & (ranks[drawn] < NEAR)]
    near_misses = _of_new_images(near, images, parts[1], shown)
    successes = _of_new_images(drawn[ranks[drawn] == 0], images, parts[0], shown)
    near_misses.sort(key=lambda query: int(ranks[query]))
    return successes, near_misses, failures


def select_queries_of_two(first: Rows, second: Rows, images: Rows, n: int) -> tuple[list[int], list[int]]:
    """Up to ``n`` queries whose ranks in two results differ: half that the first ranks better, then half that the second does.

    Those that one result mends come first, which puts the right answer at rank 0 where the other does not (Tables II and III
    of the TOD-Net paper); among these, and among the rest, those whose ranks differ by the largest factors.
    """
    gain = np.log1p(second) - np.log1p(first)
    mended = (first == 0) | (second == 0)
    shown: set[int] = set()
    halves = []
    for sign, size in ((1, n - n // 2), (-1, n // 2)):
        order = np.lexsort((-sign * gain, ~mended))
        halves.append(_of_new_images(order[sign * gain[order] > 0], images, size, shown))
    return halves[0], halves[1]


def _of_new_images(queries: Rows, images: Rows, n: int, shown: set[int]) -> list[int]:
    """The first ``n`` queries of images that are not among those ``shown``, to which theirs are added."""
    selected: list[int] = []
    for query in queries.tolist():
        if len(selected) == n:
            break
        if images[query] not in shown:
            shown.add(int(images[query]))
            selected.append(query)
    return selected


def _retrieved(query: int, scores: Tensor, right: NDArray[np.bool_], top: int) -> Retrieved:
    wrong_first = torch.from_numpy(np.argsort(right, kind="stable"))
    order = wrong_first[torch.argsort(scores[wrong_first], descending=True, stable=True)].numpy()

    def candidate(rank: int) -> Candidate:
        row = int(order[rank])
        return Candidate(row, rank, float(scores[row]), bool(right[row]))

    best = tuple(candidate(rank) for rank in range(min(top, len(order))))
    return Retrieved(query, best, candidate(int(np.argmax(right[order]))))


def _scores_of_images(run: Embeddings, queries: Sequence[int]) -> Iterator[Tensor]:
    """Scores (n_captions,) of each of some images with all captions."""
    scores = run.direction_scores("i2t")
    if scores is not None:
        yield from (torch.as_tensor(scores[query : query + 1])[0] for query in queries)
    elif queries and run.vectors is not None:
        images, captions = map(shared_tensor, run.vectors)
        image_of_caption = torch.zeros(len(captions), dtype=torch.int64)  # of no importance for scores
        blocks = blocks_from_embeddings(images[list(queries)], captions, image_of_caption, run.similarity)
        for start in range(0, len(queries), blocks.rows):
            yield from blocks.score(slice(start, min(start + blocks.rows, len(queries))), None)


def _scores_of_captions(run: Embeddings, queries: Sequence[int]) -> Iterator[Tensor]:
    """Scores (n_images,) of each of some captions with all images."""
    i2t, t2i = run.score_blocks()
    blocks = t2i or i2t
    columns = torch.tensor(list(queries), dtype=torch.int64)
    starts = range(0, blocks.n_images, blocks.rows)
    parts = (blocks.score(slice(start, min(start + blocks.rows, blocks.n_images)), columns) for start in starts)
    yield from torch.cat([part.clone() for part in parts]).T  # a block may overwrite the last
