"""Exact ranks of the positives from a stream of score blocks, with ties against the model.

A rank is 0-based. A candidate that scores exactly as high as the positive counts as ranked before it, so a
model that gives every pair the same score earns nothing.

How many are true in each row or column of a block of comparisons, counted by bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.ranking.scores import similarity_by_name
from vse.pipeline.errors import UserError

_MOST = 255  # that a byte counts


def row_counts(mask: Bool[Tensor, "n_rows n_columns"]) -> Int[Tensor, " n_rows"]:
    """How many of each row are true: as ``mask.sum(1)``, which takes a multiple of the time on a processor."""
    if mask.device.type != "cpu":
        return mask.sum(1)
    n_rows, n_columns = mask.shape
    words = torch.nn.functional.pad(mask, (0, -n_columns % 8)).flatten().view(torch.int64).view(n_rows, -(-n_columns // 8))
    counts = torch.zeros(n_rows, dtype=torch.int64)
    for some in torch.split(words, _MOST, 1):  # one sum counts eight bytes, none of which overflows
        counts += some.sum(1, keepdim=True).view(torch.uint8).sum(1)
    return counts


def column_counts(mask: Bool[Tensor, "n_rows n_columns"]) -> Int[Tensor, " n_columns"]:
    """How many of each column are true: as ``mask.sum(0)``, which takes a multiple of the time on a processor."""
    if mask.device.type != "cpu":
        return mask.sum(0)
    counts = torch.zeros(mask.shape[1], dtype=torch.int64)
    for some in torch.split(mask.contiguous().view(torch.uint8), _MOST):
        counts += some.sum(0, dtype=torch.uint8)
    return counts


ROWS = 512  # of a score matrix, ranked at once, if they are of no more than so many scores:
_SCORES = 2**24
_COLUMNS = 2**23  # scores of all images with some captions that are held at once
_CAPTIONS = 2048  # at least, that are scored at once where tiles are smaller
_CHECKED = 4096  # rows whose sums are formed at once

# Scores of some image rows with all captions, with some consecutive ones, or with the captions of these numbers.
ScoreBlock = Callable[[slice, slice | Tensor | None], Tensor]


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
        ``columns`` is None, else (n_rows, n_columns) with the captions of a slice or of these numbers. The caller reads a
        block before it asks for the next, never writes into it, and a block may therefore be overwritten by the next one.
    columns : how many captions are best asked for at once; None for all

    :class:`UserError` if a caption belongs to an image that is not there.
    """

    n_images: int
    image_of_caption: Int[Tensor, " n_captions"]
    rows: int
    score: ScoreBlock
    columns: int | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"blocks of {self.rows} rows")
        if self.columns is not None and self.columns < 1:
            raise ValueError(f"blocks of {self.columns} columns")
        outside = self.image_of_caption[(self.image_of_caption < 0) | (self.image_of_caption >= self.n_images)]
        if len(outside):
            raise UserError(f"a caption belongs to image row {int(outside[0])}, but there are {self.n_images} images")


