"""The hinge costs that the ranking losses sum up or take the highest of."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.train.losses.base import Loss


def hinge_costs(
    scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"], margin: float
) -> Float[Tensor, "n m"]:
    """The cost [margin - s(q, positive) + s(q, c)]+ of every query q (row) and negative c (column), 0 elsewhere."""
    return (margin + scores - scores.gather(1, positives[:, None])).clamp(min=0) * negatives


def highest(costs: Float[Tensor, "n m"], settings: Loss) -> Float[Tensor, ""]:
    """The ``k`` highest costs of each row: their sum, or with the reduction ``mean_topk`` their mean over all rows."""
    top = costs if settings.k is None else costs.topk(min(settings.k, costs.shape[1]), sorted=False).values
    return top.mean() if settings.reduction == "mean_topk" else top.sum()
