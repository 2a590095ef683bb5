"""HDF5 files that others wrote: only what lies in the file itself is read, and no more than it can hold."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from vse.pipeline.errors import UserError
from vse.pipeline.files.decoded_limit import check_decoded, decoded_limit
from vse.pipeline.files.inputs import check_input, wrap_read_errors

_COMPRESSION = 2000  # more than any filter of HDF5 reaches
_DEFLATE = 1032  # the most that one byte inflates to
_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_LZF, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}


@contextmanager
def open_hdf5(path: Path, what: str) -> Iterator[h5py.File]:
    """An HDF5 file to read ``what`` from; whatever goes wrong in the block is a :class:`UserError` that says so.

    No lock is asked for, so that read-only file systems will do.
    """
    check_input(path)
    with wrap_read_errors(path, what), h5py.File(path, "r", locking=False) as file:
        yield file


def find_hdf5_dataset(file: h5py.File, name: str, virtual: bool = False, path: Path | None = None) -> h5py.Dataset | None:
    """The dataset ``name`` at the root of a file; None if there is nothing of that name, or a group.

    :class:`UserError` if it is a link, lies in other files (external storage, or virtual sources unless ``virtual`` says that
    they are not going to be read), or says that it is larger than what the file holds: of such a dataset HDF5 makes up the
    rest. ``path`` is that of the file, where it was opened as a stream.
    """
    path = path or file.filename
    link = file.get(name, getlink=True)
    if link is None:
        return None
    if not isinstance(link, h5py.HardLink):
        raise UserError(f"{path}: {name} is a link; what is read must lie in the file itself")
    data = file[name]
    if not isinstance(data, h5py.Dataset):
        return None
    if data.external or (data.is_virtual and not virtual):
        raise UserError(f"{path}: {name} lies in other files; what is read must lie in the file itself")
    stored = data.id.get_storage_size() * (_COMPRESSION if data.chunks else 1)
    if not data.is_virtual and data.size and stored < data.nbytes:
        raise UserError(f"{path}: {name} says that it has {data.shape} values, which the file does not hold")
    if data.chunks and data.size:
        _check_filters(path, name, data)
    return data


def _check_filters(path: Path | str, name: str, data: h5py.Dataset) -> None:
    """Raise UserError if a dataset decodes to more bytes than it may, or is compressed in a way that is not bounded.

    HDF5 lets a chunk inflate to more than its stated size, so large chunks are inflated here first, up to that size.
    """
    n_stored, chunk_bytes = data.id.get_storage_size(), math.prod(data.chunks) * data.dtype.itemsize
    check_decoded(f"{path}: {name}", max(data.nbytes, chunk_bytes), n_stored)
    properties = data.id.get_create_plist()
    filters = [properties.get_filter(index)[0] for index in range(properties.get_nfilters())]
    if not set(filters) <= _FILTERS or sum(each in (h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_LZF) for each in filters) > 1:
        raise UserError(f"{path}: {name} is compressed by other filters than one of gzip and lzf; write it again")
    if h5py.h5z.FILTER_DEFLATE not in filters:
        return
    large: list[tuple[int, ...]] = []

    def collect(chunk: Any) -> None:
        if chunk.size * _DEFLATE > decoded_limit(n_stored):
            large.append(chunk.chunk_offset)

    data.id.chunk_iter(collect)
    for place in large:
        mask, content = data.id.read_direct_chunk(place)
        if not mask and len(zlib.decompressobj().decompress(content, chunk_bytes + 1)) > chunk_bytes:
            raise UserError(f"{path}: {name} has a chunk that inflates to more than its {chunk_bytes} bytes")


def require_hdf5_dataset(file: h5py.File, name: str, virtual: bool = False) -> h5py.Dataset:
    """As :func:`find_hdf5_dataset`; :class:`KeyError` if there is no such dataset."""
    data = find_hdf5_dataset(file, name, virtual)
    if data is None:
        raise KeyError(name)
    return data
