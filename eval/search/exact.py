"""Exact search of a corpus in blocks: one may be larger than memory, such as a memory map."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.ranking.ranks import shared_tensor
from vse.eval.ranking.scores import RankingSimilarity, similarity_by_name
from vse.eval.search.gpu import GPU_RESULTS, fall_back_to_cpu, gpu
from vse.pipeline.errors import UserError

BLOCK = 65_536  # rows read at once: 256 MB of 1,024 dimensions
_SHORT = 12  # dimensions, up to which FAISS has other sums for one query than for several

Scores = NDArray[np.float32]
Rows = NDArray[np.int64]


class Corpus(Protocol):
    """Vectors (n, dim), sliced a block at a time: an array, a memory map, a dataset of HDF5."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


class TopK(NamedTuple):
    """Of each query the best rows, best first: ``scores`` (m, k) and ``rows`` (m, k), -inf and -1 where there are no more."""

    scores: Scores
    rows: Rows


def exact_search(
    corpus: Corpus,
    queries: NDArray[np.float32],
    k: int,
    similarity: str = "cosine",
    *,
    direction: str | None = None,
    block: int = BLOCK,
) -> TopK:
    """The ``k`` rows of ``corpus`` (n, dim) that are most similar to each query (m, dim), all rows being scored.

    ``block`` rows are held at a time, and the best of them merge_top_k with the best so far; rows that score the same stand in
    ascending order, but which of those that tie with the last are found is left to FAISS. ``direction`` is as for
    :func:`vse.eval.search.top_k.search`. :class:`UserError` names a row that is not finite.
    """
    scorer = similarity_by_name(similarity)
    queries = check_queries(corpus, queries)
    if similarity != "cosine":
        check_direction(similarity, direction)
    best = TopK(np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64))
    alone = similarity == "cosine" and len(queries) == 1 and queries.shape[1] > _SHORT and gpu() is None
    for start, rows in read_blocks(corpus, block, checked=not alone):
        few = min(k, len(rows))
        if alone:
            near = _nearest(queries, rows, few, float(best.scores[0, -1]) if best.scores.shape[1] >= k else -np.inf, start)
        else:
            near = _knn(queries, rows, few) if similarity == "cosine" else _top(scorer, queries, rows, few, direction)
        best = merge_top_k(k, best, TopK(near.scores, near.rows + start))
    return best


def exact_scores(corpus: Corpus, queries: NDArray[np.float32], rows: Rows, similarity: str, direction: str | None) -> Scores:
    """The score of each query (m, dim) with some rows (m, k) of the corpus, pair by pair; -inf where the row is -1."""
    scorer = similarity_by_name(similarity)
    scores = np.full(rows.shape, -np.inf, np.float32)
    for query, near, out in zip(queries, rows, scores, strict=True):
        there = near >= 0
        if not there.any():
            continue
        wanted, where = np.unique(near[there], return_inverse=True)  # in ascending order, as files are read fastest
        entries = torch.from_numpy(np.array(corpus[wanted], np.float32))
        asked = torch.from_numpy(np.array(query[None], np.float32))
        computed = torch.empty(len(wanted))
        if direction == "i2t":
            scorer.score(asked, entries, computed[None])
        else:
            scorer.score(entries, asked, computed[:, None])
        out[there] = computed.numpy()[where]
    return scores


