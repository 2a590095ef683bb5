from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.dataset.phrases import iou

corners = st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=4)


def pixels(box: tuple[int, ...]) -> set[tuple[int, int]]:
    """Return the pixels of a box, one by one."""
    return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}


@given(corners, corners)
def test_iou_is_the_share_of_pixels_that_two_boxes_have_in_common(a: list[tuple[int, ...]], b: list[tuple[int, ...]]) -> None:
    expected = [[len(pixels(x) & pixels(y)) / max(1, len(pixels(x) | pixels(y))) for y in b] for x in a]
    overlap = iou(np.array(a), np.array(b, np.float32))
    assert overlap.dtype == np.float64
    np.testing.assert_allclose(overlap, expected, atol=1e-12)


@given(st.tuples(*[st.integers(1, 9)] * 4), st.tuples(*[st.integers(1, 9)] * 4))
def test_iou_of_whole_pixels_equals_the_published_iou_of_inclusive_corners(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    (left, top, right, bottom), (x1, y1, x2, y2) = (  # 1-based and inclusive, as in Flickr30K Entities
        (min(box[0], box[2]), min(box[1], box[3]), max(box[0], box[2]), max(box[1], box[3])) for box in (a, b)
    )
    width, height = min(right, x2) - max(left, x1) + 1, min(bottom, y2) - max(top, y1) + 1
    shared = max(width, 0) * max(height, 0)
    union = (right - left + 1) * (bottom - top + 1) + (x2 - x1 + 1) * (y2 - y1 + 1) - shared
    stored = np.array([[left - 1, top - 1, right, bottom]]), np.array([[x1 - 1, y1 - 1, x2, y2]])
    np.testing.assert_allclose(iou(*stored), shared / union)


def test_a_box_without_area_overlaps_nothing_not_even_itself() -> None:
    empty = np.array([[2, 2, 2, 5], [4, 4, 1, 1]], np.float32)
    assert not iou(empty, np.vstack([empty, [[0, 0, 9, 9]]])).any()


def test_there_may_be_no_boxes() -> None:
    assert iou(np.zeros((0, 4)), np.zeros((3, 4))).shape == (0, 3)
