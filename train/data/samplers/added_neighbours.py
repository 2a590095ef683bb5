"""Shuffled batches, to which a second caption of each image is added."""

from __future__ import annotations

from typing import Literal

import numpy as np

from vse.train.data.samplers.base import Numbers, Sampler
from vse.train.data.samplers.shuffled import Shuffled


class AddedNeighbours(Sampler):
    """Shuffled batches, where each image with one caption in a batch gets another of its own captions on top.

    This is Algorithm 1 of the two-branch paper to the letter, and the authors' code but for images that a batch has twice
    already. A batch holds up to twice ``batch_size`` pairs, and a pair may come up several times in an epoch.
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
            steps = rng.integers(1, counts[images])  # to another caption of the same image, round a circle of them
            others = by_image[firsts[images] + (place[alone] - firsts[images] + steps) % counts[images]]
            batches.append(np.concatenate([batch, others]))
        return batches
