"""Where on its photograph each vector of an image's set lies: the boxes of regions, or the cells of a CNN's grid."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from vse.features.cache import FeatureCache
from vse.features.crops import centre_crop
from vse.features.extractors.cnn import CnnConfig
from vse.features.region_boxes import RegionBoxes
from vse.pipeline.errors import UserError
from vse.pipeline.input_files import reading


class Places:
    """Boxes of the vectors of the sets in a cache; :class:`UserError` if it does not say where they lie.

    Regions have boxes of their own. A grid of positions divides the centre crop, from left to right and
    then downwards; where the network's map is no multiple of it, cells of the map beyond the edge of a position count in both.
    """

    def __init__(self, cache: FeatureCache) -> None:
        self._boxes: RegionBoxes | None = None
        self._grid: CnnConfig | None = None
        self._side = 0
        self._rows = {int(identity): row for row, identity in enumerate(cache.ids)}
        config = cache.provenance.get("config", {})
        if cache.offsets is not None:
            self._boxes = RegionBoxes(cache)
            return
        if config.get("extractor") == CnnConfig.model_fields["extractor"].default and config.get("positions") is True:
            with reading(cache.path, "a cache of a CNN's positions, by its provenance"):
                grid = CnnConfig(name=cache.feature, **config)
            side = math.isqrt(cache.row_shape[0])
            if grid.crops == "1c" and cache.row_shape[0] == side**2 and grid.grid in (side, "all"):
                self._grid, self._side = grid, side
                return
        raise UserError(f"{cache.path}: does not say where on the photos its {cache.feature} lie")

    def of(self, size: tuple[int, int], image_id: int | None = None) -> Float[np.ndarray, "n 4"]:
        """The boxes x1, y1, x2, y2 of an image's vectors, in pixels of its photo of this width and height.

        A grid lies alike on any photo of a size; regions are those of the image ``image_id``, none if the cache lacks it.
        """
        if self._grid is None:
            return self._regions(size, image_id)
        x1, y1, x2, y2 = centre_crop(size, self._grid)
        n = self._side
        x, y = (np.linspace(start, end, n + 1) for start, end in ((x1, x2), (y1, y2)))
        return np.asarray([(x[j], y[i], x[j + 1], y[i + 1]) for i in range(n) for j in range(n)])

    def _regions(self, size: tuple[int, int], image_id: int | None) -> NDArray[np.float64]:
        """Those of a row, scaled to the photo if that is of another size than the cache says."""
        row = None if image_id is None else self._rows.get(image_id)
        if row is None or self._boxes is None:
            return np.empty((0, 4))
        first, end = self._boxes.offsets[row : row + 2].tolist()
        with np.errstate(divide="ignore", invalid="ignore"):  # an image of no size has boxes that are no numbers
            scale = np.tile(np.asarray(size) / self._boxes.image_size[row], 2)
            return np.asarray(self._boxes.boxes[first:end] * scale, np.float64)
