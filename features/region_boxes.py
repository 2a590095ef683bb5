"""Boxes of a cache's regions and the sizes of its images, in memory: a ten-thousandth of what the features take."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from vse.features.cache import FeatureCache
from vse.pipeline.errors import UserError

_SHAPES = {"boxes": (4,), "image_size": (2,)}  # of a region, and of an image


class RegionBoxes:
    """Where the regions of a cache lie; :class:`UserError` if it does not say so, as that of imported regions may not.

    Attributes
    ----------
    offsets : (n + 1,); image k of the cache has the regions ``offsets[k]:offsets[k + 1]``
    boxes : (n_regions, 4) float32, x1, y1, x2, y2 in pixels of the original image
    image_size : (n, 2) int32, width and height of the original images
    """

    def __init__(self, cache: FeatureCache) -> None:
        complete = all(
            name in shard and shard[name].shape[1:] == shape for shard in cache.shards for name, shape in _SHAPES.items()
        )
        if cache.offsets is None or not complete:
            raise UserError(f"{cache.path}: does not say where on the photos its {cache.feature} lie")
        self.offsets = cache.offsets
        self.boxes: Float[np.ndarray, "n_regions 4"] = np.concatenate([shard["boxes"].read() for shard in cache.shards])
        self.image_size: Int[np.ndarray, "n 2"] = np.concatenate([shard["image_size"].read() for shard in cache.shards])

    def padded(self, positions: Int[np.ndarray, " n"], at_most: int | None = None) -> Float[np.ndarray, "n n_longest 4"]:
        """Boxes of the regions of some images, as :meth:`vse.features.reader.FeatureReader.regions` has their features.

        What pads them is zeros. ``at_most``: of each image the first so many.
        """
        starts, counts = self.offsets[positions], self.offsets[positions + 1] - self.offsets[positions]
        counts = counts if at_most is None else counts.clip(max=at_most)
        column = np.arange(counts.max(initial=0))
        inside = column < counts[:, None]
        boxes = np.zeros((*inside.shape, 4), np.float32)
        boxes[inside] = self.boxes[(starts[:, None] + column)[inside]]
        return boxes
