"""Sum of hinges (SH), the loss of VSE0."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.train.losses.base import hinge_costs
from vse.train.losses.ranking import RankingLoss


class SumOfHinges(RankingLoss):
    """Sum of hinges: every negative within the margin has a cost (VSE++ paper, Eq. 5)."""

    name: Literal["sum"] = "sum"

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        return hinge_costs(scores, positives, negatives, self.margin).sum()
