"""InfoNCE in both directions, the yardstick of today's models."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vse.pipeline.config import LossConfig


def infonce(scores: Float[Tensor, "n n"], negatives: Bool[Tensor, "n n"], settings: LossConfig) -> Float[Tensor, ""]:
    """Cross entropy of the right caption among the batch's captions and of the right image among its images, summed.

    Scores are divided by the temperature first (van den Oord et al., 2018; both directions as in Radford et al., 2021). The
    margin is not used.
    """
    pairs = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    logits = (scores / settings.temperature).masked_fill(~negatives & ~pairs, -torch.inf)
    of_images, of_captions = (-logits.log_softmax(dim).diagonal().sum() for dim in (1, 0))
    return settings.lambda1 * of_images + settings.lambda2 * of_captions
