"""Open untrusted HDF5 files. Only data that lie in the file itself are read, and no more than the file can hold."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import check_decoded, check_input, decoded_limit, wrap_read_errors

_COMPRESSION = 2000  # no filter of HDF5 reaches this ratio
_DEFLATE = 1032  # the most bytes that one compressed byte inflates to
_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_LZF, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}


@contextmanager
def open_hdf5(path: Path, what: str) -> Iterator[h5py.File]:
    """Open an HDF5 file without a lock; ``what`` names the expected content. Any error in the block becomes a UserError."""
    check_input(path)
    with wrap_read_errors(path, what), h5py.File(path, "r", locking=False) as file:
        yield file


def find_hdf5_dataset(file: h5py.File, name: str, virtual: bool = False, path: Path | None = None) -> h5py.Dataset | None:
    """Return the dataset ``name`` at the root of a file; None if the file lacks it, or if it is a group.

    Raises UserError if the dataset is a link, lies in other files, or states a larger size than the file holds, because HDF5
    would fill in the rest. Also raises UserError for other compressions than gzip and lzf, and for more decoded bytes than the
    limit.

    virtual : accept a virtual dataset, whose sources lie in other files; the caller must not read them
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
    stored = data.id.get_storage_size() * (_COMPRESSION if data.chunks else 1)
    if not data.is_virtual and data.size and stored < data.nbytes:
        raise UserError(f"{path}: {name} states a shape of {data.shape}, but the file does not hold that many values")
    if data.chunks and data.size:
        _check_filters(path, name, data)
    return data


def _check_filters(path: Path | str, name: str, data: h5py.Dataset) -> None:
    """Raise UserError if a dataset decodes to more bytes than the limit, or is compressed by others than gzip or lzf.

    HDF5 keeps decompressing a chunk that exceeds its stated size. Large chunks are therefore first decompressed here, up to
    that size.
    """
    n_stored, chunk_bytes = data.id.get_storage_size(), math.prod(data.chunks) * data.dtype.itemsize
    check_decoded(f"{path}: {name}", max(data.nbytes, chunk_bytes), n_stored)
    properties = data.id.get_create_plist()
    filters = [properties.get_filter(index)[0] for index in range(properties.get_nfilters())]
    if not set(filters) <= _FILTERS or sum(each in (h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_LZF) for each in filters) > 1:
        raise UserError(f"{path}: {name} is compressed by other filters than one of gzip and lzf; write it with one of these")
    if h5py.h5z.FILTER_DEFLATE not in filters:
        return
    large: list[tuple[int, ...]] = []

    def collect(chunk: Any) -> None:
        if chunk.size * _DEFLATE > decoded_limit(n_stored):
            large.append(chunk.chunk_offset)

    data.id.chunk_iter(collect)
    for offset in large:
        mask, content = data.id.read_direct_chunk(offset)
        if not mask and len(zlib.decompressobj().decompress(content, chunk_bytes + 1)) > chunk_bytes:
            raise UserError(f"{path}: {name} has a chunk that inflates to more than its {chunk_bytes} bytes")


def require_hdf5_dataset(file: h5py.File, name: str, virtual: bool = False) -> h5py.Dataset:
    """Return the dataset as :func:`find_hdf5_dataset` does. Raises KeyError if the file lacks it."""
    data = find_hdf5_dataset(file, name, virtual)
    if data is None:
        raise KeyError(name)
    return data
