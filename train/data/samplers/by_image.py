"""Batches in which the pairs of an image follow each other, so that a batch has few images."""

from __future__ import annotations

from typing import Literal

import numpy as np

from vse.train.data.samplers.base import Numbers, Sampler


class ByImage(Sampler):
    """Every pair once: images in random order, and the pairs of each image one after the other, in random order.

    A batch of phrases then reads and embeds the candidates of few images only. The last batch may be smaller; a last batch of
    one pair is left out.
    """

    name: Literal["by_image"] = "by_image"

    def batches(self, image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
        _, number = np.unique(image_of, return_inverse=True)
        place = rng.permutation(number.max(initial=0) + 1)
        order = np.lexsort((rng.random(len(image_of)), place[number]))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        return [batch for batch in batches if len(batch) > 1]
