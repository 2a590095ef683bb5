"""What a search loses that scores only the best K of a fast first stage, against the exact ranks, in both directions.

How much an approximate index finds of what an exact search finds, in both directions, and what it costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.defaults import RECALLS
from vse.eval.ranking.metrics import metrics
from vse.eval.ranking.ranks import Ranks, ScoreBlocks, ranks_from_blocks
from vse.eval.search.exact import BLOCK, Rows, Scores, TopK, exact_scores, exact_search
from vse.eval.search.gpu import copy_to_gpu
from vse.eval.search.index import build_index, min_training_rows, set_parameters
from vse.eval.search.top_k import CANDIDATES, search
from vse.pipeline.errors import UserError

_SCORED = 2**24  # candidates of captions that are held at once


class _Lists(NamedTuple):
    """What some queries of one direction see, (m,) of them with K candidates each.

    queries : (m,) their rows
    rows : (m, K) the rows of the corpus that the first stage gives
    sure : (m, K) whether a row is among the K however the first stage orders rows that tie
    scores : (m, K) exact scores of these
    best : (m, n) the highest exact scores of the whole corpus
    seconds : that the first stage took
    """

    queries: Tensor
    rows: Tensor
    sure: Tensor
    scores: Tensor
    best: Tensor
    seconds: float


def reranked_metrics(
    i2t: ScoreBlocks,
    t2i: ScoreBlocks | None,
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    candidates: int,
) -> dict[str, Any]:
    """Metrics of lists of ``candidates`` rows, put in order by their exact scores, and what they lose; for a result file.

    FAISS finds the candidates, exactly: the rows with the highest inner products of ``images`` (n_images, dim) and
    ``captions`` (n_captions, dim), which stand for what is scored. Ranks count the negatives among the candidates that score
    at least as high as the best right answer among them. A query of whose right answers none is a candidate counts as ranked
    behind all negatives of the split, and so does one whose right answer ties, in the first stage, with a row that is none.
    With as many candidates as rows the ranks are the exact ones.

    Of each direction there are the metrics, ``found`` (the percentage of queries that have a right answer among the
    candidates), and ``recall_at_1`` ... as of :func:`vse.eval.search.approximate.approximate_recalls`: the share of the exact
    top K that is the top K of the list. ``exact`` has the exact metrics, ``lost`` how much worse each metric is than these.

    Parameters
    ----------
    i2t, t2i : exact scores, as for :func:`vse.eval.ranking.ranks.ranks_from_blocks`; processor tensors
    """
    image_of_caption = i2t.image_of_caption
    lists = {
        "i2t": (_of_images(i2t, images, captions, candidates), image_of_caption, torch.arange(len(images))),
        "t2i": (_of_captions(t2i or i2t, images, captions, candidates), torch.arange(len(images)), image_of_caption),
    }
    judged = {name: _judged(chunks, label, wanted) for name, (chunks, label, wanted) in lists.items()}
    exact = metrics(ranks_from_blocks(i2t, t2i))
    found = metrics(Ranks(judged["i2t"][0], judged["t2i"][0]))
    for direction, (ranks, facts) in judged.items():
        n_corpus = len(captions) if direction == "i2t" else len(images)
        found[direction] = {"n_queries": len(ranks), "n_corpus": n_corpus, **facts, **found[direction]}
    return {"reranked": candidates, "factory": "Flat", **found, "exact": exact, "lost": _lost(exact, found)}


def _of_images(
    blocks: ScoreBlocks, images: NDArray[np.float32], captions: NDArray[np.float32], candidates: int
) -> Iterator[_Lists]:
    """What images see that have a caption, a block of rows at a time."""
    asking = torch.unique(blocks.image_of_caption)
    for rows in _row_slices(blocks):
        queries = asking[(asking >= rows.start) & (asking < rows.stop)]
        if len(queries):
            near, sure, seconds = _first_stage(captions, images[queries.numpy()], candidates)
            scores = blocks.score(rows, None)[queries - rows.start]
            yield _Lists(queries, near, sure, scores.gather(1, near), _highest(scores.T).T, seconds)


def _of_captions(
    blocks: ScoreBlocks, images: NDArray[np.float32], captions: NDArray[np.float32], candidates: int
) -> Iterator[_Lists]:
    """What captions see, so many at a time as have no more than a number of candidates."""
    for queries in torch.split(torch.arange(len(captions)), max(1, _SCORED // candidates)):
        near, sure, seconds = _first_stage(images, captions[queries.numpy()], candidates)
        scores, best = torch.empty(near.shape, dtype=torch.float64), torch.empty(0, len(queries))
        for rows in _row_slices(blocks):
            block = blocks.score(rows, queries)
            best = _highest(torch.cat([best.to(block.dtype), block]))
            of, place = torch.nonzero((near >= rows.start) & (near < rows.stop), as_tuple=True)
            scores[of, place] = block[near[of, place] - rows.start, of].double()
        yield _Lists(queries, near, sure, scores, best.T, seconds)


def _first_stage(corpus: NDArray[np.float32], queries: NDArray[np.float32], candidates: int) -> tuple[Tensor, Tensor, float]:
    """The rows of each query's candidates, whether each is sure to be one, and how long that took."""
    started = time.perf_counter()
    scores, rows = exact_search(corpus, queries, min(candidates + 1, len(corpus)))
    seconds = time.perf_counter() - started
    next_best = scores[:, candidates:] if len(corpus) > candidates else np.full((len(queries), 1), -np.inf, np.float32)
    return torch.from_numpy(rows[:, :candidates]), torch.from_numpy(scores[:, :candidates] > next_best), seconds


