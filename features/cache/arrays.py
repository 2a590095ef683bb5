"""Locate arrays in shards, and check their blocks of 1 MiB against checksums.

A manifest holds the checksums of each array of a shard. :class:`BlockChecker` compares a block with its checksum when the
block is read for the first time in a process.
"""

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
CHECKSUMS = "xxh3_64"  # name of the algorithm, and key of the checksums in a manifest
_DIGITS = 16  # hexadecimal digits of one checksum


class ByteSource(Protocol):
    """The bytes of an array in memory, in a memory map or in a file, read by slicing."""

    def __getitem__(self, span: slice, /) -> bytes | memoryview: ...


@dataclass(frozen=True)
class StoredArray:
    """The place of an array in a shard: contiguous bytes that start at ``offset``.

    ``checksums`` holds the checksums of its blocks (:func:`block_checksums`), or None if the cache has none.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    checksums: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def n_blocks(self) -> int:
        """Number of blocks of the array; the last block may be shorter than the others."""
        return -(-self.nbytes // BLOCK)

    def map(self) -> NDArray[Any]:
        """Map the array into memory, read only.

        The map uses no HDF5 handle, so it survives a fork and needs no lock.
        """
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        try:
            return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None

    def read(self) -> NDArray[Any]:
        """Read the array into memory. Raises UserError if a block differs from its checksum."""
        array = np.array(self.map())
        if self.checksums is not None:
            BlockChecker([self]).check_shard(0, array_bytes(array))
        return array


def array_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array without a copy."""
    return np.asarray(array).reshape(-1).view(np.uint8).data


def block_checksums(array: NDArray[Any]) -> str:
    """Return the 64-bit XXH3 checksums of an array's blocks of 1 MiB, joined: 16 hexadecimal digits for each block."""
    content = array_bytes(array)
    return "".join(xxhash.xxh3_64_hexdigest(content[first : first + BLOCK]) for first in range(0, len(content), BLOCK))


def locate_array(path: Path, data: h5py.Dataset, checksums: Mapping[str, str] = {}) -> StoredArray:
    """Return the place of an HDF5 dataset in its shard file.

    ``checksums`` holds the block checksums of the shard's arrays, by array name. Raises UserError if the dataset is not
    contiguous, or ends after the end of the file.
    """
    name, offset = data.name[1:], data.id.get_offset()
    if offset is None and data.size:
        raise UserError(f"{path}: its {name} are not contiguous; delete it and extract it again")
    stored = StoredArray(path, offset or 0, data.shape, data.dtype, checksums.get(name))
    if stored.offset + stored.nbytes > path.stat().st_size:
        raise UserError(f"{path}: its {name} end after the end of the file; delete it and extract it again")
    return stored


def shard_checksums(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Compute the block checksums of a shard's arrays, by array name; ``names`` that the shard lacks are left out."""
    with open_hdf5(path, "a readable shard") as file:
        arrays = {name: find_hdf5_dataset(file, name) for name in names}
        return {name: block_checksums(locate_array(path, data).map()) for name, data in arrays.items() if data is not None}


def are_checksums(value: object) -> bool:
    """Return whether ``value`` has the form of a shard's checksums: hexadecimal texts by array name, with ``features``."""
    if not isinstance(value, Mapping) or "features" not in value:
        return False
    return all(isinstance(text, str) and set(text) <= set("0123456789abcdef") for text in value.values())


class BlockChecker:
    """A check of an array in several shards: each block is compared once with its checksum.

    All readers of one cache share one checker. A pickled copy in another process starts again: it has checked no block. The
    blocks of a shard without checksums count as checked.

    Parameters
    ----------
    shards : the place of the array in each shard
    """

    def __init__(self, shards: Sequence[StoredArray]) -> None:
        self._shards = shards
        self._firsts = np.cumsum([0, *(shard.n_blocks for shard in shards)])
        self._checked = np.concatenate([np.full(shard.n_blocks, shard.checksums is None) for shard in shards])

    def __reduce__(self) -> tuple[type[BlockChecker], tuple[Sequence[StoredArray]]]:
        return BlockChecker, (self._shards,)

    @property
    def all_checked(self) -> bool:
        """Whether every block has been compared with its checksum."""
        return bool(self._checked.all())

    def check(
        self,
        shards: NDArray[np.int64],
        firsts: NDArray[np.int64],
        ends: NDArray[np.int64],
        contents: Sequence[ByteSource],
    ) -> None:
        """Check the blocks that contain the bytes ``firsts[k]:ends[k]`` of shard ``shards[k]``, for every k.

        Blocks that were checked before are skipped. ``contents`` holds the bytes of the array in each shard. Raises UserError,
        which names the first block that differs from its checksum.
        """
        low = self._firsts[shards] + firsts // BLOCK
        high = self._firsts[shards] + (ends - 1) // BLOCK
        for step in range(int((high - low).max(initial=-1)) + 1):
            blocks = (low + step)[low + step <= high]
            for block in np.unique(blocks[~self._checked[blocks]]).tolist():
                shard = int(np.searchsorted(self._firsts, block, side="right")) - 1
                self._check_block(shard, block - int(self._firsts[shard]), contents[shard])

    def check_shard(self, shard: int, content: ByteSource) -> None:
        """Check all blocks of a shard. Raises UserError, which names the first block that differs from its checksum."""
        for block in range(self._shards[shard].n_blocks):
            self._check_block(shard, block, content)

    def _check_block(self, shard: int, block: int, content: ByteSource) -> None:
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
        self._checked[self._firsts[shard] + block] = True
