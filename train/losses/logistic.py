"""The logistic loss of single pairs, by which the similarity network learns."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from vse.train.losses.pair_loss import PairLoss


class Logistic(PairLoss):
    """log(1 + exp(-z p)) of scores p and labels z = +1 (positive pair) or -1 (negative pair) (two-branch paper, Eq. 7)."""

    name: Literal["logistic"] = "logistic"

    def cost(self, scores: Float[Tensor, " n"], labels: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        return softplus(-labels * scores).sum()
