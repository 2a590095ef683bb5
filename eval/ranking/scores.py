"""Cosine and order scores of embeddings, by the name of the similarity, a tile of pairs at a time.

These are the only implementations of both similarities; the forward pass of training computes the same scores with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vse.pipeline.errors import UserError, did_you_mean

# Differences that are held at once, 1 MB. More of them do not fit into the cache of a core and take 1.5 times as long; fewer
# of them are not enough work for n_rows cores.
_DIFFERENCES = 2**18


class RankingSimilarity(NamedTuple):
    """A similarity, and the size of the tiles in which all pairs are scored fastest.

    The function ``score(images, captions, out)`` writes the scores of ``images`` (n_images, dim) with ``captions``
    (n_captions, dim) into ``out`` (n_images, n_captions).
    """

    score: Callable[[Tensor, Tensor, Tensor], None]
    tile_images: int
    tile_captions: int


def cosine_scores(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], out: Float[Tensor, "n_images n_captions"]
) -> None:
    """Write the inner products of all pairs into ``out``; for unit vectors these are the cosines.

    Like :func:`order_scores` this is for ranking only: no gradient flows through it.
    """
    torch.mm(images, captions.T, out=out)


def order_scores(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], out: Float[Tensor, "n_images n_captions"]
) -> None:
    """Write the order scores of all pairs into ``out``: the negative squared amount by which a caption exceeds an image.

    s(i, c) = -||max(0, c - i)||^2 (Vendrov et al. 2016; VSE++ paper, section 3.5), where the caption is the more general side.
    The computation needs one megabyte besides ``out``. It adds up the differences themselves, because the expansion
    |c|^2 - 2ci + |i|^2 would lose small differences, and a dominated caption would not score 0.
    """
    n_rows = max(1, _DIFFERENCES // max(1, captions.numel()))
    buffer = captions.new_empty(min(n_rows, len(images)), *captions.shape)
    for start in range(0, len(images), n_rows):
        rows = images[start : start + n_rows, None]
        larger = torch.maximum(captions, rows, out=buffer[: len(rows)])
        # max(0, c - i) = max(c, i) - i; torch subtracts and squares in one step, but only with this operator.
        torch.ops.aten.mse_loss.out(larger, rows, 0, out=larger)
        torch.sum(larger, 2, out=out[start : start + n_rows])
    out.neg_()


# Ranking first scores all images of a tile with all captions of these images; if a pair is expensive, tiles have few images.
SIMILARITIES = {
    "cosine": RankingSimilarity(cosine_scores, tile_images=512, tile_captions=2560),
    "order": RankingSimilarity(order_scores, tile_images=64, tile_captions=32),
}


def similarity_by_name(name: str) -> RankingSimilarity:
    """Return the similarity of that name. Raises UserError if it is unknown."""
    if name not in SIMILARITIES:
        raise UserError(f"unknown similarity {name!r}{did_you_mean(name, SIMILARITIES)}")
    return SIMILARITIES[name]
