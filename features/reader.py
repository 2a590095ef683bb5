"""The one way features are read: rows by position or id, from memory as far as they fit, else from mapped shards."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from vse.features.cache import FeatureCache
from vse.pipeline.errors import UserError


class FeatureReader:
    """Random access to the rows of a cache.

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
        self._starts = np.cumsum([0, *(shard.count for shard in cache.shards)])
        self._positions = {int(identity): k for k, identity in enumerate(cache.ids)}
        self._shards: list[NDArray[np.generic]] = []
        left = memory_gb * 1e9
        for shard in cache.shards:
            shape = (shard.count, *cache.row_shape)
            rows: NDArray[np.generic] = (
                np.memmap(shard.path, cache.dtype, "r", shard.offset, shape) if shard.count else np.empty(shape, cache.dtype)
            )
            if rows.nbytes <= left:
                left -= rows.nbytes
                rows = np.array(rows)
            self._shards.append(rows)

    def positions(self, ids: Iterable[int]) -> NDArray[np.int64]:
        """Row numbers of ``ids``; :class:`UserError` names the first id that the cache lacks."""
        wanted = [int(i) for i in ids]
        missing = [i for i in wanted if i not in self._positions]
        if missing:
            raise UserError(
                f"{self.cache.path}: {len(missing)} of {len(wanted)} images have no features, the first is id {missing[0]}; "
                f"extract the features of this very data set ({self.cache.dataset!r} is in the cache)"
            )
        return np.asarray([self._positions[i] for i in wanted], np.int64)

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Features (len(positions), dim) as float32; :class:`UserError` names an id whose features are not finite."""
        out = np.empty((len(positions), *self.cache.row_shape), np.float32)
        shard_of = np.searchsorted(self._starts, positions, side="right") - 1
        for shard in np.unique(shard_of):
            mine = np.flatnonzero(shard_of == shard)
            out[mine] = self._shards[shard][positions[mine] - self._starts[shard]]
        if not np.isfinite(out.sum()):
            bad = ~np.isfinite(out.reshape(len(out), -1)).all(axis=1)
            if bad.any():  # else the sum alone overflowed
                first = self.cache.ids[positions[bad][0]]
                raise UserError(f"{self.cache.path}: the features of id {first} are not finite (NaN)")
        return out
