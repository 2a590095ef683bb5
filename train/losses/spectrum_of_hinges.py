"""A spectrum of losses between the sum and the max of hinges, set by a temperature."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from vse.train.losses.base import hinge_costs
from vse.train.losses.ranking import RankingLoss


class SpectrumOfHinges(RankingLoss):
    """Hinges weighted by their distance from the hardest hinge of their query.

    The VSE++ paper remarks after Eq. 6 that a spectrum of losses lies between SH and MH. In these losses the gradients of all
    triplets are re-weighted. Here the weight of a hinge h is exp((h - max h) / temperature), with the maximum over the hinges
    of its query. No gradient flows through the weights. A temperature near 0 gives MH, except that all hinges count that tie
    for the hardest. A high temperature gives SH.
    """

    name: Literal["spectrum"] = "spectrum"
    temperature: float = Field(0.1, ge=1e-6, description="near 0: the max of hinges; very high: their sum")

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        hinges = hinge_costs(scores, positives, negatives, self.margin)
        below = (hinges - hinges.amax(1, keepdim=True)).detach()
        return ((below / self.temperature).exp() * hinges).sum()
