"""Sample the splits of an imported data set."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from vse.pipeline.dataset.similar_photos import group_similar_photos
from vse.pipeline.errors import UserError

log = logging.getLogger(__name__)


def sample_splits(files: Sequence[str], val: float, test: float, seed: int, images_folder: Path | None) -> dict[str, str]:
    """Return a random split for each file, which depends on the file names and the seed, not on their order.

    Photos that look alike get the same split, unless there are so many that a split would lack over half of its images.

    Parameters
    ----------
    files : paths of the photos in ``images_folder``
    val, test : the share of the photos for this split
    images_folder : the folder of the photos; None if there are no photos to compare
    """
    if val + test >= 1:
        raise UserError(f"--val {val} and --test {test} leave no images for training")
    order = sorted(files, key=lambda file: hashlib.sha256(f"{seed} {file}".encode()).digest())
    sizes = {"val": round(val * len(order)), "test": round(test * len(order))}
    single = [[index] for index in range(len(order))]
    groups = single
    if images_folder is not None and any(sizes.values()):
        groups = group_similar_photos([images_folder / file for file in order])
    sampled = _fill_splits(groups, sizes)
    counts = Counter(sampled)
    n_alike = sum(len(group) for group in groups if len(group) > 1)
    if any(counts[split] < size / 2 for split, size in sizes.items()):
        log.warning("%d of %d photos look like others, too many to keep each group in one split", n_alike, len(order))
        sampled = _fill_splits(single, sizes)
    elif n_alike:
        log.info("%d photos look like others; each group of such photos is in one split", n_alike)
    return dict(zip(order, sampled, strict=True))


def _fill_splits(groups: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> list[str]:
    """Return the split of each index. A group goes to the first split that has room for all of it, or else to train."""
    splits = ["train"] * sum(map(len, groups))
    room = dict(sizes)
    for group in groups:
        split = next((split for split in room if len(group) <= room[split]), None)
        if split is not None:
            room[split] -= len(group)
            for index in group:
                splits[index] = split
    return splits
