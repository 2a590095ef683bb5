"""Ranks of phrases against the published evaluation's arithmetic, by hand and with slow loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vse.eval.files import phrase_scores
from vse.eval.files.phrase_scores import MISSED_RANK, rank_phrases


def inclusive_iou(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Count pixels with both ends included, as the published evaluation does; our boxes have x2 and y2 exclusive."""

    def pixels(box: NDArray[np.int64]) -> set[tuple[int, int]]:
        x1, y1, x2, y2 = box[0] + 1, box[1] + 1, box[2], box[3]  # 1-based, inclusive
        return set(itertools.product(range(x1, x2 + 1), range(y1, y2 + 1)))

    first, second = pixels(a), pixels(b)
    return len(first & second) / len(first | second) if first & second else 0.0


def slow_rank(scores: NDArray[np.float64], right: list[bool]) -> int:
    """Sort with every wrong candidate before a right one of its score, and walk to the first right one."""
    order = sorted(range(len(scores)), key=lambda k: (-scores[k], right[k]))
    return next((rank for rank, k in enumerate(order) if right[k]), MISSED_RANK)


CORNERS = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 5), st.integers(0, 5))


@given(st.lists(st.lists(st.tuples(CORNERS, st.integers(0, 3)), max_size=6), min_size=1, max_size=5), st.data())
@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_ranks_and_overlaps_are_those_of_slow_loops(
    at_once: int, phrases: list[list[tuple[tuple[int, ...], int]]], data: st.DataObject
) -> None:
    threshold = data.draw(st.sampled_from([0.1, 0.3, 0.5, 0.7, 1.0]))
    truth = np.array([data.draw(CORNERS) for _ in phrases])
    truth[:, 2:] += truth[:, :2] + 1
    candidates = [entry for candidates in phrases for entry in candidates]
    boxes = np.array([corners for corners, _ in candidates], np.int64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    scores = np.array([score for _, score in candidates], float)
    offsets = np.concatenate([[0], np.cumsum([len(candidates) for candidates in phrases])]).astype(np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phrase_scores, "_MAX_CANDIDATES", at_once)
        outcome = rank_phrases(scores, boxes.astype(np.float32), offsets, truth.astype(np.float32), threshold)
        boxless = rank_phrases(scores, boxes.astype(np.float32), offsets, np.full(truth.shape, np.nan, np.float32), threshold)
    assert set(boxless.ranks) == {MISSED_RANK}
    for k, (start, stop) in enumerate(itertools.pairwise(offsets)):
        overlaps = [inclusive_iou(box, truth[k]) for box in boxes[start:stop]]
        assert outcome.ranks[k] == slow_rank(scores[start:stop], [overlap >= threshold for overlap in overlaps])
        highest = [o for o, score in zip(overlaps, scores[start:stop], strict=True) if score == scores[start:stop].max()]
        assert outcome.best_iou[k] == pytest.approx(min(highest, default=0.0))
