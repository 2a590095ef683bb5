"""Losses of hinges: max (VSE++), sum (VSE0), the k highest hinges (two-branch networks), and a weighted sum (spectrum)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from vse.training.losses.base import Mask, PositiveColumns, Scalar, ScoreMatrix, hinge_costs, reduce_highest_costs
from vse.training.losses.ranking import RankingLoss


class MaxOfHinges(RankingLoss):
    """Max of hinges: only the hardest negative of each query has a cost (VSE++ paper, Eq. 6).

    Equally hard negatives share the gradient equally. In the authors' code, one of them gets the complete gradient.
    """

    name: Literal["max"] = "max"
    mirrored_positive: bool = Field(
        False,
        description="count a positive of score s also as a negative of score -s, so that a pair with s < 0 costs at least "
        "margin - 2 s. The code of DSVE-loc does this: it subtracts twice the diagonal instead of leaving the diagonal out",
    )

    def cost(self, scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask) -> Scalar:
        costs = hinge_costs(scores, positives, negatives, self.margin)
        if self.mirrored_positive:
            mirrored = (self.margin - 2 * scores.gather(1, positives[:, None])).clamp(min=0)
            costs = torch.cat([costs, mirrored], 1)
        return costs.amax(dim=1).sum()


class SumOfHinges(RankingLoss):
    """Sum of hinges: every negative within the margin has a cost (VSE++ paper, Eq. 5)."""

    name: Literal["sum"] = "sum"

    def cost(self, scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask) -> Scalar:
        return hinge_costs(scores, positives, negatives, self.margin).sum()


class TopOfHinges(RankingLoss):
    """Top of hinges: the cost of a query comes from its ``k`` costliest negatives (two-branch paper, Eq. 3, section 5.1).

    ``reduction`` decides whether these costs are summed or averaged. The paper's hinges [m + d(x, y) - d(x, y')]+, with the
    margin m and distances d, equal the hinges of this class for the scores s = -d. If other captions of the same image are
    masked (``same_image: mask``), an image that occurs several times in a batch counts as a negative only once.
    """

    name: Literal["top"] = "top"
    has_distinct_candidates: ClassVar = True

    @property
    def is_mean_over_queries(self) -> bool:
        return self.reduction == "mean_topk"

    def cost(self, scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask) -> Scalar:
        return reduce_highest_costs(hinge_costs(scores, positives, negatives, self.margin), self)


class SpectrumOfHinges(RankingLoss):
    """A weighted sum of hinges, between the max and the sum of hinges (VSE++ paper, remark after Eq. 6).

    The weight of a hinge h is exp((h - max h) / temperature), with the maximum over all hinges of the query. No gradient flows
    through the weights.
    """

    name: Literal["spectrum"] = "spectrum"
    temperature: float = Field(0.1, ge=1e-6, description="near 0: the max of hinges; very high: the sum of hinges")

    def cost(self, scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask) -> Scalar:
        hinges = hinge_costs(scores, positives, negatives, self.margin)
        below = (hinges - hinges.amax(1, keepdim=True)).detach()
        return ((below / self.temperature).exp() * hinges).sum()
