from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.losses.pairs_of_images import Pairs, similarity
from vse.training.losses import LOSSES
from vse.training.losses.base import Cost, LearnedScale
from vse.training.losses.contrastive import ContrastiveLoss, InfoNceLoss

NAMES = ["infonce", "sigmoid"]
SAME_IMAGE = ["keep", "mask", "positive"]


def made(name: str, **settings: Any) -> ContrastiveLoss:
    loss = LOSSES[name](**settings)
    assert isinstance(loss, ContrastiveLoss)
    return loss


def learned(loss: ContrastiveLoss, exact: bool = True) -> LearnedScale:
    weights = loss.build_scale()
    return weights.double() if exact else weights


def cost(pairs: Pairs, loss: ContrastiveLoss, weights: nn.Module | None = None, compared_by: str = "cosine") -> Cost:
    return loss.build_objective(similarity(compared_by), scale=weights)(pairs.batch(), 0)


def with_gradients(loss: Tensor, pairs: Pairs, weights: nn.Module | None) -> list[Tensor]:
    leaves = [pairs.images, pairs.captions, *(() if weights is None else weights.parameters())]
    return [loss, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def slow_infonce(pairs: Pairs, loss: ContrastiveLoss, scale: Tensor) -> Tensor:
    """Query by query: the mean over its positives of how unlikely each is among all candidates."""
    n, image_indices = len(pairs.image_indices), pairs.image_indices.tolist()
    total = 0 * pairs.captions.sum()
    for i in range(n):
        same = [j for j in range(n) if image_indices[j] == image_indices[i]]
        positives = same if loss.same_image == "positive" else [i]
        candidates = [j for j in range(n) if j not in same or j == i] if loss.same_image == "mask" else range(n)
        for weight, of in (
            (loss.lambda1, lambda j, i=i: (pairs.images[image_indices[i]] * pairs.captions[j]).sum()),
            (loss.lambda2, lambda j, i=i: (pairs.images[image_indices[j]] * pairs.captions[i]).sum()),
        ):
            everything = sum((torch.exp(scale * of(j)) for j in candidates), start=0 * total)
            for positive in positives:
                total = total - weight * torch.log(torch.exp(scale * of(positive)) / everything) / len(positives)
    return total


def slow_sigmoid(pairs: Pairs, loss: ContrastiveLoss, scale: Tensor, bias: Tensor) -> Tensor:
    """Pair by pair, as the SigLIP paper has it (Eq. 1)."""
    total = 0 * pairs.captions.sum()
    for i, own in enumerate(pairs.image_indices):
        for j, other in enumerate(pairs.image_indices):
            if loss.same_image == "mask" and own == other and i != j:
                continue
            z = 1 if i == j or (loss.same_image == "positive" and own == other) else -1
            logit = scale * (pairs.images[own] * pairs.captions[j]).sum() + bias
            total = total + (loss.lambda1 + loss.lambda2) * torch.log(1 + torch.exp(-z * logit))
    return total


def slow(pairs: Pairs, loss: ContrastiveLoss, weights: LearnedScale) -> Tensor:
    scale = weights.log_scale.exp()
    return slow_infonce(pairs, loss, scale) if weights.bias is None else slow_sigmoid(pairs, loss, scale, weights.bias)


@pytest.mark.parametrize("same_image", SAME_IMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_several_captions_of_an_image_costs_what_the_loop_says(name: str, same_image: str) -> None:
    for counts, lambdas in (([1, 2, 3, 1], (0.5, 2.0)), ([4], (1.0, 0.0))):
        pairs = Pairs(counts)
        loss = made(name, same_image=same_image, learned=True, lambda1=lambdas[0], lambda2=lambdas[1], temperature=0.3)
        weights = learned(loss)
        both = cost(pairs, loss, weights).value, slow(pairs, loss, weights)
        torch.testing.assert_close(*(with_gradients(one, pairs, weights) for one in both))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_learned_is_as_it_is_set(name: str) -> None:
    pairs, fixed = Pairs([2, 1, 3]), made(name, learned=False, temperature=0.2)
    at_start = learned(made(name, learned=True, temperature=0.2))
    assert fixed.build_scale() is None
    computed, expected = cost(pairs, fixed), cost(pairs, made(name, learned=True, temperature=0.2), at_start)
    torch.testing.assert_close(computed.value, expected.value, rtol=1e-6, atol=0)
    torch.testing.assert_close(computed.collapsed_value, expected.collapsed_value, rtol=1e-6, atol=0)


def test_infonce_and_sigmoid_are_the_losses_of_clip_and_of_siglip() -> None:
    """By the pseudocode of Radford et al. (2021), Fig. 3, and of Zhai et al. (2023), Algorithm 1, summed over the pairs."""
    pairs, loss = Pairs([1] * 5), made("infonce", learned=True)
    weights, labels = learned(loss), torch.arange(5)
    logits = pairs.images[torch.from_numpy(pairs.image_indices)] @ pairs.captions.T * weights.log_scale.exp()
    published = (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2
    torch.testing.assert_close(cost(pairs, loss, weights).value, 2 * 5 * published)
    pairs, loss = Pairs([1] * 5), made("sigmoid")
    weights = learned(loss)
    assert weights.bias is not None
    logits = pairs.images[torch.from_numpy(pairs.image_indices)] @ pairs.captions.T * weights.log_scale.exp() + weights.bias
    published = -nn.functional.logsigmoid((2 * torch.eye(5) - torch.ones(5, 5)) * logits).sum() / 5
    torch.testing.assert_close(cost(pairs, loss, weights).value, 5 * published)


def test_learned_scales_start_as_in_the_papers_and_stay_bounded() -> None:
    clip, siglip = learned(made("infonce", learned=True), False), learned(made("sigmoid"), False)
    assert clip.log_scale.item() == pytest.approx(math.log(1 / 0.07))
    assert clip.bias is None
    assert siglip.log_scale.item() == pytest.approx(math.log(10))
    assert siglip.temperature_and_bias() == pytest.approx({"temperature": 0.1, "bias": -10})
    assert {weight.dtype for module in (clip, siglip) for weight in module.parameters()} == {torch.float32}
    for name, scale, expected in (("infonce", 500, 100), ("infonce", 50, 50), ("sigmoid", 500, 500)):
        weights = learned(made(name, learned=True), False)
        with torch.no_grad():
            weights.log_scale.fill_(math.log(scale))
        weights.clamp_temperature()
        assert 1 / weights.temperature_and_bias()["temperature"] == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_learned", [True, False])
def test_logits_of_half_precision_scores_are_in_float32(name: str, is_learned: bool) -> None:
    loss, scores = made(name, learned=is_learned), torch.tensor([[0.3, -0.7]], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = loss.logits(scores, loss.build_scale())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, loss.logits(scores.float(), loss.build_scale()))


@st.composite
def batches(draw: st.DrawFn) -> Pairs:
    return Pairs(draw(st.lists(st.integers(1, 4), min_size=1, max_size=6)), draw(st.integers(0, 10**6)))


@pytest.mark.slow
@given(
    pairs=batches(),
    name=st.sampled_from(NAMES),
    compared_by=st.sampled_from(["cosine", "euclidean", "order"]),
    block=st.integers(1, 26),
    lambdas=st.tuples(*[st.floats(0, 2)] * 2),
    further=st.fixed_dictionaries(
        {"same_image": st.sampled_from(SAME_IMAGE), "temperature": st.floats(0.02, 5), "learned": st.booleans()}
    ),
)
def test_blocks_of_any_size_give_the_same_loss_and_the_same_gradients(
    pairs: Pairs, name: str, compared_by: str, block: int, lambdas: tuple[float, float], further: dict[str, Any]
) -> None:
    dense = made(name, lambda1=lambdas[0], lambda2=lambdas[1], **further)
    weights = learned(dense) if dense.learned else None
    whole, parts = (cost(pairs, loss, weights, compared_by) for loss in (dense, dense.model_copy(update={"block": block})))
    assert parts.query_scores is None
    torch.testing.assert_close(*(with_gradients(one.value, pairs, weights) for one in (whole, parts)))
    torch.testing.assert_close(whole.collapsed_value, parts.collapsed_value, check_dtype=False, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("same_image", SAME_IMAGE)
def test_blocks_bear_steep_logits_in_float32(name: str, same_image: str) -> None:
    pairs = Pairs([3, 1, 2])
    dense = made(name, same_image=same_image, temperature=1e-3, learned=False)
    exact = with_gradients(cost(pairs, dense).value, pairs, None)
    pairs.images, pairs.captions = (side.detach().float().requires_grad_() for side in (pairs.images, pairs.captions))
    parts = cost(pairs, dense.model_copy(update={"block": 2})).value
    torch.testing.assert_close(with_gradients(parts, pairs, None), exact, check_dtype=False, rtol=1e-3, atol=1e-2)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns, backward passes included."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for one in returned if isinstance(returned, tuple | list) else [returned]:
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return returned


@pytest.mark.parametrize("same_image", SAME_IMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_the_scores_of_a_block_are_the_most_that_is_ever_held(name: str, same_image: str) -> None:
    n, block = 96, 16
    pairs = Pairs([2] * (n // 2))
    for size, expected in ((block, block * n), (None, n * n)):
        loss = made(name, learned=True, same_image=same_image, block=size)
        with Largest() as largest:
            cost(pairs, loss, learned(loss)).value.backward()  # type: ignore[no-untyped-call]
        assert largest.elements == expected


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("same_image", SAME_IMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_the_collapsed_loss_is_that_of_equal_embeddings(name: str, same_image: str, block: int | None) -> None:
    pairs, loss = Pairs([1, 3, 2]), made(name, same_image=same_image, block=block, learned=True)
    with torch.no_grad():
        pairs.images[:] = pairs.captions[:] = torch.tensor([0.6, 0.8, 0, 0])
    computed = cost(pairs, loss, learned(loss))
    torch.testing.assert_close(computed.value, computed.collapsed_value, check_dtype=False)
    assert not computed.collapsed_value.requires_grad


@pytest.mark.parametrize("name", [name for name in LOSSES if not LOSSES[name].allows_several_positives])
def test_other_losses_have_one_positive_of_a_query(name: str) -> None:
    with pytest.raises(ValidationError, match=f"same_image: positive goes with infonce and sigmoid, not with {name}"):
        LOSSES[name](same_image="positive")


def test_images_that_an_adversary_adds_are_negatives_beside_several_positives() -> None:
    pairs = Pairs([2, 1])
    more = torch.nn.functional.normalize(torch.randn(2, 4, dtype=torch.float64))
    loss = InfoNceLoss(same_image="positive", lambda1=0, temperature=1.0)
    batch = replace(pairs.batch(), extra_negative_images=(more,))
    computed = loss.build_objective(similarity("cosine"))(batch, 0).value
    images = pairs.images[torch.from_numpy(pairs.image_indices)]
    total = torch.zeros((), dtype=torch.float64)
    for j, own in enumerate(pairs.image_indices):
        scores = torch.cat([images, more]) @ pairs.captions[j]
        own_rows = np.flatnonzero(pairs.image_indices == own)
        total = total - (scores[own_rows] - scores.exp().sum().log()).mean()
    torch.testing.assert_close(computed, total)
