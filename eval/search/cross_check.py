"""The check that a search by FAISS agrees with the exact ranks, query by query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.ranking.ranks import Ranks
from vse.eval.ranking.scores import similarity_by_name
from vse.eval.ranking.sentences import SentenceRanks, unit_rows
from vse.eval.search.exact import Rows, Scores
from vse.eval.search.top_k import CANDIDATES, search

# Times both lengths, or times a sum of squares: float32 sums of the same terms in another order differ by less.
_ROUNDING = 1e-5
_PAIRS = 4096  # scored at once
BY_SEARCH, BY_CANDIDATES = "an exact search by FAISS", "candidates of FAISS, re-ranked by exact scores"


@dataclass(frozen=True)
class Agreement:
    """What FAISS found, which agrees with the exact ranks.

    Attributes
    ----------
    against : what the ranks were compared with
    recalls : of each direction R@K by FAISS
    queries : of each direction how many were compared
    ties : for how many of these a negative that FAISS found ties with the right answer, up to rounding: FAISS puts the two in
        any order, the ranks put the negative first, so that these queries alone may differ
    """

    against: str
    recalls: dict[str, dict[str, float]]
    queries: dict[str, int]
    ties: dict[str, int]


def check_against_search(
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    ranks: Ranks,
    ks: tuple[int, ...],
) -> Agreement:
    """What FAISS finds in both directions, after checking query by query that it agrees with the exact ranks.

    An image without a caption is found by captions and is no query itself: ``ranks.i2t`` is of the images that have any.
    FAISS breaks ties as it likes, the ranks break them against the model: a query may differ at K if, up to rounding, its
    right answer ties with the last of K or with the next. Any other difference is a fault of the program and raises
    ``RuntimeError``.
    """
    depth = max(ks) + 1
    asking = np.unique(image_of_caption)
    results = {
        "i2t": _Results(*search(captions, images[asking], depth), asking, image_of_caption),
        "t2i": _Results(*search(images, captions, depth), image_of_caption, np.arange(len(images))),
    }
    right = _products_of_pairs(images, captions, image_of_caption)
    rounding = _ROUNDING * _longest(images) * _longest(captions)
    scores = {"i2t": _best_own(right, image_of_caption)[asking], "t2i": right}
    exact = {"i2t": ranks.i2t, "t2i": ranks.t2i}
    return Agreement(
        BY_SEARCH,
        {name: _agreed_recalls(name, exact[name], results[name], scores[name], rounding, ks) for name in results},
        {name: len(exact[name]) for name in results},
        {name: results[name].ties(scores[name], rounding) for name in results},
    )


def check_sentences_against_search(
    captions: NDArray[np.float32], image_of_caption: NDArray[np.int64], exact_ranks: SentenceRanks, ks: tuple[int, ...]
) -> Agreement:
    """What FAISS finds for captions that query captions, after the same check as :func:`check_against_search`."""
    units = unit_rows(torch.from_numpy(captions)).numpy()
    queries, exact = exact_ranks.queries, exact_ranks.ranks
    # One more than needed, since each query finds itself; or, if many are equal to it, perhaps not.
    scores, rows = search(units, units[queries], max(ks) + 2)
    drop = rows == queries[:, None]
    drop[~drop.any(1), -1] = True
    scores, rows = (values[~drop].reshape(len(queries), -1) for values in (scores, rows))
    results, right = _Results(scores, rows, image_of_caption[queries], image_of_caption), _best_other(units, image_of_caption)
    recalls = _agreed_recalls("s2s", exact, results, right[queries], _ROUNDING, ks)
    ties = results.ties(right[queries], _ROUNDING)
    return Agreement(BY_SEARCH, {"s2s": recalls}, {"s2s": len(queries)}, {"s2s": ties})


def _agreed_recalls(
    direction: str, exact: Rows, results: _Results, right: Scores, rounding: float, ks: tuple[int, ...]
) -> dict[str, float]:
    """R@K of one direction, if its exact ranks and the positions that FAISS found differ by nothing but ties.

    ``exact`` and ``right`` (the scores of the right answers) are (n_queries,).
    """
    recalls, scores, position = {}, results.scores, results.positions()
    none = np.full(len(scores), -np.inf, np.float32)
    for k in ks:
        last, following = (scores[:, n] if n < scores.shape[1] else none for n in (k - 1, k))
        too_bad = (position < k) & (exact >= k) & (following < right - rounding)  # k negatives and the positive reach it
        too_good = (position >= k) & (exact < k) & (last > right + rounding)  # k negatives are ahead of it
        if (too_bad | too_good).any():
            query = int(np.flatnonzero(too_bad | too_good)[0])
            raise RuntimeError(f"{direction} query {query}: rank {exact[query]} by exact count, {position[query]} by FAISS")
        recalls[f"r{k}"] = 100.0 * float(np.mean(position < k))
    return recalls


def check_against_candidates(
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    ranks: Ranks,
    ks: tuple[int, ...],
    similarity: str,
    candidates: int = CANDIDATES,
) -> Agreement:
    """What re-ranked candidates give in both directions, after checking query by query that no exact rank contradicts them.

    Images without a caption are as in :func:`check_against_search`. A negative that scores higher than the right
    answer must be among those that the rank counts; all that the rank counts must tie with the right answer, score higher,
    or not be a candidate. With as many candidates as rows this leaves one rank, up to ties and rounding. A rank outside of
    these bounds is a fault of the program and raises ``RuntimeError``.
    """
    own, asking = np.arange(len(images)), np.unique(image_of_caption)
    right = _scores_of_pairs(images, captions, image_of_caption, similarity)
    agreement = Agreement(BY_CANDIDATES, {}, {}, {})
    for direction, corpus, queries, label, wanted, goal, exact in (
        ("i2t", captions, images[asking], image_of_caption, asking, _best_own(right, image_of_caption)[asking], ranks.i2t),
        ("t2i", images, captions, own, image_of_caption, right, ranks.t2i),
    ):
        scores, rows = search(corpus, queries, candidates, similarity, direction=direction, candidates=candidates)
        results = _Results(scores, rows, wanted, label)
        negative = ~results.hits
        unseen = len(corpus) - np.bincount(label)[wanted] - negative.sum(1)
        margin = _ROUNDING * np.abs(goal)
        least = (negative & (scores > (goal + margin)[:, None])).sum(1)
        most = (negative & (scores >= (goal - margin)[:, None])).sum(1) + unseen
        outside = (exact < least) | (exact > most)
        if outside.any():
            query = int(np.flatnonzero(outside)[0])
            bounds = f"{least[query]} to {most[query]} by {rows.shape[1]} candidates"
            raise RuntimeError(f"{direction} query {query}: rank {exact[query]} by exact count, {bounds}")
        position = results.positions()
        agreement.recalls[direction] = {f"r{k}": 100.0 * float(np.mean(position < k)) for k in ks}
        agreement.queries[direction], agreement.ties[direction] = len(exact), results.ties(goal, margin)
    return agreement


class _Results:
    """What FAISS found: ``scores`` and ``rows`` (n_queries, depth), best first; ``hits`` are the right ones among them."""

    def __init__(self, scores: Scores, rows: Rows, wanted: NDArray[np.int64], label: NDArray[np.int64]) -> None:
        self.scores, self.rows = scores, rows
        self.hits = label[rows] == wanted[:, None]

    def positions(self) -> Rows:
        """Where each query's right answer first stands; the number of results if nowhere."""
        positions: Rows = np.where(self.hits.any(1), self.hits.argmax(1), self.rows.shape[1])
        return positions

    def ties(self, right: Scores, rounding: float | NDArray[np.floating[Any]]) -> int:
        """For how many queries a negative scores as high as the right answer (n_queries,), up to rounding."""
        near = np.abs(self.scores - right[:, None]) <= np.broadcast_to(rounding, right.shape)[:, None]
        return int((near & ~self.hits).any(1).sum())


