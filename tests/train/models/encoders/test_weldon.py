"""WELDON pooling against a loop over images, channels and positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from vse.train.kinds import Kind
from vse.train.models.encoders.base import Sizes
from vse.train.models.encoders.pooling import Weldon, WeldonEncoder, weldon_pooling

COUNTS = [6, 1, 4]


def slow_pooling(responses: Tensor, mask: Tensor, k_max: int, k_min: int) -> Tensor:
    """The authors' code: sort the positions of each channel, and take the mean of the first and of the last ones."""
    images = []
    for image, there in zip(responses, mask, strict=True):
        channels = []
        for channel in range(responses.shape[2]):
            ordered = sorted((image[k, channel] for k in range(len(there)) if there[k]), key=Tensor.item, reverse=True)
            highest, lowest = ordered[:k_max], ordered[-k_min:] if k_min else []
            pooled = sum(highest, start=torch.zeros((), dtype=responses.dtype)) / len(highest)
            if lowest:
                pooled = pooled + sum(lowest, start=torch.zeros((), dtype=responses.dtype)) / len(lowest)
            channels.append(pooled)
        images.append(torch.stack(channels))
    return torch.stack(images)


def sets(dim: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Sets of unlike sizes whose padding is no zeros."""
    torch.manual_seed(0)
    vectors = torch.randn(len(COUNTS), max(COUNTS), dim, dtype=dtype, requires_grad=True)
    return vectors, torch.arange(max(COUNTS)) < torch.tensor(COUNTS)[:, None]


@pytest.mark.parametrize(("k_max", "k_min"), [(1, 0), (2, 2), (15, 15), (3, 1), (6, 2)])
def test_values_and_gradients_are_those_of_the_loop(k_max: int, k_min: int) -> None:
    responses, mask = sets()
    pooled, slow = (pool(responses, mask, k_max, k_min) for pool in (weldon_pooling, slow_pooling))
    torch.testing.assert_close(pooled, slow)
    weights = torch.linspace(-1, 2, slow.numel(), dtype=slow.dtype).view_as(slow)
    of_both = (torch.autograd.grad((weights * values).sum(), responses, retain_graph=True) for values in (pooled, slow))
    torch.testing.assert_close(*of_both)


@given(
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    k_max=st.integers(1, 9),
    k_min=st.integers(0, 9),
    extra=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
def test_order_and_padding_change_nothing(counts: list[int], k_max: int, k_min: int, extra: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    responses = torch.randn(len(counts), max(counts), 3, generator=generator, dtype=torch.float64)
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    pooled = weldon_pooling(responses, mask, k_max, k_min)
    torch.testing.assert_close(pooled, slow_pooling(responses, mask, k_max, k_min))
    order = torch.randperm(max(counts) + extra, generator=generator)
    padded = torch.nn.functional.pad(responses, (0, 0, 0, extra), value=100.0)[:, order]
    torch.testing.assert_close(
        weldon_pooling(padded, torch.nn.functional.pad(mask, (0, extra))[:, order], k_max, k_min), pooled
    )


def test_a_single_position_counts_twice() -> None:
    responses = torch.tensor([[[2.0, -3.0]]])
    assert weldon_pooling(responses, torch.tensor([[True]]), 15, 15).tolist() == [[4.0, -6.0]]


def made(**settings: object) -> WeldonEncoder:
    torch.manual_seed(0)
    encoder = Weldon.model_validate({"channels": 7, "k_max": 2, "k_min": 2, **settings}).build(
        Sizes(Kind.SETS, input_dim=5, dim=3, word_dim=0)
    )
    assert isinstance(encoder, WeldonEncoder)
    return encoder


def test_an_embedding_is_a_linear_map_of_the_pooled_responses_at_each_position() -> None:
    encoder = made().eval()
    vectors, mask = sets(dtype=torch.float32)
    (embeddings,) = encoder(vectors, mask)
    responses = torch.stack(
        [encoder.convolution.weight @ vector + encoder.convolution.bias for vector in vectors.flatten(0, 1)]
    )
    pooled = slow_pooling(responses.view(3, 6, 7), mask, 2, 2)
    torch.testing.assert_close(embeddings, pooled @ encoder.linear.weight.T + encoder.linear.bias)
    assert encoder.dim == 3


def test_dropout_is_of_the_pooled_channels() -> None:
    vectors, mask = sets(dtype=torch.float32)
    dropping, plain = made(dropout=0.5).train(), made(dropout=0.0).train()
    assert not torch.equal(dropping(vectors, mask)[0], dropping(vectors, mask)[0])
    torch.testing.assert_close(plain(vectors, mask), dropping.eval()(vectors, mask))


def test_sets_become_vectors() -> None:
    assert Weldon.takes == (Kind.SETS,)
    assert Weldon().gives(Kind.SETS) == Kind.VECTORS
    assert (Weldon().channels, Weldon().k_max, Weldon().k_min, Weldon().dropout) == (2400, 15, 15, 0.5)


@pytest.mark.parametrize("settings", [{"k_max": 0}, {"k_min": -1}, {"dropout": 1.0}])
def test_numbers_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Weldon.model_validate(settings)
