from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.slow_ranks import slow_cosines, slow_sentence_ranks
from vse.eval import DEFAULT_KS
from vse.eval.ranking.answers import find_sentence_answers, normalise_rows
from vse.eval.ranking.metrics import BestAnswers, compute_direction_metrics
from vse.eval.ranking.ranks import SIMILARITIES
from vse.eval.search.cross_check import check_sentences_against_search
from vse.pipeline.errors import UserError


def ranked(captions: np.ndarray, image_of_caption: np.ndarray | list[int]) -> BestAnswers:
    return find_sentence_answers(torch.from_numpy(captions), torch.as_tensor(image_of_caption))


def listed(found: BestAnswers) -> dict[int, int]:
    return dict(zip(found.queries.tolist(), found.ranks.tolist(), strict=True))


def made(n_images: int = 30, n_each: int = 3, noise: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Captions near their image plus noise, of any length, in any order; and the row of each one's image."""
    rng = np.random.default_rng(seed)
    image_of_caption = rng.permutation(np.repeat(np.arange(n_images), n_each))
    captions = rng.normal(size=(n_images, 16))[image_of_caption] + noise * rng.normal(size=(len(image_of_caption), 16))
    return (captions * rng.uniform(0.1, 9.0, (len(image_of_caption), 1))).astype(np.float32), image_of_caption


# Their lengths are powers of two, so no cosine is rounded and equal ones tie in every arithmetic.
SIGNS = [np.float32(signs) for signs in itertools.product((-1, 1), repeat=4)]
EXACT = [*SIGNS, *(4 * row for row in SIGNS), *np.eye(4, dtype=np.float32), *(-2 * np.eye(4, dtype=np.float32)), np.zeros(4)]


def exact(n_captions: int, n_images: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Captions with many ties, of images that have some, one or none of them."""
    rng = np.random.default_rng(seed)
    captions = np.float32([EXACT[k] for k in rng.integers(0, len(EXACT), n_captions)])
    return captions, rng.integers(0, n_images, n_captions)


def test_only_the_direction_of_a_caption_counts() -> None:
    captions, image_of_caption = made()
    longer = captions * np.float32([2.0**k for k in range(-60, 30)])[:, None]
    assert listed(ranked(longer, image_of_caption)) == listed(ranked(captions, image_of_caption))


@given(st.data())
def test_ranks_equal_the_slow_count_with_ties_and_any_number_of_captions(data: st.DataObject) -> None:
    image_of_caption = [0, 0, *data.draw(st.lists(st.integers(0, 5), max_size=12))]
    image_of_caption = data.draw(st.permutations(image_of_caption))
    captions = np.float32([EXACT[data.draw(st.integers(0, len(EXACT) - 1))] for _ in image_of_caption])
    assert listed(ranked(captions, image_of_caption)) == slow_sentence_ranks(slow_cosines(captions), image_of_caption)


@given(rows=st.integers(1, 70), columns=st.integers(1, 70), seed=st.integers(0, 1000))
def test_the_size_of_a_block_does_not_matter(rows: int, columns: int, seed: int) -> None:
    captions, image_of_caption = exact(40, 16, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIMILARITIES, "cosine", SIMILARITIES["cosine"]._replace(tile_images=rows, tile_captions=columns))
        found = ranked(captions, image_of_caption)
    assert listed(found) == slow_sentence_ranks(slow_cosines(captions), image_of_caption.tolist())
    check_sentences_against_search(captions, image_of_caption, found, DEFAULT_KS)  # ties do not trouble it


def test_more_captions_than_a_tile_holds_and_an_image_that_fills_blocks() -> None:
    captions, image_of_caption = made(n_images=1000, n_each=3)
    image_of_caption[np.random.default_rng(1).integers(0, len(image_of_caption), 1100)] = 7
    units = normalise_rows(torch.from_numpy(captions)).double().numpy()
    scores, own = units @ units.T, image_of_caption[:, None] == image_of_caption
    best = np.where(own & ~np.eye(len(image_of_caption), dtype=bool), scores, -np.inf).max(1)
    expected = ((scores >= best[:, None]) & ~own).sum(1)
    found = ranked(captions, image_of_caption)
    np.testing.assert_array_equal(found.queries, np.flatnonzero(own.sum(1) > 1))
    # In single precision the nearest of thousands of others may change places.
    assert np.mean(found.ranks == expected[found.queries]) > 0.99
    assert np.abs(found.ranks - expected[found.queries]).max() <= 2


def test_a_collapsed_model_gets_no_credit() -> None:
    n_images = 300
    caption = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    found = ranked(np.repeat(caption, 5 * n_images, 0), np.arange(5 * n_images) // 5)
    assert set(found.ranks.tolist()) == {5 * n_images - 5}
    nothing = ranked(np.zeros((5 * n_images, 4), np.float32), np.arange(5 * n_images) // 5)
    assert set(nothing.ranks.tolist()) == {5 * n_images - 5}


@pytest.mark.parametrize("dim", [1, 3, 33, 300])
def test_equal_captions_tie_wherever_they_stand(dim: int) -> None:
    """Let both captions of each image be equal, and the last image repeat the first one."""
    rng = np.random.default_rng(0)
    captions = np.repeat(rng.normal(size=(2200, dim)).astype(np.float32), 2, axis=0)
    captions[-2:] = captions[:2]
    order = rng.permutation(len(captions))
    found = listed(ranked(captions[order], (np.arange(len(captions)) // 2)[order]))
    ranks = [found[int(row)] for row in np.argsort(order)]
    if dim == 1:
        assert min(ranks) > 1000
    else:
        assert [row for row, rank in enumerate(ranks) if rank] == [0, 1, len(ranks) - 2, len(ranks) - 1]
        assert set(ranks) == {0, 2}


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1.0, 1e30, 3e38])
def test_unit_rows_have_unit_length_however_long_they_were(scale: float) -> None:
    rows = torch.tensor([[1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]) * scale
    expected = torch.tensor([[3**-0.5, -(3**-0.5), 3**-0.5], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(normalise_rows(rows), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_captions_that_are_not_finite_are_named(bad: float) -> None:
    captions, image_of_caption = made()
    captions[66, 1] = bad
    with pytest.raises(UserError, match="captions row 66 is not finite"):
        ranked(captions, image_of_caption)


@pytest.mark.parametrize("n_each", [2, 7])
def test_faiss_and_the_exact_ranks_agree(n_each: int) -> None:
    captions, image_of_caption = made(n_each=n_each)
    image_of_caption[:4] = [100, 101, 102, 103]  # nothing to find
    found = ranked(captions, image_of_caption)
    exact = compute_direction_metrics(found.ranks)
    assert listed(found) == slow_sentence_ranks(slow_cosines(captions), image_of_caption.tolist())
    assert 0 < exact["r1"] < exact["r10"]
    recalls = check_sentences_against_search(captions, image_of_caption, found, DEFAULT_KS).recalls["s2s"]
    assert recalls == pytest.approx({f"r{k}": exact[f"r{k}"] for k in DEFAULT_KS})


WRONG: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "all found": np.zeros_like,
    "none found": lambda ranks: np.full_like(ranks, 80),
    "the worst is first": lambda ranks: np.where(np.arange(len(ranks)) == np.argmax(ranks), 0, ranks),
    "the best is lost": lambda ranks: np.where(np.arange(len(ranks)) == np.argmin(ranks), 80, ranks),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_rank_that_faiss_contradicts_is_a_fault_of_the_program(wrong: str) -> None:
    captions, image_of_caption = made()
    found = ranked(captions, image_of_caption)
    with pytest.raises(RuntimeError, match="s2s query .* by exact count, .* by FAISS"):
        check_sentences_against_search(captions, image_of_caption, replace(found, ranks=WRONG[wrong](found.ranks)), DEFAULT_KS)
