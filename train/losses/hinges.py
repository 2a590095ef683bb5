"""The hinge costs that the ranking losses sum up or take the highest of."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from vse.pipeline.config import LossConfig


def hinge_costs(
    scores: Float[Tensor, "n n"], negatives: Bool[Tensor, "n n"], margin: float
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """Costs [margin - s(i, c) + s(i, c')]+ and [margin - s(i, c) + s(i', c)]+ of every wrong pair, 0 elsewhere.

    In the first matrix row i is the query image and column j the wrong caption; in the second column j is
    the query caption and row i the wrong image.
    """
    right = scores.diagonal()
    wrong_caption = (margin + scores - right[:, None]).clamp(min=0) * negatives
    wrong_image = (margin + scores - right[None, :]).clamp(min=0) * negatives
    return wrong_caption, wrong_image


def highest(costs: Float[Tensor, "n m"], settings: LossConfig) -> Float[Tensor, ""]:
    """The ``k`` highest costs of each row: their sum, or with the reduction ``mean_topk`` their mean over all rows."""
    top = costs if settings.k is None else costs.topk(min(settings.k, costs.shape[1]), sorted=False).values
    return top.mean() if settings.reduction == "mean_topk" else top.sum()
