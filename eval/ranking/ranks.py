"""Exact ranks of the right answers, from scores that are computed or read block by block (some images at a time).

A rank is 0-based: the number of wrong candidates that score at least as high as the best right candidate. Ties therefore count
against the model: a model that gives every pair the same score gets the worst ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.ranking.metrics import Ints, Ranks
from vse.pipeline.errors import UserError, did_you_mean

_MAX_BYTE_SUMMANDS = 255  # the sum of up to this number of bytes, each 0 or 1, fits into a byte
_MAX_BLOCK_ROWS = 512  # rows in a block of a score matrix
_MAX_BLOCK_SCORES = 2**24  # scores in a block of a score matrix
_MAX_COLUMN_SCORES = 2**23  # scores of all images with a block of captions
_MIN_BLOCK_CAPTIONS = 2048  # lowest number of captions per block in a ranking of embeddings
_N_ROWS_PER_CHECK = 4096  # number of rows that are checked at once
# Number of differences between images and captions that are in memory at once: 1 MB, which fits into the cache of a core. A
# larger number takes 1.5 times as long, and a smaller number is not enough work for several cores.
_MAX_ORDER_DIFFERENCES = 2**18

# score(rows, columns) returns the scores of the images ``rows`` with the captions ``columns``: a slice, indices or None (all).
ScoreFunction = Callable[[slice, slice | Tensor | None], Tensor]


class TiledSimilarity(NamedTuple):
    """A similarity of vectors: a function that scores pairs, and the size of its inputs for which it is fastest.

    The function ``score(images, captions, out)`` writes the scores of ``images`` (n_images, dim) with ``captions``
    (n_captions, dim) into ``out`` (n_images, n_captions). It is fastest with ``tile_images`` images and ``tile_captions``
    captions.
    """

    score: Callable[[Tensor, Tensor, Tensor], None]
    tile_images: int
    tile_captions: int


def write_cosine_scores(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], out: Float[Tensor, "n_images n_captions"]
) -> None:
    """Write the inner products of all pairs into ``out``; for unit vectors these are the cosines. No gradient is recorded."""
    torch.mm(images, captions.T, out=out)


def write_order_scores(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], out: Float[Tensor, "n_images n_captions"]
) -> None:
    """Write the order scores of all pairs into ``out``: minus the squared amount by which a caption exceeds an image.

    s(i, c) = -||max(0, c - i)||^2 (Vendrov et al. 2016; VSE++ paper, section 3.5). The computation needs one megabyte besides
    ``out``. It sums the differences themselves: the expansion |c|^2 - 2ci + |i|^2 would lose small differences. No gradient is
    recorded.
    """
    n_rows = max(1, _MAX_ORDER_DIFFERENCES // max(1, captions.numel()))
    buffer = captions.new_empty(min(n_rows, len(images)), *captions.shape)
    for start in range(0, len(images), n_rows):
        rows = images[start : start + n_rows, None]
        larger = torch.maximum(captions, rows, out=buffer[: len(rows)])
        # max(0, c - i) = max(c, i) - i; torch subtracts and squares in one step, but only with this operator.
        torch.ops.aten.mse_loss.out(larger, rows, 0, out=larger)
        torch.sum(larger, 2, out=out[start : start + n_rows])
    out.neg_()


# A ranking first scores the images of a tile with all their captions. Order scores are slow, so their tiles have few images.
SIMILARITIES = {
    "cosine": TiledSimilarity(write_cosine_scores, tile_images=512, tile_captions=2560),
    "order": TiledSimilarity(write_order_scores, tile_images=64, tile_captions=32),
}


def find_similarity(name: str) -> TiledSimilarity:
    """Return the similarity called ``name``, e.g. ``cosine``. Raises UserError if it is unknown."""
    if name not in SIMILARITIES:
        raise UserError(f"unknown similarity {name!r}{did_you_mean(name, SIMILARITIES)}")
    return SIMILARITIES[name]


def count_true_per_row(mask: Bool[Tensor, "n_rows n_columns"]) -> Int[Tensor, " n_rows"]:
    """Count the true values of each row, several times faster on a CPU than ``mask.sum(1)``."""
    if mask.device.type != "cpu":
        return mask.sum(1)
    n_rows, n_columns = mask.shape
    words = torch.nn.functional.pad(mask, (0, -n_columns % 8)).flatten().view(torch.int64).view(n_rows, -(-n_columns // 8))
    counts = torch.zeros(n_rows, dtype=torch.int64)
    for some in torch.split(words, _MAX_BYTE_SUMMANDS, 1):  # a sum of int64 adds eight bytes at once, and no byte overflows
        counts += some.sum(1, keepdim=True).view(torch.uint8).sum(1)
    return counts


def count_true_per_column(mask: Bool[Tensor, "n_rows n_columns"]) -> Int[Tensor, " n_columns"]:
    """Count the true values of each column, several times faster on a CPU than ``mask.sum(0)``."""
    if mask.device.type != "cpu":
        return mask.sum(0)
    counts = torch.zeros(mask.shape[1], dtype=torch.int64)
    for some in torch.split(mask.contiguous().view(torch.uint8), _MAX_BYTE_SUMMANDS):
        counts += some.sum(0, dtype=torch.uint8)
    return counts


@runtime_checkable
class ScoreMatrix(Protocol):
    """A matrix of scores (n_images, n_captions) whose rows are read in blocks: an array, a memory map or a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class ScoreBlocks:
    """Scores of all images with all captions, computed or read a block of image rows at a time.

    Raises UserError if a caption belongs to an image that does not exist.

    Parameters
    ----------
    n_images : number of images
    image_of_caption : (n_captions,) int64, for each caption the row of its image, on the device of the scores
    rows_per_block : number of image rows in a block; the last block may have fewer
    score : function ``score(rows, columns)`` that returns the scores of the images ``rows`` (a slice) with the captions
        ``columns`` (a slice, indices, or None for all captions). The next call may overwrite the returned block. The caller
        must not write into the block.
    columns_per_block : number of captions in a block; None for all
    """

    n_images: int
    image_of_caption: Int[Tensor, " n_captions"]
    rows_per_block: int
    score: ScoreFunction
    columns_per_block: int | None = None

    def __post_init__(self) -> None:
        if self.rows_per_block < 1:
            raise ValueError(f"blocks of {self.rows_per_block} rows")
        if self.columns_per_block is not None and self.columns_per_block < 1:
            raise ValueError(f"blocks of {self.columns_per_block} columns")
        outside = self.image_of_caption[(self.image_of_caption < 0) | (self.image_of_caption >= self.n_images)]
        if len(outside):
            raise UserError(f"a caption belongs to image row {int(outside[0])}, but there are {self.n_images} images")

    @property
    def row_slices(self) -> list[slice]:
        """The image rows of each block, as slices that cover all images in order."""
        return split_into_slices(self.n_images, self.rows_per_block)


