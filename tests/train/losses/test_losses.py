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
from vse.train.losses import LOSSES, PAIR_LOSSES, check_loss, negative_pairs

DTYPES = [torch.float32, torch.float64]
LAMBDAS = [(1.0, 1.0), (0.5, 2.0), (1.0, 0.0), (0.0, 1.5)]  # of the terms whose query is an image, and of the others


def slow_loss(
    name: str, scores: Tensor, image_ids: list[int], margin: float, mask: bool, lambdas: tuple[float, float] = (1, 1)
) -> Tensor:
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
        for weight, costs in zip(lambdas, (torch.stack(wrong_captions), torch.stack(wrong_images)), strict=True):
            total = total + weight * (costs.max() if name == "max" else costs.sum())
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


def slow_top(
    scores: Tensor, image_ids: list[int], settings: LossConfig, mask: bool, lambdas: tuple[float, float] = (1, 1)
) -> Tensor:
    """Of each pair the k wrong captions and the k wrong images that cost most; under a mask, each image once."""
    n = len(scores)
    total = 0 * scores.sum()
    for i in range(n):
        wrong = [j for j in range(n) if j != i and not (mask and image_ids[i] == image_ids[j])]
        seen = [j for j in wrong if not (mask and image_ids[j] in image_ids[:j])]
        for weight, pairs in zip(lambdas, ([(i, j) for j in wrong], [(j, i) for j in seen]), strict=True):
            hinges = [torch.relu(settings.margin - scores[i, i] + scores[pair]) for pair in pairs]
            total = total + weight * sum(sorted(hinges, key=Tensor.item, reverse=True)[: settings.k])
    return total


@pytest.mark.parametrize(("dtype", "n", "mask", "k"), list(product(DTYPES, [1, 2, 7, 20], [False, True], [1, 3, 10, None])))
def test_the_top_of_hinges_and_its_gradient_equal_the_nested_loops(
    dtype: torch.dtype, n: int, mask: bool, k: int | None
) -> None:
    scores, image_ids = batch(n, dtype)
    at = LossConfig(k=k)
    found = LOSSES["top"](scores, negative_pairs(image_ids, mask), at)
    slow = slow_top(scores, image_ids.tolist(), at, mask)
    torch.testing.assert_close(found, slow)
    torch.testing.assert_close(torch.autograd.grad(found, scores), torch.autograd.grad(slow, scores))


@pytest.mark.parametrize(("lambdas", "mask"), list(product(LAMBDAS, [False, True])))
@pytest.mark.parametrize("name", LOSSES)
def test_each_direction_has_a_weight(name: str, lambdas: tuple[float, float], mask: bool) -> None:
    scores, image_ids = batch(9, torch.float64)
    at = LossConfig(lambda1=lambdas[0], lambda2=lambdas[1], temperature=0.3, k=2)
    ids = image_ids.tolist()
    slow = {
        "max": lambda: slow_loss("max", scores, ids, 0.2, mask, lambdas),
        "sum": lambda: slow_loss("sum", scores, ids, 0.2, mask, lambdas),
        "top": lambda: slow_top(scores, ids, at, mask, lambdas),
        "spectrum": lambda: slow_spectrum(scores, ids, 0.2, 0.3, mask, lambdas),
        "infonce": lambda: slow_infonce(scores, ids, 0.3, mask, lambdas),
    }[name]()
    found = LOSSES[name](scores, negative_pairs(image_ids, mask), at)
    torch.testing.assert_close(found, slow)
    torch.testing.assert_close(torch.autograd.grad(found, scores), torch.autograd.grad(slow, scores))


