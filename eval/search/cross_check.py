"""Checks, query by query, that a search by FAISS agrees with the exact ranks.

FAISS orders ties as it likes, while exact ranks put wrong answers first. Results may therefore differ only for queries whose
right answer ties with a wrong one, up to rounding. Any other difference is an error of the program and raises RuntimeError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.ranking.answers import BestAnswers, unit_rows
from vse.eval.ranking.ranks import Ranks, shared_tensor, similarity_by_name
from vse.eval.search.top_k import CANDIDATES, DirectionSearch, Rows, Scores, TopK, both_directions, search

# Relative to the product of both lengths, or to a sum of squares: float32 sums in another order differ by less.
_ROUNDING = 1e-5
_PAIRS = 512  # pairs that are scored at once
BY_SEARCH, BY_CANDIDATES = "an exact search by FAISS", "candidates of FAISS, re-ranked by exact scores"


@dataclass(frozen=True)
class Agreement:
    """The recalls of a FAISS search that agrees with the exact ranks; each field has a value for each direction.

    Attributes
    ----------
    against : description of the search
    recalls, exact : R@K of the compared queries, by FAISS and by their exact ranks
    queries, of : number of compared queries, and number of all queries
    ties : number of compared queries with a wrong result that ties with the right answer, up to rounding; only these may
        differ
    """

    against: str
    recalls: dict[str, dict[str, float]] = field(default_factory=dict)
    exact: dict[str, dict[str, float]] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)
    of: dict[str, int] = field(default_factory=dict)
    ties: dict[str, int] = field(default_factory=dict)

    def add(self, direction: str, recalls: dict[str, float], sample: Rows, exact_ranks: NDArray[np.int64], ties: int) -> None:
        """Add a direction; ``sample`` has the indices of the compared queries among those with ``exact_ranks``."""
        self.recalls[direction] = recalls
        self.exact[direction] = {name: 100.0 * float(np.mean(exact_ranks[sample] < int(name[1:]))) for name in recalls}
        self.queries[direction], self.of[direction], self.ties[direction] = len(sample), len(exact_ranks), ties


def check_against_search(
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    ranks: Ranks,
    ks: tuple[int, ...],
    most: int = 0,
) -> Agreement:
    """Search both directions with FAISS, check every query against its exact rank, and return the agreement.

    An image without captions is a candidate but no query; ``ranks.i2t`` has the images with captions. At most ``most``
    queries of each direction are compared, a random sample that is always the same; 0 compares all. A query may differ at K
    only if its right answer ties, up to rounding, with result K or K + 1. Raises RuntimeError for any other difference.
    """
    samples, tasks = _sample_tasks(images, captions, image_of_caption, most)
    right_scores = _right_scores(tasks, images, captions, image_of_caption, "cosine")
    rounding = _ROUNDING * _longest(images) * _longest(captions)
    agreement = Agreement(BY_SEARCH)
    for name, task in tasks.items():
        top = search(task.corpus, task.queries, max(ks) + 1)
        results = _SearchResults(top, task.image_of_query, task.image_of_row)
        sample, exact_ranks, right = samples[name], ranks.by_direction[name], right_scores[name]
        recalls = _check_recalls(name, sample, exact_ranks, results, right, rounding, ks)
        agreement.add(name, recalls, sample, exact_ranks, results.ties(right, rounding))
    return agreement


def check_sentences_against_search(
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    exact_ranks: BestAnswers,
    ks: tuple[int, ...],
    most: int = 0,
) -> Agreement:
    """Search captions with captions by FAISS, and check the results as :func:`check_against_search` does."""
    units, sample = unit_rows(shared_tensor(captions)).numpy(), _sample_queries(len(exact_ranks.queries), most)
    queries, exact = exact_ranks.queries[sample], exact_ranks.ranks
    # Each query finds itself, so search for one more result; if many captions equal it, it may not be among the results.
    scores, rows = search(units, units[queries], max(ks) + 2)
    drop = rows == queries[:, None]
    drop[~drop.any(1), -1] = True
    others = TopK(*(values[~drop].reshape(len(queries), -1) for values in (scores, rows)))
    results = _SearchResults(others, image_of_caption[queries], image_of_caption)
    right = _best_other(units, image_of_caption)[queries]
    recalls = _check_recalls("s2s", sample, exact, results, right, _ROUNDING, ks)
    agreement = Agreement(BY_SEARCH)
    agreement.add("s2s", recalls, sample, exact, results.ties(right, _ROUNDING))
    return agreement


def _sample_tasks(
    images: NDArray[np.float32], captions: NDArray[np.float32], image_of_caption: NDArray[np.int64], most: int
) -> tuple[dict[str, Rows], dict[str, DirectionSearch]]:
    """Return for each direction the indices of the compared queries, and the search of these queries."""
    tasks = both_directions(images, captions, image_of_caption)
    samples = {name: _sample_queries(len(task.query_rows), most) for name, task in tasks.items()}
    return samples, {name: task.sample(samples[name]) for name, task in tasks.items()}


def _sample_queries(n: int, most: int) -> Rows:
    """Return the indices of at most ``most`` of ``n`` queries, ascending; all of them if it is 0."""
    if not 0 < most < n:
        return np.arange(n)
    return np.sort(np.random.default_rng(0).choice(n, most, replace=False))


def _check_recalls(
    direction: str,
    sample: Rows,
    exact_ranks: NDArray[np.int64],
    results: _SearchResults,
    right: Scores,
    rounding: float,
    ks: tuple[int, ...],
) -> dict[str, float]:
    """Return R@K of one direction, after checking that exact ranks and FAISS differ only by ties.

    ``exact_ranks`` has the ranks of all queries, ``sample`` the indices of the compared ones, and ``right`` (n_compared,) the
    scores of their right answers. Raises RuntimeError for any other difference.
    """
    exact = exact_ranks[sample]
    recalls, scores, position = {}, results.scores, results.positions()
    no_result = np.full(len(scores), -np.inf, np.float32)
    for k in ks:
        last, following = (scores[:, n] if n < scores.shape[1] else no_result for n in (k - 1, k))
        too_bad = (
            (position < k) & (exact >= k) & (following < right - rounding)
        )  # k wrong answers and the right one score as high
        too_good = (position >= k) & (exact < k) & (last > right + rounding)  # k wrong answers score higher
        if (too_bad | too_good).any():
            wrong = int(np.flatnonzero(too_bad | too_good)[0])
            found = f"rank {exact[wrong]} by exact count, {position[wrong]} by FAISS"
            raise RuntimeError(f"{direction} query {sample[wrong]}: {found}")
        recalls[f"r{k}"] = 100.0 * float(np.mean(position < k))
    return recalls


def check_against_candidates(
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    ranks: Ranks,
    ks: tuple[int, ...],
    similarity: str,
    most: int = 0,
    candidates: int = CANDIDATES,
) -> Agreement:
    """Search both directions by re-ranked candidates, check every query against its exact rank, and return the agreement.

    Images without captions and ``most`` are as in :func:`check_against_search`. A wrong candidate that scores higher than the
    right answer must be counted in the rank. Each answer that the rank counts must tie with the right answer, score higher, or
    not be a candidate. With as many candidates as rows these bounds leave one rank, up to ties and rounding. Raises
    RuntimeError if a rank is outside of the bounds.
    """
    samples, tasks = _sample_tasks(images, captions, image_of_caption, most)
    right_scores = _right_scores(tasks, images, captions, image_of_caption, similarity)
    agreement = Agreement(BY_CANDIDATES)
    for name, task in tasks.items():
        sample, exact_ranks, right = samples[name], ranks.by_direction[name], right_scores[name]
        exact = exact_ranks[sample]
        top = search(task.corpus, task.queries, candidates, similarity, direction=name, candidates=candidates)
        results = _SearchResults(top, task.image_of_query, task.image_of_row)
        wrong = ~results.hits
        unseen = len(task.corpus) - np.bincount(task.image_of_row)[task.image_of_query] - wrong.sum(1)
        margin = _ROUNDING * np.abs(right)
        lowest = (wrong & (top.scores > (right + margin)[:, None])).sum(1)
        highest = (wrong & (top.scores >= (right - margin)[:, None])).sum(1) + unseen
        outside = (exact < lowest) | (exact > highest)
        if outside.any():
            query = int(np.flatnonzero(outside)[0])
            bounds = f"{lowest[query]} to {highest[query]} by {top.rows.shape[1]} candidates"
            raise RuntimeError(f"{name} query {sample[query]}: rank {exact[query]} by exact count, {bounds}")
        position = results.positions()
        recalls = {f"r{k}": 100.0 * float(np.mean(position < k)) for k in ks}
        agreement.add(name, recalls, sample, exact_ranks, results.ties(right, margin))
    return agreement


class _SearchResults:
    """The results of a search: ``scores`` and ``rows`` (n_queries, depth), best first; ``hits`` masks the right ones."""

    def __init__(self, top: TopK, image_of_query: NDArray[np.int64], image_of_row: NDArray[np.int64]) -> None:
        self.scores, self.rows = top
        self.hits = image_of_row[self.rows] == image_of_query[:, None]

    def positions(self) -> Rows:
        """Return the position of each query's first right result; the number of results if none is right."""
        positions: Rows = np.where(self.hits.any(1), self.hits.argmax(1), self.rows.shape[1])
        return positions

    def ties(self, right: Scores, rounding: float | NDArray[np.floating[Any]]) -> int:
        """Count queries with a wrong result that scores as high as the right answer (n_queries,), up to rounding."""
        near = np.abs(self.scores - right[:, None]) <= np.broadcast_to(rounding, right.shape)[:, None]
        return int((near & ~self.hits).any(1).sum())


