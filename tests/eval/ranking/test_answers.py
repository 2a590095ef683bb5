"""The best answers to each query, and its best candidates, against a look at every pair."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.eval.ranking.test_ranks import TIES, blocks_of, splits
from vse.eval.ranking.answers import RankedList, break_ties, find_best_answers, rank_captions, rank_images
from vse.eval.ranking.metrics import BestAnswers
from vse.eval.ranking.ranks import ranks_from_blocks


def slow_best(scores: np.ndarray, right: list[int]) -> tuple[int, float, int, float]:
    """Return the best right and the best wrong candidate of a row of scores, the first one if several tie, by a loop."""
    best, best_wrong = (-1, -np.inf), (0, -np.inf)
    for candidate, score in enumerate(scores):
        if candidate in right and score > best[1]:
            best = (candidate, score)
        if candidate not in right and score > best_wrong[1]:
            best_wrong = (candidate, score)
    return *best, *best_wrong


def listed(found: BestAnswers) -> list[tuple[int, float, int, float]]:
    columns = (found.right_answers, found.right_scores, found.wrong_answers, found.wrong_scores)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(splits(), st.data())
def test_the_best_answers_are_those_that_a_look_at_every_pair_finds(
    split: tuple[int, list[int], int], data: st.DataObject
) -> None:
    n_images, image_of_caption, rows = split
    i2t, t2i = (data.draw(hnp.arrays(np.float32, (n_images, len(image_of_caption)), elements=TIES)) for _ in range(2))
    directional = data.draw(st.booleans())
    blocks = blocks_of(i2t, image_of_caption, rows), blocks_of(t2i, image_of_caption, rows) if directional else None
    ranks = ranks_from_blocks(*blocks)
    found = find_best_answers(*blocks, ranks)
    asking = sorted(set(image_of_caption))
    assert found["i2t"].queries.tolist() == asking
    own = [[c for c, of in enumerate(image_of_caption) if of == image] for image in asking]
    assert listed(found["i2t"]) == [slow_best(i2t[image], right) for image, right in zip(asking, own, strict=True)]
    columns = t2i.T if directional else i2t.T
    assert found["t2i"].queries.tolist() == list(range(len(image_of_caption)))
    assert listed(found["t2i"]) == [slow_best(column, [of]) for column, of in zip(columns, image_of_caption, strict=True)]
    for direction, of_direction in (("i2t", ranks.i2t), ("t2i", ranks.t2i)):
        answers = found[direction]
        assert answers.ranks.tolist() == of_direction.tolist()
        assert ((answers.ranks == 0) == (answers.right_scores > answers.wrong_scores)).all()


def slow_list(scores: np.ndarray, right: list[int], depth: int) -> list[tuple[int, float]]:
    """Return all candidates in descending order of score, wrong ones first among equals, then lower rows."""
    order = sorted(range(len(scores)), key=lambda row: (-scores[row], row in right, row))
    return [(row, float(scores[row])) for row in order][: depth or len(order)]


def entries(found: RankedList) -> list[tuple[int, float]]:
    return list(zip(found.rows.tolist(), found.scores.tolist(), strict=True))


@given(splits(), st.integers(0, 14), st.data())
def test_lists_are_those_of_a_full_sort(split: tuple[int, list[int], int], depth: int, data: st.DataObject) -> None:
    n_images, image_of_caption, rows = split
    scores = data.draw(hnp.arrays(np.float32, (n_images, len(image_of_caption)), elements=TIES))
    blocks = blocks_of(scores, image_of_caption, rows)
    own = {image: [c for c, of in enumerate(image_of_caption) if of == image] for image in sorted(set(image_of_caption))}
    found = {one.query: entries(one) for one in rank_captions(blocks, depth)}
    assert found == {image: slow_list(scores[image], right, depth) for image, right in own.items()}
    found = {one.query: entries(one) for one in rank_images(blocks, depth)}
    assert found == {c: slow_list(scores[:, c], [image], depth) for c, image in enumerate(image_of_caption)}


NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 1e-45, -1e-45]), st.floats(-1e37, 1e37))


@given(st.lists(NUMBERS, min_size=1, max_size=40), st.sampled_from([np.float32, np.float64]))
def test_scores_fall_strictly_and_differ_from_their_own_by_no_more_than_that_takes(values: list[float], dtype: type) -> None:
    scores = np.sort(np.array(values, dtype))[::-1]
    found = break_ties(scores)
    assert found.dtype == np.float32
    expected = [np.float32(scores[0])]
    for score in scores[1:]:
        expected.append(min(np.float32(score), np.nextafter(expected[-1], np.float32(-np.inf))))
    assert found.tolist() == [float(value) for value in expected]
    beyond = break_ties(np.array([1e300, 1e200, -1e200, -1e300]))
    assert np.isfinite(beyond).all()
    for falling in (found, beyond):
        assert (np.diff(falling.astype(np.float64)) < 0).all()
