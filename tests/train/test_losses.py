from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vse.pipeline.config import LossConfig
from vse.pipeline.errors import UserError
from vse.train.losses import LOSSES, loss_by_name, negative_pairs

DTYPES = [torch.float32, torch.float64]


def slow_loss(name: str, scores: Tensor, image_ids: list[int], margin: float, mask: bool) -> Tensor:
    """Eqs. 5 and 6 of the VSE++ paper, pair by pair."""
    n, score = len(scores), [row.unbind() for row in scores.unbind()]
    total = 0 * scores.sum()
    for i in range(n):
        wrong_captions, wrong_images = [scores.new_zeros(())], [scores.new_zeros(())]
        for j in range(n):
            if i == j or (mask and image_ids[i] == image_ids[j]):
                continue
            wrong_captions.append(torch.relu(margin - score[i][i] + score[i][j]))
            wrong_images.append(torch.relu(margin - score[i][i] + score[j][i]))
        for costs in (torch.stack(wrong_captions), torch.stack(wrong_images)):
            total = total + (costs.max() if name == "max" else costs.sum())
    return total


def batch(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    scores = torch.rand(n, n, generator=generator, dtype=dtype, requires_grad=True)
    return scores, torch.randint(0, max(1, n // 2), (n,), generator=generator)


@pytest.mark.parametrize(("name", "dtype", "n", "mask"), list(product(["max", "sum"], DTYPES, [1, 2, 7, 128], [False, True])))
def test_a_loss_and_its_gradient_equal_the_nested_loops(name: str, dtype: torch.dtype, n: int, mask: bool) -> None:
    scores, image_ids = batch(n, dtype)
    found = LOSSES[name](scores, negative_pairs(image_ids, mask), LossConfig())
    slow = slow_loss(name, scores, image_ids.tolist(), 0.2, mask)
    torch.testing.assert_close(found, slow)
    torch.testing.assert_close(torch.autograd.grad(found, scores), torch.autograd.grad(slow, scores))
    assert n > 1 or found.item() == 0


@pytest.mark.parametrize(("name", "expected"), [("max", 2 * 128 * 0.2), ("sum", 2 * 128 * 127 * 0.2)])
def test_equal_embeddings_cost_the_collapse_value(name: str, expected: float) -> None:
    negatives = negative_pairs(torch.arange(128), mask_same_image=False)
    assert float(LOSSES[name](torch.ones(128, 128), negatives, LossConfig())) == pytest.approx(expected)


def slow_spectrum(scores: Tensor, image_ids: list[int], margin: float, temperature: float, mask: bool) -> Tensor:
    """Each hinge h weighs exp((h - its query's largest) / temperature), a plain number."""
    n = len(scores)
    total = 0 * scores.sum()
    for i in range(n):
        wrong = [j for j in range(n) if j != i and not (mask and image_ids[i] == image_ids[j])]
        for pairs in ([(i, j) for j in wrong], [(j, i) for j in wrong]):
            hinges = [torch.relu(margin - scores[i, i] + scores[pair]) for pair in pairs]
            hardest = max((hinge.item() for hinge in hinges), default=0.0)
            total = total + sum(math.exp((hinge.item() - hardest) / temperature) * hinge for hinge in hinges)
    return total


@pytest.mark.parametrize(
    ("dtype", "n", "mask", "temperature"), list(product(DTYPES, [1, 2, 7], [False, True], [0.03, 0.5, 20]))
)
def test_the_spectrum_and_its_gradient_equal_the_nested_loops(
    dtype: torch.dtype, n: int, mask: bool, temperature: float
) -> None:
    scores, image_ids = batch(n, dtype)
    found = LOSSES["spectrum"](scores, negative_pairs(image_ids, mask), LossConfig(temperature=temperature))
    slow = slow_spectrum(scores, image_ids.tolist(), 0.2, temperature, mask)
    torch.testing.assert_close(found, slow)
    torch.testing.assert_close(torch.autograd.grad(found, scores), torch.autograd.grad(slow, scores))


@pytest.mark.parametrize(("limit", "temperature"), [("max", 1e-6), ("sum", 1e6)])
@pytest.mark.parametrize(("dtype", "n", "mask"), list(product(DTYPES, [1, 2, 7, 40], [False, True])))
def test_the_spectrum_ends_at_the_max_and_at_the_sum_of_hinges(
    dtype: torch.dtype, n: int, mask: bool, limit: str, temperature: float
) -> None:
    scores, image_ids = batch(n, dtype)
    negatives = negative_pairs(image_ids, mask)
    found = LOSSES["spectrum"](scores, negatives, LossConfig(temperature=temperature))
    end = LOSSES[limit](scores, negatives, LossConfig())
    torch.testing.assert_close(found, end, rtol=1e-5, atol=1e-5)
    of_found, of_end = (torch.autograd.grad(loss, scores)[0] for loss in (found, end))
    torch.testing.assert_close(of_found, of_end, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(2, 9), temperatures=st.tuples(*[st.floats(1e-4, 1e4)] * 2))
def test_the_spectrum_grows_with_its_temperature(seed: int, n: int, temperatures: tuple[float, float]) -> None:
    scores = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    negatives = negative_pairs(torch.arange(n), mask_same_image=False)
    losses = [float(LOSSES["spectrum"](scores, negatives, LossConfig(temperature=t))) for t in sorted(temperatures)]
    ends = [float(LOSSES[name](scores, negatives, LossConfig())) for name in ("max", "sum")]
    ascending = [ends[0], *losses, ends[1]]
    assert all(a <= b + 1e-9 for a, b in pairwise(ascending))


@pytest.mark.parametrize(("dtype", "n", "temperature"), list(product(DTYPES, [1, 2, 7, 40], [0.05, 1.0])))
def test_infonce_is_the_cross_entropy_of_both_directions(dtype: torch.dtype, n: int, temperature: float) -> None:
    scores, _ = batch(n, dtype)
    negatives = negative_pairs(torch.arange(n), mask_same_image=True)
    found = LOSSES["infonce"](scores, negatives, LossConfig(temperature=temperature))
    right = torch.arange(n)
    expected = sum(
        nn.functional.cross_entropy(logits, right, reduction="sum")
        for logits in (scores / temperature, scores.T / temperature)
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, scores), torch.autograd.grad(expected, scores))


def slow_infonce(scores: Tensor, image_ids: list[int], temperature: float, mask: bool) -> Tensor:
    """How unlikely each caption is among all that its image may be given, and the other way round."""
    n = len(scores)
    total = 0 * scores.sum()
    for i in range(n):
        rivals = [j for j in range(n) if j == i or not (mask and image_ids[i] == image_ids[j])]
        for pairs in ([(i, j) for j in rivals], [(j, i) for j in rivals]):
            share = torch.exp(scores[i, i] / temperature) / sum(torch.exp(scores[pair] / temperature) for pair in pairs)
            total = total - torch.log(share)
    return total


@pytest.mark.parametrize(("n", "mask"), list(product([1, 2, 7, 12], [False, True])))
def test_infonce_and_its_gradient_equal_the_nested_loops(n: int, mask: bool) -> None:
    scores, image_ids = batch(n, torch.float64)
    found = LOSSES["infonce"](scores, negative_pairs(image_ids, mask), LossConfig(temperature=0.3))
    slow = slow_infonce(scores, image_ids.tolist(), 0.3, mask)
    torch.testing.assert_close(found, slow)
    torch.testing.assert_close(torch.autograd.grad(found, scores), torch.autograd.grad(slow, scores))


@pytest.mark.parametrize("temperature", [1e-3, 0.1, 1e3])
@pytest.mark.parametrize("score", [-3.0, 0.0, 1.0])
def test_equal_scores_cost_what_their_number_says_at_any_temperature(temperature: float, score: float) -> None:
    n, scores = 16, torch.full((16, 16), score, dtype=torch.float64)
    negatives = negative_pairs(torch.arange(n), mask_same_image=False)
    at = LossConfig(temperature=temperature)
    assert float(LOSSES["spectrum"](scores, negatives, at)) == pytest.approx(2 * n * (n - 1) * 0.2), "all are hardest"
    assert float(LOSSES["infonce"](scores, negatives, at)) == pytest.approx(2 * n * math.log(n)), "a blind guess"


def test_a_batch_of_one_image_costs_nothing_when_masked() -> None:
    scores, _ = batch(5, torch.float32)
    negatives = negative_pairs(torch.zeros(5, dtype=torch.int64), mask_same_image=True)
    assert [loss(scores, negatives, LossConfig()).item() for loss in LOSSES.values()] == [0] * len(LOSSES)


@pytest.mark.parametrize(("name", "n", "mask"), list(product(LOSSES, [1, 2, 6], [False, True])))
@pytest.mark.parametrize("alike", [False, True])
def test_every_loss_and_its_gradient_are_finite(name: str, n: int, mask: bool, alike: bool) -> None:
    scores, image_ids = batch(n, torch.float32)
    scores = torch.ones(n, n, requires_grad=True) if alike else scores
    loss = LOSSES[name](scores, negative_pairs(image_ids, mask), LossConfig())
    gradient = torch.autograd.grad(loss, scores)[0]
    assert loss.shape == ()
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert n > 1 or (loss == 0 and not gradient.any())


def test_captions_of_one_image_are_negatives_unless_masked() -> None:
    ids = torch.tensor([4, 7, 4])
    kept = [[False, True, True], [True, False, True], [True, True, False]]
    masked = [[False, True, False], [True, False, True], [False, True, False]]
    assert negative_pairs(ids, mask_same_image=False).tolist() == kept
    assert negative_pairs(ids, mask_same_image=True).tolist() == masked


def test_an_unknown_loss_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown loss 'maxx' .did you mean 'max'"):
        loss_by_name("maxx")
