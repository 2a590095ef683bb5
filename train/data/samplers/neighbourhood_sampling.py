"""Batches with several captions of each of their images."""

from __future__ import annotations

from typing import Literal

import numpy as np

from vse.pipeline.errors import UserError
from vse.train.data.samplers.base import Numbers, Sampler

_FEWEST = 4  # two captions of each of two images


class NeighbourhoodSampling(Sampler):
    """Every pair once; a batch has at least two captions of each of its images (two-branch paper, Algorithm 1, step 3c).

    The captions of an image are split into random groups of two; a caption that is left over joins the last group. Batches are
    filled with groups in random order and never exceed ``batch_size``, with one exception: if the last batch had a single
    image and therefore no negatives, it is appended to the batch before. An image with one caption contributes that one.
    Raises :class:`UserError` if ``batch_size`` is below four, which is too few for two images.
    """

    name: Literal["neighbourhood"] = "neighbourhood"

    def batches(self, image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
        if batch_size < _FEWEST:
            raise UserError(
                f"train.batch_size {batch_size}: neighbourhood sampling requires batches of at least {_FEWEST} pairs"
            )
        order = np.lexsort((rng.random(len(image_of)), image_of))
        _, firsts, counts = np.unique(image_of[order], return_index=True, return_counts=True)
        position = np.arange(len(order)) - np.repeat(firsts, counts)
        starts_group = (position % 2 == 0) & ((position == 0) | (position + 1 < np.repeat(counts, counts)))
        group_starts = np.flatnonzero(starts_group)
        sizes = np.diff(group_starts, append=len(order))
        shuffle = rng.permutation(len(sizes))
        ends = np.cumsum(sizes[shuffle])
        rank = np.empty_like(shuffle)
        rank[shuffle] = np.arange(len(shuffle))
        pairs = order[np.argsort(np.repeat(rank, sizes), kind="stable")]
        cuts = [0]
        while cuts[-1] < len(pairs):
            fitting = int(np.searchsorted(ends, cuts[-1] + batch_size, side="right")) - 1
            following = int(np.searchsorted(ends, cuts[-1], side="right"))
            cuts.append(int(ends[max(fitting, following)]))
        if len(cuts) > 2 and len(np.unique(image_of[pairs[cuts[-2] :]])) == 1:
            del cuts[-2]
        return np.split(pairs, cuts[1:-1])
