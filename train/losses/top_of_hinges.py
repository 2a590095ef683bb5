"""Sum of the K highest hinges, the loss of the two-branch embedding network."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.train.losses.base import highest, hinge_costs
from vse.train.losses.ranking import RankingLoss


class TopOfHinges(RankingLoss):
    """Top of hinges: the ``k`` negatives with the highest cost count for each query (two-branch paper, Eq. 3, section 5.1).

    The hinges [m + d(x, y) - d(x, y')]+ are those of the scores s = -d. With masked negatives, an image that occurs several
    times in a batch is a negative only in its first row.
    """

    name: Literal["top"] = "top"
    distinct_candidates: ClassVar = True

    @property
    def averages(self) -> bool:
        return self.reduction == "mean_topk"

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        return highest(hinge_costs(scores, positives, negatives, self.margin), self)
