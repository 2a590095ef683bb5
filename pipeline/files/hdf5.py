"""Open untrusted HDF5 files, and read their ids and attributes.

Any program may have written a file. Datasets that lie in other files, and impossible or excessive sizes, are errors.
"""

from __future__ import annotations

import hashlib
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import (
    InputFile,
    InputFolder,
    check_decoded_size,
    check_input,
    max_decoded_bytes,
    wrap_read_errors,
)
from vse.pipeline.files.writing import sha256_json

log = logging.getLogger(__name__)

_MAX_COMPRESSION_RATIO = 2000  # no compression of HDF5 reaches this ratio
_MAX_DEFLATE_RATIO = 1032
_ALLOWED_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_LZF, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}


@contextmanager
def open_hdf5(path: Path, what: str) -> Iterator[h5py.File]:
    """Open an HDF5 file without a lock. Any error in the ``with`` block becomes a UserError.

    ``what`` is the end of the message: ``a readable shard`` for *not a readable shard*.
    """
    check_input(path)
    with wrap_read_errors(path, what), h5py.File(path, "r", locking=False) as file:
        yield file


def find_hdf5_dataset(file: h5py.File, name: str, virtual: bool = False, path: Path | None = None) -> h5py.Dataset | None:
    """Return the dataset ``name`` at the root of a file; None if the file has no such dataset.

    Raises UserError if the dataset is a link, lies in other files, states a larger size than the file can hold, or has another
    compression than gzip or lzf. Raises UserError if the dataset expands to over 1 GB and over 100 times its size
    (:func:`~vse.pipeline.files.inputs.max_decoded_bytes`).

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
        _check_compression(path, name, data)
    return data


def _check_compression(path: Path | str, name: str, data: h5py.Dataset) -> None:
    """Raise UserError if a dataset has another compression than gzip or lzf, or expands beyond :func:`max_decoded_bytes`.

    HDF5 decompresses a chunk completely, even if the chunk is larger than the file states. Large chunks are therefore
    decompressed here first, up to the stated size.
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
    """Return the dataset ``name`` at the root of a file. Raises KeyError if the file has no such dataset.

    With ``virtual``, the data may lie in other files. The caller must not read these files. Raises UserError for an unsafe
    dataset, such as one that states an impossible size (:func:`find_hdf5_dataset`).
    """
    data = find_hdf5_dataset(file, name, virtual)
    if data is None:
        raise KeyError(name)
    return data


HASH_ATTRIBUTE = "content_sha256"
_N_ROWS_HASHED_AT_ONCE = 4096


class ArrayHash:
    """The hash of an array whose rows are added in order. ``str()`` returns the type, the shape and the SHA-256 as a text."""

    def __init__(self, dtype: Any, shape: Iterable[int]) -> None:
        self._description = f"{np.dtype(dtype).str} {' x '.join(map(str, shape))}"
        self._digest = hashlib.sha256()

    def add(self, rows: NDArray[Any]) -> None:
        self._digest.update(np.ascontiguousarray(rows).data)

    def __str__(self) -> str:
        return f"{self._description} {self._digest.hexdigest()}"


def hash_array(values: NDArray[Any]) -> ArrayHash:
    """Return the hash of a complete array."""
    array_hash = ArrayHash(values.dtype, values.shape)
    for start in range(0, len(values), _N_ROWS_HASHED_AT_ONCE):
        array_hash.add(values[start : start + _N_ROWS_HASHED_AT_ONCE])
    return array_hash


def hash_content(array_hashes: Mapping[str, ArrayHash], attributes: Mapping[str, Any]) -> str:
    """Return one SHA-256 for all arrays and attributes of a file, both by name. Attributes that are None are left out."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in attributes.items()}
    stored = {name: value for name, value in plain.items() if value is not None}
    return sha256_json({"arrays": {name: str(array_hashes[name]) for name in array_hashes}, "attributes": stored})


def check_content_hash(path: Path, stored: object, compute: Callable[[], str]) -> None:
    """Raise UserError if ``stored``, the hash that a file states, differs from ``compute()``, the hash of its content.

    If ``stored`` is None, nothing is computed, and a line is logged.
    """
    if stored is None:
        log.info("%s: has no %s, so its content is not checked", path, HASH_ATTRIBUTE)
    elif not isinstance(stored, str) or stored != compute():
        raise UserError(
            f"{path}: its content has changed since it was written ({HASH_ATTRIBUTE} does not match); create it again"
        )


class ModelOutputMetadata(Protocol):
    """Metadata of a file of embeddings or phrase scores: the data set, the split and the model.

    ``experiment`` and ``seed`` are None if the file does not state them. ``trained_on`` is the data set of the training; None
    if it is the same as ``dataset``. ``provenance`` is a JSON text with features, settings and versions. ``source`` is the
    file or folder from which the metadata were read; None if they were not read.
    """

    @property
    def dataset(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def experiment(self) -> str | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def trained_on(self) -> str | None: ...
    @property
    def provenance(self) -> str: ...
    @property
    def source(self) -> InputFile | InputFolder | None: ...


def check_same_attributes(
    first_path: Path, first: ModelOutputMetadata, path: Path, other: ModelOutputMetadata, names: Sequence[str]
) -> None:
    """Raise UserError if an attribute in ``names`` differs between two files. An attribute that is None is not compared."""
    for name in names:
        first_value, value = getattr(first, name), getattr(other, name)
        if None not in (first_value, value) and first_value != value:
            raise UserError(f"{path} has {name} {value!r}, but {first_path} has {first_value!r}")


def parse_attribute(path: Path, name: str, value: Any) -> Any:
    """Return an attribute of an HDF5 file: an integer for ``seed``, otherwise a text. Raises UserError for other types."""
    value = value.item() if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim) else value
    try:
        value = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise UserError(f"{path}: the attribute {name} is not UTF-8") from None
    if name == "seed" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int if name == "seed" else str):
        raise UserError(f"{path}: the attribute {name} is {value!r}, not {'an integer' if name == 'seed' else 'a text'}")
    return value


def parse_ids(path: Path, name: str, values: NDArray[Any] | h5py.Empty) -> NDArray[np.int64]:
    """Return a 1-D array of integers as int64. Raises UserError for any other array."""
    integers = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"
    if not integers or (values.dtype.kind == "u" and values.size and values.max() > np.iinfo(np.int64).max):
        kind = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else "empty"
        raise UserError(f"{path}: {name} must be a 1-D integer array (int64), but is {kind}")
    return values.astype(np.int64)


def parse_floats(path: Path, name: str, values: NDArray[Any] | h5py.Empty, kinds: str = "fiu") -> NDArray[Any]:
    """Return numbers in float32. If ``name`` begins with ``scores``, float64 is kept, because rounding would create ties.

    ``kinds`` has the allowed kinds of NumPy types: ``f`` (floating point), ``i`` (integer) and ``u`` (unsigned integer) by
    default. Raises UserError for another kind.
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
        raise UserError(f"{path}: {name} holds no numbers")
    if name.startswith("scores") and values.dtype == np.float64:
        return values
    with np.errstate(over="ignore"):  # the caller rejects infinite values, and names their row
        return values.astype(np.float32, copy=False)


def parse_hashes(path: Path, name: str, values: NDArray[Any] | h5py.Empty, n: int, width: int) -> NDArray[np.uint8]:
    """Return hashes (n, width) unchanged. Raises UserError if their type is not uint8 or their shape is not (n, width)."""
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.shape != (n, width):
        kind = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else "empty"
        raise UserError(f"{path}: {name} must be uint8 of shape ({n}, {width}), but is {kind}")
    return np.asarray(values)
