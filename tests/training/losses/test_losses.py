from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.training.losses.pairs_of_images import Pairs, cost
from tests.training.losses.slow_losses import RANKING, Table, numbered, ranking_loss, slow_query
from vse.training.losses.base import Batch
from vse.training.losses.hinges import MaxOfHinges
from vse.training.losses.ranking import QueryScores, RankingLoss

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "max": [{}, {"margin": 0.5}, {"mirrored_positive": True}],
    "sum": [{}, {"margin": 0.0}],
    "top": [{"k": k} for k in (1, 3, 10, None)],
    "spectrum": [{"temperature": temperature} for temperature in (0.03, 0.5, 20)],
    "infonce": [{"temperature": temperature} for temperature in (0.05, 1.0)],
    "sigmoid": [{"temperature": 0.1}, {"temperature": 1.0, "bias": 0.5}],
    "gce": [{"temperature": 0.2}, {"temperature": 1.0, "q": 1.0}],
}
CASES = [(name, settings) for name in RANKING for settings in SETTINGS[name]]


def square(n: int, seed: int = 0) -> QueryScores:
    """``n`` queries whose positives are on the diagonal; all other candidates are negatives."""
    scores = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
    return QueryScores(scores, torch.arange(n), ~torch.eye(n, dtype=torch.bool))


def test_ties_share_the_gradient_and_a_mirrored_positive_is_the_trick_with_the_diagonal() -> None:
    scores = torch.tensor([[0.5, 0.4, 0.4, 0.1]], dtype=torch.float64, requires_grad=True)
    ranking = QueryScores(scores, torch.tensor([0]), torch.tensor([[False, True, True, True]]))
    loss, gradient = with_gradient(MaxOfHinges().cost(*ranking), scores)
    assert loss.item() == pytest.approx(0.2 - 0.5 + 0.4)
    assert gradient.tolist() == [[-1.0, 0.5, 0.5, 0.0]]
    for seed in range(20):
        ranking = square(5, seed)
        scores = (2 * ranking.scores - 1).detach().requires_grad_()
        loss = MaxOfHinges(margin=0.2, mirrored_positive=True)
        computed = with_gradient(loss.cost(*ranking._replace(scores=scores)), scores)
        torch.testing.assert_close(computed, with_gradient(diagonal_trick(scores, 0.2), scores))


def diagonal_trick(scores: Tensor, margin: float) -> Tensor:
    """Of captions as queries, as the code of DSVE-loc has it: twice the diagonal is subtracted, then the highest is taken."""
    total = 0 * scores.sum()
    for query in range(len(scores)):
        candidates = [scores[query, c] - 2 * scores[c, c] * (c == query) for c in range(len(scores))]
        total = total + torch.relu(margin - scores[query, query] + max(candidates, key=Tensor.item))
    return total


def with_gradient(loss: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    return loss, torch.autograd.grad(loss, scores, retain_graph=True)[0]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_mean_of_the_highest_counts_hinges_of_zero(k: int) -> None:
    ranking = square(6)
    mean, total = (ranking_loss("top", k=k, reduction=reduction).cost(*ranking) for reduction in ("mean_topk", "sum"))
    torch.testing.assert_close(mean, total / (6 * k))


@pytest.mark.parametrize(("limit", "temperature"), [("max", 1e-6), ("sum", 1e6)])
def test_the_spectrum_ends_at_max_and_sum(limit: str, temperature: float) -> None:
    for n in (1, 2, 20):
        ranking, losses = square(n), (ranking_loss("spectrum", temperature=temperature), ranking_loss(limit))
        computed, end = (with_gradient(loss.cost(*ranking), ranking.scores) for loss in losses)
        torch.testing.assert_close(computed, end, rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 99), temperature=st.sampled_from([0.1, 1.0]))
def test_the_generalised_cross_entropy_ends_at_infonce_and_at_the_absolute_error(seed: int, temperature: float) -> None:
    ranking = square(8, seed)
    near, infonce = (ranking_loss(name, temperature=temperature, q=1e-7) for name in ("gce", "infonce"))
    computed, end = (with_gradient(loss.cost(*ranking), ranking.scores) for loss in (near, infonce))
    torch.testing.assert_close(computed, end, rtol=1e-4, atol=1e-4)
    far = ranking_loss("gce", temperature=temperature, q=1.0).cost(*ranking)
    probabilities = (ranking.scores / temperature).softmax(1).diagonal()
    torch.testing.assert_close(far, (1 - probabilities).sum())


@pytest.mark.parametrize("q", [0.2, 0.7])
def test_an_unlikely_pair_has_a_smaller_share_of_the_gradient_than_in_infonce(q: float) -> None:
    """Each query's gradient is that of InfoNCE times p^q, so that likely pairs lead."""
    ranking = square(6, 1)
    gce, infonce = (ranking_loss(name, temperature=0.2, q=q).cost(*ranking) for name in ("gce", "infonce"))
    gradients = [with_gradient(cost, ranking.scores)[1] for cost in (gce, infonce)]
    probabilities = (ranking.scores / 0.2).softmax(1).diagonal().detach()
    torch.testing.assert_close(gradients[0], gradients[1] * probabilities[:, None] ** q)


@pytest.mark.parametrize("temperature", [1e-3, 0.1, 1e3])
@pytest.mark.parametrize("score", [-3.0, 0.0, 1.0])
def test_equal_scores_cost_what_their_number_says_at_any_temperature(temperature: float, score: float) -> None:
    n = 16
    ranking = square(n)._replace(scores=torch.full((n, n), score, dtype=torch.float64))
    spectrum, infonce = (ranking_loss(name, temperature=temperature).cost(*ranking) for name in ("spectrum", "infonce"))
    assert float(spectrum) == pytest.approx(n * (n - 1) * 0.2), "all are hardest"
    assert float(infonce) == pytest.approx(n * math.log(n)), "a blind guess"


