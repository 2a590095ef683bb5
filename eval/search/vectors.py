"""Vectors that are searched, read a block at a time.

This module does not import FAISS, so that ``vse-embed`` starts without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vse.eval.ranking.ranks import check_finite, shared_tensor

N_ROWS_PER_BLOCK = 65_536  # rows that are read at once: 256 MB for 1,024 dimensions

Vectors = NDArray[np.float32]


class Corpus(Protocol):
    """Vectors (n, dim) that are read a block at a time: an array, a memory map or a data set of an HDF5 file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


def read_blocks(corpus: Corpus, block: int, checked: bool = True) -> Iterator[tuple[int, Vectors]]:
    """Yield the corpus in blocks of ``block`` rows, each with the index of its first row.

    Raises UserError if ``checked`` and a row is not finite.
    """
    if block < 1:
        raise ValueError(f"blocks of {block} rows")
    for start in range(0, len(corpus), block):
        rows = np.ascontiguousarray(corpus[start : start + block], np.float32)
        if checked:
            check_finite("corpus", shared_tensor(rows), start)
        yield start, rows
