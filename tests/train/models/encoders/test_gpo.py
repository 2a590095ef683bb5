"""Sets as one vector by generalised pooling: the map of each vector, the layers beside it, and what a training leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vse.train.kinds import Kind
from vse.train.models.encoders.base import Sizes
from vse.train.models.encoders.gpo import Gpo, GpoEncoder

INPUT_DIM, DIM = 5, 6


def encoder(**settings: Any) -> GpoEncoder:
    torch.manual_seed(0)
    made = Gpo.model_validate(settings).build(Sizes(Kind.SETS, INPUT_DIM, DIM, 0))
    assert isinstance(made, GpoEncoder)
    return made.double()


def sets() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    mask = torch.arange(4) < torch.tensor([4, 1, 3])[:, None]
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
        pooled.append(made.pooling.weights(torch.tensor([size]), size)[0] @ own.sort(0, descending=True).values)
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
        torch.testing.assert_close(made(vectors, mask)[0][1], made.linear(vectors[1, 0]))
    made.eval()
    torch.testing.assert_close(made(vectors, mask)[0], slow(made, vectors, mask))


def test_a_batch_of_one_vector_trains() -> None:
    made = encoder()
    (pooled,) = made(torch.randn(1, 1, INPUT_DIM, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool))
    pooled.sum().backward()
    assert pooled.isfinite().all()
    assert not made.residual.batch_norm.running_mean.any()


def test_sets_become_vectors() -> None:
    assert Gpo.takes == (Kind.SETS,)
    assert Gpo().gives(Kind.SETS) == Kind.VECTORS
    assert encoder().dim == DIM
