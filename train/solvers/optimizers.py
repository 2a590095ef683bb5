"""torch's optimizers without torch's compiler: their first call would import it, which takes as long as torch itself."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer


def _eager(optimizer: type[Optimizer]) -> Any:
    """The optimizer with its methods as they are beneath torch's hooks for code that is compiled, which ours is not."""
    names = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(optimizer.step))  # one of the hooks switches gradients off
    return type(optimizer.__name__, (optimizer,), {**methods, "step": step})


OPTIMIZERS = {"adam": _eager(torch.optim.Adam), "adamw": _eager(torch.optim.AdamW)}
