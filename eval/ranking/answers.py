"""What each query got: its rank, its best right answer and its best wrong one, from a stream of score blocks.

The best candidates of each query in their order, and scores that keep this order in other programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.ranking.ranks import Ranks, ScoreBlocks, caption_scores, row_blocks


@dataclass(frozen=True)
class BestAnswers:
    """The best answers to the queries of one direction; queries and answers are rows until :meth:`with_ids` makes ids of them.

    queries : (n,) the queries
    ranks : (n,) 0-based, how many wrong answers score at least as high as the best right one
    right, right_scores : (n,) the best right answer and its score; of several that tie the first
    wrong, wrong_scores : (n,) the same of the wrong answers; the score is -inf where there is none
    """

    queries: NDArray[np.int64]
    ranks: NDArray[np.int64]
    right: NDArray[np.int64]
    right_scores: NDArray[np.floating]
    wrong: NDArray[np.int64]
    wrong_scores: NDArray[np.floating]

    def with_ids(self, of_queries: NDArray[np.int64], of_answers: NDArray[np.int64]) -> BestAnswers:
        """The same with the ids of the rows of queries and answers; what is no answer keeps its row."""
        wrong = np.where(np.isneginf(self.wrong_scores), self.wrong, of_answers[self.wrong])
        return replace(self, queries=of_queries[self.queries], right=of_answers[self.right], wrong=wrong)


def best_answers(i2t: ScoreBlocks, t2i: ScoreBlocks | None, ranks: Ranks) -> dict[str, BestAnswers]:
    """The best answers in both directions, ``i2t`` and ``t2i``, in the order of the ``ranks`` of the same scores.

    ``i2t`` and ``t2i`` are as for :func:`vse.eval.ranking.ranks.ranks_from_blocks`; each block is asked for once, and no more
    than two copies of a block are held. For captions an image without a caption is a wrong answer like any other.
    """
    image_of_caption = i2t.image_of_caption
    images = _Best(i2t.n_images, image_of_caption.device)
    captions = _Best(len(image_of_caption), image_of_caption.device)
    for rows, own in row_blocks(i2t):
        pairs = (image_of_caption[own] - rows.start, own)
        scores = i2t.score(rows, None)
        images.add(slice(rows.start, rows.stop), scores, _mask(scores, pairs), 0)
        if t2i is not None:
            scores = t2i.score(rows, None)
        captions.add(slice(None), scores.T, _mask(scores, pairs).T, rows.start)
    asking = torch.unique(image_of_caption).numpy()
    return {"i2t": images.of(asking, ranks.i2t), "t2i": captions.of(np.arange(len(image_of_caption)), ranks.t2i)}


class _Best:
    """The best right and wrong answers to some queries so far, as more and more candidates are scored."""

    def __init__(self, n_queries: int, device: torch.device) -> None:
        self._scores = torch.full((2, n_queries), -torch.inf, dtype=torch.float64, device=device)
        self._rows = torch.zeros((2, n_queries), dtype=torch.int64, device=device)
        self._dtype = np.dtype(np.float32)

    def add(self, queries: slice, scores: Float[Tensor, "n m"], right: Tensor, first: int) -> None:
        """``scores`` of some queries with the candidates from row ``first`` on, and a mask of those that are ``right``."""
        self._dtype = np.dtype(str(scores.dtype).removeprefix("torch."))
        for k, others in enumerate((~right, right)):
            best, row = scores.masked_fill(others, -torch.inf).max(1)
            before, rows = self._scores[k, queries], self._rows[k, queries]
            better = best > before
            self._rows[k, queries] = torch.where(better, row + first, rows)
            self._scores[k, queries] = torch.where(better, best.double(), before)

    def of(self, queries: NDArray[np.int64], ranks: NDArray[np.int64]) -> BestAnswers:
        """What there is of some ``queries``."""
        scores, rows = self._scores.cpu().numpy()[:, queries].astype(self._dtype), self._rows.cpu().numpy()[:, queries]
        return BestAnswers(queries, ranks, rows[0], scores[0], rows[1], scores[1])


def _mask(scores: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Which scores are those of ``pairs``."""
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    mask[pairs] = True
    return mask


_LARGEST = 1e38  # in single precision, with room for smaller and larger numbers


class RankedList(NamedTuple):
    """The row of a query, and the rows (n,) and scores (n,) of its best candidates, best first."""

    query: int
    rows: NDArray[np.int64]
    scores: NDArray[np.floating]


def rank_captions(blocks: ScoreBlocks, depth: int) -> Iterator[RankedList]:
    """The best captions of each image that has one, a block of images at a time.

    Of candidates that tie, wrong ones come first, then lower rows. ``depth`` is how many there are at most, 0 for all.
    """
    for rows, own in row_blocks(blocks):
        image_of_own = blocks.image_of_caption[own]
        scores = blocks.score(rows, None).cpu().numpy()
        for image in torch.unique(image_of_own).tolist():
            yield _best_list(image, scores[image - rows.start], own[image_of_own == image].cpu().numpy(), depth)


def rank_images(blocks: ScoreBlocks, depth: int) -> Iterator[RankedList]:
    """The best images of each caption, as :func:`rank_captions`, for some captions at a time."""
    image_of_caption = blocks.image_of_caption.cpu().numpy()
    for captions, scores in caption_scores(blocks, np.arange(len(image_of_caption))):
        for caption, column in zip(captions, np.ascontiguousarray(scores.T), strict=True):
            yield _best_list(int(caption), column, image_of_caption[caption, None], depth)


def strictly_descending(scores: NDArray[np.floating]) -> NDArray[np.float32]:
    """Scores in descending order made strictly descending in single precision: each one as it is, or the next smaller number.

    A program that sorts by them, in single precision as trec_eval does or in double, has no ties left to decide.
    """
    bits = np.clip(scores, -_LARGEST, _LARGEST).astype(np.float32).view(np.int32).astype(np.int64)
    # Numbers of single precision, in their order, as consecutive integers; both zeros are 0.
    places = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    steps = np.arange(len(places))
    places = np.minimum.accumulate(places + steps) - steps
    sizes = np.abs(places).astype(np.int32).view(np.float32)
    strict: NDArray[np.float32] = np.where(places < 0, -sizes, sizes)
    return strict


def _best_list(query: int, scores: NDArray[np.floating], right: NDArray[np.int64], depth: int) -> RankedList:
    """The best of all candidates, which have ``scores`` (n_candidates,) and of which some rows are ``right``."""
    n = len(scores)
    rows = np.arange(n)
    if 0 < depth < n:
        rows = np.flatnonzero(scores >= np.partition(scores, n - depth)[n - depth])
    is_right = np.zeros(n, bool)
    is_right[right] = True
    rows = rows[np.lexsort((rows, is_right[rows], -scores[rows]))][: depth or n]
    return RankedList(query, rows, scores[rows])
