"""The sigmoid loss, by which SigLIP learns."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from vse.train.losses.contrastive import ContrastiveLoss, ScoreBlock


class Sigmoid(ContrastiveLoss):
    """log(1 + exp(-z (s / temperature + bias))) of every pair of a batch, z = +1 or -1 (SigLIP: Zhai et al., 2023, Eq. 1).

    A pair is seen from its image and from its caption, and counts half each time. ``same_image`` says of other captions of an
    image whether they have z = -1 (``keep``), z = +1 (``positive``) or do not count (``mask``). The margin is not used.
    """

    name: Literal["sigmoid"] = "sigmoid"
    learned: bool = Field(True, description="whether the temperature and the bias are learned")
    bias: float = Field(-10.0, description="added to the logits; if it is learned, where it starts")
    lambda1: float = Field(0.5, ge=0, description="weight of the terms in which an image is the query")
    lambda2: float = Field(0.5, ge=0, description="weight of those in which a caption is")

    @property
    def first_bias(self) -> float:
        return self.bias

    def equal_scores(self, scores: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        return scores.mean().expand_as(scores) if scores.numel() else scores

    def of_logits(
        self, logits: Float[Tensor, "n m"], positives: Bool[Tensor, "n m"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        costs = softplus(torch.where(positives, -logits, logits))
        return costs.masked_fill(~(positives | negatives), 0).sum()

    def of_block(self, block: ScoreBlock) -> tuple[Float[Tensor, ""], Float[Tensor, " m"]]:
        logits, own, same = block
        paired = torch.zeros_like(same).scatter(1, own[:, None], True)
        positives = same if self.same_image == "positive" else paired
        negatives = ~paired if self.same_image == "keep" else ~same
        return (self.lambda1 + self.lambda2) * self.of_logits(logits, positives, negatives), logits.new_empty(0)

    def of_columns(self, columns: Float[Tensor, "n_blocks m"]) -> Float[Tensor, ""]:
        return columns.sum()

    def of_equal(self, n_same: Int[Tensor, " n"], mean: Float[Tensor, ""]) -> Float[Tensor, ""]:
        n = len(n_same)
        n_positives = n_same.sum() if self.same_image == "positive" else torch.tensor(n)
        n_negatives = n * n - (n if self.same_image == "keep" else n_same.sum())
        return (self.lambda1 + self.lambda2) * (n_positives * softplus(-mean) + n_negatives * softplus(mean))
