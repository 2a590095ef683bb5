"""The best candidates of each query, against a full sort, and scores in which no other program finds ties."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.eval.ranking.test_ranks import TIES, blocks_of, splits
from vse.eval.ranking.answers import RankedList, rank_captions, rank_images, strictly_descending


def slow_list(scores: np.ndarray, right: list[int], depth: int) -> list[tuple[int, float]]:
    """Return all candidates in descending order of score, wrong ones first among equals, then lower rows."""
    order = sorted(range(len(scores)), key=lambda row: (-scores[row], row in right, row))
    return [(row, float(scores[row])) for row in order][: depth or len(order)]


def listed(found: RankedList) -> list[tuple[int, float]]:
    return list(zip(found.rows.tolist(), found.scores.tolist(), strict=True))


@given(splits(), st.integers(0, 14), st.data())
def test_lists_are_those_of_a_full_sort(split: tuple[int, list[int], int], depth: int, data: st.DataObject) -> None:
    n_images, image_of_caption, rows = split
    scores = data.draw(hnp.arrays(np.float32, (n_images, len(image_of_caption)), elements=TIES))
    blocks = blocks_of(scores, image_of_caption, rows)
    own = {image: [c for c, of in enumerate(image_of_caption) if of == image] for image in sorted(set(image_of_caption))}
    found = {one.query: listed(one) for one in rank_captions(blocks, depth)}
    assert found == {image: slow_list(scores[image], right, depth) for image, right in own.items()}
    found = {one.query: listed(one) for one in rank_images(blocks, depth)}
    assert found == {c: slow_list(scores[:, c], [image], depth) for c, image in enumerate(image_of_caption)}


NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 1e-45, -1e-45]), st.floats(-1e37, 1e37))


@given(st.lists(NUMBERS, min_size=1, max_size=40), st.sampled_from([np.float32, np.float64]))
def test_scores_fall_strictly_and_differ_from_their_own_by_no_more_than_that_takes(values: list[float], dtype: type) -> None:
    scores = np.sort(np.array(values, dtype))[::-1]
    found = strictly_descending(scores)
    assert found.dtype == np.float32
    expected = [np.float32(scores[0])]
    for score in scores[1:]:
        expected.append(min(np.float32(score), np.nextafter(expected[-1], np.float32(-np.inf))))
    assert found.tolist() == [float(value) for value in expected]
    assert (np.diff(found.astype(np.float64)) < 0).all()


def test_numbers_beyond_single_precision_fall_too() -> None:
    found = strictly_descending(np.array([1e300, 1e200, -1e200, -1e300]))
    assert np.isfinite(found).all()
    assert (np.diff(found.astype(np.float64)) < 0).all()


@given(hnp.arrays(np.float32, 5, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_nine_digits_of_a_score_are_the_score(scores: np.ndarray) -> None:
    found = strictly_descending(np.sort(scores)[::-1])
    assert [np.float32(f"{score:.9g}") for score in found] == found.tolist()
