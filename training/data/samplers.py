"""Samplers, which split the pairs of an epoch into batches. A new sampler is one class and one line in SAMPLERS."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError
from vse.pipeline.presets.parts import Registry
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
    """Every pair once, in random order. A last batch of a single pair has no negatives and is left out."""

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


_MIN_BATCH_SIZE = 4  # two captions of each of two images


class NeighbourhoodSampler(Sampler):
    """Every pair once, with two or more captions of an image in the same batch (two-branch paper, sections 3.2.3 and 5.1).

    The captions of an image are split into random groups of two. A single remaining caption joins the last group. The only
    caption of an image is a group of one. Batches are filled with groups in random order, up to ``batch_size`` pairs. A last
    batch with a single image has no negatives. It is appended to the previous batch, which may then exceed ``batch_size``.
    Raises :class:`UserError` if ``batch_size`` is below four.
    """

    name: Literal["neighbourhood"] = "neighbourhood"

    def batches(self, image_indices: Indices, batch_size: int, rng: np.random.Generator) -> list[Indices]:
        if batch_size < _MIN_BATCH_SIZE:
            raise UserError(
                f"train.batch_size {batch_size}: neighbourhood sampling requires at least {_MIN_BATCH_SIZE} pairs in a batch"
            )
        order = np.lexsort((rng.random(len(image_indices)), image_indices))
        _, firsts, counts = np.unique(image_indices[order], return_index=True, return_counts=True)
        position = np.arange(len(order)) - np.repeat(firsts, counts)
        starts_group = (position % 2 == 0) & ((position == 0) | (position + 1 < np.repeat(counts, counts)))
        group_starts = np.flatnonzero(starts_group)
        sizes = np.diff(group_starts, append=len(order))
        shuffle = rng.permutation(len(sizes))
        ends = np.cumsum(sizes[shuffle])
        rank = np.empty_like(shuffle)
        rank[shuffle] = np.arange(len(shuffle))
        pairs = order[np.argsort(np.repeat(rank, sizes), kind="stable")]
        bounds = [0]
        while bounds[-1] < len(pairs):
            fitting = int(np.searchsorted(ends, bounds[-1] + batch_size, side="right")) - 1
            following = int(np.searchsorted(ends, bounds[-1], side="right"))
            bounds.append(int(ends[max(fitting, following)]))
        if len(bounds) > 2 and len(np.unique(image_indices[pairs[bounds[-2] :]])) == 1:
            del bounds[-2]
        return np.split(pairs, bounds[1:-1])


class NeighbourAddingSampler(Sampler):
    """Shuffled batches with added pairs: if a batch has a single caption of an image, another one is added.

    This is Algorithm 1 of the two-branch paper (Wang et al., TPAMI 2018). A batch then has up to twice ``batch_size`` pairs,
    and a pair may occur several times in an epoch. The authors' code also adds captions of images that already have two.
    """

    name: Literal["neighbourhood_added"] = "neighbourhood_added"

    def batches(self, image_indices: Indices, batch_size: int, rng: np.random.Generator) -> list[Indices]:
        by_image = np.argsort(image_indices, kind="stable")
        _, image, counts = np.unique(image_indices, return_inverse=True, return_counts=True)
        firsts = np.cumsum(counts) - counts
        position = np.empty(len(image_indices), np.int64)
        position[by_image] = np.arange(len(image_indices))
        batches = []
        for batch in ShuffledSampler().batches(image_indices, batch_size, rng):
            images = image[batch]
            alone = batch[(np.bincount(images, minlength=len(counts))[images] == 1) & (counts[images] > 1)]
            images = image[alone]
            steps = rng.integers(1, counts[images])  # a step in the circular list of the image's captions, to another caption
            others = by_image[firsts[images] + (position[alone] - firsts[images] + steps) % counts[images]]
            batches.append(np.concatenate([batch, others]))
        return batches


SAMPLERS: Registry[Sampler] = Registry(
    "sampler",
    base=Sampler,
    lazy={
        "shuffled": "vse.training.data.samplers:ShuffledSampler",
        "neighbourhood": "vse.training.data.samplers:NeighbourhoodSampler",
        "by_image": "vse.training.data.samplers:GroupedByImageSampler",
        "neighbourhood_added": "vse.training.data.samplers:NeighbourAddingSampler",
    },
)
