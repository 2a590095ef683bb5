"""Fully connected layers with ReLU, dropout and batch normalisation, against their formulas."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from vse.train.kinds import Kind
from vse.train.models.encoders.base import Sizes
from vse.train.models.encoders.mlp import Branch, BranchSettings


def branch(widths: list[int], **settings: Any) -> Branch:
    """With a bias, and statistics, that are not those of the start."""
    torch.manual_seed(0)
    made = Branch(5, BranchSettings(widths=widths, **settings)).double()
    for tensor in [*made.linears.parameters(), *([] if made.batch_norm is None else made.batch_norm.parameters())]:
        nn.init.normal_(tensor)
    return made


def normalized(rows: Tensor, norm: nn.BatchNorm1d, training: bool) -> Tensor:
    """By the statistics of the batch, the variance being the mean square; or by the running ones."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean = rows.mean(0) if training else norm.running_mean
    variance = (rows - mean).square().mean(0) if training else norm.running_var
    return (rows - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias


def slow_branch(made: Branch, features: Tensor, place: str, training: bool) -> Tensor:
    """Formulas of three layers: fully connected, batch normalisation in one of two places, ReLU."""
    assert made.batch_norm is not None
    weights = [(layer.weight, layer.bias) for layer in made.linears]
    first = features @ weights[0][0].T + weights[0][1]
    if place == "after_first":
        first = normalized(first, made.batch_norm, training)
    second = torch.relu(first) @ weights[1][0].T + weights[1][1]
    last = torch.relu(second) @ weights[2][0].T + weights[2][1]
    return normalized(last, made.batch_norm, training) if place == "after_last" else last


@pytest.mark.parametrize(("place", "training"), list(product(["after_last", "after_first"], [True, False])))
def test_nonlinear_layers_have_relu_between_them_and_one_batch_normalisation(place: str, training: bool) -> None:
    made, features = branch([7, 6, 4], batch_norm=place, dropout=0), torch.randn(8, 5, dtype=torch.float64)
    assert made.batch_norm.num_features == (4 if place == "after_last" else 7)
    for _ in range(3):
        made.train()(torch.randn(8, 5, dtype=torch.float64))
    slow = slow_branch(made, features, place, training)
    torch.testing.assert_close(made.train(training)(features)[0], slow)


@pytest.mark.parametrize("momentum", [0.1, 0.9])
@pytest.mark.parametrize("place", ["after_last", "after_first"])
def test_a_batch_has_its_share_in_the_running_statistics(place: str, momentum: float) -> None:
    made = branch([3, 4], batch_norm=place, batch_norm_momentum=momentum, dropout=0)
    features = torch.randn(6, 5, dtype=torch.float64)
    first = made.linears[0](features)
    seen = first if place == "after_first" else made.linears[1](first.relu())
    made.train()(features)
    torch.testing.assert_close(made.batch_norm.running_mean, momentum * seen.mean(0).detach())
    torch.testing.assert_close(made.batch_norm.running_var, (1 - momentum) + momentum * seen.var(0).detach())


def test_a_linear_branch_is_its_first_layer_alone() -> None:
    made, features = branch([4]), torch.randn(3, 5, dtype=torch.float64)
    assert made.batch_norm is None
    for training in (True, False):
        torch.testing.assert_close(
            made.train(training)(features)[0], features @ made.linears[0].weight.T + made.linears[0].bias
        )


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


def test_a_branch_without_dropout_is_the_same_twice() -> None:
    made, features = branch([6, 3], dropout=0).train(), torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(made(features)[0], made(features)[0])


def test_the_embedding_is_as_long_as_the_last_layer_is_wide() -> None:
    made = BranchSettings(widths=[7, 3]).build(Sizes(Kind.VECTORS, input_dim=5, dim=99, word_dim=99))
    assert made.dim == 3
    assert made(torch.rand(2, 5))[0].shape == (2, 3)


def test_only_a_single_layer_is_a_linear_map() -> None:
    assert branch([4]).linear_map() is not None
    assert branch([4, 4]).linear_map() is None


@pytest.mark.parametrize("widths", [[], [0]])
def test_layers_without_outputs_are_refused(widths: list[int]) -> None:
    with pytest.raises(ValidationError, match="widths"):
        BranchSettings(widths=widths)
