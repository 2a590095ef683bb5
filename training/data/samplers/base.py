"""The base class of samplers, which split the pairs of an epoch into batches, and samplers that use each pair once."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.presets.schema import Settings

Indices = NDArray[np.int64]


class Sampler(Settings):
    """A sampler and its settings, chosen by its ``name``."""

    name: str

    def batches(self, image_indices: Indices, batch_size: int, rng: np.random.Generator) -> list[Indices]:
        """Return the pair indices of each batch, given the image index of every pair (n_pairs,)."""
        raise NotImplementedError

    def build_epoch_batches(self, image_indices: Indices, batch_size: int, seed: int, epoch: int) -> list[Indices]:
        """Return the batches of an epoch. The batches depend only on ``seed`` and ``epoch``."""
        return self.batches(image_indices, batch_size, np.random.default_rng([seed, epoch]))


class ShuffledSampler(Sampler):
    """Every pair once, in random order. A last batch of a single pair is left out, because it has no negatives."""

    name: Literal["shuffled"] = "shuffled"

    def batches(self, image_indices: Indices, batch_size: int, rng: np.random.Generator) -> list[Indices]:
        return _split_into_batches(rng.permutation(len(image_indices)), batch_size)


class GroupedByImageSampler(Sampler):
    """Every pair once, with images in random order and the captions of an image one after another.

    A last batch of a single pair is left out.
    """

    name: Literal["by_image"] = "by_image"

    def batches(self, image_indices: Indices, batch_size: int, rng: np.random.Generator) -> list[Indices]:
        _, image = np.unique(image_indices, return_inverse=True)
        rank = rng.permutation(image.max(initial=0) + 1)
        return _split_into_batches(np.lexsort((rng.random(len(image_indices)), rank[image])), batch_size)


def _split_into_batches(order: Indices, batch_size: int) -> list[Indices]:
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batch for batch in batches if len(batch) > 1]
