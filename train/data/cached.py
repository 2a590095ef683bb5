"""Cached features by number, in a device's memory if they fit, else read from the shards."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vse.features.reader import FeatureReader

_BLOCK = 4096  # rows
Numbers = NDArray[np.int64]


class CachedFeatures:
    """Features of images or captions by their number.

    Parameters
    ----------
    reader : of the cache
    ids : the images or captions, in the order of their numbers
    device : where features are wanted
    memory_gb : how much may be kept, in units of 1e9 bytes; on a GPU, what is free there
    """

    def __init__(self, reader: FeatureReader, ids: Numbers, device: torch.device, memory_gb: float = 0) -> None:
        self._reader = reader
        self._rows = reader.positions(ids)
        self._device = device
        shape = reader.cache.row_shape
        self.n_crops = shape[0] if len(shape) == 2 else 0
        self._mean_is_unit = bool(reader.cache.provenance.get("config", {}).get("normalize"))
        needed = len(self._rows) * int(np.prod(shape)) * reader.cache.dtype.itemsize
        self._kept = self._loaded() if needed <= _room(device, memory_gb) else None
        self.gb_kept = 0.0 if self._kept is None else 1e-9 * needed

    def vectors(self, numbers: Numbers, crops: Numbers | None = None) -> Tensor:
        """Features (n, dim); of a bank, those of ``crops`` (n,), or the mean over all, of unit length if its vectors are."""
        if self.n_crops and crops is None:
            return self._mean(numbers)
        crops = np.zeros_like(numbers) if crops is None else crops
        if self._kept is not None:
            which = numbers * self.n_crops + crops if self.n_crops else numbers
            return self._kept.index_select(0, torch.from_numpy(which).to(self._device)).float()
        rows = self._rows[numbers]
        found = self._reader.crops(rows, crops) if self.n_crops else self._reader.rows(rows)
        return self._checked(torch.from_numpy(found).float(), rows).to(self._device)

    def _mean(self, numbers: Numbers) -> Tensor:
        rows = self._rows[numbers]
        mean = self._checked(torch.from_numpy(self._reader.rows(rows)).float().mean(1), rows).to(self._device)
        return torch.nn.functional.normalize(mean, dim=1) if self._mean_is_unit else mean

    def _loaded(self) -> Tensor:
        """All features, a row per vector, in the type in which they are stored."""
        shape = self._reader.cache.row_shape
        dtype = torch.float16 if self._reader.cache.dtype == np.float16 else torch.float32
        kept = torch.empty(len(self._rows), *shape, dtype=dtype, device=self._device)
        for start in range(0, len(self._rows), _BLOCK):
            rows = self._rows[start : start + _BLOCK]
            kept[start : start + _BLOCK] = self._checked(torch.from_numpy(self._reader.rows(rows)), rows)
        return kept.view(-1, shape[-1])

    def _checked(self, features: Tensor, rows: Numbers) -> Tensor:
        if not features.sum(dtype=torch.float32).isfinite():
            self._reader.refuse_not_finite(rows)  # or else the sum alone overflowed
        return features


def _room(device: torch.device, memory_gb: float) -> float:
    """Bytes that features may take."""
    if device.type == "cuda" and memory_gb > 0:
        return 0.8 * torch.cuda.mem_get_info(device)[0]
    return memory_gb * 1e9
