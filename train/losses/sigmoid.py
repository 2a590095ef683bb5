"""The sigmoid loss of SigLIP."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from vse.train.losses.base import Mask, Scalar, ScoreMatrix
from vse.train.losses.contrastive import ContrastiveLoss, ScoreBlock


class Sigmoid(ContrastiveLoss):
    """The sigmoid loss log(1 + exp(-z (s / temperature + bias))) of all pairs (SigLIP: Zhai et al., 2023, Eq. 1).

    Positive pairs have z = +1, negative ones z = -1. Each pair counts half in either direction. Other captions of the same
    image have z = -1 (``same_image: keep``), z = +1 (``positive``) or are left out (``mask``). The margin is not used.
    """

    name: Literal["sigmoid"] = "sigmoid"
    learned: bool = Field(True, description="whether the temperature and the bias are learned")
    bias: float = Field(-10.0, description="added to the logits; the first value of a learned bias")
    lambda1: float = Field(0.5, ge=0, description="weight of the terms with an image as the query")
    lambda2: float = Field(0.5, ge=0, description="weight of the terms with a caption as the query")

    @property
    def initial_bias(self) -> float:
        return self.bias

    def equal_scores(self, scores: ScoreMatrix) -> ScoreMatrix:
        return scores.mean().expand_as(scores) if scores.numel() else scores

    def logit_cost(self, logits: ScoreMatrix, positives: Mask, negatives: Mask) -> Scalar:
        costs = softplus(torch.where(positives, -logits, logits))
        return costs.masked_fill(~(positives | negatives), 0).sum()

    def block_cost(self, block: ScoreBlock) -> tuple[Scalar, Float[Tensor, " m"]]:
        logits, own, same = block
        paired = torch.zeros_like(same).scatter(1, own[:, None], True)
        positives = same if self.same_image == "positive" else paired
        negatives = ~paired if self.same_image == "keep" else ~same
        return (self.lambda1 + self.lambda2) * self.logit_cost(logits, positives, negatives), logits.new_empty(0)

    def column_cost(self, columns: Float[Tensor, "n_blocks m"]) -> Scalar:
        return columns.sum()

    def collapsed_cost(self, n_same: Int[Tensor, " n"], mean: Scalar) -> Scalar:
        n = len(n_same)
        n_positives = n_same.sum() if self.same_image == "positive" else torch.tensor(n)
        n_negatives = n * n - (n if self.same_image == "keep" else n_same.sum())
        return (self.lambda1 + self.lambda2) * (n_positives * softplus(-mean) + n_negatives * softplus(mean))
