"""Quality and cost of searches that do not score all pairs, compared with exact search in both directions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vse.eval import DEFAULT_KS
from vse.eval.ranking.answers import N_ROWS_PER_BLOCK, Vectors
from vse.eval.ranking.metrics import IMAGE_TEXT_DIRECTIONS, RANK_METRICS, Ranks, compute_metrics
from vse.eval.ranking.ranks import ScoreBlocks, ranks_from_blocks
from vse.eval.search.gpu import copy_to_gpu
from vse.eval.search.index import build_index, min_training_rows, set_search_parameters
from vse.eval.search.top_k import (
    N_RESCORED_CANDIDATES,
    DirectionSearch,
    RowIndices,
    Scores,
    TopK,
    build_both_searches,
    compute_exact_scores,
    search_corpus,
    search_exactly,
)
from vse.pipeline.errors import UserError

_MAX_CANDIDATES = 2**24  # largest number of candidates of all queries in a chunk of queries


class _CandidateLists(NamedTuple):
    """The candidates of m queries of one direction: the first stage of a search returned K candidates for each query.

    Attributes
    ----------
    queries : (m,) rows of the queries
    candidate_rows : (m, K) rows of the candidates in the corpus
    is_sure : (m, K) whether the first-stage score of a candidate is higher than the scores of all rows that are not candidates
    scores : (m, K) exact scores of the candidates
    best_scores : (m, n) the n highest exact scores in the complete corpus
    seconds : duration of the first stage
    """

    queries: Tensor
    candidate_rows: Tensor
    is_sure: Tensor
    scores: Tensor
    best_scores: Tensor
    seconds: float


def measure_reranked_search(
    i2t: ScoreBlocks, t2i: ScoreBlocks | None, images: Vectors, captions: Vectors, candidates: int
) -> dict[str, Any]:
    """Return the metrics of a two-stage search, as an entry of a result file.

    The first stage finds the candidates of each query: the rows with the highest inner products with the query, by the vectors
    ``images`` (n_images, dim) and ``captions`` (n_captions, dim). The second stage ranks the candidates by exact scores. The
    rank of a query is the number of wrong candidates that score at least as high as its best right candidate. A query without
    a right candidate is ranked behind all wrong answers of the split. A right candidate does not count if a row with
    the same score in the first stage was left out: only the order of equal scores made it a candidate.

    For each direction, the result has the metrics; ``found``, the percentage of queries with a right answer among the
    candidates; and ``recall_at_1`` etc., the percentage of the exact search's top K that is also in the top K of this search.
    ``exact`` has the metrics of exact search, and ``lost`` has the amounts by which the metrics of this search are worse.

    Parameters
    ----------
    i2t, t2i : exact scores in each direction, as CPU tensors; ``t2i`` is None if the scores of ``i2t`` serve both directions
    candidates : number of candidates of each query
    """
    image_of_caption = i2t.image_of_caption
    lists = {
        "i2t": _list_image_candidates(i2t, images, captions, candidates),
        "t2i": _list_caption_candidates(t2i or i2t, images, captions, candidates),
    }
    image_of_row = {"image": torch.arange(len(images)), "caption": image_of_caption}
    ranks, measured = {}, {}
    for direction in IMAGE_TEXT_DIRECTIONS:
        name, corpus_images = direction.name, image_of_row[direction.candidate_kind]
        ranks[name], facts = _evaluate_lists(lists[name], corpus_images, image_of_row[direction.query_kind])
        measured[name] = {"n_queries": len(ranks[name]), "n_corpus": len(corpus_images), **facts}
    exact, found = compute_metrics(ranks_from_blocks(i2t, t2i)), compute_metrics(Ranks(ranks["i2t"], ranks["t2i"]))
    found |= {name: {**facts, **found[name]} for name, facts in measured.items()}
    return {"reranked": candidates, "factory": "Flat", **found, "exact": exact, "lost": _compute_metric_drops(exact, found)}


def _list_image_candidates(
    blocks: ScoreBlocks, images: Vectors, captions: Vectors, candidates: int
) -> Iterator[_CandidateLists]:
    with_captions = torch.unique(blocks.image_of_caption)
    for rows in blocks.row_slices:
        queries = with_captions[(with_captions >= rows.start) & (with_captions < rows.stop)]
        if len(queries):
            near, sure, seconds = find_candidates(captions, images[queries.numpy()], candidates)
            scores = blocks.score(rows, None)[queries - rows.start]
            yield _CandidateLists(queries, near, sure, scores.gather(1, near), _find_highest_scores(scores.T).T, seconds)


def _list_caption_candidates(
    blocks: ScoreBlocks, images: Vectors, captions: Vectors, candidates: int
) -> Iterator[_CandidateLists]:
    for queries in torch.split(torch.arange(len(captions)), max(1, _MAX_CANDIDATES // candidates)):
        near, sure, seconds = find_candidates(images, captions[queries.numpy()], candidates)
        scores, best = torch.empty(near.shape, dtype=torch.float64), torch.empty(0, len(queries))
        for rows in blocks.row_slices:
            block = blocks.score(rows, queries)
            best = _find_highest_scores(torch.cat([best.to(block.dtype), block]))
            query, place = torch.nonzero((near >= rows.start) & (near < rows.stop), as_tuple=True)
            scores[query, place] = block[near[query, place] - rows.start, query].double()
        yield _CandidateLists(queries, near, sure, scores, best.T, seconds)


def find_candidates(corpus: Vectors, queries: Vectors, candidates: int) -> tuple[Tensor, Tensor, float]:
    """Return the K = ``candidates`` best rows (m, K) for each query, a mask (m, K), and the duration in seconds.

    The best rows of ``corpus`` have the highest inner products with the query. The mask is True for sure candidates, whose
    scores are higher than the scores of all rows that are not candidates.
    """
    started = time.perf_counter()
    scores, rows = search_exactly(corpus, queries, min(candidates + 1, len(corpus)))
    seconds = time.perf_counter() - started
    next_best = scores[:, candidates:] if len(corpus) > candidates else np.full((len(queries), 1), -np.inf, np.float32)
    return torch.from_numpy(rows[:, :candidates]), torch.from_numpy(scores[:, :candidates] > next_best), seconds


def _evaluate_lists(
    chunks: Iterator[_CandidateLists], image_of_row: Tensor, query_images: Tensor
) -> tuple[RowIndices, dict[str, float]]:
    """Return the ranks of all queries of one direction, and a dict of measurements.

    The dict has ``found`` (the percentage of queries with a right candidate that does not tie with rows left out),
    ``recall_at_1`` etc. (the percentage of the exact search's top K that is also in the top K of this search), and the
    duration ``search_s`` in seconds. Each item of ``chunks`` has the candidates of some queries. ``image_of_row`` has the
    image of each corpus row, and ``query_images`` the image of each query row.
    """
    n_right = torch.bincount(image_of_row, minlength=int(query_images.max()) + 1)
    depths = [min(k, len(image_of_row)) for k in DEFAULT_KS]
    ranks, n_found, agreed, duration = [], 0, np.zeros(len(depths), np.int64), 0.0
    for queries, rows, sure, scores, best, seconds in chunks:
        images = query_images[queries]
        right = image_of_row[rows] == images[:, None]
        ranks.append(rank_listed_candidates(right, sure, scores, len(image_of_row) - n_right[images]))
        n_found += int((right & sure).any(1).sum())
        agreed += [int((scores >= best[:, k - 1 : k]).sum(1).clamp(max=k).sum()) for k in depths]
        duration += seconds
    all_ranks = torch.cat(ranks).numpy()
    shares = 100.0 * agreed / (np.asarray(depths) * len(all_ranks))
    recalls = {f"recall_at_{k}": float(share) for k, share in zip(DEFAULT_KS, shares, strict=True)}
    return all_ranks, {"search_s": round(duration, 3), "found": 100.0 * n_found / len(all_ranks), **recalls}


def rank_listed_candidates(right: Tensor, sure: Tensor, scores: Tensor, n_wrong: Tensor) -> Tensor:
    """Return the rank (m,) of each query: how many wrong candidates score at least as high as the best right candidate.

    ``right`` (m, K) marks right candidates. ``sure`` (m, K) marks candidates with a higher first-stage score than all rows
    that are not candidates. ``scores`` (m, K) are exact. ``n_wrong`` (m,) is the number of wrong answers in the split. If no
    right candidate of a query is sure, its rank is ``n_wrong``.
    """
    sure_right = right & sure
    goal = scores.masked_fill(~sure_right, -torch.inf).amax(1, keepdim=True)
    ahead = (~right & (scores >= goal)).sum(1)
    return torch.where(sure_right.any(1), ahead, n_wrong)


def _compute_metric_drops(exact: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the amount by which each metric in ``found`` is worse than the same metric in ``exact``."""
    return {
        name: _compute_metric_drops(value, found[name])
        if isinstance(value, dict)
        else (found[name] - value if name in RANK_METRICS else value - found[name])
        for name, value in exact.items()
    }


def _find_highest_scores(scores: Tensor) -> Tensor:
    """Return the ten highest scores of each column, or all scores if there are fewer, the highest first."""
    return torch.topk(scores, min(max(DEFAULT_KS), len(scores)), dim=0).values


def measure_index_recalls(
    images: Vectors,
    captions: Vectors,
    image_of_caption: RowIndices,
    similarity: str = "cosine",
    factory: str = "Flat",
    parameters: str = "",
    ks: tuple[int, ...] = DEFAULT_KS,
    *,
    candidates: int = N_RESCORED_CANDIDATES,
    seed: int = 0,
    block: int = N_ROWS_PER_BLOCK,
) -> dict[str, Any]:
    """Return the recalls (in percent) and the cost of a FAISS index in both directions, for a result file.

    ``r1`` etc. are R@K by the results of the index; if scores are equal, wrong results are ranked first. ``recall_at_1`` etc.
    are the percentage of the exact search's top K that is also in the top K of the index. A row with the same score as the
    last row of the exact top K counts as well. For the similarity ``order``, the index finds ``candidates`` rows, which are
    then sorted by exact scores; the result has their number as ``reranked``. Durations are wall-clock seconds. If only the
    images or only the captions are too few to train the index, their index is a ``Flat`` index, and their ``factory`` in the
    result is ``Flat``.

    Parameters
    ----------
    images, captions : embeddings (n_images, dim) and (n_captions, dim)
    image_of_caption : for each caption the row of its image; an image without captions is a candidate but no query
    factory, parameters : type of the index, such as ``IVF1024,Flat``, and settings of its search, such as ``nprobe=16``
    seed : seed of the sample of rows on which the index is trained
    """
    if (
        len(image_of_caption) != len(captions)
        or not len(image_of_caption)
        or image_of_caption.min() < 0
        or image_of_caption.max() >= len(images)
    ):
        counts = f"{len(image_of_caption)} rows for {len(captions)} captions of {len(images)} images"
        raise UserError(f"image_of_caption has {counts}, or rows that are not among these images")
    needed = min_training_rows(factory, images.shape[1])
    measured: dict[str, Any] = {"factory": factory, "parameters": parameters, "similarity": similarity}
    if similarity != "cosine":
        measured["reranked"] = candidates
    for direction, one in build_both_searches(images, captions, image_of_caption).items():
        # Request K results plus the largest number of right answers: K wrong rows that tie with right rows are then found.
        depth = max(ks) + int(np.bincount(one.image_of_row).max())
        times = [time.perf_counter()]
        small = len(one.corpus) < needed <= max(len(images), len(captions))
        name = f"{one.direction.candidate_kind}s"
        built = build_index(one.corpus, "Flat" if small else factory, seed=seed, block=block, name=name)
        if not small:
            set_search_parameters(built.index, parameters)
        times.append(time.perf_counter())
        index = copy_to_gpu(built.index, depth if similarity == "cosine" else max(depth, candidates))
        queries = one.queries
        top = search_corpus(one.corpus, queries, depth, similarity, direction=direction, candidates=candidates, index=index)
        times.append(time.perf_counter())
        del index
        exact = search_exactly(one.corpus, queries, max(ks), similarity, direction=direction, block=block)
        times.append(time.perf_counter())
        build_s, search_s, exact_s = np.diff(times).round(3).tolist()
        first = top.rows[:, : max(ks)]
        scores = compute_exact_scores(one.corpus, queries, first, similarity, direction)
        best = compute_exact_scores(one.corpus, queries, exact.rows, similarity, direction)
        ranks = _rank_top_results(top, one)
        measured[direction] = {
            "n_queries": len(queries),
            "n_corpus": len(one.corpus),
            "factory": built.factory,
            "trained_on": built.n_training_rows,
            "build_s": build_s,
            "search_s": search_s,
            "exact_s": exact_s,
            **{f"r{k}": 100.0 * float(np.mean(ranks < k)) for k in ks},
            **{f"recall_at_{k}": 100.0 * _compute_recalled_share(first, exact.rows, scores, best, k) for k in ks},
        }
    return measured


def _rank_top_results(top: TopK, direction_search: DirectionSearch) -> RowIndices:
    """Return the rank of each query: how many wrong results score at least as high as its best right result.

    The rank is the largest int64 if no right answer is among the results.
    """
    found = top.rows >= 0
    right = found & (direction_search.image_of_row[top.rows] == direction_search.image_of_query[:, None])
    best = np.where(right, top.scores, -np.inf).max(1, keepdims=True)
    ahead = (found & ~right & (top.scores >= best)).sum(1)
    ranks: RowIndices = np.where(right.any(1), ahead, np.iinfo(np.int64).max)
    return ranks


def _compute_recalled_share(rows: RowIndices, exact: RowIndices, scores: Scores, exact_scores: Scores, k: int) -> float:
    """Return the share of the top ``k`` rows of an exact search, ``exact``, that are in the top ``k`` of another, ``rows``.

    A found row with the same score as the last row of the exact top ``k`` counts as well.
    """
    rows, exact = rows[:, :k], exact[:, :k]
    same = (rows[:, :, None] == exact[:, None, :]).any(2)
    good = (rows >= 0) & (same | (scores[:, :k] >= exact_scores[:, :k].min(1, keepdims=True)))
    return float(good.sum()) / exact.size
