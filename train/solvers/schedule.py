"""Which weights a training changes in an epoch, and how fast: learning rates, their decay, and parts that wait."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from vse.pipeline.errors import UserError, did_you_mean
from vse.train.models.build import Model
from vse.train.solvers.base import TrainConfig


class Schedule:
    """The schedule of :class:`vse.train.solvers.base.TrainConfig` for a model.

    It depends on the epoch alone, so a resume needs nothing of it. :class:`UserError` if the settings name what the model does
    not have, or leave nothing to train in the first epoch.
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
        model.hold(*self.frozen(0))
        if not any(weight.requires_grad for weight in model.parameters()):
            raise UserError("train.frozen: nothing of the model is left to train in epoch 1")
        model.hold()

    def groups(self) -> list[dict[str, Any]]:
        """The weights that are trained at any time, for an optimiser: by learning rate, and by whether they decay."""
        undecayed = {id(weight) for weight in self.model.caption_encoder.undecayed()}
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

    def start_epoch(self, epoch: int, optimizer: Optimizer) -> float:
        """Set the learning rates of an epoch (from 0), and hold what waits; returns the rate of what has none of its own."""
        self.model.hold(*self.frozen(epoch))
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.decay(epoch)
        return self.settings.learning_rate * self.decay(epoch)
