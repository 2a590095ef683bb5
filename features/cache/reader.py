"""Reading features: rows by position or id, from memory as far as they fit, else from the shards.

Boxes of a cache's regions and the sizes of its images, in memory: a ten-thousandth of what the features take.

Whether a cache of texts has the rows that are read: captions, or phrases.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from vse.features.cache.arrays import Bytes, Stored, bytes_of
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.rows import TextRows
from vse.pipeline.dataset.columns import IdRows
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
        """Boxes of the regions of some images, as :meth:`vse.features.cache.reader.FeatureReader.regions` has their features.

        What pads them is zeros. ``at_most``: of each image the first so many.
        """
        starts, counts = self.offsets[positions], self.offsets[positions + 1] - self.offsets[positions]
        counts = counts if at_most is None else counts.clip(max=at_most)
        column = np.arange(counts.max(initial=0))
        inside = column < counts[:, None]
        boxes = np.zeros((*inside.shape, 4), np.float32)
        boxes[inside] = self.boxes[(starts[:, None] + column)[inside]]
        return boxes


@dataclass(frozen=True)
class Regions:
    """A set of vectors for each of n rows: ``features`` (n, n_longest, dim), ``mask`` (n, n_longest), False for padding.

    The vectors of a set come first; the padding after them is zeros.
    """

    features: NDArray[np.generic]
    mask: NDArray[np.bool_]


class _File:
    """Bytes of an array in a shard, read where they are asked for; another process may read the same descriptor."""

    def __init__(self, stored: Stored) -> None:
        try:
            self._descriptor = os.open(stored.path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{stored.path}: {error.strerror}") from None
        self._stored = stored
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, span: slice) -> bytes:
        content = os.pread(self._descriptor, span.stop - span.start, self._stored.offset + span.start)
        if len(content) < span.stop - span.start:
            raise UserError(f"{self._stored.path}: shorter than it was when it was opened")
        return content


class FeatureReader:
    """Random access to the rows of a cache, in the type in which they are stored.

    Shards are read into memory in order while they fit into ``memory_gb``; of the others rows are read where HDF5 stored
    them, from a map of the file or from the file itself. A map is faster; but of each row that is read the system maps
    hundreds of kilobytes around it, and counts them as our memory. No HDF5 handle stays open, so a reader survives a fork
    and works where file locking does not; a shard that is not in memory holds one file descriptor.

    Each block of 1 MiB is compared with its checksum when it is read for the first time in this process; :class:`UserError`
    names one that has changed. Caches from before there were checksums are read without.

    Parameters
    ----------
    cache : what :func:`vse.features.cache.feature_cache.open_cache` returned
    memory_gb : how much may be kept in memory, in units of 1e9 bytes
    mapped : read the rest from maps, not from files
    """

    def __init__(self, cache: FeatureCache, memory_gb: float = 2.0, mapped: bool = True) -> None:
        self.cache = cache
        self._memory_gb, self._mapped = memory_gb, mapped
        self._rows = IdRows(cache.ids)
        stored = [shard["features"] for shard in cache.shards]
        counts = [part.shape[0] for part in stored]
        fits = int(np.searchsorted(np.cumsum([part.nbytes for part in stored]), memory_gb * 1e9, side="right"))
        kept = [np.asarray(part.map()).reshape(-1, *cache.row_shape) for part in stored[:fits]]
        rest: list[Bytes] = [bytes_of(np.asarray(part.map())) if mapped else _File(part) for part in stored[fits:]]
        self._memory = np.concatenate([np.empty((0, *cache.row_shape), cache.dtype), *kept])
        self._starts = np.cumsum([0, len(self._memory), *counts[fits:]])
        self._bytes = [bytes_of(self._memory), *rest]
        ends = np.cumsum([part.nbytes for part in stored[:fits]], dtype=np.int64).tolist()
        self._of_shards = [*(self._bytes[0][first:end] for first, end in zip([0, *ends], ends, strict=False)), *rest]
        self._n_kept = fits
        for shard in range(fits):
            cache.blocks.check_shard(shard, self._of_shards[shard])

    def __reduce__(self) -> tuple[type[FeatureReader], tuple[FeatureCache, float, bool]]:
        """Another process opens the shards itself."""
        return FeatureReader, (self.cache, self._memory_gb, self._mapped)

    def positions(self, ids: Iterable[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Row numbers of ``ids``; :class:`UserError` names the first id that the cache lacks."""
        wanted = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        positions = self._rows.find(wanted)
        missing = wanted[positions < 0]
        if len(missing):
            what = "images" if self.cache.kind == "image" else self.cache.text_rows
            raise UserError(
                f"{self.cache.path}: {len(missing)} of {len(wanted)} {what} have no features, the first is id {missing[0]}; "
                f"extract the features of this very data set ({self.cache.dataset!r} is in the cache)"
            )
        return positions

    def crops(self, positions: NDArray[np.int64], crops: NDArray[np.int64]) -> NDArray[np.generic]:
        """One crop of each row of a crop bank, (len(positions), dim): the one with the number in ``crops``."""
        n_crops = self.cache.row_shape[0]
        assert len(self.cache.row_shape) == 2, "not a bank of crops"
        assert not len(crops) or 0 <= crops.min() <= crops.max() < n_crops, "no such crop"
        first = positions * n_crops + crops
        return self._gathered(first, first + 1, n_crops).reshape(-1, self.cache.dim)

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.generic]:
        """Features (len(positions), dim) or (len(positions), n_crops, dim) of a cache without regions."""
        assert self.cache.offsets is None, "regions are read by regions()"
        if len(self._bytes) == 1:
            in_memory: NDArray[np.generic] = self._memory[positions]
            return in_memory
        return self._gathered(positions, positions + 1)

    def sets(self, positions: NDArray[np.int64]) -> Regions:
        """The set of vectors of each row, with its mask, of any cache whose ``row_kind`` is ``sets``.

        Regions of images are padded to the longest set of the rows asked for; an image without a region has a mask that is
        False throughout. Of a grid or of patches every position is there. There is at least one column, so that a maximum
        over the sets exists.
        """
        assert self.cache.row_kind == "sets", f"rows are {self.cache.row_kind}"
        if self.cache.offsets is not None:
            return self.regions(positions, at_least=1)
        return Regions(self.rows(positions), np.ones((len(positions), self.cache.row_shape[0]), bool))

    def vectors(self, numbers: NDArray[np.int64]) -> NDArray[np.generic]:
        """Single regions (len(numbers), dim) by their numbers among all regions of the cache, from 0."""
        assert self.cache.offsets is not None, "not a cache of regions"
        return self._gathered(numbers, numbers + 1)

    @cached_property
    def boxes(self) -> RegionBoxes:
        """Boxes of the regions and sizes of the images; :class:`UserError` if the cache has none."""
        return RegionBoxes(self.cache)

    def regions(self, positions: NDArray[np.int64], at_least: int = 0, at_most: int | None = None) -> Regions:
        """Regions of images with their mask, padded to the longest set of these rows or to ``at_least`` columns.

        ``at_most``: of each image the first so many, which are the best.
        """
        assert self.cache.offsets is not None, "not a cache of regions"
        starts, counts = self.cache.offsets[positions], self.cache.offsets[positions + 1] - self.cache.offsets[positions]
        counts = counts if at_most is None else counts.clip(max=at_most)
        column = np.arange(counts.max(initial=at_least))
        mask = column < counts[:, None]
        features = np.zeros((*mask.shape, *self.cache.row_shape), self.cache.dtype)
        features[mask] = self._gathered(starts, starts + counts)
        return Regions(features, mask)

    def refuse_not_finite(self, positions: NDArray[np.int64]) -> None:
        """:class:`UserError` naming the first of these rows whose features are not all finite numbers, if there is one."""
        for position in positions:
            row = np.asarray([position])
            features = self.rows(row) if self.cache.offsets is None else self.regions(row).features
            if not np.isfinite(features).all():
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
        first_bytes, end_bytes = (firsts - shift) * size, (ends - shift) * size
        self._check(part_of, first_bytes, end_bytes)
        spans = zip(part_of.tolist(), first_bytes.tolist(), end_bytes.tolist(), strict=True)
        joined = bytearray().join([self._bytes[part][first:end] for part, first, end in spans])
        return np.frombuffer(joined, self.cache.dtype).reshape(-1, *shape)

    def _check(self, part_of: NDArray[np.int64], firsts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Compare the blocks that are read for the first time; what is in memory was compared when it was read."""
        if self.cache.blocks.are_sound:
            return
        on_disk = part_of > 0
        if on_disk.any():
            self.cache.blocks.check(part_of[on_disk] + self._n_kept - 1, firsts[on_disk], ends[on_disk], self._of_shards)


def check_text_rows(cache: FeatureCache, wanted: TextRows) -> None:
    """:class:`UserError` unless a cache holds features of texts, and of ``wanted`` ones: ids of the other mean other texts."""
    if cache.kind != "text" or cache.text_rows != wanted:
        raise UserError(
            f"{cache.path} holds {cache.described()}; features of {wanted} are needed, those of a preset with of: {wanted}"
            if cache.kind == "text"
            else f"{cache.path} holds {cache.described()}; features of {wanted} are needed"
        )
