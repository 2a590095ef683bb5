"""The optimizers without hooks for compiled code against torch's own: the same weights and state, bit for bit."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vse.train.solvers.optimisation import OPTIMIZERS

TORCH = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def trained(optimizer: Any, n_steps: int, state: dict[str, Any] | None = None) -> tuple[list[Tensor], dict[str, Any]]:
    """Weights and state after steps on a fixed problem, of two groups of weights that learn at their own rates."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(7, 5)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05, "weight_decay": 0.1}]
    made = optimizer(groups, lr=0.01, fused=True)
    if state is not None:
        made.load_state_dict(deepcopy(state))  # whose tensors it takes
    for _ in range(n_steps):
        made.zero_grad(set_to_none=True)
        model(inputs).square().sum().backward()
        made.step()
    assert all(weight.requires_grad and weight.grad_fn is None for weight in model.parameters())
    return list(model.parameters()), made.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_are_those_of_torch_s_optimizer(name: str) -> None:
    ours, our_state = trained(OPTIMIZERS[name], 4)
    theirs, their_state = trained(TORCH[name], 4)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(our_state["state"], their_state["state"], rtol=0, atol=0)
    assert our_state["param_groups"] == their_state["param_groups"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_either_continues_from_the_state_of_the_other(name: str) -> None:
    _, state = trained(TORCH[name], 3)
    ours, _ = trained(OPTIMIZERS[name], 2, state)
    theirs, _ = trained(TORCH[name], 2, state)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_torch_s_own_classes_stay_as_they_are() -> None:
    assert all(issubclass(OPTIMIZERS[name], TORCH[name]) and OPTIMIZERS[name] is not TORCH[name] for name in TORCH)
    assert hasattr(torch.optim.Adam.zero_grad, "__wrapped__"), "the hooks of compiled code"
