"""InfoNCE, the loss of CLIP."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from vse.train.losses.base import Mask, Scalar, ScoreMatrix
from vse.train.losses.contrastive import ContrastiveLoss, ScoreBlock

_MASKED = -1e30  # a logit without effect; unlike infinity, its differences are finite
_CLIP = 0.07  # the first temperature of CLIP


class InfoNce(ContrastiveLoss):
    """Cross entropy of each query's positive among its negatives (van den Oord et al., 2018), in both directions.

    A learned temperature starts at 0.07 unless another value is set, and the logits are at most the scores times 100 (CLIP:
    Radford et al., 2021, section 2.3). With ``same_image: positive`` the cost of a query is the mean of the cross entropies of
    its positives, each among all candidates (UniCL: Yang et al., 2022, Eqs. 3 and 4). The margin is not used.
    """

    name: Literal["infonce"] = "infonce"
    least_temperature: float = Field(0.01, ge=1e-6, description="lower bound of a learned temperature")

    @model_validator(mode="before")
    @classmethod
    def _start_as_clip(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("learned") is True and "temperature" not in content:
            return {**content, "temperature": _CLIP}
        return content

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if self.learned and self.temperature < self.least_temperature:
            raise ValueError(
                f"temperature {self.temperature:g} is below the lower bound, least_temperature {self.least_temperature:g}"
            )
        return self

    @property
    def lower_bound(self) -> float:
        return self.least_temperature

    def logit_cost(self, logits: ScoreMatrix, positives: Mask, negatives: Mask) -> Scalar:
        logs = logits.masked_fill(~(positives | negatives), -torch.inf).log_softmax(1)
        return -(logs.masked_fill(~positives, 0).sum(1) / positives.sum(1)).sum()

    def block_cost(self, block: ScoreBlock) -> tuple[Scalar, Float[Tensor, " m"]]:
        logits, own, same = block
        if self.same_image == "positive":
            positives = logits.masked_fill(~same, 0).sum(1) / same.sum(1)
        else:
            positives = logits.gather(1, own[:, None])[:, 0]
        if self.same_image == "mask":
            logits = logits.masked_fill(same.scatter(1, own[:, None], False), _MASKED)
        both = (self.lambda1 + self.lambda2) * positives.sum()
        return self.lambda1 * logits.logsumexp(1).sum() - both, logits.logsumexp(0)

    def column_cost(self, columns: Float[Tensor, "n_blocks m"]) -> Scalar:
        return self.lambda2 * columns.logsumexp(0).sum()

    def collapsed_cost(self, n_same: Int[Tensor, " n"], mean: Scalar) -> Scalar:
        left_out = n_same - 1 if self.same_image == "mask" else torch.zeros_like(n_same)
        return (self.lambda1 + self.lambda2) * (len(n_same) - left_out).log().sum()
