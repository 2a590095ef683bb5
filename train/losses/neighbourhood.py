"""Neighbourhood constraints: related items of one side should be nearer to each other than unrelated ones."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.train.losses.base import Loss, highest


def neighbourhood(
    scores: Float[Tensor, "n n"], neighbours: Bool[Tensor, "n n"], outside: Bool[Tensor, "n n"], settings: Loss
) -> Float[Tensor, ""]:
    """Return the hinges [m + d(y, y+) - d(y, y-)]+ of queries y, neighbours y+ and other items y- (two-branch, Eqs. 4 to 6).

    ``scores`` = -d are the scores of all items of one side with each other. The ``k`` highest hinges of each query and
    neighbour are summed. With the reduction ``mean_topk``, as in the authors' code, only the farthest neighbour counts, a
    query is its own neighbour, and the result is the mean of the ``k`` highest hinges over all queries.
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
    """Return which items of one side are related: they share an item of the other side in some pair of the batch.

    ``own`` and ``others`` are the indices of the items of each pair on both sides. Returns the first pair of each of the m
    different items, a mask of neighbours (an item is not its own neighbour), and a mask of unrelated items.
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
