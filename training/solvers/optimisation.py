"""The optimisation of a model's weights: optimisers, learning rates and their schedule, frozen parts, and averaged weights."""

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
from vse.training.models.build import Model
from vse.training.settings import TrainConfig

_EMA_DECAY_OFFSET = 10  # update t of an average has a decay of at most (1 + t) / (_EMA_DECAY_OFFSET + t)
log = logging.getLogger(__name__)
_NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _remove_compile_hooks(optimizer: type[Optimizer]) -> Any:
    """Return a subclass of a torch optimizer without the hooks for compilation, which import torch's slow compiler."""
    names = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(optimizer.step))  # one of the removed hooks disables gradients
    return type(optimizer.__name__, (optimizer,), {**methods, "step": step})


OPTIMIZERS = {"adam": _remove_compile_hooks(torch.optim.Adam), "adamw": _remove_compile_hooks(torch.optim.AdamW)}


class AveragedWeights:
    """An exponential moving average of a model's weights (Polyak and Juditsky, 1992; Tarvainen and Valpola, NIPS 2017).

    The average m starts as the model's current weights w. Update t (from 1) sets m to d m + (1 - d) w, where
    d = min(decay, (1 + t) / (10 + t)) is low at first, so that the average soon forgets the random initial weights. Statistics
    of batch normalisations are averaged in the same way. Integers, such as a count of batches, are copied from the model.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._n_updates = 0
        self.weights: dict[str, Tensor] = {name: weight.clone() for name, weight in model.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        self._n_updates += 1
        decay = min(self._decay, (1 + self._n_updates) / (_EMA_DECAY_OFFSET + self._n_updates))
        for name, weight in self._model.state_dict().items():
            mean = self.weights[name]
            if mean.is_floating_point():
                mean.lerp_(weight, 1 - decay)
            else:
                mean.copy_(weight)

    @contextmanager
    def use_in_model(self) -> Iterator[None]:
        """Give the model the averaged weights in the caller's ``with`` block, and its own weights again afterwards."""
        own = {name: weight.clone() for name, weight in self._model.state_dict().items()}
        self._model.load_state_dict(self.weights)
        try:
            yield
        finally:
            self._model.load_state_dict(own)

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "n_updates": self._n_updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, mean in self.weights.items():
            mean.copy_(state["weights"][name])
        self._n_updates = int(state["n_updates"])


class Schedule:
    """A schedule of learning rates and frozen parts. Parts are modules of the model, named by their dotted names.

    Raises UserError if the settings name an unknown part, or leave nothing to train in the first epoch.
    """

    def __init__(self, settings: TrainConfig, model: Model) -> None:
        self.settings, self.model = settings, model
        modules = {name: module for name, module in model.named_modules() if name}
        frozen_names = [name for name, epochs in settings.frozen.items() if epochs]
        for key, names in (("frozen", frozen_names), ("learning_rates", settings.learning_rates)):
            for name in names:
                if name not in modules:
                    raise UserError(f"train.{key}: the model has no part {name!r}{did_you_mean(name, modules)}")
        self._group_learning_rates: list[float] = []  # learning rate of each parameter group, before any decay
        self._loss_group: tuple[nn.Module, float] | None = None
        model.freeze_modules(*self.frozen_parts(0))
        if not any(weight.requires_grad for weight in model.parameters()):
            raise UserError("train.frozen: no part of the model is left to train in epoch 1")
        model.freeze_modules()

    def add_loss_parameters(self, loss: nn.Module, rate: float | None) -> None:
        """Add the parameters of a loss, without weight decay. ``rate``: their learning rate; None: ``train.learning_rate``."""
        self._loss_group = loss, rate or self.settings.learning_rate

    def build_parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trainable weights as parameter groups of an optimiser, one group for each learning rate and decay."""
        without_decay = self._ids_of_weights_without_decay()
        weights = {id(weight): weight for weight in self.model.parameters() if weight.requires_grad}
        rates = dict.fromkeys(weights, self.settings.learning_rate)
        rate_by_part = self.settings.learning_rates
        for name in sorted(
            rate_by_part, key=len
        ):  # a longer name is a smaller part, whose rate replaces that of the larger one
            rates |= {
                id(weight): rate_by_part[name]
                for weight in self.model.get_submodule(name).parameters()
                if id(weight) in weights
            }
        groups = []
        self._group_learning_rates = []
        for rate in dict.fromkeys([self.settings.learning_rate, *rate_by_part.values()]):
            for decays in (True, False):
                chosen = [w for key, w in weights.items() if rates[key] == rate and (key not in without_decay) == decays]
                groups.append({"params": chosen, "lr": rate, "weight_decay": self.settings.weight_decay if decays else 0.0})
                self._group_learning_rates.append(rate)
        if self._loss_group is not None:
            loss, rate = self._loss_group
            groups.append({"params": list(loss.parameters()), "lr": rate, "weight_decay": 0.0})
            self._group_learning_rates.append(rate)
        return groups

    def frozen_parts(self, epoch: int) -> list[str]:
        """Return the names of the parts that are frozen in an epoch (0-based)."""
        return [name for name, epochs in self.settings.frozen.items() if epochs == "always" or epoch < epochs]

    def step_decay_factor(self, epoch: int) -> float:
        """Return the factor by which the schedule ``step`` has reduced learning rates in an epoch (0-based)."""
        settings = self.settings
        if settings.decay_at:
            return settings.decay ** sum(epoch >= after for after in settings.decay_at)
        return settings.decay ** (epoch // settings.decay_after)

    def learning_rate_factor(self, epoch: int, update: int = 0, n_updates: int = 1) -> float:
        """Return the factor that warm-up and decay apply to the learning rates of an update.

        ``epoch``, ``update`` : index of the epoch, and of the update in the epoch, from 0.
        ``n_updates`` : number of updates in each epoch.
        """
        settings = self.settings
        before = epoch * n_updates + update
        rising = (before + 1) / settings.warmup_steps if before < settings.warmup_steps else 1.0
        if settings.schedule == "step":
            return rising * self.step_decay_factor(epoch)
        falling = max(0, before - settings.warmup_steps) / max(1, settings.epochs * n_updates - settings.warmup_steps)
        return rising * (1 + math.cos(math.pi * falling)) / 2

    def learning_rate(self, epoch: int, update: int = 0, n_updates: int = 1) -> float:
        """Return the learning rate of an update for parts without a separate learning rate."""
        return self.settings.learning_rate * self.learning_rate_factor(epoch, update, n_updates)

    def warn_if_all_warmup(self, n_updates: int) -> None:
        """Warn if the warm-up is not shorter than the training. ``n_updates`` is the number of updates in an epoch."""
        settings = self.settings
        if 0 < settings.epochs * n_updates <= settings.warmup_steps:
            log.warning(
                "train.warmup_steps: all %d updates are warm-up, so the full learning rate is never used",
                settings.epochs * n_updates,
            )

    def freeze_scheduled_parts(self, epoch: int) -> None:
        """Freeze the parts that the settings freeze in this epoch (0-based)."""
        self.model.freeze_modules(*self.frozen_parts(epoch))

    def set_learning_rates(self, optimizer: Optimizer, epoch: int, update: int = 0, n_updates: int = 1) -> None:
        """Set the learning rates of an update. No other code sets them, so that a resume is exact."""
        factor = self.learning_rate_factor(epoch, update, n_updates)
        for group, rate in zip(optimizer.param_groups, self._group_learning_rates, strict=True):
            group["lr"] = rate * factor

    def _ids_of_weights_without_decay(self) -> set[int]:
        kinds = self.settings.undecayed
        chosen = {id(weight) for weight in self.model.caption_encoder.weights_without_decay()} if "words" in kinds else set()
        for module in self.model.modules():
            for name, weight in module.named_parameters(recurse=False):
                is_a = {
                    "embeddings": isinstance(module, nn.Embedding),
                    "biases": "bias" in name,
                    "norms": isinstance(module, _NORM_LAYERS),
                    "vectors": weight.ndim <= 1,
                }
                if any(is_a.get(kind, False) for kind in kinds):
                    chosen.add(id(weight))
        return chosen
