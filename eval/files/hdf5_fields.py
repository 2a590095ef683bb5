"""Fields of HDF5 files that any program may have written: checked ids and attributes, and the hash of a file's content."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, InputFolder
from vse.pipeline.files.writing import sha256_json

log = logging.getLogger(__name__)
HASH_ATTRIBUTE = "content_sha256"
_N_ROWS_HASHED_AT_ONCE = 4096  # rows that are hashed at once


class ArrayHash:
    """The hash of an array: its type, its shape, and the SHA-256 of all rows. Rows are added in their order."""

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
    """Return the SHA-256 of the arrays and attributes of a file. Attributes that are None are left out."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in attributes.items()}
    stored = {name: value for name, value in plain.items() if value is not None}
    return sha256_json({"arrays": {name: str(array_hashes[name]) for name in array_hashes}, "attributes": stored})


def check_content_hash(path: Path, stored: object, compute: Callable[[], str]) -> None:
    """Raise UserError if the stored hash of a file's content differs from the computed one; log a line if none is stored."""
    if stored is None:
        log.info("%s: has no %s, so its content is not checked", path, HASH_ATTRIBUTE)
    elif not isinstance(stored, str) or stored != compute():
        raise UserError(
            f"{path}: its content has changed since it was written ({HASH_ATTRIBUTE} does not match); create it again"
        )


class FileMetadata(Protocol):
    """Metadata of a file of embeddings or phrase scores: the data set, the split and the model.

    ``experiment`` and ``seed`` are None if the file has none. ``trained_on`` is the data set of the training, or None if it is
    ``dataset``. ``provenance`` is a JSON text with features, settings and versions. ``source`` is the file or folder that was
    read, or None.
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
    first_path: Path, first: FileMetadata, path: Path, other: FileMetadata, names: Sequence[str]
) -> None:
    """Raise UserError if two files differ in an attribute in ``names``. An attribute that one file lacks is ignored."""
    for name in names:
        first_value, value = getattr(first, name), getattr(other, name)
        if None not in (first_value, value) and first_value != value:
            raise UserError(f"{path} has {name} {value!r}, but {first_path} has {first_value!r}")


def parse_attribute(path: Path, name: str, value: Any) -> Any:
    """Return an attribute of an HDF5 file as text, ``seed`` as an integer. Raises UserError if it has another type."""
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
    """Return values in float32. Scores in float64 are returned unchanged, since rounding would create ties.

    Raises UserError if the kind of NumPy type is not in ``kinds``.
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
        raise UserError(f"{path}: {name} holds no numbers")
    if name.startswith("scores") and values.dtype == np.float64:
        return values
    with np.errstate(over="ignore"):  # the caller refuses values that overflow, with their row
        return values.astype(np.float32, copy=False)


def parse_hashes(path: Path, name: str, values: NDArray[Any] | h5py.Empty, n: int, width: int) -> NDArray[np.uint8]:
    """Return hashes (n, width) unchanged. Raises UserError if their type is not uint8 or their shape is not (n, width)."""
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.shape != (n, width):
        kind = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else "empty"
        raise UserError(f"{path}: {name} must be uint8 of shape ({n}, {width}), but is {kind}")
    return np.asarray(values)
