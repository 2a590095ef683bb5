"""Shuffled batches with a second caption added for each image."""

from __future__ import annotations

from typing import Literal

import numpy as np

from vse.train.data.samplers.base import Numbers, Sampler
from vse.train.data.samplers.shuffled import Shuffled


class AddedNeighbours(Sampler):
    """Shuffled batches in which each image with one caption receives a second one of its own captions.

    This is Algorithm 1 of the two-branch paper exactly. The authors' code does the same, except for images that occur twice in
    a batch already. A batch holds up to twice ``batch_size`` pairs, and a pair may occur several times in an epoch.
    """

    name: Literal["neighbourhood_added"] = "neighbourhood_added"

    def batches(self, image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
        by_image = np.argsort(image_of, kind="stable")
        _, number, counts = np.unique(image_of, return_inverse=True, return_counts=True)
        firsts = np.cumsum(counts) - counts
        place = np.empty(len(image_of), np.int64)
        place[by_image] = np.arange(len(image_of))
        batches = []
        for batch in Shuffled().batches(image_of, batch_size, rng):
            images = number[batch]
            alone = batch[(np.bincount(images, minlength=len(counts))[images] == 1) & (counts[images] > 1)]
            images = number[alone]
            steps = rng.integers(1, counts[images])  # a step in the circular list of the image's captions, to another caption
            others = by_image[firsts[images] + (place[alone] - firsts[images] + steps) % counts[images]]
            batches.append(np.concatenate([batch, others]))
        return batches
