"""Max of hinges (MH), the loss of VSE++."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.train.losses.hinges import hinge_costs
from vse.train.losses.ranking import RankingLoss


class MaxOfHinges(RankingLoss):
    """Of each query only the hardest negative costs (VSE++ paper, Eq. 6).

    Negatives that tie for the hardest share the gradient in equal parts, as the derivative of ``amax`` has it; the authors'
    code, whose maximum takes one of them, gives it all to that one. The loss is the same.
    """

    name: Literal["max"] = "max"

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        return hinge_costs(scores, positives, negatives, self.margin).amax(dim=1).sum()
