from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from vse.training.kinds import InputKind
from vse.training.models.encoders import IMAGE_ENCODERS
from vse.training.models.encoders.base import Encoder, EncoderSpec
from vse.training.models.encoders.linear import BranchSettings, DenseLayersEncoder, MlpEncoder, ResidualEncoder

INPUT, DIM = 5, 4
HEADS: dict[str, list[dict[str, Any]]] = {
    "mlp": [{"hidden": [6]}, {"hidden": [6, 3, 7]}],
    "residual": [{"width": 6}, {"width": 3, "blocks": 3}],
}
CASES = [(name, settings) for name, cases in HEADS.items() for settings in cases]


def built(name: str, **settings: Any) -> Encoder:
    """A head whose weights are all other than 0."""
    torch.manual_seed(0)
    head = IMAGE_ENCODERS.parse({"name": name, **settings}).build(EncoderSpec(InputKind.VECTORS, INPUT, DIM, 99)).double()
    assert isinstance(head, Encoder)
    for weight in head.parameters():
        nn.init.normal_(weight)
    return head


def slow(head: Encoder, vectors: Tensor) -> Tensor:
    """Layer by layer, of GELU and layer normalisations by torch."""
    if isinstance(head, MlpEncoder):
        *hidden, last = head.linears
        for layer in hidden:
            vectors = gelu(vectors @ layer.weight.T + layer.bias)
        return vectors @ last.weight.T + last.bias
    assert isinstance(head, ResidualEncoder)
    vectors = vectors @ head.linear.weight.T + head.linear.bias
    for block in head.blocks:
        normal = layer_norm(vectors, vectors.shape[1:], block.norm.weight, block.norm.bias, block.norm.eps)
        inner = gelu(normal @ block.inner.weight.T + block.inner.bias)
        vectors = vectors + inner @ block.outer.weight.T + block.outer.bias
    return vectors


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_head_and_its_gradients_are_those_of_its_layers(name: str, settings: dict[str, Any], n: int) -> None:
    head, vectors = built(name, **settings), torch.randn(n, INPUT, dtype=torch.float64, requires_grad=True)
    (computed,) = head(vectors)
    expected = slow(head, vectors)
    torch.testing.assert_close(computed, expected)
    weights = torch.linspace(-1, 2, computed.numel(), dtype=torch.float64).view_as(computed)
    leaves = [vectors, *head.parameters()]
    torch.testing.assert_close(*(torch.autograd.grad((weights * one).sum(), leaves) for one in (computed, expected)))


@pytest.mark.parametrize("name", HEADS)
def test_vectors_go_through_a_head_by_themselves_and_dropout_is_for_training(name: str) -> None:
    head, sets = built(name), torch.randn(2, 3, INPUT, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    vectors, same = head(sets, mask)
    assert same is mask
    for k in range(3):
        torch.testing.assert_close(vectors[:, k], head(sets[:, k])[0])
    head, vectors = built(name, dropout=0.5), torch.randn(4, INPUT, dtype=torch.float64)
    assert not torch.equal(head(vectors)[0], head(vectors)[0])
    head.eval()
    assert torch.equal(head(vectors)[0], head(vectors)[0])
    torch.testing.assert_close(head(vectors), built(name, dropout=0.0)(vectors))


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_residual_head_starts_as_its_linear_map(blocks: int) -> None:
    settings = {"name": "residual", "blocks": blocks, "width": 7}
    head = IMAGE_ENCODERS.parse(settings).build(EncoderSpec(InputKind.VECTORS, INPUT, DIM, 99))
    assert isinstance(head, ResidualEncoder)
    vectors = torch.randn(6, INPUT)
    (computed,) = head(vectors)
    torch.testing.assert_close(computed, head.linear(vectors))
    computed.square().sum().backward()
    assert all(block.outer.weight.grad.any() for block in head.blocks), "but what it adds is learned"


def branch(widths: list[int], **settings: Any) -> DenseLayersEncoder:
    """With a bias, and statistics, that are not those of the start."""
    torch.manual_seed(0)
    made = DenseLayersEncoder(5, BranchSettings(widths=widths, **settings)).double()
    for tensor in [*made.linears.parameters(), *([] if made.batch_norm is None else made.batch_norm.parameters())]:
        nn.init.normal_(tensor)
    return made


def slow_branch(made: DenseLayersEncoder, features: Tensor, place: str, training: bool) -> Tensor:
    """Formulas of three layers: fully connected, batch normalisation in one of two places, ReLU."""
    norm = made.batch_norm
    assert norm is not None

    def normalized(rows: Tensor) -> Tensor:
        mean, variance = (rows.mean(0), rows.var(0, correction=0)) if training else (norm.running_mean, norm.running_var)
        return (rows - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias

    weights = [(layer.weight, layer.bias) for layer in made.linears]
    first = features @ weights[0][0].T + weights[0][1]
    if place == "after_first":
        first = normalized(first)
    second = torch.relu(first) @ weights[1][0].T + weights[1][1]
    last = torch.relu(second) @ weights[2][0].T + weights[2][1]
    return normalized(last) if place == "after_last" else last


@pytest.mark.parametrize(("place", "training"), list(product(["after_last", "after_first"], [True, False])))
def test_nonlinear_layers_have_relu_between_them_and_one_batch_normalisation(place: str, training: bool) -> None:
    made = branch([7, 6, 4], batch_norm=place, batch_norm_momentum=0.9, dropout=0)
    features = torch.randn(8, 5, dtype=torch.float64)
    assert (made.batch_norm.num_features, made.batch_norm.momentum) == (4 if place == "after_last" else 7, 0.9)
    for _ in range(3):
        made.train()(torch.randn(8, 5, dtype=torch.float64))
    slow = slow_branch(made, features, place, training)
    torch.testing.assert_close(made.train(training)(features)[0], slow)


def test_a_branch_of_one_layer_is_a_linear_map_as_wide_as_the_last_one() -> None:
    made, features = branch([4]), torch.randn(3, 5, dtype=torch.float64)
    assert made.batch_norm is None
    expected = features @ made.linears[0].weight.T + made.linears[0].bias
    for training in (True, False):
        torch.testing.assert_close(made.train(training)(features)[0], expected)
    made = BranchSettings(widths=[7, 3]).build(EncoderSpec(InputKind.VECTORS, input_dim=5, dim=99, word_dim=99))
    assert made.dim == 3
    assert made(torch.rand(2, 5))[0].shape == (2, 3)
    assert branch([4]).single_linear_layer() is not None
    assert branch([4, 4]).single_linear_layer() is None


def test_dropout_follows_each_relu_and_in_training_alone() -> None:
    made, features = branch([2000, 1500, 3], dropout=0.3), torch.randn(2, 5, dtype=torch.float64)
    inputs: list[Tensor] = []
    for layer in made.linears:
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    for training in (True, True, False):
        made.train(training)(features)
    passes = [inputs[start : start + 3] for start in (0, 3, 6)]
    for training, seen in zip((True, True, False), passes, strict=True):
        for number in (1, 2):
            relu = made.linears[number - 1](seen[number - 1]).relu().detach()
            kept = seen[number] != 0
            torch.testing.assert_close(seen[number][kept], relu[kept] / (0.7 if training else 1))
            share = (kept & (relu > 0)).sum() / (relu > 0).sum()
            assert share.item() == pytest.approx(0.7 if training else 1, abs=0.05)
    assert not torch.equal(passes[0][1], passes[1][1])
