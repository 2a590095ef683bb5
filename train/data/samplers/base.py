"""The base class of samplers, which split the pairs of an epoch into batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.presets.schema import Settings

Numbers = NDArray[np.int64]


class Sampler(Settings):
    """The settings of a sampler, chosen by its ``name``, and its code."""

    name: str

    def batches(self, image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
        """Return the pair indices of each batch, given the image index of every pair (n_pairs,)."""
        raise NotImplementedError

    def batches_of_epoch(self, image_of: Numbers, batch_size: int, seed: int, epoch: int) -> list[Numbers]:
        """Return the batches of an epoch, which depend on the seed and the epoch only."""
        return self.batches(image_of, batch_size, np.random.default_rng([seed, epoch]))
