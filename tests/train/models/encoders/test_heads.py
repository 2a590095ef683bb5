"""The heads of several layers, MLP and residual, against loops over their numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vse.train.kinds import Kind
from vse.train.models.encoders import CAPTION_ENCODERS, IMAGE_ENCODERS
from vse.train.models.encoders.base import Encoder, Sizes
from vse.train.models.encoders.mlp import MlpEncoder, ResidualEncoder

INPUT, DIM = 5, 4
HEADS: dict[str, list[dict[str, Any]]] = {
    "mlp": [{"hidden": [6]}, {"hidden": [6, 3, 7]}],
    "residual": [{"width": 6}, {"width": 3, "blocks": 3}],
}
CASES = [(name, settings) for name, cases in HEADS.items() for settings in cases]


def built(name: str, **settings: Any) -> Encoder:
    """A head whose weights are all other than 0."""
    torch.manual_seed(0)
    head = IMAGE_ENCODERS.parse({"name": name, **settings}).build(Sizes(Kind.VECTORS, INPUT, DIM, 99)).double()
    assert isinstance(head, Encoder)
    for weight in head.parameters():
        nn.init.normal_(weight)
    return head


def mapped(layer: nn.Module, vector: list[Tensor]) -> list[Tensor]:
    assert isinstance(layer, nn.Linear)
    return [
        sum((w * x for w, x in zip(row, vector, strict=True)), start=b)
        for row, b in zip(layer.weight, layer.bias, strict=True)
    ]


def slow_gelu(x: Tensor) -> Tensor:
    """The number times the probability that a standard normal variable is below it."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def slow_norm(norm: nn.LayerNorm, vector: list[Tensor]) -> list[Tensor]:
    mean = sum(vector, start=0 * vector[0]) / len(vector)
    variance = sum(((x - mean) ** 2 for x in vector), start=0 * mean) / len(vector)
    scaled = [(x - mean) / torch.sqrt(variance + norm.eps) for x in vector]
    return [w * x + b for w, x, b in zip(norm.weight, scaled, norm.bias, strict=True)]


def slow(head: Encoder, vector: list[Tensor]) -> list[Tensor]:
    """Layer by layer, number by number."""
    if isinstance(head, MlpEncoder):
        *hidden, last = head.linears
        for layer in hidden:
            vector = [slow_gelu(x) for x in mapped(layer, vector)]
        return mapped(last, vector)
    assert isinstance(head, ResidualEncoder)
    vector = mapped(head.linear, vector)
    for block in head.blocks:
        inner = [slow_gelu(x) for x in mapped(block.inner, slow_norm(block.norm, vector))]
        vector = [x + added for x, added in zip(vector, mapped(block.outer, inner), strict=True)]
    return vector


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_head_and_its_gradients_equal_a_loop_over_its_numbers(name: str, settings: dict[str, Any], n: int) -> None:
    head, vectors = built(name, **settings), torch.randn(n, INPUT, dtype=torch.float64, requires_grad=True)
    (computed,) = head(vectors)
    expected = torch.stack([torch.stack(slow(head, list(vector))) for vector in vectors])
    torch.testing.assert_close(computed, expected)
    weights = torch.linspace(-1, 2, computed.numel(), dtype=torch.float64).view_as(computed)
    leaves = [vectors, *head.parameters()]
    torch.testing.assert_close(*(torch.autograd.grad((weights * one).sum(), leaves) for one in (computed, expected)))


@pytest.mark.parametrize("name", HEADS)
def test_of_a_set_each_vector_goes_through_by_itself(name: str) -> None:
    head, sets = built(name), torch.randn(2, 3, INPUT, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    vectors, same = head(sets, mask)
    assert same is mask
    for k in range(3):
        torch.testing.assert_close(vectors[:, k], head(sets[:, k])[0])


@pytest.mark.parametrize("name", HEADS)
def test_a_head_may_be_on_either_side_and_says_how_long_its_embeddings_are(name: str) -> None:
    for registry in (IMAGE_ENCODERS, CAPTION_ENCODERS):
        head = registry.parse(name).build(Sizes(Kind.VECTORS, INPUT, DIM, 99))
        assert head.dim == DIM
        assert head(torch.zeros(2, INPUT))[0].shape == (2, DIM)
        assert head.linear_map() is None


@pytest.mark.parametrize("name", HEADS)
def test_dropout_is_for_training_alone(name: str) -> None:
    head, vectors = built(name, dropout=0.5), torch.randn(4, INPUT, dtype=torch.float64)
    assert not torch.equal(head(vectors)[0], head(vectors)[0])
    head.eval()
    assert torch.equal(head(vectors)[0], head(vectors)[0])
    torch.testing.assert_close(head(vectors), built(name, dropout=0.0)(vectors))


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_residual_head_starts_as_its_linear_map(blocks: int) -> None:
    settings = {"name": "residual", "blocks": blocks, "width": 7}
    head = IMAGE_ENCODERS.parse(settings).build(Sizes(Kind.VECTORS, INPUT, DIM, 99))
    assert isinstance(head, ResidualEncoder)
    vectors = torch.randn(6, INPUT)
    (computed,) = head(vectors)
    torch.testing.assert_close(computed, head.linear(vectors))
    computed.square().sum().backward()
    assert all(block.outer.weight.grad.any() for block in head.blocks), "but what it adds is learned"
