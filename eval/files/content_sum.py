"""The sum of the content of an embeddings file, by which a later change of it is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.files import sha256_json

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