def _right_scores(
    tasks: Mapping[str, DirectionSearch],
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    similarity: str,
) -> dict[str, Scores]:
    """Return for each direction the score of each query (n_queries,) with its best right answer, computed pair by pair."""
    needed = np.isin(image_of_caption, tasks["i2t"].query_rows)
    needed[tasks["t2i"].query_rows] = True
    scores = _scores_of_pairs(images, captions, image_of_caption, np.flatnonzero(needed), similarity)
    best_of_image = _best_own(scores, image_of_caption)
    return {"i2t": best_of_image[tasks["i2t"].query_rows], "t2i": scores[tasks["t2i"].query_rows]}


def _scores_of_pairs(
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    needed: Rows,
    similarity: str,
) -> Scores:
    """Return the scores (n_captions,) of the ``needed`` captions with their images, pair by pair; -inf for the others."""
    score = similarity_by_name(similarity).score
    scores = np.full(len(captions), -np.inf, np.float32)
    for start in range(0, len(needed), _PAIRS):
        part = needed[start : start + _PAIRS]
        left, right = images[image_of_caption[part]], captions[part]
        if similarity == "cosine":
            scores[part] = np.einsum("nd,nd->n", left, right)
            continue
        pair_scores = torch.empty(len(part))
        for pair, (image, caption) in enumerate(zip(torch.from_numpy(left), torch.from_numpy(right), strict=True)):
            score(image[None], caption[None], pair_scores[pair, None, None])
        scores[part] = pair_scores.numpy()
    return scores


def _longest(rows: NDArray[np.float32]) -> float:
    """Return the length of the longest row, without a copy of all rows."""
    return float(np.sqrt(np.einsum("nd,nd->n", rows, rows).max()))


def _best_own(right: Scores, image_of_caption: NDArray[np.int64]) -> Scores:
    """Return the highest score of each image, up to the last one with captions, with its own captions; -inf without any."""
    best = np.full(int(image_of_caption.max()) + 1, -np.inf, np.float32)
    np.maximum.at(best, image_of_caption, right)
    return best


def _best_other(captions: NDArray[np.float32], image_of_caption: NDArray[np.int64]) -> Scores:
    """Return the highest score of each caption (n_captions,) with another one of its image; -inf for an only caption."""
    best = np.empty(len(captions), np.float32)
    order = np.argsort(image_of_caption, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(image_of_caption[order])) + 1):
        scores = captions[own] @ captions[own].T
        np.fill_diagonal(scores, -np.inf)
        best[own] = scores.max(1)
    return best
