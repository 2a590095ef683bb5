"""Arrays in shards, and the checksums of their blocks, each of which is compared when its block is read for the first time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import find_hdf5_dataset, open_hdf5

BLOCK = 2**20  # bytes
CHECKSUMS = "xxh3_64"  # the name of the algorithm, under which a manifest has the checksums of a shard's arrays
_DIGITS = 16


class Bytes(Protocol):
    """The bytes of an array, in memory, in a map, or in a file."""

    def __getitem__(self, span: slice, /) -> bytes | memoryview: ...


@dataclass(frozen=True)
class Stored:
    """Where an array lies in a shard: contiguous, from byte ``offset``.

    ``checksums`` are those of its blocks (:func:`block_checksums`); None if the cache has none.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    checksums: str | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def n_blocks(self) -> int:
        """The number of its blocks; the last one may be shorter than the others."""
        return -(-self.nbytes // BLOCK)

    def map(self) -> NDArray[Any]:
        """Map the array, read only. No HDF5 handle is involved, so it survives a fork and needs no lock."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        try:
            return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None

    def read(self) -> NDArray[Any]:
        """Return the array in memory; :class:`UserError` if a block has changed."""
        array = np.array(self.map())
        if self.checksums is not None:
            Blocks([self]).check_shard(0, bytes_of(array))
        return array


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array, not copied."""
    return np.asarray(array).reshape(-1).view(np.uint8).data


def block_checksums(array: NDArray[Any]) -> str:
    """Return the XXH3 (64 bits) of each mebibyte of an array's bytes, joined: 16 hexadecimal digits for each block."""
    content = bytes_of(array)
    return "".join(xxhash.xxh3_64_hexdigest(content[first : first + BLOCK]) for first in range(0, len(content), BLOCK))


def stored_array(path: Path, data: h5py.Dataset, checksums: Mapping[str, str] = {}) -> Stored:
    """Return where a dataset of a shard lies; :class:`UserError` if it is not contiguous, or not completely in the file."""
    name, offset = data.name[1:], data.id.get_offset()
    if offset is None and data.size:
        raise UserError(f"{path}: its {name} are not contiguous; delete it and extract it again")
    stored = Stored(path, offset or 0, data.shape, data.dtype, checksums.get(name))
    if stored.offset + stored.nbytes > path.stat().st_size:
        raise UserError(f"{path}: its {name} end after the file; delete it and extract it again")
    return stored


def shard_checksums(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Compute the checksums of those arrays of a shard that are there, by their names."""
    with open_hdf5(path, "a readable shard") as file:
        arrays = {name: find_hdf5_dataset(file, name) for name in names}
        return {name: block_checksums(stored_array(path, data).map()) for name, data in arrays.items() if data is not None}


def are_checksums(value: object) -> bool:
    """Return whether ``value`` can be the checksums of a shard's arrays by their names, features among them."""
    if not isinstance(value, Mapping) or "features" not in value:
        return False
    return all(isinstance(text, str) and set(text) <= set("0123456789abcdef") for text in value.values())


class Blocks:
    """The blocks of an array that lies in several shards, and whether each was compared with its checksum.

    All readers of one cache share this object. A pickled copy of it, in another process, has compared no block yet. A shard
    without checksums is never compared.

    Parameters
    ----------
    shards : where the array lies in each shard
    """

    def __init__(self, shards: Sequence[Stored]) -> None:
        self._shards = shards
        self._firsts = np.cumsum([0, *(shard.n_blocks for shard in shards)])
        self._sound = np.concatenate([np.full(shard.n_blocks, shard.checksums is None) for shard in shards])

    def __reduce__(self) -> tuple[type[Blocks], tuple[Sequence[Stored]]]:
        return Blocks, (self._shards,)

    @property
    def are_sound(self) -> bool:
        """Return whether no block is left to be compared."""
        return bool(self._sound.all())

    def check(
        self,
        shards: NDArray[np.int64],
        firsts: NDArray[np.int64],
        ends: NDArray[np.int64],
        contents: Sequence[Bytes],
    ) -> None:
        """Compare the blocks that the bytes ``firsts[k]:ends[k]`` of the shards ``shards[k]`` lie in, unless that was done.

        ``contents`` holds the bytes of the array in each shard. :class:`UserError` names the first block that has changed.
        """
        low = self._firsts[shards] + firsts // BLOCK
        high = self._firsts[shards] + (ends - 1) // BLOCK
        for step in range(int((high - low).max(initial=-1)) + 1):
            numbers = (low + step)[low + step <= high]
            for number in np.unique(numbers[~self._sound[numbers]]).tolist():
                shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
                self._check_block(shard, number - int(self._firsts[shard]), contents[shard])

    def check_shard(self, shard: int, content: Bytes) -> None:
        """Compare all blocks of a shard; :class:`UserError` names the first one that has changed."""
        for block in range(self._shards[shard].n_blocks):
            self._check_block(shard, block, content)

    def _check_block(self, shard: int, block: int, content: Bytes) -> None:
        stored = self._shards[shard]
        if stored.checksums is None:
            return
        first = block * BLOCK
        end = min(first + BLOCK, stored.nbytes)
        expected = stored.checksums[block * _DIGITS : (block + 1) * _DIGITS]
        if xxhash.xxh3_64_hexdigest(content[first:end]) != expected:
            raise UserError(
                f"{stored.path}: its bytes {stored.offset + first} to {stored.offset + end} are not those that were written "
                "(their checksum differs); delete it and extract it again"
            )
        self._sound[self._firsts[shard] + block] = True
