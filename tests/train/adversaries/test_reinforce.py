"""Drawing negatives, and the gradient by which the drawing is learnt, against enumerations of all that can be drawn."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vse.train.adversaries.base import (
    Baseline,
    CandidateLogits,
    ReinforceSettings,
    SampledCandidates,
    find_quantiles,
    reinforce_loss,
    sample_candidates,
)


def settings(**changes: Any) -> ReinforceSettings:
    return ReinforceSettings(name="any", **changes)


LOGITS = torch.tensor([[0.0, 1.0, 2.0, -1.0], [3.0, 0.0, 0.0, 0.5]], dtype=torch.float64)
MASK = torch.tensor([[False, False, True, False], [False, True, False, False]])


def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
    """The softmax over what is not masked, number by number."""
    weights = [
        [0.0 if out else math.exp(x) for x, out in zip(row, hidden, strict=True)]
        for row, hidden in zip(logits.tolist(), mask.tolist(), strict=True)
    ]
    return torch.tensor([[w / sum(row) for w in row] for row in weights], dtype=torch.float64)


def test_candidates_are_drawn_as_often_as_their_probability_says() -> None:
    torch.manual_seed(0)
    expected = probabilities(LOGITS, MASK)
    drawn = sample_candidates(LOGITS, MASK, 40_000)
    for numbers, p in zip(drawn.indices, expected, strict=True):
        shares = torch.bincount(numbers, minlength=4) / len(numbers)
        assert (shares - p).abs().max() < 4 * 0.5 / math.sqrt(len(numbers))
        assert not shares[p == 0].any()
    torch.testing.assert_close(drawn.log_probabilities.exp(), expected.gather(1, drawn.indices))
    assert drawn.likeliest.tolist() == [1, 0]
    entropy = [-sum(p * math.log(p) for p in row if p) for row in expected.tolist()]
    assert drawn.entropies.tolist() == pytest.approx(entropy)


def test_every_one_of_566_000_candidates_can_be_drawn() -> None:
    """As many captions as COCO has for training: each is drawn by the number in the middle of its own share."""
    p = torch.randn(1, 566_000, generator=torch.Generator().manual_seed(0)).softmax(1)
    exact = p[0].numpy().astype(np.longdouble)
    ends = exact.cumsum()
    middles = ((ends - exact / 2) / ends[-1]).astype(np.float64)
    assert torch.equal(find_quantiles(p, torch.from_numpy(middles)[None])[0], torch.arange(566_000))


def test_draws_depend_on_the_seed_alone() -> None:
    torch.manual_seed(3)
    first = sample_candidates(LOGITS, None, 50).indices
    torch.manual_seed(3)
    assert torch.equal(sample_candidates(LOGITS, None, 50).indices, first)
    assert not torch.equal(sample_candidates(LOGITS, None, 50).indices, first)


def test_a_query_whose_candidates_are_all_masked_counts_nowhere() -> None:
    mask = torch.tensor([[True] * 4, [False] * 4])
    logits = LOGITS.clone().requires_grad_()
    drawn = sample_candidates(logits, mask, 2)
    assert drawn.possible.tolist() == [False, True]
    (gradient,) = torch.autograd.grad(
        reinforce_loss(drawn, torch.ones(2, 2), settings(entropy_weight=1.0, entropy_of=4)), logits
    )
    assert gradient.isfinite().all()
    assert not gradient[0].any()
    assert gradient[1].any()


def enumerated(logits: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    """The mean of the reinforce_loss's gradient over all that can be drawn, each as often as its probability says."""
    p = logits.detach().log_softmax(1).exp()
    total = torch.zeros_like(logits)
    for numbers in itertools.product(range(logits.shape[1]), repeat=len(logits)):
        chosen = torch.tensor(numbers)[:, None]
        log_p = logits.log_softmax(1)
        drawn = SampledCandidates(
            chosen, log_p.gather(1, chosen), torch.zeros(len(logits)), chosen[:, 0], torch.ones(len(logits)).bool()
        )
        loss = reinforce_loss(drawn, rewards.gather(1, chosen) - baseline, settings())
        total += p.gather(1, chosen).prod() * torch.autograd.grad(loss, logits)[0]
    return total


