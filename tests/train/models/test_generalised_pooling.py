"""The generalised pooling operator against its definition, one set, one rank and one dimension at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vse.train.models.encoders.gpo import GeneralisedPooling

SIZES = [1, 4, 2, 7, 4]


def operator(dtype: torch.dtype = torch.float64) -> GeneralisedPooling:
    torch.manual_seed(0)
    return GeneralisedPooling().to(dtype)


def sets(sizes: list[int] = SIZES, dim: int = 3, longest: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    vectors = torch.randn(len(sizes), longest, dim, dtype=torch.float64, requires_grad=True)
    return vectors, torch.arange(longest) < torch.tensor(sizes)[:, None]


def slow_encoding(rank: int) -> Tensor:
    """Sines and cosines in turn."""
    numbers = []
    for i in range(16):
        angle = rank / 10_000 ** (2 * i / 32)
        numbers += [math.sin(angle), math.cos(angle)]
    return torch.tensor(numbers, dtype=torch.float64)


def slow_states(pooling: GeneralisedPooling, ranks: list[int], suffix: str) -> dict[int, Tensor]:
    """The state of one direction of the GRU after each rank, in the order in which it reads them."""
    gru = pooling.ranks
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    of_input, of_state, input_bias, state_bias = (getattr(gru, f"{name}_l0{suffix}") for name in names)
    state, states = torch.zeros(32, dtype=torch.float64), {}
    for rank in ranks:
        (reset_x, update_x, new_x) = (of_input @ slow_encoding(rank) + input_bias).chunk(3)
        (reset_h, update_h, new_h) = (of_state @ state + state_bias).chunk(3)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        state = states[rank] = (1 - update) * new + update * state
    return states


def slow_weights(pooling: GeneralisedPooling, size: int) -> Tensor:
    forwards = slow_states(pooling, list(range(size)), "")
    backwards = slow_states(pooling, list(reversed(range(size))), "_reverse")
    logits = [pooling.logit.weight[0] @ ((forwards[k] + backwards[k]) / 2) / 0.1 for k in range(size)]
    exponentials = [torch.exp(logit - max(logits)) for logit in logits]
    return torch.stack(exponentials) / sum(exponentials)


def slow_pooling(pooling: GeneralisedPooling, members: list[Tensor]) -> Tensor:
    """Of the vectors of one set."""
    weights = slow_weights(pooling, len(members))
    numbers = []
    for dim in range(len(members[0])):
        highest = sorted((member[dim] for member in members), key=Tensor.item, reverse=True)
        numbers.append(sum(weight * number for weight, number in zip(weights, highest, strict=True)))
    return torch.stack(numbers)


def slow(pooling: GeneralisedPooling, vectors: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([slow_pooling(pooling, list(own[there])) for own, there in zip(vectors, mask, strict=True)])


def gradients(pooled: Tensor, pooling: GeneralisedPooling, vectors: Tensor) -> tuple[Tensor, ...]:
    """Of a sum in which every number weighs differently."""
    weights = torch.linspace(-1, 2, pooled.numel(), dtype=pooled.dtype).view_as(pooled)
    return torch.autograd.grad((weights * pooled).sum(), [vectors, *pooling.parameters()])


def test_values_and_gradients_are_those_of_the_definition() -> None:
    pooling = operator()
    vectors, mask = sets()
    fast, expected = pooling(vectors, mask), slow(pooling, vectors, mask)
    torch.testing.assert_close(fast, expected)
    torch.testing.assert_close(gradients(fast, pooling, vectors), gradients(expected, pooling, vectors))


def test_a_mask_may_have_gaps() -> None:
    pooling = operator()
    vectors, _ = sets()
    mask = torch.tensor(
        [[0, 0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 1], [1] * 7, [0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1]]
    ).bool()
    fast, expected = pooling(vectors, mask), slow(pooling, vectors, mask)
    torch.testing.assert_close(fast, expected)
    torch.testing.assert_close(gradients(fast, pooling, vectors), gradients(expected, pooling, vectors))


@pytest.mark.parametrize("value", [0.0, 1e9, -1e9])
def test_padding_changes_nothing(value: float) -> None:
    pooling = operator()
    vectors, mask = sets()
    longer = torch.nn.functional.pad(vectors, (0, 0, 0, 5), value=value).masked_fill(
        ~torch.nn.functional.pad(mask, (0, 5))[:, :, None], value
    )
    padded = pooling(longer, torch.nn.functional.pad(mask, (0, 5)))
    torch.testing.assert_close(padded, pooling(vectors, mask))
    of_vectors, *of_weights = gradients(padded, pooling, vectors)
    expected, *expected_of_weights = gradients(pooling(vectors, mask), pooling, vectors)
    torch.testing.assert_close(of_vectors, expected)
    torch.testing.assert_close(of_weights, expected_of_weights)


def test_a_set_of_one_vector_is_that_vector() -> None:
    vectors, mask = sets([1, 1], longest=4)
    assert torch.equal(operator()(vectors, mask), vectors[:, 0])
    assert torch.equal(operator()(vectors[:, :1], mask[:, :1]), vectors[:, 0])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 3))
def test_weights_are_those_of_the_size_whatever_the_others_and_sum_to_one(sizes: list[int], more: int) -> None:
    pooling, longest = operator(), max(sizes) + more
    weights = pooling.weights(torch.tensor(sizes), longest)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(sizes), dtype=torch.float64))
    for own, size in zip(weights, sizes, strict=True):
        torch.testing.assert_close(own[:size], slow_weights(pooling, size))
        assert not own[size:].any()


def test_the_order_of_a_set_does_not_matter() -> None:
    pooling = operator()
    vectors, _ = sets()
    everything = torch.ones(vectors.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(pooling(vectors.flip(1), everything), pooling(vectors, everything))


def test_under_autocast_weights_are_as_exact_as_without() -> None:
    pooling = operator(torch.float32)
    sizes = torch.tensor(SIZES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = pooling.weights(sizes, 7)
    assert torch.equal(low, pooling.weights(sizes, 7))