@pytest.mark.parametrize(("name", "n"), list(product(RANKING, [1, 2, 6])))
def test_equal_scores_have_a_finite_loss_and_gradient(name: str, n: int) -> None:
    scores = torch.ones(n, n, requires_grad=True)
    cost, gradient = with_gradient(ranking_loss(name).cost(*square(n)._replace(scores=scores)), scores)
    assert cost.shape == ()
    assert cost.isfinite()
    assert gradient.isfinite().all()


def tables(n_images: int, n_captions: int, n_tables: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    settings = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    return [torch.rand(n_images, n_captions, **settings) for _ in range(n_tables)]


def drawn_batch(n: int, more_images: int = 0, more_captions: int = 0) -> Batch:
    """``n`` pairs of about n / 2 images, whose numbers in the table are those of the pairs; further candidates come after."""
    image_indices = np.random.default_rng(n).integers(0, max(1, n // 2), n)
    further = [numbered(n, n + more) if more else None for more in (more_images, more_captions)]
    return Batch(numbered(0, n), numbered(0, n), image_indices, np.arange(n), *further)


def slow_batch(loss: RankingLoss, batch: Batch, i2t: Tensor, t2i: Tensor) -> Tensor:
    """Query by query: all images, then all captions. Rows and columns after those of the batch are further candidates."""
    n, image_indices = len(batch.image_indices), batch.image_indices.tolist()
    n_images, n_captions = i2t.shape
    masked = loss.same_image == "mask"
    total = 0 * i2t.sum()
    for i in range(n):
        negatives = [j for j in range(n) if j != i and not (masked and image_indices[i] == image_indices[j])]
        images = [
            j for j in negatives if not (masked and loss.has_distinct_candidates and image_indices[j] in image_indices[:j])
        ]
        of_image = [i2t[i, j] for j in [*negatives, *range(n, n_captions)]]
        of_caption = [t2i[j, i] for j in [*images, *range(n, n_images)]]
        total = total + loss.lambda1 * slow_query(loss, i2t[i, i], of_image)
        total = total + loss.lambda2 * slow_query(loss, t2i[i, i], of_caption)
    return total


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "settings"), CASES)
@given(
    n=st.integers(1, 9),
    more=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    n_tables=st.integers(1, 2),
    seed=st.integers(0, 10**6),
    further=st.fixed_dictionaries(
        {"same_image": st.sampled_from(["keep", "mask"]), "lambda1": st.floats(0, 3), "lambda2": st.floats(0, 3)}
    ),
)
def test_any_batch_with_or_without_further_candidates_costs_what_the_loop_says(
    name: str, settings: dict[str, Any], n: int, more: tuple[int, int], n_tables: int, seed: int, further: dict[str, Any]
) -> None:
    loss, batch = ranking_loss(name, **settings, **further), drawn_batch(n, *more)
    scores = tables(n + more[0], n + more[1], n_tables, seed)
    computed, slow = loss.build_objective(Table(*scores))(batch, 0).value, slow_batch(loss, batch, scores[0], scores[-1])
    torch.testing.assert_close(computed, slow)
    gradients = (torch.autograd.grad(total, scores, materialize_grads=True) for total in (computed, slow))
    torch.testing.assert_close(*gradients)


def test_the_collapsed_loss_counts_further_candidates_and_each_direction_its_own_matrix() -> None:
    i2t, t2i = tables(5, 5, 2)
    images, captions = ranking_loss("max").build_objective(Table(i2t, t2i))(drawn_batch(5), 0).query_scores or (None, None)
    assert torch.equal(images.scores, i2t)
    assert torch.equal(captions.scores, t2i.T)
    batch, scores = drawn_batch(4, 3, 2), tables(7, 6)
    computed = ranking_loss("sum").build_objective(Table(*scores))(batch, 0)
    assert computed.collapsed_value.item() == pytest.approx(0.2 * (4 * (3 + 2) + 4 * (3 + 3)))
    assert not computed.collapsed_value.requires_grad


@pytest.mark.parametrize("k", [1, 2, None])
def test_an_image_that_a_batch_has_twice_is_a_negative_once_and_at_its_first_row(k: int | None) -> None:
    scores = torch.tensor([[0.5, 0.0, 0.8], [0.0, 0.5, 0.9], [0.0, 0.0, 0.5]], requires_grad=True)
    batch = Batch(numbered(0, 3), numbered(0, 3), np.asarray([4, 4, 9]), np.arange(3))
    for same_image, of_third in (("mask", [1, 0, -1]), ("keep", [0, 1, -1] if k == 1 else [1, 1, -2])):
        loss = ranking_loss("top", same_image=same_image, k=k, lambda1=0).build_objective(Table(scores))(batch, 0).value
        assert torch.autograd.grad(loss, scores)[0][:, 2].tolist() == of_third


@pytest.mark.parametrize("reduction", ["sum", "mean_topk"])
@pytest.mark.parametrize("name", RANKING)
def test_the_cost_knows_what_it_would_be_if_all_embeddings_were_equal(name: str, reduction: str) -> None:
    loss = ranking_loss(name, reduction=reduction, k=3, same_image="mask", lambda2=1.5, lambda3=0.3, lambda4=0.2)
    pairs = Pairs([1, 2, 3, 2], n_texts=4)
    with torch.no_grad():
        pairs.images[:] = pairs.captions[:] = torch.tensor([1.0, 0, 0, 0])
    computed = cost(pairs, loss)
    assert computed.collapsed_value > 0
    torch.testing.assert_close(computed.value, computed.collapsed_value)