@pytest.mark.parametrize("k", [1, 2, None])
def test_an_image_that_a_batch_has_twice_is_wrong_once_and_at_its_first_row(k: int | None) -> None:
    """Rows of the same image differ where each visit sees another crop of it."""
    scores = torch.tensor([[0.5, 0.0, 0.8], [0.0, 0.5, 0.9], [0.0, 0.0, 0.5]], requires_grad=True)
    ids = torch.tensor([4, 4, 9])
    for mask, of_third in ((True, [1, 0, -1]), (False, [0, 1, -1] if k == 1 else [1, 1, -2])):
        loss = LOSSES["top"](scores, negative_pairs(ids, mask), LossConfig(k=k, lambda1=0))
        assert torch.autograd.grad(loss, scores)[0][:, 2].tolist() == of_third


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_mean_of_the_highest_counts_hinges_of_zero(k: int) -> None:
    scores, _ = batch(6, torch.float64)
    negatives = negative_pairs(torch.arange(6), mask_same_image=True)
    mean, total = (
        LOSSES["top"](scores, negatives, LossConfig(k=k, reduction=reduction)) for reduction in ("mean_topk", "sum")
    )
    torch.testing.assert_close(mean, total / (6 * k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_logistic_loss_is_a_sum_over_pairs(dtype: torch.dtype) -> None:
    """Eq. 7 of the two-branch paper."""
    scores = torch.tensor([-2.0, 0.3, 0.0, 1.5, -0.4], dtype=dtype, requires_grad=True)
    labels = torch.tensor([1, -1, 1, 1, -1], dtype=dtype)
    found = PAIR_LOSSES["logistic"](scores, labels)
    slow = sum(torch.log(1 + torch.exp(-z * p)) for p, z in zip(scores, labels, strict=True))
    torch.testing.assert_close(found, slow)
    torch.testing.assert_close(torch.autograd.grad(found, scores), torch.autograd.grad(slow, scores))


def test_the_logistic_loss_of_large_scores_is_finite() -> None:
    scores = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = PAIR_LOSSES["logistic"](scores, torch.tensor([-1.0, -1.0]))
    assert loss.item() == pytest.approx(1e4)
    assert torch.autograd.grad(loss, scores)[0].tolist() == [1, 0]


@pytest.mark.parametrize(("name", "expected"), [("max", 2 * 128 * 0.2), ("sum", 2 * 128 * 127 * 0.2)])
def test_equal_embeddings_cost_the_collapse_value(name: str, expected: float) -> None:
    negatives = negative_pairs(torch.arange(128), mask_same_image=False)
    assert float(LOSSES[name](torch.ones(128, 128), negatives, LossConfig())) == pytest.approx(expected)


def slow_spectrum(
    scores: Tensor,
    image_ids: list[int],
    margin: float,
    temperature: float,
    mask: bool,
    lambdas: tuple[float, float] = (1, 1),
) -> Tensor:
    """Each hinge h weighs exp((h - its query's largest) / temperature), a plain number."""
    n = len(scores)
    total = 0 * scores.sum()
    for i in range(n):
        wrong = [j for j in range(n) if j != i and not (mask and image_ids[i] == image_ids[j])]
        for weight, pairs in zip(lambdas, ([(i, j) for j in wrong], [(j, i) for j in wrong]), strict=True):
            hinges = [torch.relu(margin - scores[i, i] + scores[pair]) for pair in pairs]
            hardest = max((hinge.item() for hinge in hinges), default=0.0)
            total = total + weight * sum(math.exp((hinge.item() - hardest) / temperature) * hinge for hinge in hinges)
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


def slow_infonce(
    scores: Tensor, image_ids: list[int], temperature: float, mask: bool, lambdas: tuple[float, float] = (1, 1)
) -> Tensor:
    """How unlikely each caption is among all that its image may be given, and the other way round."""
    n = len(scores)
    total = 0 * scores.sum()
    for i in range(n):
        rivals = [j for j in range(n) if j == i or not (mask and image_ids[i] == image_ids[j])]
        for weight, pairs in zip(lambdas, ([(i, j) for j in rivals], [(j, i) for j in rivals]), strict=True):
            share = torch.exp(scores[i, i] / temperature) / sum(torch.exp(scores[pair] / temperature) for pair in pairs)
            total = total - weight * torch.log(share)
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
        check_loss("maxx")
    with pytest.raises(UserError, match="unknown loss 'logistics' .did you mean 'logistic'"):
        check_loss("logistics")
    for name in (*LOSSES, *PAIR_LOSSES):
        check_loss(name)
