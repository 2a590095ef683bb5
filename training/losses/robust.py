"""A loss for noisy pairs: some captions of the training data describe another image."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from vse.training.losses.base import Mask, PositiveColumns, Scalar, ScoreMatrix, upcast_to_float32
from vse.training.losses.ranking import RankingLoss


class GeneralisedCrossEntropy(RankingLoss):
    """Generalised cross entropy: each query costs (1 - p^q) / q (Zhang and Sabuncu, NeurIPS 2018).

    p is the probability of the query's positive: the softmax of score / temperature over the positive and all negatives. The
    gradient of a query is the gradient of InfoNCE, -log p, times p^q. A model finds most wrong pairs unlikely, so they count
    less. With q near 0 the loss is InfoNCE, and with q = 1 it is 1 - p. The margin is not used.
    """

    name: Literal["gce"] = "gce"
    temperature: float = Field(0.07, ge=1e-6, description="divisor of the scores")
    q: float = Field(0.4, gt=0, le=1, description="near 0: InfoNCE; higher: unlikely pairs count less")

    def cost(self, scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask) -> Scalar:
        own = torch.zeros_like(negatives).scatter(1, positives[:, None], True)
        logits = (upcast_to_float32(scores) / self.temperature).masked_fill(~(own | negatives), -torch.inf)
        log_probabilities = logits.log_softmax(1).gather(1, positives[:, None])
        return -torch.expm1(self.q * log_probabilities).sum() / self.q
