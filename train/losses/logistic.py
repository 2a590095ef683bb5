"""The logistic loss of single pairs, by which the similarity network learns."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus


def logistic(scores: Float[Tensor, " n"], labels: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """log(1 + exp(-z p)) of scores p and labels z = +1 (right pair) or -1 (wrong pair), summed (two-branch paper, Eq. 7)."""
    return softplus(-labels * scores).sum()
