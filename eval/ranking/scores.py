"""Cosine and order scores of embeddings, for ranking: the similarities by name, scored a tile of pairs at a time.

These are the only implementations of both; training computes the same scores in its forward pass by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vse.pipeline.errors import UserError, did_you_mean

# Differences held at once, 1 MB: more would leave the cache of a core and take half as long again, fewer would
# leave nothing for several cores to share.
_DIFFERENCES = 2**18


class RankingSimilarity(NamedTuple):
    """A similarity, and the size of the tiles in which all pairs are scored fastest.

    ``score(images, captions, out)`` writes the scores of ``images`` (n_images, dim) with ``captions``
    (n_captions, dim) into ``out`` (n_images, n_captions).
    """

    score: Callable[[Tensor, Tensor, Tensor], None]
    tile_images: int
    tile_captions: int


def cosine_scores(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], out: Float[Tensor, "n_images n_captions"]
) -> None:
    """Write the inner products of all pairs into ``out``; of unit vectors these are the cosines.

    Like :func:`order_scores` it is made for ranking: no gradient flows through it.
    """
    torch.mm(images, captions.T, out=out)


def order_scores(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], out: Float[Tensor, "n_images n_captions"]
) -> None:
    """Write the order scores of all pairs into ``out``: how little each caption, the more general side, exceeds each image.

    s(i, c) = -||max(0, c - i)||^2 (Vendrov et al. 2016; VSE++ paper, section 3.5), in memory of one megabyte besides
    ``out``. The sum runs over the differences themselves: written out as |c|^2 - 2ci + |i|^2 it would lose the small ones,
    and a dominated caption would not score 0.
    """
    several = max(1, _DIFFERENCES // max(1, captions.numel()))
    buffer = captions.new_empty(min(several, len(images)), *captions.shape)
    for start in range(0, len(images), several):
        rows = images[start : start + several, None]
        larger = torch.maximum(captions, rows, out=buffer[: len(rows)])
        # max(0, c - i) = max(c, i) - i, which torch subtracts and squares in one go, but only by this name.
        torch.ops.aten.mse_loss.out(larger, rows, 0, out=larger)
        torch.sum(larger, 2, out=out[start : start + several])
    out.neg_()


# Ranking scores all images of a tile with all their own captions first; where a pair is dear, few images keep that small.
SIMILARITIES = {
    "cosine": RankingSimilarity(cosine_scores, tile_images=512, tile_captions=2560),
    "order": RankingSimilarity(order_scores, tile_images=64, tile_captions=32),
}


def similarity_by_name(name: str) -> RankingSimilarity:
    """The similarity of that name; :class:`UserError` names those that there are."""
    if name not in SIMILARITIES:
        raise UserError(f"unknown similarity {name!r}{did_you_mean(name, SIMILARITIES)}")
    return SIMILARITIES[name]
