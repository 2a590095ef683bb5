"""Max of hinges (MH), the loss of VSE++."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from vse.pipeline.config import LossConfig
from vse.train.losses.hinges import hinge_costs


def max_of_hinges(scores: Float[Tensor, "n n"], negatives: Bool[Tensor, "n n"], settings: LossConfig) -> Float[Tensor, ""]:
    """Only the hardest wrong caption and the hardest wrong image cost (VSE++ paper, Eq. 6), summed over the batch."""
    wrong_caption, wrong_image = hinge_costs(scores, negatives, settings.margin)
    return settings.lambda1 * wrong_caption.amax(dim=1).sum() + settings.lambda2 * wrong_image.amax(dim=0).sum()