def ranks_from_blocks(i2t: ScoreBlocks, t2i: ScoreBlocks | None = None, with_caption_ranks: bool = False) -> Ranks:
    """Return the ranks in both directions from scores that are computed or read block by block.

    Each block of rows is first scored with the captions of its images (possibly no captions), and later with blocks of all
    captions. The two scores of a pair must be bit for bit the same, and equal images or captions must have equal scores in
    every call. Otherwise ties are missed, and a model that gives all pairs one score gets good ranks. Most kernels compute the
    same bits only for inputs of one shape: a model should therefore score tiles of a fixed size, and pad the last tile. Raises
    UserError if scores are not finite; the message names the row of the image.

    Parameters
    ----------
    i2t : the scores by which images rank captions
    t2i : the scores by which captions rank images, also (n_images, n_captions) and in blocks of the same shape; None if both
        directions share scores. Each block is requested from ``i2t`` and then from ``t2i``, so that a model can compute both
        blocks in the first request
    with_caption_ranks : whether to return the rank of every caption, ``Ranks.by_caption``
    """
    other = i2t if t2i is None else t2i
    image_of_caption = i2t.image_of_caption
    shapes = [(blocks.n_images, blocks.rows_per_block, blocks.columns_per_block) for blocks in (i2t, other)]
    if shapes[0] != shapes[1] or not torch.equal(other.image_of_caption, image_of_caption):
        raise ValueError("the two directions differ in their images, their captions or the shape of a block")
    blocks, n_captions = list_rows_and_captions(i2t), len(image_of_caption)
    own_scores_i2t, own_scores_t2i = _score_own_captions(i2t, t2i, blocks)
    ranks_i2t = torch.empty(i2t.n_images, dtype=torch.int64, device=image_of_caption.device)
    ranks_t2i, by_caption = torch.zeros_like(image_of_caption), torch.zeros_like(image_of_caption)
    for rows, own in blocks:
        image_queries = _ImageRankCounter(
            rows, own, image_of_caption[own] - rows.start, own_scores_i2t[own], with_caption_ranks
        )
        for columns in split_into_slices(n_captions, i2t.columns_per_block or n_captions):
            inside = own[(own >= columns.start) & (own < columns.stop)]
            pairs = (image_of_caption[inside] - rows.start, inside - columns.start)
            scores = _score_and_check_block(i2t, rows, columns)
            image_queries.add_wrong_counts(scores, pairs)
            if t2i is not None:
                scores = _score_and_check_block(t2i, rows, columns)
            ranks_t2i[columns] += count_true_per_column(scores >= own_scores_t2i[columns])
            # The count above includes the right image.
            ranks_t2i[inside] -= (scores[pairs] >= own_scores_t2i[inside]).long()
        ranks_i2t[rows] = image_queries.ranks.amin(1)
        by_caption[own] = image_queries.ranks[image_queries.rank_rows, image_queries.rank_columns] if with_caption_ranks else 0
    ranks = (ranks_i2t[torch.unique(image_of_caption)], ranks_t2i, *([by_caption] if with_caption_ranks else []))
    return Ranks(*(values.cpu().numpy() for values in ranks))


