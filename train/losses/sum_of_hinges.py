"""Sum of hinges (SH), the loss of VSE0."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from vse.pipeline.config import LossConfig
from vse.train.losses.hinges import hinge_costs


def sum_of_hinges(scores: Float[Tensor, "n n"], negatives: Bool[Tensor, "n n"], settings: LossConfig) -> Float[Tensor, ""]:
    """Every wrong caption and every wrong image within the margin costs (VSE++ paper, Eq. 5), summed over the batch."""
    wrong_caption, wrong_image = hinge_costs(scores, negatives, settings.margin)
    return settings.lambda1 * wrong_caption.sum() + settings.lambda2 * wrong_image.sum()
