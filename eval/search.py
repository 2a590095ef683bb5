"""Top-K search over embeddings with FAISS, and the check that it agrees with the exact ranks."""

from __future__ import annotations

import faiss
import numpy as np
from numpy.typing import NDArray

from vse.eval.ranks import Ranks

_ROUNDING = 1e-5  # times both lengths: float32 inner products of the same vectors, summed in another order, differ by less

Scores = NDArray[np.float32]
Rows = NDArray[np.int64]


def search(corpus: NDArray[np.float32], queries: NDArray[np.float32], k: int) -> tuple[Scores, Rows]:
    """The ``k`` rows of ``corpus`` (n, dim) with the highest inner product for each query (m, dim): scores and rows (m, k)."""
    index = faiss.IndexFlatIP(corpus.shape[1])
    index.add(np.ascontiguousarray(corpus, np.float32))
    scores, rows = index.search(np.ascontiguousarray(queries, np.float32), min(k, len(corpus)))
    return scores, rows


def check_against_search(
    images: NDArray[np.float32], captions: NDArray[np.float32], owners: NDArray[np.int64], ranks: Ranks, ks: tuple[int, ...]
) -> dict[str, dict[str, float]]:
    """R@K of both directions by FAISS, after checking query by query that it agrees with the exact ranks.

    FAISS breaks ties as it likes, the ranks break them against the model: a query may differ if the score of
    its right answer is, up to rounding, that of the last one found. Any other difference is a fault of the
    program and raises ``RuntimeError``.
    """
    depth = max(ks)
    found = {
        "i2t": _found_at(*search(captions, images, depth), np.arange(len(images)), owners),
        "t2i": _found_at(*search(images, captions, depth), owners, np.arange(len(images))),
    }
    right = np.einsum("nd,nd->n", images[owners], captions)
    longest = float(np.linalg.norm(images, axis=1).max() * np.linalg.norm(captions, axis=1).max())
    best = np.full(len(images), -np.inf, np.float32)
    np.maximum.at(best, owners, right)
    scores = {"i2t": best, "t2i": right}
    recalls: dict[str, dict[str, float]] = {}
    for way, exact in (("i2t", ranks.i2t), ("t2i", ranks.t2i)):
        position, last = found[way]
        for k in ks:
            differs = (position < k) != (exact < k)
            tied = np.abs(last[:, min(k, last.shape[1]) - 1] - scores[way]) <= _ROUNDING * longest
            if (differs & ~tied).any():
                query = int(np.flatnonzero(differs & ~tied)[0])
                raise RuntimeError(f"{way} query {query}: rank {exact[query]} by exact count, {position[query]} by FAISS")
            recalls.setdefault(way, {})[f"r{k}"] = 100.0 * float(np.mean(position < k))
    return recalls


def _found_at(scores: Scores, rows: Rows, wanted: NDArray[np.int64], label: NDArray[np.int64]) -> tuple[Rows, Scores]:
    """Where each query's right answer first stands among its results (their number if nowhere), and their scores."""
    hits = label[rows] == wanted[:, None]
    return np.where(hits.any(1), hits.argmax(1), rows.shape[1]), scores
