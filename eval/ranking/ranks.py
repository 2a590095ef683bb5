"""Exact ranks of the positives from a stream of score blocks, with ties against the model.

A rank is 0-based. A candidate that scores exactly as high as the positive counts as ranked before it, so a
model that gives every pair the same score earns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.ranking.scores import similarity_by_name
from vse.pipeline.errors import UserError

ROWS = 512  # of a score matrix, ranked at once
_COLUMNS = 2**23  # scores of all images with some captions that are held at once
_CHECKED = 4096  # rows whose sums are formed at once, in double precision

# Scores of some image rows with all captions, or with the captions of these numbers.
ScoreBlock = Callable[[slice, Tensor | None], Tensor]


@runtime_checkable
class ScoreMatrix(Protocol):
    """Scores (n_images, n_captions) that are read some rows at a time: an array, a memory map, a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


@dataclass(frozen=True)
class Ranks:
    """0-based ranks: ``i2t`` of each image's best own caption, ``t2i`` (n_captions,) of each caption's image.

    An image without a caption is no query and has no place in ``i2t``; for captions it is a candidate all the same.
    ``own`` (n_captions,), where it was asked for, are the ranks of all captions among those of other images, by their own
    image: ``i2t`` has the lowest of each image.
    """

    i2t: NDArray[np.int64]
    t2i: NDArray[np.int64]
    own: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class ScoreBlocks:
    """Scores of all images with all captions, computed or read a block of image rows at a time.

    Parameters
    ----------
    n_images : how many images there are
    image_of_caption : (n_captions,) int64, for each caption the row of its image, on the device of the scores
    rows : how many image rows a block has; the last one may have fewer
    score : ``score(rows, columns)`` gives the scores (n_rows, n_captions) of the images ``rows`` with all captions if
        ``columns`` is None, else (n_rows, n_columns) with the captions of these numbers. The caller reads a block before
        it asks for the next, never writes into it, and a block may therefore be overwritten by the next one.

    :class:`UserError` if a caption belongs to an image that is not there.
    """

    n_images: int
    image_of_caption: Int[Tensor, " n_captions"]
    rows: int
    score: ScoreBlock

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"blocks of {self.rows} rows")
        outside = self.image_of_caption[(self.image_of_caption < 0) | (self.image_of_caption >= self.n_images)]
        if len(outside):
            raise UserError(f"a caption belongs to image row {int(outside[0])}, but there are {self.n_images} images")


def ranks_from_blocks(i2t: ScoreBlocks, t2i: ScoreBlocks | None = None, own_ranks: bool = False) -> Ranks:
    """Ranks of both directions from scores that are computed or read block by block; no whole matrix is ever held.

    ``i2t`` are the scores by which images rank captions, and captions images, unless the score depends on the direction:
    then ``t2i`` are those by which captions rank images, also (n_images, n_captions), in blocks of the same rows. Both are
    asked in lockstep, for a block of rows first ``i2t``, then ``t2i``, so that a model that computes both at once can keep
    what it made for ``i2t`` and hand out the other half.

    Every block is asked for twice: first for the positive pairs alone (of ``t2i``, if it is given), with ``columns`` the
    captions of its own images, of which there may be none at all; then for all captions. Both times a pair must have the
    same score, bit for bit, and equal images or captions equal scores, whatever is asked along with them: otherwise a tie
    is missed and a collapsed model gets credit. Most kernels give that only for inputs of one shape, so that a model does
    best to score tiles of a fixed size, the last one padded.

    With ``own_ranks`` the ranks of all captions of an image are counted, not of its best one alone.

    :class:`UserError` names the first image row whose scores are not finite.
    """
    other = i2t if t2i is None else t2i
    image_of_caption = i2t.image_of_caption
    if (other.n_images, other.rows) != (i2t.n_images, i2t.rows) or not torch.equal(other.image_of_caption, image_of_caption):
        raise ValueError("the two directions differ in their images, their captions or the rows of a block")
    blocks = row_blocks(i2t)
    positives = _positive_scores(other, blocks)
    ranks_i2t = torch.empty(i2t.n_images, dtype=torch.int64, device=image_of_caption.device)
    ranks_t2i = torch.zeros_like(image_of_caption)
    ranks_own = torch.zeros_like(image_of_caption) if own_ranks else None
    for rows, own in blocks:
        scores = _finite_block(i2t, rows)
        ranks_i2t[rows] = _image_ranks(scores, own, image_of_caption[own] - rows.start)
        if ranks_own is not None:
            ranks_own[own] = _own_ranks(scores, own, image_of_caption[own] - rows.start)
        if t2i is not None:
            scores = _finite_block(t2i, rows)
        ranks_t2i += (scores >= positives).sum(0)
        # The positive itself is no candidate that comes before it.
        ranks_t2i[own] -= (scores[image_of_caption[own] - rows.start, own] >= positives[own]).long()
    every = None if ranks_own is None else ranks_own.cpu().numpy()
    return Ranks(ranks_i2t[torch.unique(image_of_caption)].cpu().numpy(), ranks_t2i.cpu().numpy(), every)


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
    return ranks_from_blocks(blocks_from_embeddings(images, captions, image_of_caption, similarity))


def ranks_from_scores(scores: ScoreMatrix, image_of_caption: Int[Tensor, " n_captions"]) -> Ranks:
    """Ranks from a full score matrix (n_images, n_captions)."""
    return ranks_from_blocks(blocks_from_scores(scores, image_of_caption))


def blocks_from_embeddings(
    images: Float[Tensor, "n_images dim"],
    captions: Float[Tensor, "n_captions dim"],
    image_of_caption: Int[Tensor, " n_captions"],
    similarity: str = "cosine",
) -> ScoreBlocks:
    """Scores of embeddings, up to ``tile_images`` images at once, each block overwritten by the next.

    Parameters are those of :func:`ranks_from_embeddings`; :class:`UserError` names a row that is not finite.
    """
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

    return ScoreBlocks(len(images), image_of_caption, tile_images, block)


