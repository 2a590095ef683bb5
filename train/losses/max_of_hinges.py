"""Max of hinges (MH), the loss of VSE++."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from vse.train.losses.base import hinge_costs
from vse.train.losses.ranking import RankingLoss


class MaxOfHinges(RankingLoss):
    """Max of hinges: only the hardest negative of each query has a cost (VSE++ paper, Eq. 6).

    Negatives that tie for the hardest share the gradient equally, as in the derivative of ``amax``. The maximum in the
    authors' code selects one of them, which gets the complete gradient. The loss is the same.
    """

    name: Literal["max"] = "max"
    mirrored_positive: bool = Field(
        False,
        description="count the positive as a negative with the score -s, as the code of DSVE-loc does: it subtracts twice the "
        "diagonal instead of leaving it out, so a pair with s < 0 costs at least margin - 2 s",
    )

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        costs = hinge_costs(scores, positives, negatives, self.margin)
        if self.mirrored_positive:
            mirrored = (self.margin - 2 * scores.gather(1, positives[:, None])).clamp(min=0)
            costs = torch.cat([costs, mirrored], 1)
        return costs.amax(dim=1).sum()
