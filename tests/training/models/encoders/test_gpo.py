from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from vse.training.kinds import InputKind
from vse.training.models.encoders.base import EncoderSpec
from vse.training.models.encoders.pooling import (
    GeneralisedPooling,
    GpoEncoder,
    GpoSettings,
    WeldonEncoder,
    WeldonSettings,
    weldon_pooling,
)

INPUT_DIM, DIM = 5, 6


def encoder(**settings: Any) -> GpoEncoder:
    torch.manual_seed(0)
    made = GpoSettings.model_validate(settings).build(EncoderSpec(InputKind.SETS, INPUT_DIM, DIM, 0))
    assert isinstance(made, GpoEncoder)
    return made.double()


def sets() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    mask = torch.tensor([[True] * 4, [False, False, True, False], [True, False, True, True]])
    return torch.randn(3, 4, INPUT_DIM, dtype=torch.float64), mask


def slow(made: GpoEncoder, vectors: Tensor, mask: Tensor) -> Tensor:
    """Vector by vector; the batch normalisation sees all vectors of the batch, in evaluation its running statistics."""
    rows = [vector for own, there in zip(vectors, mask, strict=True) for vector in own[there]]
    layers = made.residual
    mapped = [made.linear.weight @ row + made.linear.bias for row in rows]
    if layers is not None:
        hidden = torch.stack([layers.first.weight @ row + layers.first.bias for row in rows])
        norm = layers.batch_norm
        mean, variance = hidden.mean(0), hidden.var(0, correction=0)
        if not made.training:
            mean, variance = norm.running_mean, norm.running_var
        hidden = ((hidden - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias).relu()
        mapped = [one + layers.last.weight @ h + layers.last.bias for one, h in zip(mapped, hidden, strict=True)]
    pooled, start = [], 0
    for size in mask.sum(1).tolist():
        own = torch.stack(mapped[start : start + size])
        pooled.append(slow_weights(made.pooling, size) @ own.sort(0, descending=True).values)
        start += size
    return torch.stack(pooled)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_values_and_gradients_are_those_of_a_loop(residual: bool, training: bool) -> None:
    made = encoder(residual=residual, size_augmentation=0).train(training)
    vectors, mask = sets()
    (fast,) = made(vectors, mask)
    expected = slow(made, vectors, mask)
    torch.testing.assert_close(fast, expected)
    weights = torch.linspace(-1, 2, fast.numel()).view_as(fast)
    found, wanted = (torch.autograd.grad((weights * pooled).sum(), list(made.parameters())) for pooled in (fast, expected))
    torch.testing.assert_close(found, wanted)


def test_padding_changes_nothing_not_even_the_statistics() -> None:
    short, long = encoder(size_augmentation=0), encoder(size_augmentation=0)
    vectors, mask = sets()
    padded = nn.functional.pad(vectors, (0, 0, 0, 3), value=7.0), nn.functional.pad(mask, (0, 3))
    torch.testing.assert_close(short(vectors, mask), long(*padded))
    torch.testing.assert_close(short.state_dict(), long.state_dict())


def test_training_leaves_vectors_out_and_evaluation_does_not() -> None:
    made = encoder(size_augmentation=0.5, residual=False)
    vectors, mask = sets()
    seen = {tuple(made(vectors, mask)[0][0].tolist()) for _ in range(20)}
    assert len(seen) > 5
    for _ in range(5):  # an only vector stays
        torch.testing.assert_close(made(vectors, mask)[0][1], made.linear(vectors[1, 2]))
    made.eval()
    torch.testing.assert_close(made(vectors, mask)[0], slow(made, vectors, mask))


SIZES = [1, 4, 2, 7, 4]


def operator(dtype: torch.dtype = torch.float64) -> GeneralisedPooling:
    torch.manual_seed(0)
    return GeneralisedPooling().to(dtype)


def drawn_sets(sizes: list[int] = SIZES, dim: int = 3, longest: int = 7) -> tuple[Tensor, Tensor]:
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


def slow_weights(pooling: GeneralisedPooling, size: int) -> Tensor:
    forwards, backwards = pooling.ranks(torch.stack([slow_encoding(k) for k in range(size)])[None])[0][0].chunk(2, dim=1)
    logits = [pooling.logit.weight[0] @ ((forwards[k] + backwards[k]) / 2) / 0.1 for k in range(size)]
    exponentials = [torch.exp(logit - max(logits)) for logit in logits]
    return torch.stack(exponentials) / sum(exponentials)


def test_single_vectors_are_pooled_to_themselves_and_train() -> None:
    vectors, mask = drawn_sets([1, 1], longest=4)
    assert torch.equal(operator()(vectors, mask), vectors[:, 0])
    assert torch.equal(operator()(vectors[:, :1], mask[:, :1]), vectors[:, 0])
    made = encoder()
    (pooled,) = made(torch.randn(1, 1, INPUT_DIM, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool))
    pooled.sum().backward()
    assert pooled.isfinite().all()
    assert not made.residual.batch_norm.running_mean.any()


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 3))
def test_weights_are_those_of_the_size_whatever_the_others_and_sum_to_one(sizes: list[int], more: int) -> None:
    pooling, longest = operator(), max(sizes) + more
    weights = pooling.compute_rank_weights(torch.tensor(sizes), longest)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(sizes), dtype=torch.float64))
    for own, size in zip(weights, sizes, strict=True):
        torch.testing.assert_close(own[:size], slow_weights(pooling, size))
        assert not own[size:].any()