def blocks_from_scores(scores: ScoreMatrix, image_of_caption: Int[Tensor, " n_captions"]) -> ScoreBlocks:
    """The rows of a score matrix (n_images, n_captions), which may be a memory map, as blocks."""
    if scores.shape[1] != len(image_of_caption):
        raise UserError(f"{scores.shape[1]} columns of scores for {len(image_of_caption)} captions")

    def block(rows: slice, columns: Tensor | None) -> Tensor:
        block = torch.as_tensor(scores[rows])
        return block if columns is None else block[:, columns]

    return ScoreBlocks(len(scores), image_of_caption, ROWS, block)


def row_blocks(blocks: ScoreBlocks) -> list[tuple[slice, Int[Tensor, " _"]]]:
    """The image rows of each block, with the numbers of their own captions."""
    n_images, image_of_caption, size = blocks.n_images, blocks.image_of_caption, blocks.rows
    order = torch.argsort(image_of_caption, stable=True)
    starts = torch.searchsorted(image_of_caption[order], torch.arange(0, n_images + size, size, device=order.device))
    return [
        (slice(start, min(start + size, n_images)), order[starts[k] : starts[k + 1]])
        for k, start in enumerate(range(0, n_images, size))
    ]


def scores_of_captions(
    blocks: ScoreBlocks, captions: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.floating]]]:
    """The scores of all images (n_images, n) with some of the ``captions``, n at a time; before them, which these are."""
    size = max(1, _COLUMNS // blocks.n_images)
    slices = [slice(first, min(first + blocks.rows, blocks.n_images)) for first in range(0, blocks.n_images, blocks.rows)]
    for start in range(0, len(captions), size):
        part = np.arange(start, min(start + size, len(captions)))
        columns = torch.from_numpy(captions[part])
        yield part, np.concatenate([blocks.score(rows, columns).cpu().numpy().copy() for rows in slices])


def check_finite(name: str, rows: Float[Tensor, "n dim"]) -> None:
    """:class:`UserError` names the first row that holds NaN or an infinity."""
    # Scores alone do not tell: no caption exceeds an image of infinities, whose order scores are all 0.
    for start in range(0, len(rows), _CHECKED):
        finite = torch.isfinite(rows[start : start + _CHECKED].sum(1, dtype=torch.float64))
        if not bool(finite.all()):
            raise UserError(f"{name} row {start + int(torch.nonzero(~finite)[0])} is not finite (NaN or infinite)")


def _positive_scores(blocks: ScoreBlocks, rows: list[tuple[slice, Int[Tensor, " _"]]]) -> Float[Tensor, " n_captions"]:
    """The score of each caption with its image."""
    image_of_caption = blocks.image_of_caption
    parts = []
    for some, own in rows:
        scores = blocks.score(some, own)
        parts.append(scores[image_of_caption[own] - some.start, torch.arange(len(own), device=own.device)])
    return torch.cat(parts)[torch.argsort(torch.cat([own for _, own in rows]))]


def _finite_block(blocks: ScoreBlocks, rows: slice) -> Float[Tensor, "n_rows n_captions"]:
    """The scores of some images with all captions."""
    scores = blocks.score(rows, None)
    if scores.shape != (expected := (rows.stop - rows.start, len(blocks.image_of_caption))):
        raise ValueError(f"a block of scores has shape {tuple(scores.shape)}, expected {expected}")
    # The sum of finite scores may overflow; then they are looked at one by one.
    if not torch.isfinite(scores.sum()) and not torch.isfinite(scores).all():
        bad = int(torch.nonzero(~torch.isfinite(scores))[0, 0]) + rows.start
        raise UserError(f"the scores of image row {bad} are not finite (NaN or infinite)")
    return scores


def _image_ranks(
    scores: Float[Tensor, "n_rows n_captions"], own: Int[Tensor, " own"], row_of_own: Int[Tensor, " own"]
) -> Int[Tensor, " n_rows"]:
    """How many captions of other images score at least as high as the best of each image's own captions."""
    positives = scores[row_of_own, own]
    best = torch.full((len(scores),), -torch.inf, dtype=scores.dtype, device=scores.device)
    best.scatter_reduce_(0, row_of_own, positives, "amax")
    ranks = (scores >= best[:, None]).sum(1)
    return ranks.index_add_(0, row_of_own, -(positives >= best[row_of_own]).long())


def _own_ranks(
    scores: Float[Tensor, "n_rows n_captions"], own: Int[Tensor, " own"], row_of_own: Int[Tensor, " own"]
) -> Int[Tensor, " own"]:
    """How many captions of other images score at least as high as each of the images' own captions, which go by image."""
    n_own = torch.bincount(row_of_own, minlength=len(scores))
    place = torch.arange(len(own), device=own.device) - (n_own.cumsum(0) - n_own)[row_of_own]
    positives = torch.full((len(scores), int(n_own.max())), -torch.inf, dtype=scores.dtype, device=scores.device)
    positives[row_of_own, place] = scores[row_of_own, own]
    ranks = torch.empty_like(own)
    for k in range(positives.shape[1]):  # the k-th captions of all images that have one
        here, rows = place == k, torch.nonzero(n_own > k)[:, 0]
        goals = positives[rows, k, None]
        some = scores if len(rows) == len(scores) else scores[rows]
        ranks[here] = (some >= goals).sum(1) - (positives[rows] >= goals).sum(1)
    return ranks


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """``rows`` followed by zero rows, up to a multiple."""
    missing = -len(rows) % multiple
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows
