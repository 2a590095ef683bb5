"""Read a feature cache: its description, its rows by index or id, and the boxes of its regions."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveInt

from vse.features.cache.arrays import BlockChecker, ByteSource, StoredArray, view_bytes
from vse.features.cache.feature_cache import ROW_HASH_NAMES, FeatureCache
from vse.features.cache.rows import FeatureKind, TextUnit
from vse.pipeline.dataset.columns import IdIndex
from vse.pipeline.errors import UserError

_BOX_ARRAY_ROW_SHAPES = {"boxes": (4,), "image_size": (2,)}  # shape of one region's box, and of one image's size


class RegionBoxes:
    """The boxes of all regions of a cache, in memory. Raises UserError if the cache has no boxes.

    offsets : (n + 1,), the regions of image k are ``offsets[k]:offsets[k + 1]``
    boxes : (n_regions, 4) float32, x1, y1, x2, y2 in pixels of the original image
    image_size : (n, 2) int32, width and height of the original images
    """

    def __init__(self, cache: FeatureCache) -> None:
        complete = all(
            name in shard and shard[name].shape[1:] == shape
            for shard in cache.shard_arrays
            for name, shape in _BOX_ARRAY_ROW_SHAPES.items()
        )
        if cache.offsets is None or not complete:
            raise UserError(f"{cache.path}: has no boxes, so the positions of its {cache.feature} in the images are unknown")
        self.offsets = cache.offsets
        self.boxes: Float[np.ndarray, "n_regions 4"] = np.concatenate([shard["boxes"].read() for shard in cache.shard_arrays])
        self.image_size: Int[np.ndarray, "n 2"] = np.concatenate([shard["image_size"].read() for shard in cache.shard_arrays])


@dataclass(frozen=True)
class PaddedSets:
    """The sets of vectors of n rows, padded with zeros to the size of the largest set.

    features : (n, n_longest, dim) padded vectors
    mask : (n, n_longest) False for the padding at the end of a set
    """

    features: NDArray[np.generic]
    mask: NDArray[np.bool_]


# Above this number of ranges, and for files, fewer and longer reads save more time than the search for neighbours takes.
_MAX_SEPARATE_RANGES = 1024


class _FileBytes:
    """The bytes of an array in a shard file, read without a file position, so that forked processes can share the file."""

    def __init__(self, stored: StoredArray) -> None:
        try:
            self._descriptor = os.open(stored.path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{stored.path}: {error.strerror}") from None
        self._stored = stored
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, span: slice) -> bytes:
        content = os.pread(self._descriptor, span.stop - span.start, self._stored.offset + span.start)
        if len(content) < span.stop - span.start:
            raise UserError(f"{self._stored.path}: the file became shorter after it was opened")
        return content


class FeatureReader:
    """Random access to the rows of a cache, in the dtype of the cache.

    The reader loads the first shards into memory, up to ``memory_gb``. The other shards are read from memory maps or from open
    files. Maps are faster, but the system counts hundreds of kilobytes around each row as memory of this process. A reader
    also works in a forked process, and needs no file locks.

    If the cache has checksums, each block of 1 MiB is compared with its checksum when this process first reads the block. The
    methods raise UserError, which names the first block that differs.

    cache : an open cache (:func:`vse.features.cache.feature_cache.open_cache`)
    memory_gb : limit for features in memory, in units of 1e9 bytes
    mapped : read the other shards from memory maps (True) or from open files (False)
    """

    def __init__(self, cache: FeatureCache, memory_gb: float = 2.0, mapped: bool = True) -> None:
        self.cache = cache
        self._memory_gb, self._mapped = memory_gb, mapped
        stored = [shard["features"] for shard in cache.shard_arrays]
        counts = [part.shape[0] for part in stored]
        fits = int(np.searchsorted(np.cumsum([part.nbytes for part in stored]), memory_gb * 1e9, side="right"))
        loaded = [np.asarray(part.map_to_memory()).reshape(-1, *cache.row_shape) for part in stored[:fits]]
        rest: list[ByteSource] = [
            view_bytes(np.asarray(part.map_to_memory())) if mapped else _FileBytes(part) for part in stored[fits:]
        ]
        self._memory = np.concatenate([np.empty((0, *cache.row_shape), cache.dtype), *loaded])
        self._starts = np.cumsum([0, len(self._memory), *counts[fits:]])
        self._bytes = [view_bytes(self._memory), *rest]
        ends = np.cumsum([part.nbytes for part in stored[:fits]], dtype=np.int64).tolist()
        self._shard_bytes = [*(self._bytes[0][first:end] for first, end in zip([0, *ends], ends, strict=False)), *rest]
        self._n_in_memory = fits
        for shard in range(fits):
            cache.block_checker.check_shard(shard, self._shard_bytes[shard])

    def __reduce__(self) -> tuple[type[FeatureReader], tuple[FeatureCache, float, bool]]:
        return FeatureReader, (self.cache, self._memory_gb, self._mapped)

    @cached_property
    def _id_index(self) -> IdIndex:
        return IdIndex(self.cache.ids)

    def read_ahead(self) -> None:
        """Request that the system reads the features into its page cache, without waiting for them."""
        for shard in self.cache.shard_arrays:
            shard["features"].read_ahead()

    def find_rows(self, ids: Iterable[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row index of each id. Raises UserError, which names the first id that the cache lacks."""
        wanted_ids = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        indices = self._id_index.find_rows(wanted_ids)
        missing = wanted_ids[indices < 0]
        if len(missing):
            what = "images" if self.cache.kind == "image" else self.cache.text_unit
            raise UserError(
                f"{self.cache.path}: {len(missing)} of {len(wanted_ids)} {what} have no features, the first is id {missing[0]}"
                f"; extract the features of this data set (the cache holds features of {self.cache.dataset!r})"
            )
        return indices

    def read_crops(self, indices: NDArray[np.int64], crops: NDArray[np.int64]) -> NDArray[np.generic]:
        """Return the vector of crop ``crops[k]`` in row ``indices[k]`` for every k: (len(indices), dim)."""
        n_crops = self.cache.row_shape[0]
        assert len(self.cache.row_shape) == 2, "not a bank of crops"
        assert not len(crops) or 0 <= crops.min() <= crops.max() < n_crops, "no such crop"
        first = indices * n_crops + crops
        return self._read_vector_ranges(first, first + 1, n_crops).reshape(-1, self.cache.dim)

    def read_rows(self, indices: NDArray[np.int64]) -> NDArray[np.generic]:
        """Return rows of a cache whose rows have the same shape (``offsets`` is None): (len(indices), *row_shape)."""
        assert self.cache.offsets is None, "regions are read by read_padded_regions()"
        if len(self._bytes) == 1:
            in_memory: NDArray[np.generic] = self._memory[indices]
            return in_memory
        return self._read_vector_ranges(indices, indices + 1)

    def read_sets(self, indices: NDArray[np.int64]) -> PaddedSets:
        """Return the sets of vectors of some rows, padded with zeros to the largest set. The cache must hold sets.

        Sets are padded to at least one vector, so that a maximum over a set exists even if all sets are empty.
        """
        assert self.cache.row_kind == "sets", f"rows are {self.cache.row_kind}"
        if self.cache.offsets is not None:
            return self.read_padded_regions(indices, min_regions=1)
        return PaddedSets(self.read_rows(indices), np.ones((len(indices), self.cache.row_shape[0]), bool))

    def read_vectors(self, indices: NDArray[np.int64]) -> NDArray[np.generic]:
        """Return single vectors (len(indices), dim). An index is a position (from 0) in the list of all rows' vectors."""
        per_row = 1 if self.cache.offsets is not None else int(np.prod(self.cache.row_shape[:-1]))
        return self._read_vector_ranges(indices, indices + 1, per_row).reshape(-1, self.cache.dim)

    @cached_property
    def region_boxes(self) -> RegionBoxes:
        """The boxes of the regions. Raises UserError if the cache has no boxes."""
        return RegionBoxes(self.cache)

    def read_padded_regions(self, indices: NDArray[np.int64], min_regions: int = 0) -> PaddedSets:
        """Return the regions of some rows, padded with zeros to the same number of regions. The cache must have ``offsets``.

        This number is the largest number of regions of a row, but at least ``min_regions``.
        """
        assert self.cache.offsets is not None, "not a cache of regions"
        starts, counts = self.cache.offsets[indices], self.cache.offsets[indices + 1] - self.cache.offsets[indices]
        column = np.arange(counts.max(initial=min_regions))
        mask = column < counts[:, None]
        features = np.zeros((*mask.shape, *self.cache.row_shape), self.cache.dtype)
        features[mask] = self._read_vector_ranges(starts, starts + counts)
        return PaddedSets(features, mask)

    def check_rows_finite(self, indices: NDArray[np.int64]) -> None:
        """Raise UserError if a row at ``indices`` contains an infinite number or NaN. The message names the first such row."""
        for index in indices:
            row = np.asarray([index])
            features = self.read_rows(row) if self.cache.offsets is None else self.read_padded_regions(row).features
            if not np.isfinite(features).all():
                raise UserError(f"{self.cache.path}: the features of id {self.cache.ids[index]} are not finite (NaN)")

    def _read_vector_ranges(self, firsts: NDArray[np.int64], ends: NDArray[np.int64], per_row: int = 1) -> NDArray[np.generic]:
        """Return the vectors ``firsts[k]:ends[k]`` for every k, concatenated; each range must lie in one shard.

        ``firsts`` and ``ends`` are positions in the list of the vectors of all rows. Without ``offsets``, each row counts as
        ``per_row`` vectors: 1 if complete rows are read, else the number of vectors in a row.
        """
        shape = self.cache.row_shape[-1:] if per_row > 1 else self.cache.row_shape
        size = self.cache.dtype.itemsize * int(np.prod(shape))
        starts = self._starts * per_row
        parts = np.searchsorted(starts[1:-1], firsts, side="right")  # indices into self._bytes
        shift = starts[parts]
        first_bytes, end_bytes = (firsts - shift) * size, (ends - shift) * size
        self._check_blocks(parts, first_bytes, end_bytes)
        if not self._mapped or len(parts) > _MAX_SEPARATE_RANGES:  # turn neighbouring ranges of a shard into one
            begins = np.ones(len(parts), bool)
            begins[1:] = (parts[1:] != parts[:-1]) | (first_bytes[1:] != end_bytes[:-1])
            stops = np.append(begins[1:], True)[: len(parts)]
            parts, first_bytes, end_bytes = parts[begins], first_bytes[begins], end_bytes[stops]
        spans = zip(parts.tolist(), first_bytes.tolist(), end_bytes.tolist(), strict=True)
        joined = bytearray().join([self._bytes[part][first:end] for part, first, end in spans])
        return np.frombuffer(joined, self.cache.dtype).reshape(-1, *shape)

    def _check_blocks(self, parts: NDArray[np.int64], firsts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        if self.cache.block_checker.is_fully_checked:
            return
        on_disk = parts > 0
        if on_disk.any():
            shards = parts[on_disk] + self._n_in_memory - 1
            self.cache.block_checker.check_byte_ranges(shards, firsts[on_disk], ends[on_disk], self._shard_bytes)


def check_text_unit(cache: FeatureCache, wanted_unit: TextUnit) -> None:
    """Raise UserError unless the rows of a cache are texts of the kind ``wanted_unit``, captions or phrases."""
    if cache.kind != "text" or cache.text_unit != wanted_unit:
        hint = f" (a preset with of: {wanted_unit})" if cache.kind == "text" else ""
        raise UserError(f"{cache.path} holds {cache.describe()}; features of {wanted_unit} are needed{hint}")


_ROW_PROVENANCE_NAMES = {"counts", "data", "upper_bound"}  # entries of the provenance that describe the rows, not the feature


class FeatureDescription(BaseModel):
    """The extractor of a feature, and the shape and type of the feature's rows.

    A training run records the descriptions of its features, so that these features can be computed for new photos and captions
    without the caches.

    row_shape : shape of a row or, with ``is_ragged``, of one of its vectors
    is_ragged : whether rows have different numbers of vectors
    """

    model_config = ConfigDict(frozen=True)
    dataset: str
    feature: str
    kind: FeatureKind
    key: str
    dtype: Literal["float16", "float32"]
    row_shape: tuple[PositiveInt, ...]
    is_ragged: bool
    provenance: dict[str, Any]

    def build_rowless_cache(self, path: Path, model_folder: Path | None = None) -> FeatureCache:
        """Return the feature as a :class:`FeatureCache` without rows, for code that needs only a cache's settings and shape.

        path : path for messages: the cache file, which need not exist; for a packed model, its file of feature descriptions
        model_folder : folder of the packed model (a trained model with its encoders), from which a fitted encoder is read;
            None: no packed model, the encoder's file lies next to ``path``
        """
        return FeatureCache(
            path=path,
            dataset=self.dataset,
            feature=self.feature,
            kind=self.kind,
            key=self.key,
            provenance=self.provenance,
            dataset_file=path.with_name("dataset.json"),
            ids=np.empty(0, np.int64),
            offsets=np.zeros(1, np.int64) if self.is_ragged else None,
            row_shape=self.row_shape,
            dtype=np.dtype(self.dtype),
            shard_arrays=(),
            skipped_ids=frozenset(),
            block_checker=BlockChecker([]),
            model_folder=model_folder,
        )


def describe_feature(cache: FeatureCache) -> FeatureDescription:
    """Return the description of the feature in a cache."""
    left_out = {*ROW_HASH_NAMES, *_ROW_PROVENANCE_NAMES}
    return FeatureDescription.model_validate(
        {
            **{name: getattr(cache, name) for name in ("dataset", "feature", "kind", "key", "row_shape")},
            "dtype": cache.dtype.name,
            "is_ragged": cache.offsets is not None,
            "provenance": {name: value for name, value in cache.provenance.items() if name not in left_out},
        }
    )
