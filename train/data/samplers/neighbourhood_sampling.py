"""Batches that hold several captions of each of their images."""

from __future__ import annotations

from typing import Literal

import numpy as np

from vse.pipeline.errors import UserError
from vse.train.data.samplers.base import Numbers, Sampler

_FEWEST = 4  # two captions of each of two images


class NeighbourhoodSampling(Sampler):
    """Every pair once; a batch has two captions or more of each of its images (two-branch paper, Algorithm 1, step 3c).

    The captions of an image are cut into random twos, the last of which takes in a caption that is left over; batches are
    filled with these in random order and never exceed ``batch_size``, but for a last image that would be alone in its
    batch, where nothing would be wrong: it joins the batch before. An image with one caption comes with that one.
    :class:`UserError` if a batch is to have less than four pairs, which is too few for two images.
    """

    name: Literal["neighbourhood"] = "neighbourhood"

    def batches(self, image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
        if batch_size < _FEWEST:
            raise UserError(f"train.batch_size {batch_size}: neighbourhood sampling needs batches of {_FEWEST} pairs at least")
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
