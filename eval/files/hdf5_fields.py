"""Fields of HDF5 files that any program may have written: ids and attributes, checked.

The sum of the content of an embeddings file, by which a later change of it is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, InputFolder
from vse.pipeline.files.writing import sha256_json

SUM = "content_sha256"
_ROWS = 4096  # hashed at once


class ArraySum:
    """What a sum knows of an array: its type, its shape, and the SHA-256 of its rows, which are added in their order."""

    def __init__(self, dtype: Any, shape: Iterable[int]) -> None:
        self._described = f"{np.dtype(dtype).str} {' x '.join(map(str, shape))}"
        self._digest = hashlib.sha256()

    def add(self, rows: NDArray[Any]) -> None:
        """The next rows."""
        self._digest.update(np.ascontiguousarray(rows).data)

    def __str__(self) -> str:
        return f"{self._described} {self._digest.hexdigest()}"


def array_sum(values: NDArray[Any]) -> ArraySum:
    """The sum of a whole array, read some rows at a time."""
    total = ArraySum(values.dtype, values.shape)
    for start in range(0, len(values), _ROWS):
        total.add(values[start : start + _ROWS])
    return total


def content_sum(sums: Mapping[str, ArraySum], attributes: Mapping[str, Any]) -> str:
    """SHA-256 of the arrays of a file, by their names, and its attributes; what is None is not there."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in attributes.items()}
    there = {name: value for name, value in plain.items() if value is not None}
    return sha256_json({"arrays": {name: str(sums[name]) for name in sums}, "attributes": there})


class Described(Protocol):
    """What a file of embeddings or of phrase scores says of itself: what it is of, and which model made it.

    ``experiment`` and ``seed`` are None if the writer did not say, ``trained_on`` if that is ``dataset``; ``source`` is the
    file or folder that it was read from, if there is one.
    """

    @property
    def dataset(self) -> str:
        """The data set."""

    @property
    def split(self) -> str:
        """The split of it."""

    @property
    def experiment(self) -> str | None:
        """The model's experiment."""

    @property
    def seed(self) -> int | None:
        """The model's seed."""

    @property
    def trained_on(self) -> str | None:
        """The data set that the model was trained on."""

    @property
    def provenance(self) -> str:
        """JSON: features, settings and versions."""

    @property
    def source(self) -> InputFile | InputFolder | None:
        """The file."""


def stored_attribute(path: Path, name: str, value: Any) -> Any:
    """An attribute as text, or ``seed`` as an integer, however the writer stored it; :class:`UserError` if it is neither."""
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


def stored_ids(path: Path, name: str, values: NDArray[Any] | h5py.Empty) -> NDArray[np.int64]:
    """A 1-D array of integers as int64; :class:`UserError` if it is anything else."""
    integers = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"
    if not integers or (values.dtype.kind == "u" and values.size and values.max() > np.iinfo(np.int64).max):
        kind = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else "empty"
        raise UserError(f"{path}: {name} must be a 1-D integer array (int64), but is {kind}")
    return values.astype(np.int64)


def stored_hashes(path: Path, name: str, values: NDArray[Any] | h5py.Empty, n: int, width: int) -> NDArray[np.uint8]:
    """Return hashes (n, width) as they are stored; raise UserError if they are of another type or shape."""
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.shape != (n, width):
        kind = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else "empty"
        raise UserError(f"{path}: {name} must be uint8 of shape ({n}, {width}), but is {kind}")
    return np.asarray(values)