def ranks_from_blocks(i2t: ScoreBlocks, t2i: ScoreBlocks | None = None, own_ranks: bool = False) -> Ranks:
    """Ranks of both directions from scores that are computed or read block by block; no whole matrix is ever held.

    ``i2t`` are the scores by which images rank captions, and captions images, unless the score depends on the direction:
    then ``t2i`` are those by which captions rank images, also (n_images, n_captions), in blocks of the same shape. Both are
    asked in lockstep, for a block first ``i2t``, then ``t2i``, so that a model that computes both at once can keep what it
    made for ``i2t`` and hand out the other half.

    Every pair is asked for twice: first the positive pairs alone, for a block of rows with ``columns`` the captions of its
    own images, of which there may be none at all; then, for each block of rows, all captions, in blocks of columns. Both
    times a pair must have the same score, bit for bit, and equal images or captions equal scores, whatever is asked along
    with them: otherwise a tie is missed and a collapsed model gets credit. Most kernels give that only for inputs of one
    shape, so that a model does best to score tiles of a fixed size, the last one padded.

    With ``own_ranks`` the ranks of all captions of an image are counted, not of its best one alone.

    :class:`UserError` names the first image row, of a block, whose scores are not finite.
    """
    other = i2t if t2i is None else t2i
    image_of_caption = i2t.image_of_caption
    shapes = [(blocks.n_images, blocks.rows, blocks.columns) for blocks in (i2t, other)]
    if shapes[0] != shapes[1] or not torch.equal(other.image_of_caption, image_of_caption):
        raise ValueError("the two directions differ in their images, their captions or the shape of a block")
    blocks, n_captions = row_blocks(i2t), len(image_of_caption)
    positives_i2t, positives_t2i = _positive_scores(i2t, t2i, blocks)
    ranks_i2t = torch.empty(i2t.n_images, dtype=torch.int64, device=image_of_caption.device)
    ranks_t2i, ranks_own = torch.zeros_like(image_of_caption), torch.zeros_like(image_of_caption)
    for rows, own in blocks:
        asking = _Asking(rows, own, image_of_caption[own] - rows.start, positives_i2t[own], own_ranks)
        for columns in _slices(n_captions, i2t.columns or n_captions):
            inside = own[(own >= columns.start) & (own < columns.stop)]
            pairs = (image_of_caption[inside] - rows.start, inside - columns.start)
            scores = _finite_block(i2t, rows, columns)
            asking.count(scores, pairs)
            if t2i is not None:
                scores = _finite_block(t2i, rows, columns)
            ranks_t2i[columns] += column_counts(scores >= positives_t2i[columns])
            # The positive itself is no candidate that comes before it.
            ranks_t2i[inside] -= (scores[pairs] >= positives_t2i[inside]).long()
        ranks_i2t[rows] = asking.ranks.amin(1)
        ranks_own[own] = asking.ranks[asking.row_of_own, asking.place_of_own] if own_ranks else 0
    every = ranks_own.cpu().numpy() if own_ranks else None
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

    No more than a block is held beside the embeddings, which may be mapped from files that are larger than memory.
    Parameters are those of :func:`ranks_from_embeddings`; :class:`UserError` names a row that is not finite.
    """
    score, tile_images, tile_captions = similarity_by_name(similarity)
    if images.shape[1] != captions.shape[1]:
        raise UserError(f"images have {images.shape[1]} dimensions, captions {captions.shape[1]}")
    for name, rows in (("images", images), ("captions", captions)):
        check_finite(name, rows)
    buffer = torch.empty(tile_images, 0)

    def block(rows: slice, columns: slice | Tensor | None) -> Tensor:
        nonlocal buffer
        # All tiles have one shape: the arithmetic of a pair then does not depend on how many others are
        # scored with it, so equal embeddings get equal scores wherever they stand.
        left = _padded(images[rows].float(), tile_images)
        some = captions if columns is None else captions[columns]
        width = -(-len(some) // tile_captions) * tile_captions
        if buffer.shape[1] < width:
            buffer = torch.empty(tile_images, width)
        for start in range(0, len(some), tile_captions):
            tile = slice(start, start + tile_captions)
            score(left, _padded(some[tile].float(), tile_captions), buffer[:, tile])
        return buffer[: rows.stop - rows.start, : len(some)]

    columns = -(-_CAPTIONS // tile_captions) * tile_captions
    return ScoreBlocks(len(images), image_of_caption, tile_images, block, columns)


def blocks_from_scores(scores: ScoreMatrix, image_of_caption: Int[Tensor, " n_captions"]) -> ScoreBlocks:
    """The rows of a score matrix (n_images, n_captions), which may be a memory map, as blocks."""
    if scores.shape[1] != len(image_of_caption):
        raise UserError(f"{scores.shape[1]} columns of scores for {len(image_of_caption)} captions")

    def block(rows: slice, columns: slice | Tensor | None) -> Tensor:
        some = scores[rows]
        block = shared_tensor(some) if isinstance(some, np.ndarray) else torch.as_tensor(some)
        return block if columns is None else block[:, columns]

    return ScoreBlocks(len(scores), image_of_caption, max(1, min(ROWS, _SCORES // scores.shape[1])), block)


def row_blocks(blocks: ScoreBlocks) -> list[tuple[slice, Int[Tensor, " _"]]]:
    """The image rows of each block, with the numbers of their own captions."""
    n_images, image_of_caption, size = blocks.n_images, blocks.image_of_caption, blocks.rows
    order = torch.argsort(image_of_caption, stable=True)
    starts = torch.searchsorted(image_of_caption[order], torch.arange(0, n_images + size, size, device=order.device))
    return [
        (slice(start, min(start + size, n_images)), order[starts[k] : starts[k + 1]])
        for k, start in enumerate(range(0, n_images, size))
    ]


def caption_scores(
    blocks: ScoreBlocks, captions: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.floating]]]:
    """The scores of all images (n_images, n) with some of the ``captions``, n at a time; before them, which these are."""
    size = max(1, _COLUMNS // blocks.n_images)
    slices = [slice(first, min(first + blocks.rows, blocks.n_images)) for first in range(0, blocks.n_images, blocks.rows)]
    for start in range(0, len(captions), size):
        part = np.arange(start, min(start + size, len(captions)))
        columns = torch.from_numpy(captions[part])
        yield part, np.concatenate([blocks.score(rows, columns).cpu().numpy().copy() for rows in slices])


def shared_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor of an array's memory, which nothing may write to: it may be a file's, mapped to be read alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def check_finite(name: str, rows: Float[Tensor, "n dim"]) -> None:
    """:class:`UserError` names the first row that holds NaN or an infinity."""
    # Scores alone do not tell: no caption exceeds an image of infinities, whose order scores are all 0.
    for start in range(0, len(rows), _CHECKED):
        some = rows[start : start + _CHECKED]
        # The sum of finite values may overflow; then they are looked at one by one.
        if not torch.isfinite(some.sum()) and not (finite := torch.isfinite(some).all(1)).all():
            raise UserError(f"{name} row {start + int(torch.nonzero(~finite)[0])} is not finite (NaN or infinite)")


class _Asking:
    """The images of a block of rows as queries: how many captions of other images score as high as their own.

    Without ``own_ranks`` there is one place for each image, that of the best of its captions; else one for each of its
    captions. ``ranks`` is (n_rows, n_places), of which :attr:`place_of_own` belongs to a caption.
    """

    def __init__(self, rows: slice, own: Tensor, row_of_own: Tensor, positives: Tensor, own_ranks: bool) -> None:
        n_rows, self.row_of_own = rows.stop - rows.start, row_of_own
        self.place_of_own = torch.zeros_like(own)
        if own_ranks:  # captions go by image, so that those of an image are neighbours
            n_own = torch.bincount(row_of_own, minlength=n_rows)
            self.place_of_own = torch.arange(len(own), device=own.device) - (n_own.cumsum(0) - n_own)[row_of_own]
        n_places = 1 + (int(self.place_of_own.max()) if len(own) else 0)
        self._goals = torch.full((n_rows * n_places,), -torch.inf, dtype=positives.dtype, device=own.device)
        self._goals.scatter_reduce_(0, row_of_own * n_places + self.place_of_own, positives, "amax")
        self._goals = self._goals.view(n_rows, n_places)
        self.ranks = torch.zeros(n_rows, n_places, dtype=torch.int64, device=own.device)
        # Where an image has no such caption, the rank is above all others.
        self.ranks[torch.isneginf(self._goals)] = torch.iinfo(torch.int64).max // 2

    def count(self, scores: Float[Tensor, "n_rows n_columns"], own: tuple[Tensor, Tensor]) -> None:
        """Count among some captions, of which those at ``own`` are an image's own."""
        own_scores = scores[own]
        for place in range(self._goals.shape[1]):
            goals = self._goals[:, place]
            rows = torch.nonzero(~torch.isneginf(goals))[:, 0]
            some = scores if len(rows) == len(goals) else scores[rows]
            self.ranks[rows, place] += row_counts(some >= goals[rows, None])
            self.ranks[:, place].index_add_(0, own[0], -(own_scores >= goals[own[0]]).long())


