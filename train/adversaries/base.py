"""What all adversaries share: weights of their own, updated in the same step as the model, saved and resumed with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.pipeline.config import Settings
from vse.train.data.captions import CaptionInputs
from vse.train.data.images import TrainingImages
from vse.train.data.pairs import Pairs
from vse.train.losses.base import Batch, Cost, Loss, Objective
from vse.train.models.build import Model


@dataclass(frozen=True)
class Opponent:
    """What an adversary plays against.

    model, loss : the experiment's
    pairs, images, captions : what is trained on
    batch_size, precision, device : of a training step
    """

    model: Model
    loss: Loss
    pairs: Pairs
    images: TrainingImages
    captions: CaptionInputs
    batch_size: int
    precision: str
    device: torch.device


class Round(NamedTuple):
    """What both players make of a batch.

    cost : what the model minimises
    loss : what the adversary minimises
    measures : scalars that a run logs, as means over an epoch
    """

    cost: Cost
    loss: Tensor
    measures: dict[str, Tensor]


class Adversary(nn.Module):
    """A network that makes a batch harder and is trained against the model.

    One that adds candidates for all queries has :meth:`candidates`, and :meth:`objective` if that is not minus the model's
    loss; one that does more has a :meth:`play` of its own.
    """

    def play(self, batch: Batch, model: Model, objective: Objective, seed: int) -> Round:
        """Both players' objectives for a batch, which ``objective``, with ``seed``, gives the cost of."""
        harder = self.candidates(batch, model)
        cost = objective(harder, seed)
        return Round(cost, self.objective(cost, harder), {})

    def candidates(self, batch: Batch, model: Model) -> Batch:
        """The batch with further candidates, see ``more_images`` and ``more_captions`` of a batch."""
        return batch

    def objective(self, cost: Cost, batch: Batch) -> Tensor:
        """What the adversary minimises: minus the model's loss, unless it says otherwise."""
        return -cost.loss

    def start_epoch(self, model: Model) -> None:
        """Called before the first step of an epoch."""


class AdversarySettings(Settings):
    """Settings of an adversary, chosen by its ``name``."""

    name: str
    learning_rate: float = Field(2e-4, gt=0, description="of the adversary's own Adam")
    clip: float | None = Field(None, gt=0, description="bound on the global norm of the adversary's gradient; none: no bound")
    every: PositiveInt = Field(1, description="steps of the model for one of the adversary")

    def build(self, opponent: Opponent) -> Adversary:
        """The adversary of a model, with its first weights drawn from torch's default generator.

        :class:`vse.pipeline.errors.UserError` if it does not go with the model, the loss or the features.
        """
        raise NotImplementedError