def test_under_autocast_weights_are_as_exact_as_without() -> None:
    pooling = operator(torch.float32)
    sizes = torch.tensor(SIZES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = pooling.compute_rank_weights(sizes, 7)
    assert torch.equal(low, pooling.compute_rank_weights(sizes, 7))


COUNTS = [6, 1, 4]


def slow_weldon(responses: Tensor, mask: Tensor, k_max: int, k_min: int) -> Tensor:
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


def positions(dim: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Sets of unlike sizes whose padding is no zeros."""
    torch.manual_seed(0)
    vectors = torch.randn(len(COUNTS), max(COUNTS), dim, dtype=dtype, requires_grad=True)
    return vectors, torch.arange(max(COUNTS)) < torch.tensor(COUNTS)[:, None]


@given(
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    k_max=st.integers(1, 9),
    k_min=st.integers(0, 9),
    extra=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
def test_order_and_padding_change_nothing_in_weldon(counts: list[int], k_max: int, k_min: int, extra: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    responses = torch.randn(len(counts), max(counts), 3, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    pooled, slow = (pool(responses, mask, k_max, k_min) for pool in (weldon_pooling, slow_weldon))
    torch.testing.assert_close(pooled, slow)
    weights = torch.linspace(-1, 2, slow.numel(), dtype=slow.dtype).view_as(slow)
    of_both = (torch.autograd.grad((weights * values).sum(), responses, retain_graph=True) for values in (pooled, slow))
    torch.testing.assert_close(*of_both)
    order = torch.randperm(max(counts) + extra, generator=generator)
    padded = torch.nn.functional.pad(responses, (0, 0, 0, extra), value=100.0)[:, order]
    wider = torch.nn.functional.pad(mask, (0, extra))[:, order]
    torch.testing.assert_close(weldon_pooling(padded, wider, k_max, k_min), pooled)


def weldon(**settings: object) -> WeldonEncoder:
    torch.manual_seed(0)
    config = WeldonSettings.model_validate({"channels": 7, "k_max": 2, "k_min": 2, **settings})
    encoder = config.build(EncoderSpec(InputKind.SETS, input_dim=5, dim=3, word_dim=0))
    assert isinstance(encoder, WeldonEncoder)
    return encoder


def test_an_embedding_is_a_linear_map_of_the_pooled_channels_of_which_some_are_dropped() -> None:
    encoder = weldon().eval()
    vectors, mask = positions(dtype=torch.float32)
    (embeddings,) = encoder(vectors, mask)
    layer = encoder.convolution
    responses = torch.stack([layer.weight @ vector + layer.bias for vector in vectors.flatten(0, 1)])
    pooled = slow_weldon(responses.view(3, 6, 7), mask, 2, 2)
    torch.testing.assert_close(embeddings, pooled @ encoder.linear.weight.T + encoder.linear.bias)
    assert encoder.dim == 3
    vectors, mask = positions(dtype=torch.float32)
    dropping, plain = weldon(dropout=0.5).train(), weldon(dropout=0.0).train()
    assert not torch.equal(dropping(vectors, mask)[0], dropping(vectors, mask)[0])
    torch.testing.assert_close(plain(vectors, mask), dropping.eval()(vectors, mask))
