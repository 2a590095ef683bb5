"""The conditional flow against its equations, written number by number, and against its inverse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vse.train.models.similarities.todnet import SCALES, ConditionalFlow, ConditionalMlp, ConditionalNetwork

DIM, OF_CONDITION = 6, 4
HOW = {
    "exp": math.exp,
    "exp_tanh": lambda s: math.exp(math.tanh(s)),
    "sigmoid": lambda s: 1 / (1 + math.exp(-s - 2)),
    "product": lambda s: s,
}


def drawn(module: torch.nn.Module, seed: int = 0) -> None:
    """Weights and biases anywhere, in double precision."""
    torch.manual_seed(seed)
    module.double()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.4)


def flow(
    scale: str = "exp", layers: int = 3, kept: int = 0, condition_dim: int = OF_CONDITION, seed: int = 0
) -> ConditionalFlow:
    made = ConditionalFlow(DIM, condition_dim, layers, [5, 7], scale, identity=False, kept=kept)
    drawn(made, seed)
    return made


def slow_network(network: ConditionalNetwork, inputs: list[float]) -> list[float]:
    """One input, neuron by neuron."""
    for number, layer in enumerate(network.linears):
        weights, biases = layer.weight.tolist(), layer.bias.tolist()
        inputs = [sum(w * x for w, x in zip(row, inputs, strict=True)) + b for row, b in zip(weights, biases, strict=True)]
        if number < len(network.linears) - 1:
            inputs = [max(0.0, x) for x in inputs]
    return inputs


def slow_flow(made: ConditionalFlow, x: list[float], condition: list[float], scale: str, kept: int) -> list[float]:
    x, half = list(x), DIM // 2
    places = [list(range(half)), list(range(half, DIM))]
    for network in made.networks:
        out = slow_network(network, [x[place] for place in places[kept]] + condition)
        for place, s, t in zip(places[1 - kept], out[:half], out[half:], strict=True):
            x[place] = x[place] * HOW[scale](s) + t
        kept = 1 - kept
    return x


def vectors(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("layers", "kept"), [(1, 0), (2, 1), (3, 0), (3, 1)])
def test_a_flow_follows_its_equations(scale: str, layers: int, kept: int) -> None:
    made, x, c = flow(scale, layers, kept), vectors(4, DIM), vectors(4, OF_CONDITION, seed=2)
    slow = [slow_flow(made, *row, scale, kept) for row in zip(x.tolist(), c.tolist(), strict=True)]
    torch.testing.assert_close(made(x, c), torch.tensor(slow, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_an_mlp_is_one_of_both_inputs() -> None:
    made, x, c = ConditionalMlp(DIM, OF_CONDITION, [5, 3, 4, 2], identity=False), vectors(3, DIM), vectors(3, OF_CONDITION)
    drawn(made)
    slow = [slow_network(made.network, a + b) for a, b in zip(x.tolist(), c.tolist(), strict=True)]
    torch.testing.assert_close(made(x, c), torch.tensor(slow, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    assert len(made.network.linears) == 5


@given(
    scale=st.sampled_from(["exp", "exp_tanh", "sigmoid"]),
    layers=st.integers(1, 5),
    kept=st.integers(0, 1),
    condition_dim=st.sampled_from([0, OF_CONDITION]),
    seed=st.integers(0, 10**6),
)
def test_the_inverse_is_exact(scale: str, layers: int, kept: int, condition_dim: int, seed: int) -> None:
    made, x = flow(scale, layers, kept, condition_dim, seed), vectors(3, DIM, seed=seed)
    condition = vectors(3, condition_dim, seed=seed + 1) if condition_dim else None
    with torch.no_grad():
        y = made(x, condition)
        torch.testing.assert_close(made.inverse(y, condition), x, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(made(made.inverse(x, condition), condition), x, rtol=1e-7, atol=1e-7)


def test_a_product_has_an_inverse_where_no_factor_is_zero() -> None:
    made, x, c = flow("product"), vectors(3, DIM), vectors(3, OF_CONDITION)
    torch.testing.assert_close(made.inverse(made(x, c), c), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layers", [1, 3])
def test_axes_in_front_broadcast(layers: int) -> None:
    """Each vector under each condition, as if they were given row by row."""
    made, x, c = flow(layers=layers), vectors(4, DIM), vectors(3, OF_CONDITION)
    every = made(x[None], c[:, None])
    assert every.shape == (3, 4, DIM)
    for k in range(3):
        torch.testing.assert_close(every[k], made(x, c[k].expand(4, -1)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.inverse(every, c[:, None]), x.expand(3, -1, -1), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("scale", "factors"), [("exp", 1), ("exp_tanh", 1), ("product", 1), ("sigmoid", HOW["sigmoid"](0))])
def test_zero_last_layers_are_the_identity(scale: str, factors: float) -> None:
    """Of the sigmoid, a factor for each layer that moves a half."""
    made = ConditionalFlow(DIM, OF_CONDITION, 3, [5, 7], scale, identity=True, kept=0).double()
    x, c = vectors(4, DIM), vectors(4, OF_CONDITION)
    expected = x * torch.tensor([factors] * 3 + [factors**2] * 3, dtype=torch.float64)
    torch.testing.assert_close(made(x, c), expected, rtol=1e-14 if factors == 1 else 1e-6, atol=0)


def test_an_mlp_that_begins_as_the_identity_adds_its_input() -> None:
    made = ConditionalMlp(DIM, OF_CONDITION, [5], identity=True).double()
    x = vectors(4, DIM)
    assert torch.equal(made(x, vectors(4, OF_CONDITION)), x)


def test_weights_are_drawn_otherwise() -> None:
    made = ConditionalFlow(DIM, OF_CONDITION, 3, [5, 7], "exp", identity=False, kept=0).double()
    x = vectors(4, DIM)
    assert (made(x, vectors(4, OF_CONDITION)) - x).abs().min() > 0


def test_an_odd_length_has_no_halves() -> None:
    with pytest.raises(ValueError, match="odd length 5"):
        ConditionalFlow(5, 5, 3, [4], "exp", identity=True, kept=0)
