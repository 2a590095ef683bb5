"""The second player of a training: parameters of its own, updated in the same step as the model, saved and resumed with it."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from vse.pipeline.config import Settings
from vse.train.losses.base import Batch, Cost
from vse.train.models.build import Model


class Adversary(nn.Module):
    """A network that makes a batch harder and is trained against the model."""

    def candidates(self, batch: Batch, model: Model) -> Batch:
        """The batch with further candidates, see ``more_images`` and ``more_captions`` of a batch."""
        raise NotImplementedError

    def objective(self, cost: Cost, batch: Batch) -> Tensor:
        """What the adversary minimises: minus the model's loss, unless it says otherwise."""
        return -cost.loss


class AdversarySettings(Settings):
    """Settings of an adversary, chosen by its ``name``."""

    name: str
    learning_rate: float = Field(2e-4, gt=0, description="of the adversary's own Adam")

    def build(self, model: Model) -> Adversary:
        """The adversary of a model, with its first weights drawn from torch's default generator."""
        raise NotImplementedError
