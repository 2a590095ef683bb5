"""Open untrusted HDF5 files. Data outside the file, and impossible or excessive sizes, are errors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import check_decoded_size, check_input, max_decoded_bytes, wrap_read_errors

_MAX_COMPRESSION_RATIO = 2000  # no filter of HDF5 reaches this ratio
_MAX_DEFLATE_RATIO = 1032
_ALLOWED_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_LZF, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}


@contextmanager
def open_hdf5(path: Path, what: str) -> Iterator[h5py.File]:
    """Open an HDF5 file without a lock. Errors in the block become UserErrors: not ``what`` (e.g. ``a readable shard``)."""
    check_input(path)
    with wrap_read_errors(path, what), h5py.File(path, "r", locking=False) as file:
        yield file


def find_hdf5_dataset(file: h5py.File, name: str, virtual: bool = False, path: Path | None = None) -> h5py.Dataset | None:
    """Return the dataset ``name`` at the root of a file; None if the file has no such dataset.

    Raises UserError if the dataset is a link, lies in other files, states a larger size than the file can hold, has another
    compression than gzip or lzf, or decodes to too many bytes (:func:`~vse.pipeline.files.inputs.max_decoded_bytes`).

    virtual : accept a virtual dataset, whose sources lie in other files; the caller must not read these files
    path : the path of the file, if it was opened as a stream
    """
    path = path or file.filename
    link = file.get(name, getlink=True)
    if link is None:
        return None
    if not isinstance(link, h5py.HardLink):
        raise UserError(f"{path}: {name} is a link; the data must lie in the file itself")
    data = file[name]
    if not isinstance(data, h5py.Dataset):
        return None
    if data.external or (data.is_virtual and not virtual):
        raise UserError(f"{path}: {name} lies in other files; the data must lie in the file itself")
    stored = data.id.get_storage_size() * (_MAX_COMPRESSION_RATIO if data.chunks else 1)
    if not data.is_virtual and data.size and stored < data.nbytes:
        raise UserError(f"{path}: {name} states a shape of {data.shape}, but the file does not hold that many values")
    if data.chunks and data.size:
        _check_filters(path, name, data)
    return data


def _check_filters(path: Path | str, name: str, data: h5py.Dataset) -> None:
    """Raise UserError if a dataset decodes to too many bytes, or has another compression than gzip or lzf.

    HDF5 decompresses a chunk even beyond the stated size. Large chunks are therefore first decompressed here, up to the stated
    size.
    """
    n_stored, chunk_bytes = data.id.get_storage_size(), math.prod(data.chunks) * data.dtype.itemsize
    check_decoded_size(f"{path}: {name}", max(data.nbytes, chunk_bytes), n_stored)
    properties = data.id.get_create_plist()
    filters = [properties.get_filter(index)[0] for index in range(properties.get_nfilters())]
    if (
        not set(filters) <= _ALLOWED_FILTERS
        or sum(each in (h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_LZF) for each in filters) > 1
    ):
        raise UserError(f"{path}: {name} is compressed by other filters than one of gzip and lzf; write it with one of these")
    if h5py.h5z.FILTER_DEFLATE not in filters:
        return
    large: list[tuple[int, ...]] = []

    def collect(chunk: Any) -> None:
        if chunk.size * _MAX_DEFLATE_RATIO > max_decoded_bytes(n_stored):
            large.append(chunk.chunk_offset)

    data.id.chunk_iter(collect)
    for offset in large:
        mask, content = data.id.read_direct_chunk(offset)
        if not mask and len(zlib.decompressobj().decompress(content, chunk_bytes + 1)) > chunk_bytes:
            raise UserError(f"{path}: {name} has a chunk that inflates to more than its {chunk_bytes} bytes")


def require_hdf5_dataset(file: h5py.File, name: str, virtual: bool = False) -> h5py.Dataset:
    """Return the dataset as :func:`find_hdf5_dataset` does. Raises KeyError if the file has no such dataset."""
    data = find_hdf5_dataset(file, name, virtual)
    if data is None:
        raise KeyError(name)
    return data
