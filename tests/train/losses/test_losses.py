"""Each ranking loss against a loop over its queries and candidates: values and gradients."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.train.losses.slow_losses import RANKING, RELATIVE, ranking_loss, slow_query
from vse.train.losses.hinges import MaxOfHinges
from vse.train.losses.ranking import Ranking, RankingLoss, negative_pairs

DTYPES = [torch.float32, torch.float64]
SHAPES = [(1, 1), (1, 6), (6, 1), (2, 2), (7, 4), (4, 9), (20, 20)]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "max": [{}, {"margin": 0.5}, {"mirrored_positive": True}],
    "sum": [{}, {"margin": 0.0}],
    "top": [{"k": k} for k in (1, 3, 10, None)],
    "spectrum": [{"temperature": temperature} for temperature in (0.03, 0.5, 20)],
    "infonce": [{"temperature": temperature} for temperature in (0.05, 1.0)],
    "sigmoid": [{"temperature": 0.1}, {"temperature": 1.0, "bias": 0.5}],
}
CASES = [(name, settings) for name in RANKING for settings in SETTINGS[name]]


def rectangle(n: int, m: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Ranking:
    """``n`` queries with positives anywhere among ``m`` candidates, of which some are negatives; a query may have none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(n, m, generator=generator, dtype=dtype, requires_grad=True)
    positives = torch.randint(m, (n,), generator=generator)
    negatives = torch.rand(n, m, generator=generator) < torch.rand(n, 1, generator=generator)
    return Ranking(scores, positives, negatives.scatter(1, positives[:, None], False))


def square(n: int, seed: int = 0) -> Ranking:
    """``n`` queries whose positives are on the diagonal; all other candidates are negatives."""
    scores = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
    return Ranking(scores, torch.arange(n), ~torch.eye(n, dtype=torch.bool))


def slow_cost(loss: RankingLoss, ranking: Ranking) -> Tensor:
    """Query by query, candidate by candidate."""
    total = 0 * ranking.scores.sum()
    for row, positive, counts in zip(ranking.scores, ranking.positives.tolist(), ranking.negatives.tolist(), strict=True):
        total = total + slow_query(
            loss, row[positive], [score for score, is_negative in zip(row, counts, strict=True) if is_negative]
        )
    return total


def test_negatives_that_tie_for_the_hardest_share_the_gradient() -> None:
    """The reference takes one of them; the loss is the same."""
    scores = torch.tensor([[0.5, 0.4, 0.4, 0.1]], dtype=torch.float64, requires_grad=True)
    ranking = Ranking(scores, torch.tensor([0]), torch.tensor([[False, True, True, True]]))
    loss, gradient = with_gradient(MaxOfHinges().cost(*ranking), scores)
    assert loss.item() == pytest.approx(0.2 - 0.5 + 0.4)
    assert gradient.tolist() == [[-1.0, 0.5, 0.5, 0.0]]


def diagonal_trick(scores: Tensor, margin: float) -> Tensor:
    """Of captions as queries, as the code of DSVE-loc has it: twice the diagonal is subtracted, then the highest is taken."""
    total = 0 * scores.sum()
    for query in range(len(scores)):
        candidates = [scores[query, c] - 2 * scores[c, c] * (c == query) for c in range(len(scores))]
        total = total + torch.relu(margin - scores[query, query] + max(candidates, key=Tensor.item))
    return total


def test_a_mirrored_positive_is_the_trick_with_the_diagonal() -> None:
    for seed in range(20):
        ranking = square(5, seed)
        scores = (2 * ranking.scores - 1).detach().requires_grad_()
        loss = MaxOfHinges(margin=0.2, mirrored_positive=True)
        computed = with_gradient(loss.cost(*ranking._replace(scores=scores)), scores)
        torch.testing.assert_close(computed, with_gradient(diagonal_trick(scores, 0.2), scores))


@pytest.mark.parametrize(("positive", "usual", "mirrored"), [(0.5, 0.0, 0.0), (0.05, 0.35, 0.35), (-0.4, 0.8, 1.0)])
def test_a_mirrored_positive_makes_a_difference_where_its_score_is_negative(
    positive: float, usual: float, mirrored: float
) -> None:
    ranking = Ranking(torch.tensor([[positive, 0.2]]), torch.tensor([0]), torch.tensor([[False, True]]))
    assert MaxOfHinges().cost(*ranking).item() == pytest.approx(usual)
    assert MaxOfHinges(mirrored_positive=True).cost(*ranking).item() == pytest.approx(mirrored)


