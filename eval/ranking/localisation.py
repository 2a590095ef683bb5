"""Ranks of the right candidate boxes of phrases. Ties count against the model.

A candidate is right if its intersection over union (IoU) with the phrase's ground-truth box reaches a threshold (Plummer et
al., ICCV 2015; Wang et al., TPAMI 2018, section 4). Boxes are x1, y1, x2, y2 with x2 and y2 exclusive. For whole pixels the
IoU is that of the published evaluation, where x2 and y2 are inclusive and sides are x2 - x1 + 1 and y2 - y1 + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from vse.eval.options import DEFAULT_KS
from vse.eval.ranking.metrics import MeasuredQueries

MISSED_RANK = np.iinfo(np.int64).max  # the rank of a phrase without a right candidate
_MAX_CANDIDATES = 2**19  # candidates in a block of phrases


class PhraseRanks(NamedTuple):
    """The rank of each phrase's right box, and the IoU of its best-scoring box.

    Attributes
    ----------
    ranks : (n_phrases,) number of wrong candidates that score at least as high as the best right one; ``MISSED_RANK`` if no
        candidate is right
    best_iou : (n_phrases,) IoU of the best-scoring candidate; the lowest IoU if several tie, and 0 without candidates
    """

    ranks: Int[np.ndarray, " n_phrases"]
    best_iou: Float[np.ndarray, " n_phrases"]

    def build_queries(self, images: NDArray[np.int64]) -> MeasuredQueries:
        """Return the phrases as queries with R@K, ``bound`` (100 if a candidate is right, else 0) and ``mean_iou``, in %.

        ``images`` (n_phrases,) has the row of each phrase's image; a bootstrap resamples these images.
        """
        values = {f"r{k}": np.where(self.ranks < k, 100.0, 0.0) for k in DEFAULT_KS}
        return MeasuredQueries(
            images, values | {"bound": np.where(self.ranks < MISSED_RANK, 100.0, 0.0), "mean_iou": 100 * self.best_iou}
        )


def rank_phrases(
    scores: Float[np.ndarray, " n"],
    boxes: Float[np.ndarray, "n 4"],
    offsets: Int[np.ndarray, " n_phrases_and_one"],
    truth: Float[np.ndarray, "n_phrases 4"],
    iou: float,
) -> PhraseRanks:
    """Return the ranks of right boxes. A candidate is right if its IoU with the true box is at least ``iou``.

    The candidates of phrase k are ``scores`` and ``boxes`` at ``offsets[k]:offsets[k + 1]``. A phrase without a true box (its
    ``truth`` is NaN) gets the rank ``MISSED_RANK``.
    """
    parts = [
        _rank_block(
            scores[candidates],
            boxes[candidates],
            offsets[phrases.start : phrases.stop + 1] - offsets[phrases.start],
            truth[phrases],
            iou,
        )
        for phrases, candidates in _split_into_blocks(offsets)
    ]
    return PhraseRanks(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def rowwise_iou(boxes: Float[np.ndarray, "n 4"], others: Float[np.ndarray, "n 4"]) -> Float[np.ndarray, " n"]:
    """Return the intersection over union of box k of ``boxes`` and box k of ``others``, for each k, in float64.

    The result is 0 if one of the two boxes has no area or is NaN.
    """
    first, second = (values.astype(np.float64) for values in (boxes, others))
    width, height = (np.minimum(first[:, k + 2], second[:, k + 2]) - np.maximum(first[:, k], second[:, k]) for k in (0, 1))
    shared = np.where((width > 0) & (height > 0), width * height, 0.0)
    areas = [(sides[:, 2] - sides[:, 0]) * (sides[:, 3] - sides[:, 1]) for sides in (first, second)]
    return np.divide(shared, areas[0] + areas[1] - shared, out=np.zeros(len(shared)), where=shared > 0)


def _split_into_blocks(offsets: NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive slices of the phrases, each with the slice of their candidates.

    A slice has at most ``_MAX_CANDIDATES`` candidates, unless it is a single phrase with more.
    """
    start, n_phrases = 0, len(offsets) - 1
    while start < n_phrases:
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _MAX_CANDIDATES, "right")) - 1)
        yield slice(start, stop), slice(int(offsets[start]), int(offsets[stop]))
        start = stop


def _rank_block(
    scores: NDArray[np.floating],
    boxes: NDArray[np.floating],
    offsets: NDArray[np.int64],
    truth: NDArray[np.floating],
    iou: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    counts = np.diff(offsets)
    overlaps = rowwise_iou(boxes, np.repeat(truth, counts, axis=0))
    right: Bool[np.ndarray, " n"] = overlaps >= iou
    best_right = _reduce_slices(np.maximum, np.where(right, scores, -np.inf), offsets, -np.inf)
    before = ~right & (scores >= np.repeat(best_right, counts))
    ranks = np.where(np.isfinite(best_right), _reduce_slices(np.add, before.astype(np.int64), offsets, 0), MISSED_RANK)
    highest = np.repeat(_reduce_slices(np.maximum, scores.astype(np.float64), offsets, -np.inf), counts)
    best = _reduce_slices(np.minimum, np.where(scores == highest, overlaps, np.inf), offsets, 0.0)
    return ranks, best


def _reduce_slices(function: np.ufunc, values: NDArray[Any], offsets: NDArray[np.int64], empty: float) -> NDArray[Any]:
    """Reduce ``values[offsets[k]:offsets[k + 1]]`` with ``function`` for each k; an empty slice gives ``empty``."""
    reduced = np.full(len(offsets) - 1, empty, values.dtype)
    filled = offsets[1:] > offsets[:-1]
    if filled.any():
        reduced[filled] = function.reduceat(values, offsets[:-1][filled])
    return reduced
