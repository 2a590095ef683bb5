"""How pairs of embeddings are scored: the similarities by name, each a tile of images and captions at a time."""

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


class Similarity(NamedTuple):
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
    """Inner products; for unit vectors the cosine."""
    torch.mm(images, captions.T, out=out)


def order_scores(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], out: Float[Tensor, "n_images n_captions"]
) -> None:
    """s(i, c) = -||max(0, c - v)||^2, for the image's v: how far the caption, the more general of the two, exceeds it.

    Vendrov et al. 2016; VSE++ paper, section 3.5. The sum runs over the differences themselves: written out as
    |c|^2 - 2cv + |v|^2 it would lose the small ones, and a dominated caption would not score 0.
    """
    several = max(1, _DIFFERENCES // max(1, captions.numel()))
    buffer = captions.new_empty(min(several, len(images)), *captions.shape)
    for start in range(0, len(images), several):
        rows = images[start : start + several, None]
        larger = torch.maximum(captions, rows, out=buffer[: len(rows)])
        # max(0, c - v) = max(c, v) - v, which torch subtracts and squares in one go, but only by this name.
        torch.ops.aten.mse_loss.out(larger, rows, 0, out=larger)
        torch.sum(larger, 2, out=out[start : start + several])
    out.neg_()


# Ranking scores all images of a tile with all their own captions first; where a pair is dear, few images keep that small.
SIMILARITIES = {
    "cosine": Similarity(cosine_scores, tile_images=512, tile_captions=4096),
    "order": Similarity(order_scores, tile_images=64, tile_captions=32),
}


def similarity_by_name(name: str) -> Similarity:
    """The similarity of that name; :class:`UserError` names those that there are."""
    if name not in SIMILARITIES:
        raise UserError(f"unknown similarity {name!r}{did_you_mean(name, SIMILARITIES)}")
    return SIMILARITIES[name]