def _positive_scores(
    i2t: ScoreBlocks, t2i: ScoreBlocks | None, rows: list[tuple[slice, Int[Tensor, " _"]]]
) -> tuple[Float[Tensor, " n_captions"], Float[Tensor, " n_captions"]]:
    """The score of each caption with its image in both directions."""
    directions = [i2t] if t2i is None else [i2t, t2i]
    positives: list[list[Tensor]] = [[] for _ in directions]
    for some, own in rows:
        pairs = (i2t.image_of_caption[own] - some.start, torch.arange(len(own), device=own.device))
        for blocks, scores in zip(directions, positives, strict=True):
            scores.append(blocks.score(some, own)[pairs])
    in_order = torch.argsort(torch.cat([own for _, own in rows]))
    both = [torch.cat(scores)[in_order] for scores in positives]
    return both[0], both[-1]


def _finite_block(blocks: ScoreBlocks, rows: slice, columns: slice) -> Float[Tensor, "n_rows n_columns"]:
    """The scores of some images with some captions."""
    n_captions = len(blocks.image_of_caption)
    scores = blocks.score(rows, None if columns == slice(0, n_captions) else columns)
    if scores.shape != (expected := (rows.stop - rows.start, columns.stop - columns.start)):
        raise ValueError(f"a block of scores has shape {tuple(scores.shape)}, expected {expected}")
    # The sum of finite scores may overflow; then they are looked at one by one.
    if not torch.isfinite(scores.sum()) and not torch.isfinite(scores).all():
        bad = int(torch.nonzero(~torch.isfinite(scores))[0, 0]) + rows.start
        raise UserError(f"the scores of image row {bad} are not finite (NaN or infinite)")
    return scores


def _slices(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """``rows`` followed by zero rows, up to a multiple."""
    missing = -len(rows) % multiple
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows
