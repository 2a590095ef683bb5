"""The best candidates of each query in their order, and scores that keep this order in other programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.ranking.ranks import ScoreBlocks, row_blocks, scores_of_captions

_LARGEST = 1e38  # in single precision, with room for smaller and larger numbers


class BestList(NamedTuple):
    """The row of a query, and the rows (n,) and scores (n,) of its best candidates, best first."""

    query: int
    rows: NDArray[np.int64]
    scores: NDArray[np.floating]


def lists_of_images(blocks: ScoreBlocks, depth: int) -> Iterator[BestList]:
    """The best captions of each image that has one, a block of images at a time.

    Of candidates that tie, wrong ones come first, then lower rows. ``depth`` is how many there are at most, 0 for all.
    """
    for rows, own in row_blocks(blocks):
        image_of_own = blocks.image_of_caption[own]
        scores = blocks.score(rows, None).cpu().numpy()
        for image in torch.unique(image_of_own).tolist():
            yield _best_list(image, scores[image - rows.start], own[image_of_own == image].cpu().numpy(), depth)


def lists_of_captions(blocks: ScoreBlocks, depth: int) -> Iterator[BestList]:
    """The best images of each caption, as :func:`lists_of_images`, for some captions at a time."""
    image_of_caption = blocks.image_of_caption.cpu().numpy()
    for captions, scores in scores_of_captions(blocks, np.arange(len(image_of_caption))):
        for caption, column in zip(captions, np.ascontiguousarray(scores.T), strict=True):
            yield _best_list(int(caption), column, image_of_caption[caption, None], depth)


def falling(scores: NDArray[np.floating]) -> NDArray[np.float32]:
    """Scores in descending order made strictly descending in single precision: each one as it is, or the next smaller number.

    A program that sorts by them, in single precision as trec_eval does or in double, has no ties left to decide.
    """
    bits = np.clip(scores, -_LARGEST, _LARGEST).astype(np.float32).view(np.int32).astype(np.int64)
    # Numbers of single precision, in their order, as consecutive integers; both zeros are 0.
    places = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    steps = np.arange(len(places))
    places = np.minimum.accumulate(places + steps) - steps
    sizes = np.abs(places).astype(np.int32).view(np.float32)
    strict: NDArray[np.float32] = np.where(places < 0, -sizes, sizes)
    return strict


def _best_list(query: int, scores: NDArray[np.floating], right: NDArray[np.int64], depth: int) -> BestList:
    """The best of all candidates, which have ``scores`` (n_candidates,) and of which some rows are ``right``."""
    n = len(scores)
    rows = np.arange(n)
    if 0 < depth < n:
        rows = np.flatnonzero(scores >= np.partition(scores, n - depth)[n - depth])
    is_right = np.zeros(n, bool)
    is_right[right] = True
    rows = rows[np.lexsort((rows, is_right[rows], -scores[rows]))][: depth or n]
    return BestList(query, rows, scores[rows])
