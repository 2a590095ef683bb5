"""Neighbourhood constraints: what belongs together within one side is nearer than what does not."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.train.losses.base import Loss, highest


def neighbourhood(
    scores: Float[Tensor, "n n"], neighbours: Bool[Tensor, "n n"], outside: Bool[Tensor, "n n"], settings: Loss
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


def related(
    own: Int[Tensor, " n"], others: Int[Tensor, " n"]
) -> tuple[Int[Tensor, " m"], Bool[Tensor, "m m"], Bool[Tensor, "m m"]]:
    """Which items of one side belong together, since they share an item of the other side in some pair of the batch.

    ``own`` and ``others`` number the items of each pair on both sides. Returns the first pair of each different item, which of
    these are neighbours of which (none of itself), and which are not related at all.
    """
    items, item_of = torch.unique(own, return_inverse=True)
    partners, partner_of = torch.unique(others, return_inverse=True)
    places = torch.arange(len(own), device=own.device)
    first = places.new_full((len(items),), len(own)).scatter_reduce(0, item_of, places, "amin")
    has = torch.zeros(len(items), len(partners), device=own.device)
    has[item_of, partner_of] = 1
    share = (has @ has.T) > 0
    itself = torch.eye(len(items), dtype=torch.bool, device=own.device)
    return first, share & ~itself, ~share