def check_queries(corpus: Corpus, queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """Queries as FAISS takes them; :class:`UserError` if they are of other dimensions or a row is not finite."""
    if len(corpus.shape) != 2 or queries.ndim != 2 or queries.shape[1] != corpus.shape[1]:
        raise UserError(f"queries of shape {queries.shape} do not suit a corpus of shape {corpus.shape}")
    queries = np.ascontiguousarray(queries, np.float32)
    _check_finite("queries", queries, 0)
    return queries


def check_direction(similarity: str, direction: str | None) -> None:
    """``ValueError`` unless the direction is known."""
    if direction not in ("i2t", "t2i"):
        raise ValueError(f"search by {similarity} needs to know whether the direction is i2t or t2i, not {direction!r}")


def read_blocks(corpus: Corpus, block: int, checked: bool = True) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """The corpus, ``block`` rows at a time, each with the number of its first row; ``checked`` rows are finite."""
    if block < 1:
        raise ValueError(f"blocks of {block} rows")
    for start in range(0, len(corpus), block):
        rows = np.ascontiguousarray(corpus[start : start + block], np.float32)
        if checked:
            _check_finite("corpus", rows, start)
        yield start, rows


def merge_top_k(k: int, *parts: TopK) -> TopK:
    """The best ``k`` of several searches for the same queries; equal scores in the order of rows."""
    scores, rows = (np.concatenate(values, axis=1) for values in zip(*parts, strict=True))
    scores = np.where(rows < 0, np.float32(-np.inf), scores)
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return TopK(np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1))


def _nearest(query: NDArray[np.float32], rows: NDArray[np.float32], k: int, least: float, start: int) -> TopK:
    """The highest inner products of one query (1, dim) in one read of the rows, no lower than ``least``; more if they tie.

    A row that is not finite shows in its score. These are the scores that :func:`faiss.knn` gives for a query.
    """
    scores = np.empty(len(rows), np.float32)
    faiss.fvec_inner_products_ny(  # type: ignore[attr-defined]
        faiss.swig_ptr(scores), faiss.swig_ptr(query), faiss.swig_ptr(rows), rows.shape[1], len(rows)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(scores.sum())
    if not finite:
        _check_finite("corpus", rows, start)
    near = np.flatnonzero(scores >= least)
    if len(near) > k:
        kept = scores[near]
        near = near[kept >= np.partition(kept, len(near) - k)[len(near) - k]]
    return TopK(scores[None, near], near[None])


def _knn(queries: NDArray[np.float32], rows: NDArray[np.float32], k: int) -> TopK:
    """The highest inner products."""
    used = gpu()
    if used is not None and k <= GPU_RESULTS:
        try:
            found = faiss.knn_gpu(used.resources, queries, rows, k, metric=faiss.METRIC_INNER_PRODUCT, device=used.number)
            return TopK(*found)
        except RuntimeError as error:  # other programs may have taken its memory
            fall_back_to_cpu(error)
    return TopK(*faiss.knn(queries, rows, k, metric=faiss.METRIC_INNER_PRODUCT))


def _top(
    scorer: RankingSimilarity, queries: NDArray[np.float32], rows: NDArray[np.float32], k: int, direction: str | None
) -> TopK:
    """The highest scores of any similarity, a tile of images and captions at a time."""
    asked, entries = shared_tensor(queries), shared_tensor(rows)
    n_asked, n_entries = scorer.tile_images, scorer.tile_captions
    if direction == "t2i":
        n_asked, n_entries = n_entries, n_asked
    top = TopK(np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64))
    for first in range(0, len(asked), n_asked):
        part = asked[first : first + n_asked]
        scores = torch.empty(len(part), len(entries))
        for start in range(0, len(entries), n_entries):
            near = entries[start : start + n_entries]
            if direction == "i2t":
                scorer.score(part, near, scores[:, start : start + n_entries])
            else:
                out = torch.empty(len(near), len(part))
                scorer.score(near, part, out)
                scores[:, start : start + n_entries] = out.T
        best = torch.topk(scores, k, dim=1)
        top.scores[first : first + n_asked], top.rows[first : first + n_asked] = best.values.numpy(), best.indices.numpy()
    return top


def _check_finite(name: str, rows: NDArray[np.float32], start: int) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        total = rows.sum()
    # The sum of finite values may overflow; then they are looked at one by one.
    if not np.isfinite(total) and not (finite := np.isfinite(rows).all(1)).all():
        raise UserError(f"{name} row {start + int(np.argmin(finite))} is not finite (NaN)")
