"""The check that a search by FAISS agrees with the exact ranks, query by query."""

from __future__ import annotations

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


def check_against_search(
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    ranks: Ranks,
    ks: tuple[int, ...],
) -> dict[str, dict[str, float]]:
    """R@K of both directions by FAISS, after checking query by query that it agrees with the exact ranks.

    An image without a caption is found by captions and is no query itself: ``ranks.i2t`` is of the images that have any.
    FAISS breaks ties as it likes, the ranks break them against the model: a query may differ at K if, up to rounding, its
    right answer ties with the last of K or with the next. Any other difference is a fault of the program and raises
    ``RuntimeError``.
    """
    depth = max(ks) + 1
    asking = np.unique(image_of_caption)
    positions = {
        "i2t": _first_positions(*search(captions, images[asking], depth), asking, image_of_caption),
        "t2i": _first_positions(*search(images, captions, depth), image_of_caption, np.arange(len(images))),
    }
    right = _products_of_pairs(images, captions, image_of_caption)
    longest = _longest(images) * _longest(captions)
    scores = {"i2t": _best_own(right, image_of_caption)[asking], "t2i": right}
    exact = {"i2t": ranks.i2t, "t2i": ranks.t2i}
    return {
        direction: _agreed_recalls(
            direction, exact[direction], *positions[direction], scores[direction], _ROUNDING * longest, ks
        )
        for direction in positions
    }


def check_sentences_against_search(
    captions: NDArray[np.float32], image_of_caption: NDArray[np.int64], exact_ranks: SentenceRanks, ks: tuple[int, ...]
) -> dict[str, float]:
    """R@K of captions that query captions by FAISS, after the same check as :func:`check_against_search`."""
    units = unit_rows(torch.from_numpy(captions)).numpy()
    queries, exact = exact_ranks
    # One more than needed, since each query finds itself; or, if many are equal to it, perhaps not.
    scores, rows = search(units, units[queries], max(ks) + 2)
    drop = rows == queries[:, None]
    drop[~drop.any(1), -1] = True
    scores, rows = (values[~drop].reshape(len(queries), -1) for values in (scores, rows))
    position, scores = _first_positions(scores, rows, image_of_caption[queries], image_of_caption)
    return _agreed_recalls("s2s", exact, position, scores, _best_other(units, image_of_caption)[queries], _ROUNDING, ks)


def _agreed_recalls(
    direction: str, exact: Rows, position: Rows, scores: Scores, right: Scores, rounding: float, ks: tuple[int, ...]
) -> dict[str, float]:
    """R@K of one direction, if its exact ranks and the positions that FAISS found differ by nothing but ties.

    ``exact``, ``position`` and ``right`` (the scores of the right answers) are (n_queries,), ``scores`` (n_queries,
    depth) are those of all that FAISS found, best first.
    """
    recalls = {}
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
) -> dict[str, dict[str, float]]:
    """R@K of both directions by re-ranked candidates, after checking query by query that no exact rank contradicts them.

    Images without a caption are as in :func:`check_against_search`. A negative that scores higher than the right
    answer must be among those that the rank counts; all that the rank counts must tie with the right answer, score higher,
    or not be a candidate. With as many candidates as rows this leaves one rank, up to ties and rounding. A rank outside of
    these bounds is a fault of the program and raises ``RuntimeError``.
    """
    own, asking = np.arange(len(images)), np.unique(image_of_caption)
    right = _scores_of_pairs(images, captions, image_of_caption, similarity)
    recalls: dict[str, dict[str, float]] = {}
    for direction, corpus, queries, label, wanted, goal, exact in (
        ("i2t", captions, images[asking], image_of_caption, asking, _best_own(right, image_of_caption)[asking], ranks.i2t),
        ("t2i", images, captions, own, image_of_caption, right, ranks.t2i),
    ):
        scores, rows = search(corpus, queries, candidates, similarity, direction=direction, candidates=candidates)
        negative = label[rows] != wanted[:, None]
        unseen = len(corpus) - np.bincount(label)[wanted] - negative.sum(1)
        margin = _ROUNDING * np.abs(goal)
        least = (negative & (scores > (goal + margin)[:, None])).sum(1)
        most = (negative & (scores >= (goal - margin)[:, None])).sum(1) + unseen
        outside = (exact < least) | (exact > most)
        if outside.any():
            query = int(np.flatnonzero(outside)[0])
            bounds = f"{least[query]} to {most[query]} by {rows.shape[1]} candidates"
            raise RuntimeError(f"{direction} query {query}: rank {exact[query]} by exact count, {bounds}")
        position, _ = _first_positions(scores, rows, wanted, label)
        recalls[direction] = {f"r{k}": 100.0 * float(np.mean(position < k)) for k in ks}
    return recalls


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


def _first_positions(scores: Scores, rows: Rows, wanted: NDArray[np.int64], label: NDArray[np.int64]) -> tuple[Rows, Scores]:
    """Where each query's right answer first stands among its results (their number if nowhere), and their scores."""
    hits = label[rows] == wanted[:, None]
    return np.where(hits.any(1), hits.argmax(1), rows.shape[1]), scores
