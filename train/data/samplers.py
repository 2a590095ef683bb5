"""How the pairs of an epoch are cut into batches, by name. A new sampler is a function here and a line in ``SAMPLERS``.

A sampler is a function of the image (n_pairs,) of every pair, the batch size, and a generator of random numbers; it returns
the numbers of the pairs of each batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError, did_you_mean

Numbers = NDArray[np.int64]
_FEWEST = 4  # two captions of each of two images
Sampler = Callable[[Numbers, int, np.random.Generator], list[Numbers]]


def check_sampler(name: str) -> None:
    """:class:`UserError` suggests the nearest name if there is no sampler ``name``."""
    if name not in SAMPLERS:
        raise UserError(f"unknown sampler {name!r}{did_you_mean(name, SAMPLERS)}")


def batches_of_epoch(name: str, image_of: Numbers, batch_size: int, seed: int, epoch: int) -> list[Numbers]:
    """The batches of an epoch by the sampler ``name``; they depend on the seed and the epoch alone."""
    return SAMPLERS[name](image_of, batch_size, np.random.default_rng([seed, epoch]))


def shuffled(image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
    """Every pair once, in random order.

    The last batch may be smaller; a last batch of one pair has no negatives and is left out.
    """
    order = rng.permutation(len(image_of))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batch for batch in batches if len(batch) > 1]


def neighbourhood(image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
    """Every pair once; a batch has two captions or more of each of its images (two-branch paper, Algorithm 1, step 3c).

    The captions of an image are cut into random twos, the last of which takes in a caption that is left over; batches are
    filled with these in random order and never exceed ``batch_size``, but for a last image that would be alone in its
    batch, where nothing would be wrong: it joins the batch before. An image with one caption comes with that one.
    :class:`UserError` if a batch is to have less than four pairs, which is too few for two images.
    """
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


def neighbourhood_added(image_of: Numbers, batch_size: int, rng: np.random.Generator) -> list[Numbers]:
    """The batches of :func:`shuffled`, where each image with one caption in a batch gets another of its own on top.

    This is Algorithm 1 of the two-branch paper to the letter, and the authors' code but for images that a batch has twice
    already. A batch holds up to twice ``batch_size`` pairs, and a pair may come up several times in an epoch.
    """
    by_image = np.argsort(image_of, kind="stable")
    _, number, counts = np.unique(image_of, return_inverse=True, return_counts=True)
    firsts = np.cumsum(counts) - counts
    place = np.empty(len(image_of), np.int64)
    place[by_image] = np.arange(len(image_of))
    batches = []
    for batch in shuffled(image_of, batch_size, rng):
        images = number[batch]
        alone = batch[(np.bincount(images, minlength=len(counts))[images] == 1) & (counts[images] > 1)]
        images = number[alone]
        steps = rng.integers(1, counts[images])  # to another caption of the same image, round a circle of them
        others = by_image[firsts[images] + (place[alone] - firsts[images] + steps) % counts[images]]
        batches.append(np.concatenate([batch, others]))
    return batches


SAMPLERS: dict[str, Sampler] = {
    "shuffled": shuffled,
    "neighbourhood": neighbourhood,
    "neighbourhood_added": neighbourhood_added,
}
