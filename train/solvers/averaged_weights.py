"""A running mean of a model's weights over its updates, which often ranks better than the weights of any one update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_SHORT = 10  # of the first updates, of which there is not much to average yet, the mean leaves less


class AveragedWeights:
    """An exponential moving average of a model's weights (Polyak and Juditsky, 1992; Tarvainen and Valpola, NIPS 2017).

    After each update m <- d m + (1 - d) w, with d = min(decay, (1 + t) / (10 + t)) after t updates, so that the random first
    weights are soon forgotten. Statistics of batch normalisations are averaged as weights are, because they belong to them;
    what is no floating-point number, such as a count of batches, is that of the model.

    Parameters
    ----------
    model : whose weights they are; the mean starts as they are now
    decay : share of the mean that an update leaves, in ]0, 1[
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._n_updates = 0
        self.weights: dict[str, Tensor] = {name: weight.clone() for name, weight in model.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Count the weights that an update has just made."""
        self._n_updates += 1
        left = min(self._decay, (1 + self._n_updates) / (_SHORT + self._n_updates))
        for name, weight in self._model.state_dict().items():
            mean = self.weights[name]
            if mean.is_floating_point():
                mean.lerp_(weight, 1 - left)
            else:
                mean.copy_(weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In this block the model has the averaged weights; then its own again, to the bit."""
        own = {name: weight.clone() for name, weight in self._model.state_dict().items()}
        self._model.load_state_dict(self.weights)
        try:
            yield
        finally:
            self._model.load_state_dict(own)

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` continues from."""
        return {"weights": self.weights, "n_updates": self._n_updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` gave."""
        for name, mean in self.weights.items():
            mean.copy_(state["weights"][name])
        self._n_updates = int(state["n_updates"])