def _scores_of_pairs(
    images: NDArray[np.float32], captions: NDArray[np.float32], image_of_caption: NDArray[np.int64], similarity: str
) -> Scores:
    """The score of each caption (n_captions,) with its image, computed pair by pair."""
    score = similarity_by_name(similarity).score
    scores = torch.empty(len(captions))
    for start in range(0, len(captions), _PAIRS):
        left = torch.from_numpy(images[image_of_caption[start : start + _PAIRS]])
        right = torch.from_numpy(np.array(captions[start : start + _PAIRS]))
        for pair, (image, caption) in enumerate(zip(left, right, strict=True), start):
            score(image[None], caption[None], scores[pair, None, None])
    return scores.numpy()


def _products_of_pairs(
    images: NDArray[np.float32], captions: NDArray[np.float32], image_of_caption: NDArray[np.int64]
) -> Scores:
    """The inner product of each caption (n_captions,) with its image."""
    parts = [slice(start, start + _PAIRS) for start in range(0, len(captions), _PAIRS)]
    return np.concatenate([np.einsum("nd,nd->n", images[image_of_caption[part]], captions[part]) for part in parts])


def _longest(rows: NDArray[np.float32]) -> float:
    """The length of the longest row, without a copy of them all."""
    return float(np.sqrt(np.einsum("nd,nd->n", rows, rows).max()))


def _best_own(right: Scores, image_of_caption: NDArray[np.int64]) -> Scores:
    """The highest score of each image, up to the last that has a caption, with a caption of its own; -inf without any."""
    best = np.full(int(image_of_caption.max()) + 1, -np.inf, np.float32)
    np.maximum.at(best, image_of_caption, right)
    return best


def _best_other(captions: NDArray[np.float32], image_of_caption: NDArray[np.int64]) -> Scores:
    """The highest score of a caption (n_captions,) with another one of its image; -inf if there is none."""
    best = np.empty(len(captions), np.float32)
    order = np.argsort(image_of_caption, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(image_of_caption[order])) + 1):
        scores = captions[own] @ captions[own].T
        np.fill_diagonal(scores, -np.inf)
        best[own] = scores.max(1)
    return best