def _judged(chunks: Iterator[_Lists], label: Tensor, wanted: Tensor) -> tuple[NDArray[np.int64], dict[str, float]]:
    """The ranks of the queries of one direction in their order, and what became of their lists.

    ``label`` has what each row of the corpus belongs to, ``wanted`` what each query (all of them) asks for.
    """
    own = torch.bincount(label, minlength=int(wanted.max()) + 1)
    depths = [min(k, len(label)) for k in RECALLS]
    ranks, found, agreed, seconds = [], 0, np.zeros(len(depths), np.int64), 0.0
    for queries, rows, sure, scores, best, took in chunks:
        right = label[rows] == wanted[queries][:, None]
        there = right & sure
        goal = scores.masked_fill(~there, -torch.inf).amax(1, keepdim=True)
        ahead = (~right & (scores >= goal)).sum(1)
        ranks.append(torch.where(there.any(1), ahead, len(label) - own[wanted[queries]]))
        found += int(there.any(1).sum())
        agreed += [int((scores >= best[:, k - 1 : k]).sum(1).clamp(max=k).sum()) for k in depths]
        seconds += took
    every = torch.cat(ranks).numpy()
    shares = 100.0 * agreed / (np.asarray(depths) * len(every))
    recalls = {f"recall_at_{k}": float(share) for k, share in zip(RECALLS, shares, strict=True)}
    return every, {"search_s": round(seconds, 3), "found": 100.0 * found / len(every), **recalls}


def _lost(exact: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """How much worse each metric is than the exact one: lower recalls, higher ranks."""
    return {
        name: _lost(value, found[name])
        if isinstance(value, dict)
        else (found[name] - value if name in ("medr", "meanr") else value - found[name])
        for name, value in exact.items()
    }


def _row_slices(blocks: ScoreBlocks) -> list[slice]:
    return [slice(start, min(start + blocks.rows, blocks.n_images)) for start in range(0, blocks.n_images, blocks.rows)]


def _highest(scores: Tensor) -> Tensor:
    """The highest scores of each column, highest first."""
    return torch.topk(scores, min(max(RECALLS), len(scores)), dim=0).values


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
    needed = min_training_rows(factory, images.shape[1])
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
        index = copy_to_gpu(built.index, depth if similarity == "cosine" else max(depth, candidates))
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
