"""All pairs in random order."""

from __future__ import annotations

from typing import Literal

import numpy as np

from vse.train.data.samplers.base import Numbers, Sampler


class Shuffled(Sampler):
    """Every pair once, in random order.

    The last batch may be smaller; a last batch of one pair has no negatives and is left out.
    """

    name: Literal["shuffled"] = "shuffled"

    def batches(self, image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
        order = rng.permutation(len(image_of))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        return [batch for batch in batches if len(batch) > 1]
