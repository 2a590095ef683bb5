"""What all samplers share: they number the pairs of each batch of an epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.presets.schema import Settings

Numbers = NDArray[np.int64]


class Sampler(Settings):
    """Settings of a sampler, chosen by its ``name``, and what they do."""

    name: str

    def batches(self, image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
        """The numbers of the pairs of each batch, given the image (n_pairs,) of every pair."""
        raise NotImplementedError

    def batches_of_epoch(self, image_of: Numbers, batch_size: int, seed: int, epoch: int) -> list[Numbers]:
        """The batches of an epoch; they depend on the seed and the epoch alone."""
        return self.batches(image_of, batch_size, np.random.default_rng([seed, epoch]))
