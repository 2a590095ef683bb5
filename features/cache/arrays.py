"""Locate the arrays in the shard files of a cache, and compute and check checksums of their blocks of 1 MiB."""

from __future__ import annotations

import os
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

BLOCK_BYTES = 2**20
CHECKSUMS_KEY = "xxh3_64"  # key of the checksums in a manifest, the name of the algorithm
_CHECKSUM_DIGITS = 16  # hexadecimal digits of one checksum


class ByteSource(Protocol):
    """The bytes of an array in memory, in a memory map or in a file. A slice returns some of the bytes."""

    def __getitem__(self, span: slice, /) -> bytes | memoryview: ...


@dataclass(frozen=True)
class StoredArray:
    """An array in a shard file.

    offset : position of the array's first byte in the file; the array is contiguous
    checksums : checksums of the array's blocks by :func:`compute_block_checksums`; None if the cache records none
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    checksums: str | None = None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def n_blocks(self) -> int:
        return -(-self.nbytes // BLOCK_BYTES)

    def map_to_memory(self) -> NDArray[Any]:
        """Return a read-only memory map of the array. The map needs no HDF5 handle and no lock, and survives a fork."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        try:
            return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None

    def read_ahead(self) -> None:
        """Request that the system reads the array into its page cache, without waiting for it."""
        if hasattr(os, "posix_fadvise"):  # Linux
            with self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), self.offset, self.nbytes, os.POSIX_FADV_WILLNEED)

    def read(self) -> NDArray[Any]:
        """Read the array into memory. Raises UserError if a block differs from its checksum."""
        array = np.array(self.map_to_memory())
        if self.checksums is not None:
            BlockChecker([self]).check_shard(0, view_bytes(array))
        return array


def view_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array without a copy."""
    return np.asarray(array).reshape(-1).view(np.uint8).data


def compute_block_checksums(array: NDArray[Any]) -> str:
    """Return the 64-bit XXH3 checksums of an array's blocks as one text, with 16 hexadecimal digits for each block."""
    content = view_bytes(array)
    return "".join(
        xxhash.xxh3_64_hexdigest(content[first : first + BLOCK_BYTES]) for first in range(0, len(content), BLOCK_BYTES)
    )


def locate_array(path: Path, data: h5py.Dataset, checksums: Mapping[str, str] = {}) -> StoredArray:
    """Return the location of the HDF5 dataset ``data`` in the shard at ``path``.

    ``checksums`` holds the block checksums of the shard's arrays by name. Raises UserError if the dataset is not contiguous,
    or if it ends after the end of the file.
    """
    name, offset = data.name[1:], data.id.get_offset()
    if offset is None and data.size:
        raise UserError(f"{path}: its {name} are not contiguous; delete it and extract it again")
    stored = StoredArray(path, offset or 0, data.shape, data.dtype, checksums.get(name))
    if stored.offset + stored.nbytes > path.stat().st_size:
        raise UserError(f"{path}: its {name} end after the end of the file; delete it and extract it again")
    return stored


def compute_shard_checksums(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the block checksums of the arrays ``names`` in a shard, by name. A missing array has no entry."""
    with open_hdf5(path, "a readable shard") as file:
        arrays = {name: find_hdf5_dataset(file, name) for name in names}
        return {
            name: compute_block_checksums(locate_array(path, data).map_to_memory())
            for name, data in arrays.items()
            if data is not None
        }


def are_checksums(value: object) -> bool:
    """Return whether a value is a dictionary from array names to hexadecimal checksums, with an entry for ``features``."""
    if not isinstance(value, Mapping) or "features" not in value:
        return False
    return all(isinstance(text, str) and set(text) <= set("0123456789abcdef") for text in value.values())


class BlockChecker:
    """A checker that compares blocks of 1 MiB of an array with their checksums, each block once per process.

    All readers of a cache share one checker. A pickled copy checks every block again. Blocks without checksums are never
    checked.

    shards : for each shard, the location of its part of the array
    """

    def __init__(self, shards: Sequence[StoredArray]) -> None:
        self._shards = shards
        self._firsts = np.cumsum([0, *(shard.n_blocks for shard in shards)])
        self._checked = np.repeat(np.asarray([shard.checksums is None for shard in shards], bool), np.diff(self._firsts))

    def __reduce__(self) -> tuple[type[BlockChecker], tuple[Sequence[StoredArray]]]:
        return BlockChecker, (self._shards,)

    @property
    def is_fully_checked(self) -> bool:
        """True if no block is left to check."""
        return bool(self._checked.all())

    def check_byte_ranges(
        self,
        shards: NDArray[np.int64],
        firsts: NDArray[np.int64],
        ends: NDArray[np.int64],
        contents: Sequence[ByteSource],
    ) -> None:
        """Check the blocks that contain the bytes ``firsts[k]:ends[k]`` of shard ``shards[k]``, for every k.

        ``contents`` holds, for each shard, the bytes of the array in this shard. Raises UserError, which names the first block
        whose checksum differs.
        """
        low = self._firsts[shards] + firsts // BLOCK_BYTES
        high = self._firsts[shards] + (ends - 1) // BLOCK_BYTES
        for step in range(int((high - low).max(initial=-1)) + 1):
            blocks = (low + step)[low + step <= high]
            for block in np.unique(blocks[~self._checked[blocks]]).tolist():
                shard = int(np.searchsorted(self._firsts, block, side="right")) - 1
                self._check_block(shard, block - int(self._firsts[shard]), contents[shard])

    def check_shard(self, shard: int, content: ByteSource) -> None:
        """Check all blocks of shard ``shard``, given its bytes. Raises UserError, which names the first wrong block."""
        for block in range(self._shards[shard].n_blocks):
            self._check_block(shard, block, content)

    def _check_block(self, shard: int, block: int, content: ByteSource) -> None:
        stored = self._shards[shard]
        if stored.checksums is None:
            return
        first = block * BLOCK_BYTES
        end = min(first + BLOCK_BYTES, stored.nbytes)
        expected = stored.checksums[block * _CHECKSUM_DIGITS : (block + 1) * _CHECKSUM_DIGITS]
        if xxhash.xxh3_64_hexdigest(content[first:end]) != expected:
            raise UserError(
                f"{stored.path}: its bytes {stored.offset + first} to {stored.offset + end} have changed since they were "
                "written (their checksum differs); delete it and extract it again"
            )
        self._checked[self._firsts[shard] + block] = True
