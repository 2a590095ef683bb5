"""Neighbourhood constraints: what belongs together within one side is nearer than what does not."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vse.pipeline.config import LossConfig
from vse.train.losses.hinges import highest


def neighbourhood(
    scores: Float[Tensor, "n n"], neighbours: Bool[Tensor, "n n"], outside: Bool[Tensor, "n n"], settings: LossConfig
) -> Float[Tensor, ""]:
    """Hinges [m + d(y, y+) - d(y, y-)]+ of queries y, their neighbours y+ and what is outside y- (two-branch, Eqs. 4 to 6).

    ``scores`` = -d compare all of one side with each other. Of each query and neighbour the ``k`` highest hinges are summed.
    With the reduction ``mean_topk`` only the farthest neighbour counts, and the query is a neighbour of its own, as in the
    authors' code; the mean of the ``k`` highest hinges is taken over all queries.
    """
    if settings.reduction == "mean_topk":
        itself = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        farthest = scores.masked_fill(~(neighbours | itself), torch.inf).amin(1, keepdim=True)
        return highest((settings.margin - farthest + scores).clamp(min=0) * outside, settings)
    k = len(scores) if settings.k is None else min(settings.k, len(scores))
    nearest = scores.masked_fill(~outside, -torch.inf).topk(k, sorted=False).values
    query, neighbour = neighbours.nonzero(as_tuple=True)
    return (settings.margin - scores[query, neighbour, None] + nearest[query]).clamp(min=0).sum()