def with_gradient(loss: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    return loss, torch.autograd.grad(loss, scores, retain_graph=True)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_rectangle_costs_what_a_loop_over_it_says(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    loss = ranking_loss(name, **settings)
    for seed, shape in enumerate(SHAPES):
        ranking = rectangle(*shape, dtype, seed)
        computed, slow = (with_gradient(cost, ranking.scores) for cost in (loss.cost(*ranking), slow_cost(loss, ranking)))
        torch.testing.assert_close(computed, slow)


@given(
    name=st.sampled_from(RANKING),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 10**6),
    margin=st.floats(0, 2),
    k=st.none() | st.integers(1, 12),
    temperature=st.floats(0.02, 10),
)
def test_any_rectangle_costs_what_a_loop_over_it_says(
    name: str, shape: tuple[int, int], seed: int, margin: float, k: int | None, temperature: float
) -> None:
    loss, ranking = ranking_loss(name, margin=margin, k=k, temperature=temperature), rectangle(*shape, seed=seed)
    computed, slow = (with_gradient(cost, ranking.scores) for cost in (loss.cost(*ranking), slow_cost(loss, ranking)))
    torch.testing.assert_close(computed, slow)


@pytest.mark.parametrize("name", RANKING)
def test_what_is_neither_positive_nor_negative_does_not_count(name: str) -> None:
    loss, ranking = ranking_loss(name), rectangle(5, 8)
    gradient = torch.autograd.grad(loss.cost(*ranking), ranking.scores)[0]
    counts = ranking.negatives.scatter(1, ranking.positives[:, None], True)
    assert not counts.all()
    assert gradient.any()
    assert not gradient[~counts].any()


@pytest.mark.parametrize("name", RANKING)
def test_each_direction_has_a_weight(name: str) -> None:
    images, captions = rectangle(4, 6, seed=1), rectangle(5, 3, seed=2)
    for lambda1, lambda2 in ((1.0, 1.0), (0.5, 2.0), (1.0, 0.0), (0.0, 1.5)):
        loss = ranking_loss(name, lambda1=lambda1, lambda2=lambda2)
        slow = lambda1 * slow_cost(loss, images) + lambda2 * slow_cost(loss, captions)
        torch.testing.assert_close(loss.total_cost(images, captions), slow)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_mean_of_the_highest_counts_hinges_of_zero(k: int) -> None:
    ranking = square(6)
    mean, total = (ranking_loss("top", k=k, reduction=reduction).cost(*ranking) for reduction in ("mean_topk", "sum"))
    torch.testing.assert_close(mean, total / (6 * k))


@pytest.mark.parametrize(("name", "expected"), [("max", 20 * 0.2), ("sum", 20 * 19 * 0.2)])
def test_equal_scores_cost_a_margin_for_each_negative_that_counts(name: str, expected: float) -> None:
    ranking = square(20)
    assert float(ranking_loss(name).cost(*ranking._replace(scores=torch.ones(20, 20)))) == pytest.approx(expected)


@pytest.mark.parametrize(("limit", "temperature"), [("max", 1e-6), ("sum", 1e6)])
@pytest.mark.parametrize(("dtype", "shape"), list(product(DTYPES, SHAPES)))
def test_the_spectrum_ends_at_the_max_and_at_the_sum_of_hinges(
    dtype: torch.dtype, shape: tuple[int, int], limit: str, temperature: float
) -> None:
    ranking = rectangle(*shape, dtype)
    computed, end = (
        with_gradient(loss.cost(*ranking), ranking.scores)
        for loss in (ranking_loss("spectrum", temperature=temperature), ranking_loss(limit))
    )
    torch.testing.assert_close(computed, end, rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 999), n=st.integers(2, 9), temperatures=st.tuples(*[st.floats(1e-4, 1e4)] * 2))
def test_the_spectrum_grows_with_its_temperature(seed: int, n: int, temperatures: tuple[float, float]) -> None:
    ranking = square(n, seed)
    losses = [ranking_loss("spectrum", temperature=temperature) for temperature in sorted(temperatures)]
    ascending = [float(loss.cost(*ranking).detach()) for loss in (ranking_loss("max"), *losses, ranking_loss("sum"))]
    assert all(a <= b + 1e-9 for a, b in pairwise(ascending))


@pytest.mark.parametrize(("dtype", "n", "temperature"), list(product(DTYPES, [1, 2, 7, 20], [0.05, 1.0])))
def test_infonce_is_the_cross_entropy_of_the_positives(dtype: torch.dtype, n: int, temperature: float) -> None:
    ranking = square(n)
    scores = ranking.scores.detach().to(dtype).requires_grad_()
    cost = ranking_loss("infonce", temperature=temperature).cost(*ranking._replace(scores=scores))
    expected = nn.functional.cross_entropy(scores / temperature, torch.arange(n), reduction="sum")
    torch.testing.assert_close(with_gradient(cost, scores), with_gradient(expected, scores))


@pytest.mark.parametrize("temperature", [1e-3, 0.1, 1e3])
@pytest.mark.parametrize("score", [-3.0, 0.0, 1.0])
def test_equal_scores_cost_what_their_number_says_at_any_temperature(temperature: float, score: float) -> None:
    n = 16
    ranking = square(n)._replace(scores=torch.full((n, n), score, dtype=torch.float64))
    spectrum, infonce = (ranking_loss(name, temperature=temperature).cost(*ranking) for name in ("spectrum", "infonce"))
    assert float(spectrum) == pytest.approx(n * (n - 1) * 0.2), "all are hardest"
    assert float(infonce) == pytest.approx(n * math.log(n)), "a blind guess"


@pytest.mark.parametrize("name", RELATIVE)
def test_a_query_without_negatives_costs_nothing(name: str) -> None:
    ranking = square(5)._replace(negatives=torch.zeros(5, 5, dtype=torch.bool))
    cost, gradient = with_gradient(ranking_loss(name).cost(*ranking), ranking.scores)
    assert cost == 0
    assert not gradient.any()


@pytest.mark.parametrize(("name", "n"), list(product(RANKING, [1, 2, 6])))
def test_equal_scores_have_a_finite_loss_and_gradient(name: str, n: int) -> None:
    scores = torch.ones(n, n, requires_grad=True)
    cost, gradient = with_gradient(ranking_loss(name).cost(*square(n)._replace(scores=scores)), scores)
    assert cost.shape == ()
    assert cost.isfinite()
    assert gradient.isfinite().all()


def test_captions_of_one_image_are_negatives_unless_masked() -> None:
    ids = torch.tensor([4, 7, 4])
    kept = [[False, True, True], [True, False, True], [True, True, False]]
    masked = [[False, True, False], [True, False, True], [False, True, False]]
    assert negative_pairs(ids, mask_same_image=False).tolist() == kept
    assert negative_pairs(ids, mask_same_image=True).tolist() == masked
