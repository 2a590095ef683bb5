from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.slow_ranks import slow_order_scores, slow_ranks
from vse.eval import DEFAULT_KS
from vse.eval.ranking.metrics import Ranks, compute_metrics
from vse.eval.ranking.ranks import ranks_from_embeddings
from vse.eval.search.cross_check import check_against_candidates, check_against_search
from vse.eval.search.top_k import search_corpus
from vse.pipeline.errors import UserError

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def made(n_images: int = 30, n_each: int = 3, dim: int = 16, seed: int = 0) -> Arrays:
    """Images, captions that are their image made smaller, with noise, and the image_of_caption of the captions."""
    rng = np.random.default_rng(seed)
    images = np.abs(rng.normal(size=(n_images, dim))).astype(np.float32)
    image_of_caption = rng.permutation(np.repeat(np.arange(n_images), n_each))
    captions = 0.7 * images[image_of_caption] + 0.7 * np.abs(rng.normal(size=(len(image_of_caption), dim)))
    return images, captions.astype(np.float32), image_of_caption


def exact_ranks(images: np.ndarray, captions: np.ndarray, image_of_caption: np.ndarray) -> Ranks:
    return ranks_from_embeddings(*map(torch.from_numpy, (images, captions, image_of_caption)), "order")


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 12))
def test_candidates_have_exact_scores_in_descending_order(direction: str, seed: int, k: int, candidates: int) -> None:
    rng = np.random.default_rng(seed)
    queries, corpus = (rng.integers(-2, 3, (n, 3)).astype(np.float32) for n in (6, 10))
    scores, rows = search_corpus(corpus, queries, k, "order", direction=direction, candidates=candidates)
    full = slow_order_scores(queries, corpus) if direction == "i2t" else slow_order_scores(corpus, queries).T
    assert scores.shape == rows.shape == (6, k)
    assert (np.diff(scores, axis=1) <= 0).all()
    assert all(len(set(row)) == k for row in rows.tolist())
    np.testing.assert_array_equal(scores, np.take_along_axis(full, rows, axis=1))
    if candidates >= len(corpus):
        np.testing.assert_array_equal(scores, -np.sort(-full, axis=1)[:, :k])


def test_what_cannot_be_searched_is_named() -> None:
    images, captions, _ = made()
    with pytest.raises(UserError, match="unknown similarity 'orders'.*did you mean 'order'"):
        search_corpus(images, captions, 1, "orders", direction="t2i")
    with pytest.raises(ValueError, match="i2t or t2i"):
        search_corpus(images, captions, 2, "order")
    captions[7, 1] = np.nan
    with pytest.raises(UserError, match="queries row 7 is not finite"):
        search_corpus(images, captions, 1, "order", direction="t2i")


@pytest.mark.parametrize(("n_each", "candidates"), [(1, 10), (7, 1), (3, 1000)])
def test_candidates_do_not_contradict_the_exact_ranks(n_each: int, candidates: int) -> None:
    split = made(n_each=n_each)
    found = check_against_candidates(*split, exact_ranks(*split), DEFAULT_KS, "order", candidates=candidates).recalls
    exact = compute_metrics(exact_ranks(*split))
    for direction in ("i2t", "t2i"):
        for name, recall in found[direction].items():
            assert recall == pytest.approx(exact[direction][name]) if candidates == 1000 else 0 <= recall <= 100


WRONG: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "too good, found by few candidates": (10, np.zeros_like),
    "too bad for few candidates": (10, lambda ranks: np.full_like(ranks, 89)),
    "one too high": (1000, lambda ranks: ranks + 1),
    "one too low": (1000, lambda ranks: ranks - 1),
}


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_rank_that_the_candidates_contradict_is_a_fault_of_the_program(wrong: str, direction: str) -> None:
    candidates, spoil = WRONG[wrong]
    images, captions, image_of_caption = made()
    ranks = exact_ranks(images, captions, image_of_caption)
    ranks = Ranks(spoil(ranks.i2t), ranks.t2i) if direction == "i2t" else Ranks(ranks.i2t, spoil(ranks.t2i))
    with pytest.raises(RuntimeError, match=f"{direction} query .* by exact count"):
        check_against_candidates(images, captions, image_of_caption, ranks, DEFAULT_KS, "order", candidates=candidates)


def with_lonely_images(similarity: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, Ranks]:
    """Return a split in which the last images have no caption, with ranks that are counted pair by pair."""
    images, captions, image_of_caption = made(n_images=20)
    images = np.concatenate([images, 0.9 * images[:7]])
    order = np.random.default_rng(1).permutation(26)
    place = np.argsort(np.append(order, 26))
    images, image_of_caption = images[np.append(order, 26)], place[image_of_caption]
    scores = slow_order_scores(images, captions) if similarity == "order" else images.astype(np.float64) @ captions.T
    asking = np.unique(image_of_caption)
    i2t, _ = slow_ranks(scores[asking], np.searchsorted(asking, image_of_caption).tolist())
    t2i = [int((np.delete(scores[:, c], own) >= scores[own, c]).sum()) for c, own in enumerate(image_of_caption)]
    return images, captions, image_of_caption, Ranks(np.array(i2t), np.array(t2i))


@pytest.mark.parametrize("similarity", ["cosine", "order"])
def test_an_image_without_a_caption_is_found_but_asks_nothing(similarity: str) -> None:
    *split, ranks = with_lonely_images(similarity)
    check, more = (check_against_search, ()) if similarity == "cosine" else (check_against_candidates, ("order",))
    found, exact = check(*split, ranks, DEFAULT_KS, *more).recalls, compute_metrics(ranks)
    for direction in ("i2t", "t2i"):
        assert found[direction] == pytest.approx({name: exact[direction][name] for name in found[direction]})
        spoilt = {"i2t": ranks.i2t, "t2i": ranks.t2i}
        spoilt[direction] = np.where(spoilt[direction] > 0, 0, 50)
        with pytest.raises(RuntimeError, match=f"{direction} query .* by exact count"):
            check(*split, Ranks(**spoilt), DEFAULT_KS, *more)
