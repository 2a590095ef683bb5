"""InfoNCE, the yardstick of today's models."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from vse.train.losses.ranking import RankingLoss


class InfoNce(RankingLoss):
    """Cross entropy of each query's positive among its negatives (van den Oord et al., 2018).

    It is taken in both directions, as by Radford et al. (2021). The margin is not used.
    """

    name: Literal["infonce"] = "infonce"
    temperature: float = Field(0.1, ge=1e-6, description="divides the scores")

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        candidates = negatives.scatter(1, positives[:, None], True)
        logits = (scores / self.temperature).masked_fill(~candidates, -torch.inf)
        return -logits.log_softmax(1).gather(1, positives[:, None]).sum()
