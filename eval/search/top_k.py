"""Top-K search of embeddings, exact or with a FAISS index, and classes for displayed search results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import faiss
import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray

from vse.eval.ranking.answers import N_ROWS_PER_BLOCK, Corpus, Vectors, read_blocks
from vse.eval.ranking.metrics import IMAGE_TEXT_DIRECTIONS, Direction
from vse.eval.ranking.ranks import TiledSimilarity, check_finite, find_similarity, shared_tensor
from vse.eval.search.gpu import GPU_SEARCH_LIMIT, current_gpu, fall_back_to_cpu
from vse.pipeline.errors import UserError

N_RESCORED_CANDIDATES = 200  # number of candidates of a query that are scored exactly
# Up to this number of dimensions, the rounding of a score by FAISS depends on the number of queries in a call.
MAX_DIM_WITH_VARIABLE_ROUNDING = 12

Scores = NDArray[np.float32]
RowIndices = NDArray[np.int64]


class TopK(NamedTuple):
    """The k best rows for each of m queries, best first, with their scores.

    Both arrays are (m, k). If a query has fewer than k results, its scores end with -inf, and its rows with -1.
    """

    scores: Scores
    rows: RowIndices


@dataclass(frozen=True)
class DirectionSearch:
    """The queries and the corpus (all candidates) of one direction, and the image of each query and candidate.

    Attributes
    ----------
    direction : ``i2t`` or ``t2i``, as a :class:`vse.eval.ranking.metrics.Direction`
    corpus : (n_corpus, dim) vectors of the candidates
    image_of_row : (n_corpus,) row of the image of each candidate
    vectors : (n, dim) vectors of images or captions, some of which are queries
    query_rows : (n_queries,) rows of ``vectors`` that are queries, ascending
    image_of_query : (n_queries,) row of the image of each query
    """

    direction: Direction
    corpus: Vectors
    image_of_row: RowIndices
    vectors: Vectors
    query_rows: RowIndices
    image_of_query: RowIndices

    @property
    def queries(self) -> Vectors:
        """The vectors of the queries. They are not copied if all rows are queries."""
        return self.vectors if len(self.query_rows) == len(self.vectors) else self.vectors[self.query_rows]

    def select(self, indices: RowIndices) -> DirectionSearch:
        """Return this search with only the queries at ``indices``."""
        return replace(self, query_rows=self.query_rows[indices], image_of_query=self.image_of_query[indices])


def build_both_searches(images: Vectors, captions: Vectors, image_of_caption: RowIndices) -> dict[str, DirectionSearch]:
    """Return the searches of both directions as a dict with the keys ``i2t`` and ``t2i``.

    An image without captions is a candidate but not a query. ``image_of_caption`` has the row of each caption's image.
    """
    vectors = {"image": images, "caption": captions}
    image_of_row = {"image": np.arange(len(images)), "caption": image_of_caption}
    query_rows = {"image": np.unique(image_of_caption), "caption": np.arange(len(captions))}
    return {
        direction.name: DirectionSearch(
            direction,
            vectors[direction.candidate_kind],
            image_of_row[direction.candidate_kind],
            vectors[direction.query_kind],
            query_rows[direction.query_kind],
            image_of_row[direction.query_kind][query_rows[direction.query_kind]],
        )
        for direction in IMAGE_TEXT_DIRECTIONS
    }


def search_corpus(
    corpus: Corpus,
    queries: Vectors,
    k: int,
    similarity: str = "cosine",
    *,
    direction: str | None = None,
    candidates: int = N_RESCORED_CANDIDATES,
    index: Any = None,
    block: int = N_ROWS_PER_BLOCK,
) -> TopK:
    """Return the ``k`` rows of ``corpus`` (n, dim) that are most similar to each query (m, dim).

    For ``cosine`` without an index the search is exact. For another similarity FAISS finds the ``candidates`` rows (at least
    ``k``) with the highest inner products. Only these rows are scored exactly, and only they can be returned.

    Parameters
    ----------
    direction : ``i2t`` if images query captions, ``t2i`` if captions query images; ``cosine`` does not need it
    index : FAISS index of the corpus (see :func:`vse.eval.search.index.build_index`), which replaces the exact search; if the
        index finds fewer than ``k`` rows, scores are padded with -inf and rows with -1
    block : the number of rows that are read at once
    """
    find_similarity(similarity)
    queries = check_and_convert_queries(corpus, queries)
    if similarity == "cosine":
        return search_exactly(corpus, queries, k, block=block) if index is None else search_index(index, queries, k)
    _check_direction(similarity, direction)
    near = search_corpus(corpus, queries, max(k, candidates), index=index, block=block).rows
    return sort_by_exact_scores(corpus, queries, near, k, similarity, direction)


def sort_by_exact_scores(
    corpus: Corpus, queries: Vectors, rows: RowIndices, k: int, similarity: str, direction: str | None
) -> TopK:
    """Return for each query (m, dim) the best ``k`` of its candidates ``rows`` (m, n_candidates) by exact scores."""
    return _merge_results(k, TopK(compute_exact_scores(corpus, queries, rows, similarity, direction), rows))


def search_index(index: Any, queries: Vectors, k: int) -> TopK:
    """Return the ``k`` rows (or all rows, if there are fewer) that a FAISS index finds for each query (m, dim)."""
    k = min(k, index.ntotal)
    if not k or not len(queries):
        return TopK(np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64))
    return _merge_results(k, TopK(*index.search(np.ascontiguousarray(queries, np.float32), k)))


def search_exactly(
    corpus: Corpus,
    queries: Vectors,
    k: int,
    similarity: str = "cosine",
    *,
    direction: str | None = None,
    block: int = N_ROWS_PER_BLOCK,
) -> TopK:
    """Return the ``k`` rows of ``corpus`` (n, dim) that are most similar to each query (m, dim); all rows are scored.

    The corpus is read ``block`` rows at a time and may be larger than memory. Rows with the same score are in ascending order.
    If several rows have the same score as the last result, FAISS decides which are returned. ``direction`` is ``i2t`` if
    images query captions, else ``t2i``; ``cosine`` does not need it. Raises UserError if a row is not finite.
    """
    scorer = find_similarity(similarity)
    queries = check_and_convert_queries(corpus, queries)
    if similarity != "cosine":
        _check_direction(similarity, direction)
    best = TopK(np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64))
    is_wide = queries.shape[1] > MAX_DIM_WITH_VARIABLE_ROUNDING
    if similarity == "cosine" and len(queries) == 1 and is_wide and current_gpu() is None:
        return search_single_query(corpus, queries, k, block)
    for start, rows in read_blocks(corpus, block):
        n_best = min(k, len(rows))
        if similarity == "cosine":
            near = _search_faiss(queries, rows, n_best)
        else:
            near = _search_tiles(scorer, queries, rows, n_best, direction)
        best = _merge_results(k, best, TopK(near.scores, near.rows + start))
    return best


def search_single_query(corpus: Corpus, query: Vectors, k: int, block: int = N_ROWS_PER_BLOCK) -> TopK:
    """Return the ``k`` rows of ``corpus`` (n, dim) with the highest inner products with one query (1, dim), on the CPU.

    Among rows with the same score, lower rows come first. Raises UserError if a row is not finite.
    """
    best = TopK(np.empty((1, 0), np.float32), np.empty((1, 0), np.int64))
    for start, rows in read_blocks(corpus, block, checked=False):
        least = float(best.scores[0, -1]) if best.scores.shape[1] >= k else -np.inf
        near = _search_rows(query, rows, min(k, len(rows)), least, start)
        best = _merge_results(k, best, TopK(near.scores, near.rows + start))
    return best


def compute_inner_products(query: Vectors, rows: Vectors) -> Scores:
    """Return the inner products (n,) of one query (1, dim) with ``rows`` (n, dim).

    The result is bit for bit that of :func:`faiss.knn` for a single query. With up to ``MAX_DIM_WITH_VARIABLE_ROUNDING``
    dimensions, the rounding of a row's score depends on the other rows; with more, it does not.
    """
    scores = np.empty(len(rows), np.float32)
    faiss.fvec_inner_products_ny(  # type: ignore[attr-defined]
        faiss.swig_ptr(scores), faiss.swig_ptr(query), faiss.swig_ptr(rows), rows.shape[1], len(rows)
    )
    return scores


def compute_exact_scores(corpus: Corpus, queries: Vectors, rows: RowIndices, similarity: str, direction: str | None) -> Scores:
    """Return the scores (m, k) of each query (m, dim) with its ``rows`` (m, k) of the corpus; -inf for the row -1 (no row)."""
    scorer = find_similarity(similarity)
    scores = np.full(rows.shape, -np.inf, np.float32)
    for query, near, out in zip(queries, rows, scores, strict=True):
        found = near >= 0
        if not found.any():
            continue
        wanted, where = np.unique(near[found], return_inverse=True)  # reading rows in ascending order is fastest
        entries = torch.from_numpy(np.array(corpus[wanted], np.float32))
        query_row = torch.from_numpy(np.array(query[None], np.float32))
        computed = torch.empty(len(wanted))
        if direction == "i2t":
            scorer.score(query_row, entries, computed[None])
        else:
            scorer.score(entries, query_row, computed[:, None])
        out[found] = computed.numpy()[where]
    return scores


def check_and_convert_queries(corpus: Corpus, queries: Vectors) -> Vectors:
    """Return queries in the form that FAISS needs. Raises UserError if their shape is wrong, or if a row is not finite."""
    if len(corpus.shape) != 2 or queries.ndim != 2 or queries.shape[1] != corpus.shape[1]:
        raise UserError(f"queries of shape {queries.shape} do not fit a corpus of shape {corpus.shape}")
    queries = np.ascontiguousarray(queries, np.float32)
    check_finite("queries", shared_tensor(queries))
    return queries


def _check_direction(similarity: str, direction: str | None) -> None:
    if direction not in [known.name for known in IMAGE_TEXT_DIRECTIONS]:
        raise ValueError(f"a search by {similarity} needs the direction i2t or t2i, not {direction!r}")


def _merge_results(k: int, *parts: TopK) -> TopK:
    """Return the best ``k`` results of several searches for the same queries. Equal scores are in ascending order of rows."""
    scores, rows = (np.concatenate(values, axis=1) for values in zip(*parts, strict=True))
    scores = np.where(rows < 0, np.float32(-np.inf), scores)
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return TopK(np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1))


def _search_rows(query: Vectors, rows: Vectors, k: int, least: float, start: int) -> TopK:
    """Return the rows with the ``k`` highest inner products with one query (1, dim), and all rows that tie with the last.

    Results are indices into ``rows``. Rows with a product below ``least`` are left out. ``start``, the index of ``rows[0]`` in
    the corpus, is for error messages. Raises UserError if a row is not finite.
    """
    scores = compute_inner_products(query, rows)
    with np.errstate(over="ignore", invalid="ignore"):  # the score of a row with NaN or infinity is not finite
        finite = np.isfinite(scores.sum())
    if not finite:
        check_finite("corpus", shared_tensor(rows), start)
    near = np.flatnonzero(scores >= least)
    if len(near) > k:
        near_scores = scores[near]
        near = near[near_scores >= np.partition(near_scores, len(near) - k)[len(near) - k]]
    return TopK(scores[None, near], near[None])


def _search_faiss(queries: Vectors, rows: Vectors, k: int) -> TopK:
    used = current_gpu()
    if used is not None and k <= GPU_SEARCH_LIMIT:
        try:
            found = faiss.knn_gpu(used.resources, queries, rows, k, metric=faiss.METRIC_INNER_PRODUCT, device=used.number)
            return TopK(*found)
        except RuntimeError as error:  # e.g. if other programs use the memory of the GPU
            fall_back_to_cpu(error)
    return TopK(*faiss.knn(queries, rows, k, metric=faiss.METRIC_INNER_PRODUCT))


def _search_tiles(scorer: TiledSimilarity, queries: Vectors, rows: Vectors, k: int, direction: str | None) -> TopK:
    """Return the ``k`` best rows of each query by the similarity of ``scorer``, which computes a block of scores at a time."""
    all_queries, entries = shared_tensor(queries), shared_tensor(rows)
    n_queries, n_entries = scorer.tile_images, scorer.tile_captions
    if direction == "t2i":
        n_queries, n_entries = n_entries, n_queries
    top = TopK(np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64))
    for first in range(0, len(all_queries), n_queries):
        part = all_queries[first : first + n_queries]
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
        top.scores[first : first + n_queries], top.rows[first : first + n_queries] = best.values.numpy(), best.indices.numpy()
    return top


@dataclass(frozen=True)
class Attention:
    """The attention between the words of a caption and the regions of a photo.

    Attributes
    ----------
    direction : ``t2i`` if each word divides its attention among the regions (each column of ``weights`` adds up to 1);
        ``i2t`` if each region divides its attention among the words (each row adds up to 1)
    words : tokens that the model reads; special tokens and unknown words are in angle brackets
    size : width and height of the photo in pixels
    boxes : (n_regions, 4) x1, y1, x2, y2 of the regions in pixels of the photo
    weights : (n_regions, n_words) share of the attention between each region and each word
    score : score of the caption with the photo by the model
    """

    direction: Literal["t2i", "i2t"]
    words: tuple[str, ...]
    size: tuple[int, int]
    boxes: Float[np.ndarray, "n_regions 4"]
    weights: Float[np.ndarray, "n_regions n_words"]
    score: float


@dataclass(frozen=True, eq=False)
class PhraseCandidates:
    """The candidate boxes of a photo for the phrase ``text``, best first.

    A box has x1, y1, x2, y2 in pixels of the photo, with x2 and y2 exclusive.
    """

    text: str
    boxes: Float[np.ndarray, "n_boxes 4"]
    scores: Float[np.ndarray, " n_boxes"]

    def select_best(self, k: int) -> PhraseCandidates:
        """Return the ``k`` best boxes with their scores."""
        return PhraseCandidates(self.text, self.boxes[:k], self.scores[:k])


@dataclass(frozen=True)
class SearchHit:
    """An image or a caption that a search returned, with its score.

    If captions were searched, ``captions`` has only the returned caption, and ``caption_id`` is its id. If images were
    searched, ``captions`` has all captions of the image. If ``dataset.json`` does not have the image, ``photo`` is None and
    ``captions`` is empty. ``attention`` is None if the model computes no attention between the query and this hit.
    """

    score: float
    image_id: int
    photo: Path | None
    captions: tuple[str, ...]
    caption_id: int | None = None
    attention: Attention | None = None

    @property
    def caption(self) -> str | None:
        """The text of the returned caption, or its id if the text is unknown; None if images were searched."""
        return None if self.caption_id is None else self.captions[0] if self.captions else str(self.caption_id)
