"""What no ranking of an image's boxes can exceed: the share of phrases of which a box overlaps the ground truth enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from vse.features.rows import Ids
from vse.features.shards import read_rows
from vse.pipeline.boxes_overlap import iou
from vse.pipeline.dataset import SPLITS, Dataset
from vse.pipeline.hdf5_files import open_hdf5
from vse.pipeline.phrase_lists import Mention, mentions

IOU = 0.5
"""What an overlap has to be, as the evaluation of Flickr30K Entities has it."""


def bounds_of_splits(
    dataset: Dataset,
    ids: Ids,
    offsets: Ids,
    boxes: Float[np.ndarray, "n_boxes 4"],
    of_images: Collection[int] | None = None,
    threshold: float = IOU,
) -> dict[str, dict[str, int]]:
    """How many phrases with a box each split has, and how many of these have a candidate whose IoU is the ``threshold``.

    The box of a phrase is the one around all of its boxes. Image ``ids[k]`` has the candidates
    ``boxes[offsets[k]:offsets[k + 1]]``; the phrases of an image without any count, too, and are not covered. ``of_images``
    are the images whose phrases are looked at; none: all. Splits without such phrases are left out.
    """
    rows = {int(identity): k for k, identity in enumerate(ids)}
    counts: dict[str, dict[str, int]] = {}
    for image_id, of_image in _with_truth(dataset).items():
        if of_images is not None and image_id not in of_images:
            continue
        truths = np.asarray([mention.phrase.truth for mention in of_image], np.float64)
        row = rows.get(image_id)
        candidates = boxes[:0] if row is None else boxes[offsets[row] : offsets[row + 1]]
        covered = (iou(truths, candidates) >= threshold).any(axis=1).sum()
        of_split = counts.setdefault(of_image[0].image.split, {"phrases": 0, "covered": 0})
        of_split["phrases"] += len(truths)
        of_split["covered"] += int(covered)
    return counts


def bounds_of_shards(dataset: Dataset, shards: Sequence[Path], of_images: Collection[int] | None = None) -> dict[str, Any]:
    """What a cache's provenance says of the boxes in its ``shards``: ``upper_bound``, with the share for each split.

    Empty where there are no boxes, or no phrases with boxes. ``of_images`` as :func:`bounds_of_splits` takes it.
    """
    with open_hdf5(shards[0], "a readable shard") as first:
        if not {"boxes", "offsets"} <= first.keys():
            return {}
    ids, counts, boxes = zip(*(_of_shard(path) for path in shards), strict=True)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts), dtype=np.int64)])
    splits = bounds_of_splits(dataset, np.concatenate(ids), offsets, np.concatenate(boxes), of_images)
    shares = {name: {**of_split, "share": of_split["covered"] / of_split["phrases"]} for name, of_split in splits.items()}
    return {"upper_bound": {"iou": IOU, "splits": shares}} if splits else {}


def described_bounds(bound: Mapping[str, Any]) -> str:
    """The ``upper_bound`` of a provenance for a person: ``phrases with a box of IoU >= 0.5: train 69.5% of 77,911, ...``."""
    splits = [f"{name} {100 * n['share']:.1f}% of {n['phrases']:,}" for name in SPLITS if (n := bound["splits"].get(name))]
    return f"phrases with a box of IoU >= {bound['iou']:g}: {', '.join(splits)}"


def _with_truth(dataset: Dataset) -> dict[int, list[Mention]]:
    """The phrases with a box, by their image."""
    by_image: dict[int, list[Mention]] = defaultdict(list)
    for mention in mentions(dataset):
        if mention.phrase.boxes:
            by_image[mention.image.imgid].append(mention)
    return by_image


def _of_shard(path: Path) -> tuple[Ids, Ids, NDArray[np.float32]]:
    """Ids, number of boxes of each, and boxes."""
    ids, offsets, boxes = read_rows(path, "ids", "offsets", "boxes")
    return ids, np.diff(offsets), boxes
