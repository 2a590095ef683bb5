"""Exact ranks of the right answers, in blocks, with ties against the model.

A rank is 0-based. A candidate that scores exactly as high as the right one counts as ranked before it, so a
model that gives every pair the same score earns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.ranking.scores import similarity_by_name
from vse.pipeline.errors import UserError

ROWS = 512  # of a score matrix, ranked at once
_CHECKED = 4096  # rows whose sums are formed at once, in double precision

# Scores of some image rows with all captions, or with the captions of these numbers.
ScoreBlock = Callable[[slice, Tensor | None], Tensor]


@dataclass(frozen=True)
class Ranks:
    """0-based ranks: ``i2t`` of each image's best own caption, ``t2i`` (n_captions,) of each caption's image.

    An image without a caption is no query and has no place in ``i2t``; captions may find it all the same.
    """

    i2t: NDArray[np.int64]
    t2i: NDArray[np.int64]


def ranks_from_embeddings(
    images: Float[Tensor, "n_images dim"],
    captions: Float[Tensor, "n_captions dim"],
    image_of_caption: Int[Tensor, " n_captions"],
    similarity: str = "cosine",
) -> Ranks:
    """Ranks under a similarity of :data:`vse.eval.ranking.scores.SIMILARITIES`.

    Parameters
    ----------
    images : image embeddings
    captions : caption embeddings
    image_of_caption : for each caption the row of its image
    similarity : ``cosine`` (the inner product) or ``order`` (how far captions exceed images)
    """
    block = score_blocks(images, captions, similarity)
    return _ranks(block, len(images), image_of_caption, similarity_by_name(similarity).tile_images)


def score_blocks(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], similarity: str
) -> ScoreBlock:
    """Scores of up to ``tile_images`` images at once, each overwritten by the next; rows are checked to be finite."""
    score, tile_images, tile_captions = similarity_by_name(similarity)
    if images.shape[1] != captions.shape[1]:
        raise UserError(f"images have {images.shape[1]} dimensions, captions {captions.shape[1]}")
    for name, rows in (("images", images), ("captions", captions)):
        check_finite(name, rows)
    captions = captions.float()
    # All tiles have one shape: the arithmetic of a pair then does not depend on how many others are
    # scored with it, so equal embeddings get equal scores wherever they stand.
    everything = _padded(captions, tile_captions)
    buffer = torch.empty(tile_images, len(everything))

    def block(rows: slice, columns: Tensor | None) -> Tensor:
        part = _padded(images[rows].float(), tile_images)
        right = everything if columns is None else _padded(captions[columns], tile_captions)
        for start in range(0, len(right), tile_captions):
            tile = slice(start, start + tile_captions)
            score(part, right[tile], buffer[:, tile])
        return buffer[: rows.stop - rows.start, : len(captions) if columns is None else len(columns)]

    return block


def ranks_from_scores(scores: Float[Tensor, "n_images n_captions"], image_of_caption: Int[Tensor, " n_captions"]) -> Ranks:
    """Ranks from a full score matrix."""
    if scores.shape[1] != len(image_of_caption):
        raise UserError(f"{scores.shape[1]} columns of scores for {len(image_of_caption)} captions")
    return _ranks(scores_in_blocks(scores), len(scores), image_of_caption, ROWS)


def scores_in_blocks(scores: Float[Tensor, "n_images n_captions"]) -> ScoreBlock:
    """A matrix as the blocks that :func:`score_blocks` gives; each is a copy."""

    def block(rows: slice, columns: Tensor | None) -> Tensor:
        return scores[rows].clone() if columns is None else scores[rows][:, columns]

    return block


def _ranks(block: ScoreBlock, n_images: int, image_of_caption: Int[Tensor, " n_captions"], size: int) -> Ranks:
    """The scores of the right pairs first, then, block by block of images, how many others reach them."""
    _check_image_of_caption(image_of_caption, n_images)
    blocks = list(_row_blocks(n_images, image_of_caption, size))
    right = torch.cat([block(rows, own)[image_of_caption[own] - rows.start, torch.arange(len(own))] for rows, own in blocks])
    right = right[torch.argsort(torch.cat([own for _, own in blocks]))]
    best = torch.full((n_images,), -torch.inf, dtype=right.dtype).scatter_reduce(0, image_of_caption, right, "amax")
    i2t = torch.empty(n_images, dtype=torch.int64)
    t2i = torch.zeros(len(image_of_caption), dtype=torch.int64)
    for rows, own in blocks:
        scores = block(rows, None)
        # The sum of finite scores may overflow; then they are looked at one by one.
        if not torch.isfinite(scores.sum()) and not torch.isfinite(scores).all():
            bad = int(torch.nonzero(~torch.isfinite(scores))[0, 0]) + rows.start
            raise UserError(f"the scores of image row {bad} are not finite (NaN or infinite)")
        scores[image_of_caption[own] - rows.start, own] = -torch.inf
        i2t[rows] = (scores >= best[rows, None]).sum(1)
        t2i += (scores >= right).sum(0)
    return Ranks(i2t[torch.unique(image_of_caption)].numpy(), t2i.numpy())


def _row_blocks(n_images: int, image_of_caption: Tensor, size: int) -> Iterator[tuple[slice, Int[Tensor, " own"]]]:
    """Blocks of ``size`` image rows with the numbers of their own captions."""
    order = torch.argsort(image_of_caption, stable=True)
    starts = torch.searchsorted(image_of_caption[order], torch.arange(0, n_images + size, size))
    for k, start in enumerate(range(0, n_images, size)):
        yield slice(start, min(start + size, n_images)), order[starts[k] : starts[k + 1]]


def _check_image_of_caption(image_of_caption: Tensor, n_images: int) -> None:
    outside = image_of_caption[(image_of_caption < 0) | (image_of_caption >= n_images)]
    if len(outside):
        raise UserError(f"a caption belongs to image row {int(outside[0])}, but there are {n_images} images")


def check_finite(name: str, rows: Float[Tensor, "n dim"]) -> None:
    """:class:`UserError` names the first row that holds NaN or an infinity."""
    # Scores alone do not tell: no caption exceeds an image of infinities, whose order scores are all 0.
    for start in range(0, len(rows), _CHECKED):
        finite = torch.isfinite(rows[start : start + _CHECKED].sum(1, dtype=torch.float64))
        if not bool(finite.all()):
            raise UserError(f"{name} row {start + int(torch.nonzero(~finite)[0])} is not finite (NaN or infinite)")


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """``rows`` with zero rows behind, up to a multiple."""
    missing = -len(rows) % multiple
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows
