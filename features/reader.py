"""The one way features are read: rows by position or id, from memory as far as they fit, else from mapped shards."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vse.features.cache import FeatureCache
from vse.pipeline.errors import UserError


@dataclass(frozen=True)
class Regions:
    """Regions of n images: ``features`` (n, longest, dim), and where there is a region at all, ``mask`` (n, longest)."""

    features: NDArray[np.generic]
    mask: NDArray[np.bool_]


class FeatureReader:
    """Random access to the rows of a cache, in the type in which they are stored.

    Shards are read into memory in order while they fit into ``memory_gb``; the others are memory-mapped at
    the place where HDF5 stored their contiguous rows. No HDF5 handle stays open, so a reader survives a fork and
    works where file locking does not; a mapped shard holds one file descriptor.

    Parameters
    ----------
    cache : what :func:`vse.features.cache.open_cache` returned
    memory_gb : how much may be kept in memory, in units of 1e9 bytes
    """

    def __init__(self, cache: FeatureCache, memory_gb: float = 2.0) -> None:
        self.cache = cache
        self._memory_gb = memory_gb
        self._positions = {int(identity): k for k, identity in enumerate(cache.ids)}
        maps = [shard["features"].map() for shard in cache.shards]
        mapped = [np.asarray(part).reshape(-1, *cache.row_shape) for part in maps]
        fits = int(np.searchsorted(np.cumsum([part.nbytes for part in mapped]), memory_gb * 1e9, side="right"))
        memory = np.concatenate([np.empty((0, *cache.row_shape), cache.dtype), *mapped[:fits]])
        self._parts: list[NDArray[np.generic]] = [memory, *mapped[fits:]]
        self._maps = [part for part in maps[fits:] if isinstance(part, np.memmap)]
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])
        self._bytes = [part.reshape(-1).view(np.uint8).data for part in self._parts]

    def __reduce__(self) -> tuple[type[FeatureReader], tuple[FeatureCache, float]]:
        """Another process opens the shards itself."""
        return FeatureReader, (self.cache, self._memory_gb)

    def positions(self, ids: Iterable[int]) -> NDArray[np.int64]:
        """Row numbers of ``ids``; :class:`UserError` names the first id that the cache lacks."""
        wanted = [int(i) for i in ids]
        missing = [i for i in wanted if i not in self._positions]
        if missing:
            what = "images" if self.cache.kind == "image" else "captions"
            raise UserError(
                f"{self.cache.path}: {len(missing)} of {len(wanted)} {what} have no features, the first is id {missing[0]}; "
                f"extract the features of this very data set ({self.cache.dataset!r} is in the cache)"
            )
        return np.asarray([self._positions[i] for i in wanted], np.int64)

    def crops(self, positions: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.generic]:
        """One crop of each row of a crop bank, (len(positions), dim): that with the number ``chosen``."""
        n_crops = self.cache.row_shape[0]
        assert len(self.cache.row_shape) == 2, "not a bank of crops"
        assert not len(chosen) or 0 <= chosen.min() <= chosen.max() < n_crops, "no such crop"
        first = positions * n_crops + chosen
        return self._gathered(first, first + 1, n_crops).reshape(-1, self.cache.dim)

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.generic]:
        """Features (len(positions), dim) or (len(positions), n_crops, dim) of a cache without regions."""
        assert self.cache.offsets is None, "regions are read by regions()"
        if len(self._parts) == 1:
            found: NDArray[np.generic] = self._parts[0][positions]
            return found
        return self._gathered(positions, positions + 1)

    def regions(self, positions: NDArray[np.int64]) -> Regions:
        """Regions of images, side by side, and the mask that tells them from the zeros behind the shorter rows."""
        assert self.cache.offsets is not None, "not a cache of regions"
        starts, counts = self.cache.offsets[positions], self.cache.offsets[positions + 1] - self.cache.offsets[positions]
        column = np.arange(counts.max(initial=0))
        mask = column < counts[:, None]
        features = np.zeros((*mask.shape, *self.cache.row_shape), self.cache.dtype)
        features[mask] = self._gathered(starts, starts + counts)
        return Regions(features, mask)

    def forget(self) -> None:
        """Let go of the mapped pages that were read. The system keeps them, but as its cache, not as our memory."""
        for part in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):
                part._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def refuse_not_finite(self, positions: NDArray[np.int64]) -> None:
        """:class:`UserError` naming the first of these rows whose features are not all finite numbers, if there is one."""
        for position in positions:
            row = np.asarray([position])
            found = self.rows(row) if self.cache.offsets is None else self.regions(row).features
            if not np.isfinite(found).all():
                raise UserError(f"{self.cache.path}: the features of id {self.cache.ids[position]} are not finite (NaN)")

    def _gathered(self, firsts: NDArray[np.int64], ends: NDArray[np.int64], per_row: int = 1) -> NDArray[np.generic]:
        """Vectors ``firsts[k]:ends[k]`` for every k, one after the other; none of these spans crosses a shard.

        A row has ``per_row`` of them. Joining their bytes copies each once, which is as fast as numpy's own indexing.
        """
        shape = self.cache.row_shape[-1:] if per_row > 1 else self.cache.row_shape
        size = self.cache.dtype.itemsize * int(np.prod(shape))
        starts = self._starts * per_row
        part_of = np.searchsorted(starts[1:-1], firsts, side="right")
        shift = starts[part_of]
        spans = zip(part_of.tolist(), ((firsts - shift) * size).tolist(), ((ends - shift) * size).tolist(), strict=True)
        joined = bytearray().join([self._bytes[part][first:end] for part, first, end in spans])
        return np.frombuffer(joined, self.cache.dtype).reshape(-1, *shape)
