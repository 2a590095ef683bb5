"""Lists of different lengths as flat arrays, so that a batch is made without a loop over its pairs."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray


def flat_spans(
    starts: Int[np.ndarray, " n"], counts: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " total"], Int[np.ndarray, " total"]]:
    """The numbers from ``starts[k]`` to ``starts[k] + counts[k]`` of every k, list after list: the k of each, and itself."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


def one_of_each(rows: Int[np.ndarray, " total"], n_rows: int, rng: np.random.Generator) -> Int[np.ndarray, " n_rows"]:
    """For each of ``n_rows`` a random place in ``rows``, which need not be sorted, where it stands; -1 where it does not."""
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=n_rows)
    drawn = np.cumsum(counts) - counts + rng.integers(0, np.maximum(counts, 1))
    places = np.full(n_rows, -1, np.int64)
    there = counts > 0
    places[there] = order[drawn[there]]
    return places


def some_of_each(rows: Int[np.ndarray, " total"], most: int | None, rng: np.random.Generator) -> Bool[np.ndarray, " total"]:
    """Whether each place of ``rows`` is among the ``most`` that are drawn of its row; with None all are."""
    if most is None:
        return np.ones(len(rows), bool)
    order = np.lexsort((rng.random(len(rows)), rows))
    counts = np.bincount(rows)
    rank = np.empty(len(rows), np.int64)
    rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank < most


def padded_lists(
    rows: Int[np.ndarray, " total"], values: Int[np.ndarray, " total"], n_rows: int
) -> tuple[Int[np.ndarray, "n_rows longest"], Bool[np.ndarray, "n_rows longest"]]:
    """The values of each row side by side, padded with 0, and where there is one. ``rows`` ascends."""
    counts = np.bincount(rows, minlength=n_rows)
    mask = np.arange(counts.max(initial=0)) < counts[:, None]
    padded = np.zeros(mask.shape, np.int64)
    padded[mask] = values
    return padded, mask


class Sets:
    """Which values belong to which keys, looked up for many of them at once.

    Parameters
    ----------
    keys, values : (n,) not negative; a pair may come up several times
    """

    def __init__(self, keys: Int[np.ndarray, " n"], values: Int[np.ndarray, " n"]) -> None:
        self._size = int(values.max(initial=0)) + 1
        self._pairs = np.unique(keys * self._size + values)
        self._counts = np.bincount(self._pairs // self._size, minlength=int(keys.max(initial=0)) + 1)
        self._starts = np.cumsum(self._counts) - self._counts

    def have(self, keys: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each value is one of its key; the two are broadcast against each other."""
        wanted = keys * self._size + values
        places = np.searchsorted(self._pairs, wanted).clip(max=len(self._pairs) - 1)
        is_there: NDArray[np.bool_] = (self._pairs[places] == wanted) & (values < self._size)
        return is_there

    def another(
        self, keys: Int[np.ndarray, " n"], values: Int[np.ndarray, " n"], rng: np.random.Generator
    ) -> Int[np.ndarray, " n"]:
        """For each value of a key a random other one of that key; -1 if there is none."""
        counts, starts = self._counts[keys], self._starts[keys]
        own = np.searchsorted(self._pairs, keys * self._size + values) - starts
        steps = rng.integers(1, np.maximum(counts, 2))  # round a circle of them
        others = self._pairs[starts + (own + steps) % counts] % self._size
        return np.where(counts > 1, others, -1)
