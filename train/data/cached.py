"""Cached features by number, in a device's memory if they fit, else read from the shards."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vse.features.hardware import moved
from vse.features.reader import FeatureReader
from vse.train.kinds import Encoded, Kind, kind_of_rows

_BLOCK = 4096  # rows
Numbers = NDArray[np.int64]


class CachedFeatures:
    """Features of images or captions by their number: vectors, or sets of vectors with their mask.

    An image without a region, whose set would be empty, has one vector of zeros instead.

    Parameters
    ----------
    reader : of the cache
    ids : the images or captions, in the order of their numbers
    device : where features are wanted
    memory_gb : how much may be kept, in units of 1e9 bytes; on a GPU, if it is not 0, what is free there
    taken_gb : how much of that others have taken

    Attributes
    ----------
    kind : vectors or sets; of a bank of crops, vectors
    n_crops : how many crops a bank keeps of each image; 0 if it is none
    gb_kept : how much is in memory, in units of 1e9 bytes
    """

    def __init__(
        self, reader: FeatureReader, ids: Numbers, device: torch.device, memory_gb: float = 0, taken_gb: float = 0
    ) -> None:
        cache = reader.cache
        self._reader = reader
        self._rows = reader.positions(ids)
        self._device = device
        self.kind = kind_of_rows(cache.row_kind)
        self.n_crops = cache.row_shape[0] if cache.row_kind == "crops" else 0
        self._mean_is_unit = bool(cache.provenance.get("config", {}).get("normalize"))
        if cache.offsets is not None:
            self._counts = np.diff(cache.offsets)[self._rows]
        else:
            self._counts = np.full(len(self._rows), int(np.prod(cache.row_shape[:-1])))
        self._starts = np.cumsum(self._counts) - self._counts
        needed = int(self._counts.sum()) * cache.dim * cache.dtype.itemsize
        self._kept = self._loaded() if needed <= free_room(device, memory_gb, taken_gb) else None
        self.gb_kept = 0.0 if self._kept is None else 1e-9 * needed

    def of(self, numbers: Numbers, crops: Numbers | None = None) -> Encoded:
        """The features with these numbers: (vectors (n, dim),), or (vectors (n, longest, dim), mask (n, longest)).

        Of a bank of crops, those of ``crops`` (n,), or the mean over all, of unit length if its vectors are.
        """
        return self._sets(numbers) if self.kind == Kind.SETS else (self._vectors(numbers, crops),)

    def _vectors(self, numbers: Numbers, crops: Numbers | None) -> Tensor:
        if self.n_crops and crops is None:
            return self._mean(numbers)
        crops = np.zeros_like(numbers) if crops is None else crops
        if self._kept is not None:
            which = numbers * self.n_crops + crops if self.n_crops else numbers
            return self._kept.index_select(0, torch.from_numpy(which).to(self._device)).float()
        rows = self._rows[numbers]
        vectors = self._reader.crops(rows, crops) if self.n_crops else self._reader.rows(rows)
        return moved(self._checked(torch.from_numpy(vectors).float(), rows), self._device)

    def _mean(self, numbers: Numbers) -> Tensor:
        rows = self._rows[numbers]
        mean = moved(self._checked(torch.from_numpy(self._reader.rows(rows)).float().mean(1), rows), self._device)
        return torch.nn.functional.normalize(mean, dim=1) if self._mean_is_unit else mean

    def _sets(self, numbers: Numbers) -> Encoded:
        if self._kept is None:
            rows = self._rows[numbers]
            sets = self._reader.sets(rows)
            vectors = moved(self._checked(torch.from_numpy(sets.features).float(), rows), self._device)
            mask = torch.from_numpy(sets.mask).to(self._device)
        else:
            starts, counts = (torch.from_numpy(part[numbers]).to(self._device) for part in (self._starts, self._counts))
            column = torch.arange(int(max(1, self._counts[numbers].max(initial=1))), device=self._device)
            mask = column < counts[:, None]
            which = (starts[:, None] + column).clamp(max=len(self._kept) - 1)
            vectors = self._kept.index_select(0, which.flatten()).float().view(*mask.shape, self._kept.shape[1])
            vectors = vectors * mask[:, :, None]
        mask[:, 0] = True  # an empty set is one vector of zeros
        return vectors, mask

    def _loaded(self) -> Tensor:
        """All features, a row per vector, in the type in which they are stored."""
        cache = self._reader.cache
        dtype = torch.float16 if cache.dtype == np.float16 else torch.float32
        n_vectors = int(self._counts.sum())
        kept = torch.zeros(max(1, n_vectors), cache.dim, dtype=dtype, device=self._device)  # one, to have what padding copies
        for start in range(0, len(self._rows), _BLOCK):
            rows = self._rows[start : start + _BLOCK]
            if cache.offsets is None:
                vectors = self._reader.rows(rows).reshape(-1, cache.dim)
            else:
                sets = self._reader.regions(rows)
                vectors = sets.features[sets.mask]
            first = self._starts[start]
            kept[first : first + len(vectors)] = self._checked(torch.from_numpy(vectors), rows)
        return kept

    def _checked(self, features: Tensor, rows: Numbers) -> Tensor:
        if not features.sum(dtype=torch.float32).isfinite():
            self._reader.refuse_not_finite(rows)  # or else the sum alone overflowed
        return features


def free_room(device: torch.device, memory_gb: float, taken_gb: float = 0) -> float:
    """Bytes that features may take: of ``memory_gb``, what is not taken; on a GPU, unless that is 0, 80% of what is free."""
    if device.type == "cuda" and memory_gb > 0:
        return 0.8 * torch.cuda.mem_get_info(device)[0]
    return max(0.0, memory_gb - taken_gb) * 1e9
