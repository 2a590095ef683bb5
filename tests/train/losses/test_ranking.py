"""What a batch costs by a ranking loss: both directions, each by its own scores, with further candidates."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.train.losses.pairs_of_images import Pairs, cost
from tests.train.losses.slow_losses import RANKING, RELATIVE, Table, numbered, ranking_loss, slow_query
from vse.train.losses.base import Batch
from vse.train.losses.ranking import RankingLoss

LAMBDAS = [(1.0, 1.0), (0.5, 2.0), (1.0, 0.0), (0.0, 1.5)]  # of the terms whose query is an image, and of the others
FORMS = {"one matrix": 1, "a matrix for each direction": 2}


def tables(n_images: int, n_captions: int, n_tables: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.rand(n_images, n_captions, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(n_tables)
    ]


def drawn_batch(n: int, more_images: int = 0, more_captions: int = 0) -> Batch:
    """``n`` pairs of about n / 2 images, whose numbers in the table are those of the pairs; further candidates come after."""
    image_of = np.random.default_rng(n).integers(0, max(1, n // 2), n)
    return Batch(
        numbered(0, n),
        numbered(0, n),
        image_of,
        np.arange(n),
        numbered(n, n + more_images) if more_images else None,
        numbered(n, n + more_captions) if more_captions else None,
    )


def slow_batch(loss: RankingLoss, batch: Batch, i2t: Tensor, t2i: Tensor) -> Tensor:
    """Query by query: all images, then all captions. Rows and columns after those of the batch are further candidates."""
    n, image_of = len(batch.image_of), batch.image_of.tolist()
    n_images, n_captions = i2t.shape
    masked = loss.same_image == "mask"
    total = 0 * i2t.sum()
    for i in range(n):
        negatives = [j for j in range(n) if j != i and not (masked and image_of[i] == image_of[j])]
        images = [j for j in negatives if not (masked and loss.distinct_candidates and image_of[j] in image_of[:j])]
        of_image = [i2t[i, j] for j in [*negatives, *range(n, n_captions)]]
        of_caption = [t2i[j, i] for j in [*images, *range(n, n_images)]]
        total = total + loss.lambda1 * slow_query(loss, i2t[i, i], of_image)
        total = total + loss.lambda2 * slow_query(loss, t2i[i, i], of_caption)
    return total


def assert_costs_as_the_loop_says(loss: RankingLoss, batch: Batch, scores: list[Tensor]) -> None:
    computed = loss.objective(Table(*scores))(batch, 0).loss
    slow = slow_batch(loss, batch, scores[0], scores[-1])
    torch.testing.assert_close(computed, slow)
    gradients = (torch.autograd.grad(total, scores, materialize_grads=True) for total in (computed, slow))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("name", "form", "same_image"), list(product(RANKING, FORMS, ["keep", "mask"])))
def test_a_batch_and_its_gradients_cost_what_the_loop_says(name: str, form: str, same_image: str) -> None:
    for n, (lambda1, lambda2) in product([1, 2, 7, 20], LAMBDAS):
        loss = ranking_loss(name, same_image=same_image, lambda1=lambda1, lambda2=lambda2, k=2, temperature=0.3)
        assert_costs_as_the_loop_says(loss, drawn_batch(n), tables(n, n, FORMS[form]))


@pytest.mark.parametrize(("name", "form", "same_image"), list(product(RANKING, FORMS, ["keep", "mask"])))
def test_further_candidates_are_negatives_of_every_query(name: str, form: str, same_image: str) -> None:
    loss = ranking_loss(name, same_image=same_image, k=3, temperature=0.3)
    for n, more_images, more_captions in ((1, 2, 1), (6, 4, 0), (6, 0, 3), (5, 2, 7)):
        batch, scores = drawn_batch(n, more_images, more_captions), tables(n + more_images, n + more_captions, FORMS[form])
        assert_costs_as_the_loop_says(loss, batch, scores)


@given(
    name=st.sampled_from(RANKING),
    n=st.integers(1, 8),
    more=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    same_image=st.sampled_from(["keep", "mask"]),
    n_tables=st.integers(1, 2),
    seed=st.integers(0, 10**6),
    lambdas=st.tuples(*[st.floats(0, 3)] * 2),
)
def test_any_batch_costs_what_the_loop_says(
    name: str, n: int, more: tuple[int, int], same_image: str, n_tables: int, seed: int, lambdas: tuple[float, float]
) -> None:
    loss = ranking_loss(name, same_image=same_image, lambda1=lambdas[0], lambda2=lambdas[1], k=2)
    assert_costs_as_the_loop_says(loss, drawn_batch(n, *more), tables(n + more[0], n + more[1], n_tables, seed))


def test_each_direction_is_ranked_by_its_own_matrix() -> None:
    i2t, t2i = tables(5, 5, 2)
    images, captions = ranking_loss("max").objective(Table(i2t, t2i))(drawn_batch(5), 0).rankings or (None, None)
    assert torch.equal(images.scores, i2t)
    assert torch.equal(captions.scores, t2i.T)


@pytest.mark.parametrize("k", [1, 2, None])
def test_an_image_that_a_batch_has_twice_is_a_negative_once_and_at_its_first_row(k: int | None) -> None:
    """Rows of the same image differ where each visit sees another crop of it."""
    scores = torch.tensor([[0.5, 0.0, 0.8], [0.0, 0.5, 0.9], [0.0, 0.0, 0.5]], requires_grad=True)
    batch = Batch(numbered(0, 3), numbered(0, 3), np.asarray([4, 4, 9]), np.arange(3))
    for same_image, of_third in (("mask", [1, 0, -1]), ("keep", [0, 1, -1] if k == 1 else [1, 1, -2])):
        loss = ranking_loss("top", same_image=same_image, k=k, lambda1=0).objective(Table(scores))(batch, 0).loss
        assert torch.autograd.grad(loss, scores)[0][:, 2].tolist() == of_third


@pytest.mark.parametrize("name", [name for name in RANKING if name != "top"])
def test_for_the_other_losses_it_is_a_negative_as_often_as_a_batch_has_it(name: str) -> None:
    scores = torch.zeros(3, 3, requires_grad=True)
    batch = Batch(numbered(0, 3), numbered(0, 3), np.asarray([4, 4, 9]), np.arange(3))
    loss = ranking_loss(name, same_image="mask", lambda1=0).objective(Table(scores))(batch, 0).loss
    first, second, _ = torch.autograd.grad(loss, scores)[0][:, 2].tolist()
    assert first == second > 0


@pytest.mark.parametrize("name", RELATIVE)
def test_a_batch_of_one_image_costs_nothing_when_masked(name: str) -> None:
    batch = replace(drawn_batch(5), image_of=np.zeros(5, np.int64))
    assert ranking_loss(name, same_image="mask").objective(Table(*tables(5, 5)))(batch, 0).loss == 0


@given(n=st.integers(1, 7), seed=st.integers(0, 10**6), margin=st.floats(0, 2), lambdas=st.tuples(*[st.floats(0, 2)] * 2))
def test_the_top_of_all_hinges_of_different_images_is_their_sum(
    n: int, seed: int, margin: float, lambdas: tuple[float, float]
) -> None:
    pairs, weights = Pairs([1] * n, seed), {"margin": margin, "lambda1": lambdas[0], "lambda2": lambdas[1]}
    top, total = (
        cost(pairs, ranking_loss(name, k=None, same_image=same_image, **weights), "cosine").loss
        for name, same_image in (("top", "mask"), ("sum", "keep"))
    )
    torch.testing.assert_close(pairs.with_gradients(top), pairs.with_gradients(total))


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    margin=st.floats(0, 2),
    lambdas=st.tuples(*[st.floats(0, 2)] * 2),
)
def test_so_it_is_if_captions_of_the_same_image_count_as_negatives(
    counts: list[int], seed: int, margin: float, lambdas: tuple[float, float]
) -> None:
    pairs, weights = Pairs(counts, seed), {"margin": margin, "k": None, "lambda1": lambdas[0], "lambda2": lambdas[1]}
    top, total = (cost(pairs, ranking_loss(name, **weights), "cosine").loss for name in ("top", "sum"))
    torch.testing.assert_close(pairs.with_gradients(top), pairs.with_gradients(total))


@pytest.mark.parametrize("reduction", ["sum", "mean_topk"])
@pytest.mark.parametrize("name", RANKING)
def test_the_cost_knows_what_it_would_be_if_all_embeddings_were_equal(name: str, reduction: str) -> None:
    loss = ranking_loss(name, reduction=reduction, k=3, same_image="mask", lambda2=1.5, lambda3=0.3, lambda4=0.2)
    pairs = Pairs([1, 2, 3, 2], n_texts=4)
    with torch.no_grad():
        pairs.images[:] = pairs.captions[:] = torch.tensor([1.0, 0, 0, 0])
    computed = cost(pairs, loss)
    assert computed.collapsed > 0
    torch.testing.assert_close(computed.loss, computed.collapsed)


def test_the_collapsed_loss_counts_further_candidates() -> None:
    batch, scores = drawn_batch(4, 3, 2), tables(7, 6)
    computed = ranking_loss("sum").objective(Table(*scores))(batch, 0)
    assert computed.collapsed.item() == pytest.approx(0.2 * (4 * (3 + 2) + 4 * (3 + 3)))
    assert not computed.collapsed.requires_grad


COMPILED = """
import functools, sys
import numpy as np, torch
from vse.train.losses.base import Batch
from vse.train.losses.hinges import MaxOfHinges
from vse.train.models.similarities.vectors import Cosine
torch.compile = functools.partial(torch.compile, backend=sys.argv[1])
sides = [torch.rand(5, 3, generator=torch.Generator().manual_seed(k), requires_grad=True) for k in (0, 1)]
batch = Batch(*[(side,) for side in sides], np.arange(5), np.arange(5))
both = []
for compiled in (False, True):
    cost = MaxOfHinges().objective(Cosine(), compiled)(batch, 0)
    both.append([cost.loss, cost.collapsed, *torch.autograd.grad(cost.loss, sides)])
torch.testing.assert_close(*both)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_compiled_loss_gives_the_same_value_and_gradients(backend: str) -> None:
    """In a process of its own, where no annotations are checked, which cannot be compiled."""
    done = subprocess.run([sys.executable, "-c", COMPILED, backend], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
