"""The spectrum of losses from the sum of hinges to their max, by one temperature."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from vse.train.losses.base import hinge_costs
from vse.train.losses.ranking import RankingLoss


class SpectrumOfHinges(RankingLoss):
    """Hinges re-weighted by how far they are from the hardest of their query.

    The VSE++ paper remarks after Eq. 6 that a spectrum of losses lies between SH and MH, in which the gradients of all
    triplets are re-weighted. Here a hinge h weighs exp((h - max h) / temperature), the maximum being its query's; no
    gradient flows through the weights. So a temperature near 0 is MH (but counts all of several hardest hinges that tie), a
    high one SH.
    """

    name: Literal["spectrum"] = "spectrum"
    temperature: float = Field(0.1, ge=1e-6, description="near 0 the max of hinges, infinite their sum")

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        hinges = hinge_costs(scores, positives, negatives, self.margin)
        below = (hinges - hinges.amax(1, keepdim=True)).detach()
        return ((below / self.temperature).exp() * hinges).sum()
