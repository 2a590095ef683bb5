"""Which weights a training changes in an epoch, and how fast: learning rates, their decay, and parts that wait.

torch's optimizers without torch's compiler: their first call would import it, which takes as long as torch itself.

A running mean of a model's weights over its updates, which often ranks better than the weights of any one update.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vse.pipeline.errors import UserError, did_you_mean
from vse.train.models.build import Model
from vse.train.settings import TrainConfig


def _eager(optimizer: type[Optimizer]) -> Any:
    """The optimizer with its methods as they are beneath torch's hooks for code that is compiled, which ours is not."""
    names = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(optimizer.step))  # one of the hooks switches gradients off
    return type(optimizer.__name__, (optimizer,), {**methods, "step": step})


OPTIMIZERS = {"adam": _eager(torch.optim.Adam), "adamw": _eager(torch.optim.AdamW)}


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


log = logging.getLogger(__name__)

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Schedule:
    """The schedule of :class:`vse.train.solvers.base.TrainConfig` for a model.

    It depends on the epoch and the update alone, so a resume needs nothing of it. :class:`UserError` if the settings name what
    the model does not have, or leave nothing to train in the first epoch.
    """

    def __init__(self, settings: TrainConfig, model: Model) -> None:
        self.settings, self.model = settings, model
        modules = {name: module for name, module in model.named_modules() if name}
        waiting = [name for name, epochs in settings.frozen.items() if epochs]
        for key, names in (("frozen", waiting), ("learning_rates", settings.learning_rates)):
            for name in names:
                if name not in modules:
                    raise UserError(f"train.{key}: the model has no part {name!r}{did_you_mean(name, modules)}")
        self._rates: list[float] = []  # of the groups, before any decay
        self._of_loss: tuple[nn.Module, float] | None = None
        model.hold(*self.frozen(0))
        if not any(weight.requires_grad for weight in model.parameters()):
            raise UserError("train.frozen: nothing of the model is left to train in epoch 1")
        model.hold()

    def add_loss(self, weights: nn.Module, rate: float | None) -> None:
        """What the loss learns is trained as well, without weight decay; at the usual learning rate, if it has none."""
        self._of_loss = weights, rate or self.settings.learning_rate

    def groups(self) -> list[dict[str, Any]]:
        """The weights that are trained at any time, for an optimiser: by learning rate, and by whether they decay."""
        undecayed = self._undecayed()
        weights = {id(weight): weight for weight in self.model.parameters() if weight.requires_grad}
        rates = dict.fromkeys(weights, self.settings.learning_rate)
        own = self.settings.learning_rates
        for name in sorted(own, key=len):  # the longer name is the narrower part
            rates |= {id(weight): own[name] for weight in self.model.get_submodule(name).parameters() if id(weight) in weights}
        groups = []
        self._rates = []
        for rate in dict.fromkeys([self.settings.learning_rate, *own.values()]):
            for decays in (True, False):
                chosen = [w for key, w in weights.items() if rates[key] == rate and (key not in undecayed) == decays]
                groups.append({"params": chosen, "lr": rate, "weight_decay": self.settings.weight_decay if decays else 0.0})
                self._rates.append(rate)
        if self._of_loss is not None:
            learned, rate = self._of_loss
            groups.append({"params": list(learned.parameters()), "lr": rate, "weight_decay": 0.0})
            self._rates.append(rate)
        return groups

    def frozen(self, epoch: int) -> list[str]:
        """The parts that are not trained in an epoch (from 0)."""
        return [name for name, epochs in self.settings.frozen.items() if epochs == "always" or epoch < epochs]

    def decay(self, epoch: int) -> float:
        """What learning rates are multiplied by in an epoch (from 0)."""
        settings = self.settings
        if settings.decay_at:
            return settings.decay ** sum(epoch >= after for after in settings.decay_at)
        return settings.decay ** (epoch // settings.decay_after)

    def factor(self, epoch: int, update: int = 0, n_updates: int = 1) -> float:
        """What learning rates are multiplied by in an update (from 0) of the ``n_updates`` of an epoch (from 0)."""
        settings = self.settings
        before = epoch * n_updates + update
        rising = (before + 1) / settings.warmup_steps if before < settings.warmup_steps else 1.0
        if settings.schedule == "step":
            return rising * self.decay(epoch)
        falling = max(0, before - settings.warmup_steps) / max(1, settings.epochs * n_updates - settings.warmup_steps)
        return rising * (1 + math.cos(math.pi * falling)) / 2

    def rate(self, epoch: int, update: int = 0, n_updates: int = 1) -> float:
        """The learning rate, in such an update, of what has none of its own."""
        return self.settings.learning_rate * self.factor(epoch, update, n_updates)

    def check_warmup(self, n_updates: int) -> None:
        """Warn if all updates are warm-up."""
        settings = self.settings
        if 0 < settings.epochs * n_updates <= settings.warmup_steps:
            log.warning(
                "train.warmup_steps: all %d updates are warm-up, and the full learning rate is never used",
                settings.epochs * n_updates,
            )

    def start_epoch(self, epoch: int) -> None:
        """Hold what waits in an epoch (from 0)."""
        self.model.hold(*self.frozen(epoch))

    def set_rates(self, optimizer: Optimizer, epoch: int, update: int = 0, n_updates: int = 1) -> None:
        """Set the learning rates of an update, see :meth:`factor`; nothing else may, lest a resume ends with others."""
        factor = self.factor(epoch, update, n_updates)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def _undecayed(self) -> set[int]:
        """The weights that do not decay."""
        kinds = self.settings.undecayed
        chosen = {id(weight) for weight in self.model.caption_encoder.undecayed()} if "words" in kinds else set()
        for module in self.model.modules():
            for name, weight in module.named_parameters(recurse=False):
                is_a = {
                    "embeddings": isinstance(module, nn.Embedding),
                    "biases": "bias" in name,
                    "norms": isinstance(module, _NORMS),
                    "vectors": weight.ndim <= 1,
                }
                if any(is_a.get(kind, False) for kind in kinds):
                    chosen.add(id(weight))
        return chosen
