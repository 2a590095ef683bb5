"""HDF5 files that others wrote: only what lies in the file itself is read, and no more than it can hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from vse.pipeline.errors import UserError
from vse.pipeline.input_files import check_input, reading

_COMPRESSION = 2000  # more than any filter of HDF5 reaches


@contextmanager
def open_hdf5(path: Path, what: str) -> Iterator[h5py.File]:
    """An HDF5 file to read ``what`` from; whatever goes wrong in the block is a :class:`UserError` that says so.

    No lock is asked for, so that read-only file systems will do.
    """
    check_input(path)
    with reading(path, what), h5py.File(path, "r", locking=False) as file:
        yield file


def own_data(file: h5py.File, name: str, virtual: bool = False, path: Path | None = None) -> h5py.Dataset | None:
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
    return data


def required_data(file: h5py.File, name: str, virtual: bool = False) -> h5py.Dataset:
    """As :func:`own_data`; :class:`KeyError` if there is no such dataset."""
    data = own_data(file, name, virtual)
    if data is None:
        raise KeyError(name)
    return data
