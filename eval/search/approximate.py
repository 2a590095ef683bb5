"""How much an approximate index finds of what an exact search finds, in both directions, and what it costs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.defaults import RECALLS
from vse.eval.search.exact import BLOCK, Rows, Scores, TopK, exact_scores, exact_search
from vse.eval.search.gpu import on_gpu
from vse.eval.search.index import build_index, rows_needed, set_parameters
from vse.eval.search.top_k import CANDIDATES, search
from vse.pipeline.errors import UserError


def approximate_recalls(
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    similarity: str = "cosine",
    factory: str = "Flat",
    parameters: str = "",
    ks: tuple[int, ...] = RECALLS,
    *,
    candidates: int = CANDIDATES,
    seed: int = 0,
    block: int = BLOCK,
) -> dict[str, Any]:
    """What an index of this type, searched with these parameters, finds and costs, for a result file; recalls in percent.

    Of each direction, ``i2t`` and ``t2i``: ``r1`` ... are R@K by what the index returns, a negative that scores as high as
    the right one counted as before it; ``recall_at_1`` ... are the share of the exact top K, by the true similarity, that the
    index returned as its top K, where a row that ties with the last of the exact ones is as good. For ``order`` the index
    proposes ``reranked`` candidates, put in order by their exact scores. Times are wall seconds of this machine. Where one
    side has too few rows to train the index, it has a ``Flat`` one, and its ``factory`` says so.

    Parameters
    ----------
    images : embeddings (n_images, dim); a memory map stays on disk
    captions : embeddings (n_captions, dim)
    image_of_caption : for each caption the row of its image; an image that has none is found by captions, and is no query
    factory, parameters : see :func:`vse.eval.search.index.build_index` and :func:`vse.eval.search.index.set_parameters`
    """
    if (
        len(image_of_caption) != len(captions)
        or not len(image_of_caption)
        or image_of_caption.min() < 0
        or image_of_caption.max() >= len(images)
    ):
        counts = f"{len(image_of_caption)} rows for {len(captions)} captions of {len(images)} images"
        raise UserError(f"image_of_caption has {counts}, or rows that are none of these images")
    asking = np.unique(image_of_caption)
    needed = rows_needed(factory, images.shape[1])
    measured: dict[str, Any] = {"factory": factory, "parameters": parameters, "similarity": similarity}
    if similarity != "cosine":
        measured["reranked"] = candidates
    for direction, name, corpus, label, queries, wanted in (
        ("i2t", "captions", captions, image_of_caption, images[asking], asking),
        ("t2i", "images", images, np.arange(len(images)), captions, image_of_caption),
    ):
        # As many results more as a query can have right answers: K negatives that tie with these are then seen.
        depth = max(ks) + int(np.bincount(label).max())
        times = [time.perf_counter()]
        small = len(corpus) < needed <= max(len(images), len(captions))
        built = build_index(corpus, "Flat" if small else factory, seed=seed, block=block, name=name)
        if not small:
            set_parameters(built.index, parameters)
        times.append(time.perf_counter())
        index = on_gpu(built.index, depth if similarity == "cosine" else max(depth, candidates))
        top = search(corpus, queries, depth, similarity, direction=direction, candidates=candidates, index=index)
        times.append(time.perf_counter())
        del index
        exact = exact_search(corpus, queries, max(ks), similarity, direction=direction, block=block)
        times.append(time.perf_counter())
        build_s, search_s, exact_s = np.diff(times).round(3).tolist()
        first = top.rows[:, : max(ks)]
        true = exact_scores(corpus, queries, first, similarity, direction)
        best = exact_scores(corpus, queries, exact.rows, similarity, direction)
        agreed = {f"recall_at_{k}": 100.0 * _share(first, exact.rows, true, best, k) for k in ks}
        measured[direction] = {
            "n_queries": len(queries),
            "n_corpus": len(corpus),
            "factory": built.factory,
            "trained_on": built.trained_on,
            "build_s": build_s,
            "search_s": search_s,
            "exact_s": exact_s,
            **{f"r{k}": 100.0 * float(np.mean(_ranks(top, label, wanted) < k)) for k in ks},
            **agreed,
        }
    return measured


def _ranks(top: TopK, label: NDArray[np.int64], wanted: NDArray[np.int64]) -> Rows:
    """How many negatives score as high as each query's (m,) best right one; their number at least, if none was found."""
    there = top.rows >= 0
    right = there & (label[top.rows] == wanted[:, None])
    best = np.where(right, top.scores, -np.inf).max(1, keepdims=True)
    ahead = (there & ~right & (top.scores >= best)).sum(1)
    ranks: Rows = np.where(right.any(1), ahead, np.iinfo(np.int64).max)
    return ranks


def _share(rows: Rows, exact: Rows, scores: Scores, exact_scores: Scores, k: int) -> float:
    """The share of the top ``k`` of an exact search (m, >= k) that is among the top ``k`` of another; ties are as good."""
    rows, exact = rows[:, :k], exact[:, :k]
    same = (rows[:, :, None] == exact[:, None, :]).any(2)
    good = (rows >= 0) & (same | (scores[:, :k] >= exact_scores[:, :k].min(1, keepdims=True)))
    return float(good.sum()) / exact.size