def ranks_from_embeddings(
    images: Float[Tensor, "n_images dim"],
    captions: Float[Tensor, "n_captions dim"],
    image_of_caption: Int[Tensor, " n_captions"],
    similarity: str = "cosine",
) -> Ranks:
    """Return the ranks of embeddings that are compared by ``similarity``, ``cosine`` or ``order``.

    ``image_of_caption`` has the row of each caption's image.
    """
    return ranks_from_blocks(blocks_from_embeddings(images, captions, image_of_caption, similarity))


def blocks_from_embeddings(
    images: Float[Tensor, "n_images dim"],
    captions: Float[Tensor, "n_captions dim"],
    image_of_caption: Int[Tensor, " n_captions"],
    similarity: str = "cosine",
) -> ScoreBlocks:
    """Return the scores of embeddings in blocks of a few images. Each block overwrites the previous block.

    ``similarity``, ``cosine`` or ``order``, also determines the size of a block. The embeddings may be memory maps of files
    larger than memory. Raises UserError if a row is not finite, or if the dimensions of images and captions differ.
    """
    score, tile_images, tile_captions = find_similarity(similarity)
    if images.shape[1] != captions.shape[1]:
        raise UserError(f"images have {images.shape[1]} dimensions, captions {captions.shape[1]}")
    for name, rows in (("images", images), ("captions", captions)):
        check_finite(name, rows)
    buffer = torch.empty(tile_images, 0)

    def block(rows: slice, columns: slice | Tensor | None) -> Tensor:
        nonlocal buffer
        # All tiles have one shape. The rounding of a score then does not depend on the other pairs in the tile, and equal
        # embeddings have equal scores.
        tile_of_images = _pad_rows(images[rows].float(), tile_images)
        selected = captions if columns is None else captions[columns]
        width = -(-len(selected) // tile_captions) * tile_captions
        if buffer.shape[1] < width:
            buffer = torch.empty(tile_images, width)
        for start in range(0, len(selected), tile_captions):
            tile = slice(start, start + tile_captions)
            score(tile_of_images, _pad_rows(selected[tile].float(), tile_captions), buffer[:, tile])
        return buffer[: rows.stop - rows.start, : len(selected)]

    columns = -(-_MIN_BLOCK_CAPTIONS // tile_captions) * tile_captions
    return ScoreBlocks(len(images), image_of_caption, tile_images, block, columns)


def blocks_from_scores(scores: ScoreMatrix, image_of_caption: Int[Tensor, " n_captions"]) -> ScoreBlocks:
    """Return the blocks of a score matrix (n_images, n_captions), which may be a memory map.

    Raises UserError if the number of columns is not the number of captions.
    """
    if scores.shape[1] != len(image_of_caption):
        raise UserError(f"{scores.shape[1]} columns of scores for {len(image_of_caption)} captions")

    def block(rows: slice, columns: slice | Tensor | None) -> Tensor:
        values = scores[rows]
        block = shared_tensor(values) if isinstance(values, np.ndarray) else torch.as_tensor(values)
        return block if columns is None else block[:, columns]

    return ScoreBlocks(
        len(scores), image_of_caption, max(1, min(_MAX_BLOCK_ROWS, _MAX_BLOCK_SCORES // scores.shape[1])), block
    )


def list_rows_and_captions(blocks: ScoreBlocks) -> list[tuple[slice, Int[Tensor, " _"]]]:
    """Return for each block its image rows, and the indices of the captions of these images (possibly none)."""
    image_of_caption, size = blocks.image_of_caption, blocks.rows_per_block
    order = torch.argsort(image_of_caption, stable=True)
    starts = torch.searchsorted(image_of_caption[order], torch.arange(0, blocks.n_images + size, size, device=order.device))
    return [(rows, order[starts[k] : starts[k + 1]]) for k, rows in enumerate(blocks.row_slices)]


def iter_caption_scores(blocks: ScoreBlocks, captions: Ints) -> Iterator[tuple[Ints, NDArray[np.floating]]]:
    """Yield the scores of all images with ``captions`` (n,), some captions at a time.

    Each item has indices (n_part,) into ``captions``, and the scores (n_images, n_part) of these captions.
    """
    size = max(1, _MAX_COLUMN_SCORES // blocks.n_images)
    for span in split_into_slices(len(captions), size):
        columns = torch.from_numpy(captions[span])
        scores = [blocks.score(rows, columns).cpu().numpy().copy() for rows in blocks.row_slices]
        yield np.arange(span.start, span.stop), np.concatenate(scores)


def shared_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the memory of an array. Never write to the tensor: the memory may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def check_finite(name: str, rows: Float[Tensor, "n dim"], first: int = 0) -> None:
    """Raise UserError if one of ``rows`` has NaN or an infinity.

    ``rows`` are rows of a matrix that the message calls ``name``. ``first`` is the index of ``rows[0]`` in this matrix.
    """
    # Finite scores are not enough: an image vector of infinities has order scores of 0 with all captions.
    for start in range(0, len(rows), _N_ROWS_PER_CHECK):
        part = rows[start : start + _N_ROWS_PER_CHECK]
        # The sum of finite values may overflow. Only then are single values checked.
        if not torch.isfinite(part.sum()) and not (finite := torch.isfinite(part).all(1)).all():
            raise UserError(f"{name} row {first + start + int(torch.nonzero(~finite)[0])} is not finite (NaN or infinite)")


class _ImageRankCounter:
    """The ranks of a block of images, counted while captions are scored block by block.

    The own captions of an image are the captions that describe it. ``ranks`` (n_rows, n_ranks) has the rank of each image's
    best own caption or, if ``with_caption_ranks``, the rank of each own caption. The rank for the k-th own caption of the
    block is at ``ranks[rank_rows[k], rank_columns[k]]``.
    """

    def __init__(self, rows: slice, own: Tensor, rank_rows: Tensor, own_scores: Tensor, with_caption_ranks: bool) -> None:
        n_rows, self.rank_rows = rows.stop - rows.start, rank_rows
        self.rank_columns = torch.zeros_like(own)
        if with_caption_ranks:  # this works because own captions are sorted by image
            n_own = torch.bincount(rank_rows, minlength=n_rows)
            self.rank_columns = torch.arange(len(own), device=own.device) - (n_own.cumsum(0) - n_own)[rank_rows]
        n_ranks = 1 + (int(self.rank_columns.max()) if len(own) else 0)
        self._goals = torch.full((n_rows * n_ranks,), -torch.inf, dtype=own_scores.dtype, device=own.device)
        self._goals.scatter_reduce_(0, rank_rows * n_ranks + self.rank_columns, own_scores, "amax")
        self._goals = self._goals.view(n_rows, n_ranks)
        self.ranks = torch.zeros(n_rows, n_ranks, dtype=torch.int64, device=own.device)
        # If an image has fewer captions than others, the unused numbers in its row of ``ranks`` are above all ranks.
        self.ranks[torch.isneginf(self._goals)] = torch.iinfo(torch.int64).max // 2

    def add_wrong_counts(self, scores: Float[Tensor, "n_rows n_columns"], own: tuple[Tensor, Tensor]) -> None:
        """Add to each rank the number of wrong captions that score at least as high as the own caption with this rank.

        ``scores`` has the scores of the images with some further captions. ``own`` has the rows and the columns of the entries
        in ``scores`` for an image and a caption that describes it.
        """
        own_scores = scores[own]
        for k in range(self._goals.shape[1]):
            goals = self._goals[:, k]
            rows = torch.nonzero(~torch.isneginf(goals))[:, 0]
            selected = scores if len(rows) == len(goals) else scores[rows]
            self.ranks[rows, k] += count_true_per_row(selected >= goals[rows, None])
            self.ranks[:, k].index_add_(0, own[0], -(own_scores >= goals[own[0]]).long())


def _score_own_captions(
    i2t: ScoreBlocks, t2i: ScoreBlocks | None, parts: list[tuple[slice, Int[Tensor, " _"]]]
) -> tuple[Float[Tensor, " n_captions"], Float[Tensor, " n_captions"]]:
    """Return the score of each caption with its own image, for image-to-text and for text-to-image retrieval.

    ``parts`` has the image rows of each block, and the indices of the captions of these images. If ``t2i`` is None, both
    directions have the scores of ``i2t``.
    """
    directions = [i2t] if t2i is None else [i2t, t2i]
    own_scores: list[list[Tensor]] = [[] for _ in directions]
    for rows, own in parts:
        pairs = (i2t.image_of_caption[own] - rows.start, torch.arange(len(own), device=own.device))
        for blocks, scores in zip(directions, own_scores, strict=True):
            scores.append(blocks.score(rows, own)[pairs])
    in_order = torch.argsort(torch.cat([own for _, own in parts]))
    both = [torch.cat(scores)[in_order] for scores in own_scores]
    return both[0], both[-1]


def _score_and_check_block(blocks: ScoreBlocks, rows: slice, columns: slice) -> Float[Tensor, "n_rows n_columns"]:
    """Return the scores of some images with some captions. Raises UserError if a score is not finite."""
    n_captions = len(blocks.image_of_caption)
    scores = blocks.score(rows, None if columns == slice(0, n_captions) else columns)
    if scores.shape != (expected := (rows.stop - rows.start, columns.stop - columns.start)):
        raise ValueError(f"a block of scores has shape {tuple(scores.shape)}, expected {expected}")
    # The sum of finite scores may overflow. Only then are single scores checked.
    if not torch.isfinite(scores.sum()) and not torch.isfinite(scores).all():
        bad = int(torch.nonzero(~torch.isfinite(scores))[0, 0]) + rows.start
        raise UserError(f"the scores of image row {bad} are not finite (NaN or infinite)")
    return scores


def split_into_slices(n: int, size: int) -> list[slice]:
    """Return slices of at most ``size`` rows that cover ``n`` rows in order."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _pad_rows(rows: Tensor, multiple: int) -> Tensor:
    missing = -len(rows) % multiple
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows
