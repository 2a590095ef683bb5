from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.slow_ranks import slow_order_scores
from vse.eval.files.embeddings import Embeddings
from vse.eval.ranking.ranks import ranks_from_blocks
from vse.eval.report.gallery import DirectionName, retrieve_candidates
from vse.eval.report.report_inputs import select_contrasting_queries, select_extreme_queries, select_queries


def made(seed: int, similarity: str, n_images: int = 9, n_each: int = 3, dim: int = 2) -> Embeddings:
    """Embeddings of small whole numbers, so that many scores are equal; image ids and captions in no order."""
    rng = np.random.default_rng(seed)
    images = rng.integers(-1, 2, (n_images, dim)).astype(np.float32)
    image_of_caption = rng.permutation(np.repeat(np.arange(n_images), n_each))
    captions = rng.integers(-1, 2, (len(image_of_caption), dim)).astype(np.float32)
    ids = rng.permutation(1000)[:n_images]
    sides = {"images": images, "captions": captions}
    if similarity == "scores":
        sides = {"scores": images @ captions.T}
    if similarity == "directional":
        sides = {"scores_i2t": images @ captions.T, "scores_t2i": -images @ captions.T}
    kind = "order" if similarity == "order" else "cosine"
    return Embeddings(ids, np.arange(len(image_of_caption)), ids[image_of_caption], "d", "test", **sides, similarity=kind)


def slow_candidates(run: Embeddings, direction: DirectionName, query: int) -> list[tuple[int, bool]]:
    """All candidates of a query, best first: of equal scores the negatives, and of these the earlier rows."""
    if run.vectors is None:
        scores = np.asarray(run.direction_scores(direction))
    else:
        order = run.similarity == "order"
        scores = slow_order_scores(run.images, run.captions) if order else run.images @ run.captions.T
    of = run.image_of_caption()
    row, right = (
        (scores[query], of == query) if direction == "i2t" else (scores[:, query], np.arange(len(scores)) == of[query])
    )
    ranked = sorted(range(len(row)), key=lambda candidate: (-row[candidate], right[candidate], candidate))
    return [(candidate, bool(right[candidate])) for candidate in ranked]


@pytest.mark.parametrize("similarity", ["cosine", "order", "scores", "directional"])
@pytest.mark.parametrize("direction", ["i2t", "t2i"])
@given(seed=st.integers(0, 1000))
def test_the_best_candidates_are_those_of_a_full_sort_and_agree_with_the_ranks(
    direction: DirectionName, similarity: str, seed: int
) -> None:
    run = made(seed, similarity)
    ranks = getattr(ranks_from_blocks(*run.score_blocks()), direction)
    queries = np.random.default_rng(seed).permutation(len(ranks))[:6].tolist()
    for query, result in zip(queries, retrieve_candidates(run, direction, queries), strict=True):
        expected = slow_candidates(run, direction, query)
        assert result.query == query
        assert [(shown.row, shown.is_right) for shown in result.candidates] == expected[:5]
        assert [shown.rank for shown in result.candidates] == [0, 1, 2, 3, 4]
        assert result.best_right.rank == ranks[query]
        assert (result.best_right.row, True) == expected[result.best_right.rank]


def test_an_order_file_larger_than_a_tile_is_searched_whole() -> None:
    run = made(1, "order", n_images=150, n_each=1, dim=8)
    queries = [0, 149]
    for direction in ("i2t", "t2i"):
        for query, result in zip(queries, retrieve_candidates(run, direction, queries), strict=True):
            assert [shown.row for shown in result.candidates] == [row for row, _ in slow_candidates(run, direction, query)[:5]]


RANKS = np.array([0, 0, 0, 0, 3, 9, 10, 500, 40, 2])


def test_selected_are_successes_near_misses_and_the_worst() -> None:
    successes, near, failures = select_queries(RANKS, np.arange(10), 6, seed=0)
    assert [RANKS[query] for query in successes] == [0, 0]
    assert failures == [7, 8]
    assert all(0 < RANKS[query] < 10 for query in near)
    assert sorted(near, key=lambda query: RANKS[query]) == near
    of_image = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
    queries = [query for group in select_queries(RANKS, of_image, 9, seed=0) for query in group]
    assert len({of_image[query] for query in queries}) == len(queries) == 3, "an image has one query"
    first, again, other = (select_queries(np.zeros(1000, np.int64), np.arange(1000), 9, seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("n", range(12))
def test_no_more_are_selected_than_asked_for_and_none_twice(n: int) -> None:
    queries = [query for group in select_queries(RANKS, np.arange(10), n, seed=0) for query in group]
    assert len(queries) == len(set(queries)) <= n


def test_of_two_results_the_largest_ratios_of_ranks_come_first_half_for_each() -> None:
    first, second = np.array([0, 5000, 9, 0, 3, 7]), np.array([9, 4000, 0, 99, 3, 6])
    assert select_contrasting_queries(first, second, np.arange(6), 4) == ([3, 0], [2, 1])
    assert select_contrasting_queries(first, second, np.arange(6), 3) == ([3, 0], [2])
    assert select_contrasting_queries(first, first, np.arange(6), 4) == ([], [])


def test_of_two_results_what_one_puts_first_and_the_other_does_not_is_shown_before_larger_ratios() -> None:
    first = np.array([900, 4, 700, 20, 0])
    second = np.array([10, 0, 0, 0, 0])
    assert select_contrasting_queries(first, second, np.arange(5), 8) == ([], [2, 3, 1, 0])
    assert select_contrasting_queries(second, first, np.arange(5), 8) == ([2, 3, 1, 0], [])


def test_extreme_queries_have_the_largest_and_the_smallest_ranks() -> None:
    worst, best = select_extreme_queries(RANKS, 3, seed=0)
    assert RANKS[worst].tolist() == sorted(RANKS.tolist(), reverse=True)[:3]
    assert RANKS[best].tolist() == sorted(RANKS.tolist())[:3]
    worst, best = select_extreme_queries(RANKS, 100, seed=0)
    assert sorted([*worst, *best]) == list(range(len(RANKS)))
