"""Exact search for several queries by one matrix product. The results are exactly those of a search for each query alone.

The rounding of the product depends on the number of queries. The product therefore finds only candidates, whose scores are
computed again for one query at a time. Two float32 results for the inner product of x and y (with d dimensions) differ by at
most 2 d u / (1 - d u) |x| |y|, with u = 2^-24. See Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 3.1.
The candidates are the rows whose product is at most twice this bound below the K-th highest. No other row can be a result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vse.eval.ranking.answers import N_ROWS_PER_BLOCK, Vectors
from vse.eval.ranking.ranks import check_finite, shared_tensor
from vse.eval.search.top_k import (
    MAX_DIM_WITH_VARIABLE_ROUNDING,
    Scores,
    TopK,
    check_and_convert_queries,
    compute_inner_products,
    search_single_query,
)

_ROWS_PER_PRODUCT = 1024  # this number of rows fits into the cache of a core
_PRODUCTS_PER_BLOCK = 16  # number of matrix products between two updates of the candidates
_MAX_CANDIDATE_SHARE = 1 / 8  # if more than this share of all rows are candidates, it is faster to score all rows
_UNIT_ROUNDOFF = 2.0**-24


class VectorMatrix:
    """Vectors (n, dim) in memory, for exact searches of inner products on the CPU. Raises UserError if a row is not finite."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = np.ascontiguousarray(vectors, np.float32)
        squares = [0.0]
        for start in range(0, len(vectors), N_ROWS_PER_BLOCK):
            rows = self.vectors[start : start + N_ROWS_PER_BLOCK]
            check_finite("corpus", shared_tensor(rows), start)
            squares.append(float(np.einsum("nd,nd->n", rows, rows).max()))
        self._max_norm = float(np.sqrt(max(squares)))

    def search(self, queries: Vectors, ks: Sequence[int]) -> list[TopK]:
        """Return for query i of ``queries`` (m, dim) the ``ks[i]`` rows with the highest inner products, or all rows if fewer.

        The results do not depend on the other queries: they are, bit for bit, those of
        :func:`vse.eval.search.top_k.search_single_query`.
        """
        queries = check_and_convert_queries(self.vectors, queries)
        if len(queries) == 1 or self.vectors.shape[1] <= MAX_DIM_WITH_VARIABLE_ROUNDING:
            return [search_single_query(self.vectors, query[None], k) for query, k in zip(queries, ks, strict=True)]
        candidates = self._find_candidates(queries, ks)
        return [self._rank_candidates(query[None], rows, k) for query, rows, k in zip(queries, candidates, ks, strict=True)]

    def _find_candidates(self, queries: Vectors, ks: Sequence[int]) -> list[np.ndarray]:
        """Return for each query i its candidate rows in ascending order; they include the best ``ks[i]`` rows."""
        dim = queries.shape[1]
        relative_error = dim * _UNIT_ROUNDOFF / (1 - dim * _UNIT_ROUNDOFF)
        norms = np.linalg.norm(queries.astype(np.float64), axis=1)
        # Twice the bound is a factor of 4. The factor 5 also covers the rounding of the norms and of the differences.
        margins = 5 * relative_error * norms * self._max_norm + np.finfo(np.float32).tiny
        found = [_Candidates(k, float(margin)) for k, margin in zip(ks, margins, strict=True)]
        matrix, columns = shared_tensor(self.vectors), shared_tensor(queries).T
        products = torch.empty(_PRODUCTS_PER_BLOCK * _ROWS_PER_PRODUCT, len(queries))
        for start in range(0, len(matrix), len(products)):
            block = matrix[start : start + len(products)]
            for first in range(0, len(block), _ROWS_PER_PRODUCT):
                rows = slice(first, min(first + _ROWS_PER_PRODUCT, len(block)))
                torch.mm(block[rows], columns, out=products[rows])
            for candidates, scores in zip(found, products[: len(block)].T.contiguous().numpy(), strict=True):
                candidates.add(scores, start)
        return [candidates.rows for candidates in found]

    def _rank_candidates(self, query: Vectors, rows: np.ndarray, k: int) -> TopK:
        if len(rows) > _MAX_CANDIDATE_SHARE * len(self.vectors) and len(rows) > k:
            return search_single_query(self.vectors, query, k)
        scores = compute_inner_products(query, self.vectors[rows])
        order = np.lexsort((rows, -scores))[:k]
        return TopK(scores[None, order], rows[None, order])


class _Candidates:
    """The candidate rows of one query, among the rows added so far.

    Candidates are the rows whose product with the query is at most ``margin`` below the ``k``-th highest product.
    """

    def __init__(self, k: int, margin: float) -> None:
        self.rows, self._scores = np.empty(0, np.int64), np.empty(0, np.float32)
        self._k, self._margin, self._floor = k, margin, -np.inf

    def add(self, scores: Scores, start: int) -> None:
        """Add the next n rows to the candidates if they score high enough, and drop candidates that now score too low.

        ``scores`` (n,) are the inner products of these rows with the query. ``start`` is the index of the first of them.
        """
        near = np.flatnonzero(scores >= self._floor)
        if not len(near):
            return
        self.rows, self._scores = np.concatenate([self.rows, near + start]), np.concatenate([self._scores, scores[near]])
        if len(self.rows) > self._k:
            place = len(self.rows) - self._k
            self._floor = float(np.partition(self._scores, place)[place]) - self._margin
            kept = self._scores >= self._floor
            self.rows, self._scores = self.rows[kept], self._scores[kept]
