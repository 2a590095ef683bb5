from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from vse.pipeline.config import LossConfig
from vse.pipeline.errors import UserError
from vse.train.losses import LOSSES, loss_by_name, negative_pairs

DTYPES = [torch.float32, torch.float64]


def slow_loss(name: str, scores: Tensor, image_ids: list[int], margin: float, mask: bool) -> Tensor:
    """Eqs. 5 and 6 of the VSE++ paper, pair by pair."""
    n = len(scores)
    total = 0 * scores.sum()
    for i in range(n):
        wrong_captions, wrong_images = [scores.new_zeros(())], [scores.new_zeros(())]
        for j in range(n):
            if i == j or (mask and image_ids[i] == image_ids[j]):
                continue
            wrong_captions.append(torch.relu(margin - scores[i, i] + scores[i, j]))
            wrong_images.append(torch.relu(margin - scores[i, i] + scores[j, i]))
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


def test_captions_of_one_image_are_negatives_unless_masked() -> None:
    ids = torch.tensor([4, 7, 4])
    kept = [[False, True, True], [True, False, True], [True, True, False]]
    masked = [[False, True, False], [True, False, True], [False, True, False]]
    assert negative_pairs(ids, mask_same_image=False).tolist() == kept
    assert negative_pairs(ids, mask_same_image=True).tolist() == masked


def test_an_unknown_loss_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown loss 'maxx' .did you mean 'max'"):
        loss_by_name("maxx")