@given(
    logits=st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    baseline=st.floats(-2, 2),
)
def test_the_expected_gradient_is_that_of_the_expected_reward(logits: list[list[float]], seed: int, baseline: float) -> None:
    """Whatever the baseline."""
    given_logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(given_logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected_reward = (given_logits.softmax(1) * rewards).sum(1).mean()
    (exact,) = torch.autograd.grad(-expected_reward, given_logits)
    torch.testing.assert_close(enumerated(given_logits, rewards, baseline), exact, rtol=1e-9, atol=1e-12)


def test_sampled_gradients_come_near_it() -> None:
    torch.manual_seed(1)
    logits = LOGITS.clone().requires_grad_()
    rewards = torch.tensor([[1.0, 0.0, 9.0, 0.5], [0.2, 9.0, 0.9, 0.0]], dtype=torch.float64)
    drawn = sample_candidates(logits, MASK, 100_000)
    (sampled,) = torch.autograd.grad(reinforce_loss(drawn, rewards.gather(1, drawn.indices), settings()), logits)
    p = logits.masked_fill(MASK, -torch.inf).softmax(1)
    (exact,) = torch.autograd.grad(-(p * rewards).sum(1).mean(), logits)
    torch.testing.assert_close(sampled, exact, rtol=0, atol=0.005)


@pytest.mark.parametrize(("k", "acts"), [(2, False), (4, True)])
def test_the_entropy_term_holds_the_entropy_of_a_uniform_choice_of_k(k: int, acts: bool) -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -20.0]], requires_grad=True)  # the entropy of three
    drawn = sample_candidates(logits, None, 1)
    loss = reinforce_loss(drawn, torch.zeros(1, 1), settings(entropy_weight=2.0, entropy_of=k))
    assert loss.item() == pytest.approx(2 * max(0.0, math.log(k) - math.log(3)), abs=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert bool((gradient[0, 3] < 0).item()) == acts


def test_the_running_mean_is_one_of_rewards_so_far() -> None:
    """The first rewards have nothing to be compared with; afterwards each earlier mean weighs 0.9 of the next one."""
    baseline = Baseline(settings(baseline="moving_average", momentum=0.9))
    assert baseline(torch.tensor([[1.0], [3.0]]), None).tolist() == [[1.0], [3.0]]
    assert baseline(torch.tensor([[5.0]]), None).item() == pytest.approx(5 - 2)
    assert baseline(torch.tensor([[0.0]]), None).item() == pytest.approx(-(0.9 * 2 + 5) / 1.9)


def test_other_baselines() -> None:
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(Baseline(settings(baseline="none"))(rewards, None), rewards)
    advantages = Baseline(settings(baseline="self_critical"))(rewards, torch.tensor([1.0, 5.0]))
    assert advantages.tolist() == [[0, 1], [-2, -1]]


@pytest.mark.parametrize("architecture", ["linear", "mlp", "bilinear"])
def test_logits_are_products_of_what_the_network_makes_of_queries(architecture: str) -> None:
    torch.manual_seed(0)
    queries, candidates = torch.randn(3, 5), torch.randn(4, 5)
    network = CandidateLogits(5, settings(architecture=architecture, hidden=7))
    logits = network(queries, candidates)
    slow = [[torch.dot(network.layers(query), candidate).item() for candidate in candidates] for query in queries]
    torch.testing.assert_close(logits, torch.tensor(slow))
    n_weights = {"linear": 5 * 5 + 5, "mlp": 5 * 7 + 7 + 7 * 5 + 5, "bilinear": 5 * 5}[architecture]
    assert sum(weight.numel() for weight in network.parameters()) == n_weights


def test_the_scale_makes_near_candidates_likelier_from_the_start() -> None:
    torch.manual_seed(0)
    queries, candidates = torch.randn(3, 5), torch.randn(4, 5)
    torch.manual_seed(1)
    plain = CandidateLogits(5, settings())
    torch.manual_seed(1)
    scaled = CandidateLogits(5, settings(scale=20.0))
    torch.testing.assert_close(
        scaled(queries, candidates) - plain(queries, candidates), 20 * queries @ candidates.T, rtol=1e-4, atol=1e-4
    )
