"""Regions of images as inputs of a model: cached vectors, coordinates of boxes, or both."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vse.features.backbones.device import move_tensor
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureReader, RegionBoxes
from vse.pipeline.errors import UserError
from vse.training.data.images import CachedFeatures, Indices

CoordinateUse = Literal["none", "appended", "alone"]
N_COORDINATES = 5


class BoxFeatures(CachedFeatures):
    """The regions of some images in a cache, image after image, with their boxes.

    For the parameters see :class:`vse.training.data.images.CachedFeatures`. Raises UserError if the cache does not hold
    regions with boxes.

    ``boxes`` : (n_regions, 4) x1, y1, x2, y2 in pixels of the original image.
    ``image_indices`` : (n_regions,) index of each region's image.
    ``region_starts`` : (n_images,) index of each image's first region.
    ``region_counts`` : (n_images,) number of regions of each image.
    ``image_sizes`` : (n_images, 2) width and height of each image in pixels.
    """

    def __init__(
        self, cache: FeatureCache, image_ids: Indices, device: torch.device, memory_gb: float = 0, used_gb: float = 0
    ) -> None:
        if cache.offsets is None:
            raise UserError(f"{cache.path} holds {cache.describe()}; regions with boxes are needed (vse-extract boxes)")
        super().__init__(FeatureReader(cache, 0, mapped=False), image_ids, device, memory_gb, used_gb)
        self.dim = cache.dim
        self.region_starts, self.region_counts = self._vector_starts, self._vector_counts
        self.image_indices = np.repeat(np.arange(len(image_ids)), self._vector_counts)
        within = np.arange(len(self.image_indices)) - self._vector_starts[self.image_indices]
        every = RegionBoxes(cache)
        self.boxes = every.boxes[every.offsets[self._cache_rows][self.image_indices] + within]
        self.image_sizes = every.image_size[self._cache_rows]
        if not np.isfinite(self.boxes).all():
            raise UserError(f"{cache.path}: has boxes that are not finite (NaN); extract it again")

    def __len__(self) -> int:
        return len(self.image_indices)

    def read_region_vectors(self, regions: Indices) -> Float[Tensor, "n dim"]:
        """Return the vectors of some regions. A read from the cache reads each image once."""
        if self._in_memory:
            return self._take_vectors(torch.from_numpy(regions))
        images, which = np.unique(self.image_indices[regions], return_inverse=True)
        rows = self._cache_rows[images]
        sets = self._reader.read_padded_regions(rows).features
        vectors = sets[which, regions - self.region_starts[images][which]].reshape(-1, self.dim)
        return move_tensor(self._check_finite(torch.from_numpy(vectors).float(), rows), self._device)

    def compute_coordinates(self, regions: Indices) -> Float[np.ndarray, "n 5"]:
        """Return x1, y1, x2, y2 and the area of some regions, relative to the size of the image."""
        sides = np.tile(self.image_sizes[self.image_indices[regions]], 2).clip(min=1)
        relative = self.boxes[regions].astype(np.float64) / sides
        area = (relative[:, 2:] - relative[:, :2]).prod(1, keepdims=True)
        return np.concatenate([relative, area], 1)


class RegionInputs:
    """Regions as inputs of a model. Indices count all candidates first, then all ground-truth regions (``truths``).

    ``coordinates`` of boxes are ``appended`` to the vectors of regions, replace the vectors (``alone``), or are not used.
    """

    def __init__(
        self, candidates: BoxFeatures, truths: BoxFeatures | None, coordinates: CoordinateUse, device: torch.device
    ) -> None:
        if truths is not None and truths.dim != candidates.dim:
            raise UserError(
                f"regions have {candidates.dim} numbers, ground-truth regions {truths.dim}; extract both with one setting"
            )
        self.candidates, self.truths, self._coordinates, self._device = candidates, truths, coordinates, device

    @property
    def dim(self) -> int:
        return region_input_dim(self.candidates.dim, self._coordinates)

    def read(self, regions: Indices) -> Float[Tensor, "n dim"]:
        is_truth = regions >= len(self.candidates)
        if self.truths is None or not is_truth.any():
            return self._read_from(self.candidates, regions)
        vectors = torch.empty(len(regions), self.dim, device=self._device)
        for source, chosen, first in ((self.candidates, ~is_truth, 0), (self.truths, is_truth, len(self.candidates))):
            vectors[torch.from_numpy(chosen).to(self._device)] = self._read_from(source, regions[chosen] - first)
        return vectors

    def _read_from(self, source: BoxFeatures, regions: Indices) -> Tensor:
        if self._coordinates == "none":
            return source.read_region_vectors(regions)
        coordinates = move_tensor(torch.from_numpy(source.compute_coordinates(regions)).float(), self._device)
        return (
            coordinates if self._coordinates == "alone" else torch.cat([source.read_region_vectors(regions), coordinates], 1)
        )


def region_input_dim(dim: int, coordinates: CoordinateUse) -> int:
    """Return the length of a model's input for a region whose cached vector has ``dim`` numbers."""
    return {"none": dim, "appended": dim + N_COORDINATES, "alone": N_COORDINATES}[coordinates]
