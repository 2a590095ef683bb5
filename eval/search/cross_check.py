"""The check that a search by FAISS agrees with the exact ranks, query by query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.ranking.ranks import Ranks, shared_tensor
from vse.eval.ranking.scores import similarity_by_name
from vse.eval.ranking.sentences import SentenceRanks, unit_rows
from vse.eval.search.exact import Rows, Scores
from vse.eval.search.top_k import CANDIDATES, search

# Times both lengths, or times a sum of squares: float32 sums of the same terms in another order differ by less.
_ROUNDING = 1e-5
_PAIRS = 512  # scored at once
BY_SEARCH, BY_CANDIDATES = "an exact search by FAISS", "candidates of FAISS, re-ranked by exact scores"


@dataclass(frozen=True)
class Agreement:
    """What FAISS found, which agrees with the exact ranks.

    Attributes
    ----------
    against : what the ranks were compared with
    recalls, exact : of each direction R@K of the queries that were compared, by FAISS and by their exact ranks
    queries, of : of each direction how many were compared, of how many
    ties : for how many of these a negative that FAISS found ties with the right answer, up to rounding: FAISS puts the two in
        any order, the ranks put the negative first, so that these queries alone may differ
    """

    against: str
    recalls: dict[str, dict[str, float]]
    exact: dict[str, dict[str, float]]
    queries: dict[str, int]
    of: dict[str, int]
    ties: dict[str, int]


def check_against_search(
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    ranks: Ranks,
    ks: tuple[int, ...],
    most: int = 0,
) -> Agreement:
    """What FAISS finds in both directions, after checking query by query that it agrees with the exact ranks.

    An image without a caption is found by captions and is no query itself: ``ranks.i2t`` is of the images that have any.
    No more than ``most`` queries of a direction are looked at, drawn at random, the same ones each time; 0 is all.
    FAISS breaks ties as it likes, the ranks break them against the model: a query may differ at K if, up to rounding, its
    right answer ties with the last of K or with the next. Any other difference is a fault of the program and raises
    ``RuntimeError``.
    """
    depth, asking = max(ks) + 1, np.unique(image_of_caption)
    drawn = {"i2t": _drawn(len(asking), most), "t2i": _drawn(len(captions), most)}
    looking, asked = asking[drawn["i2t"]], drawn["t2i"]
    results = {
        "i2t": _Results(*search(captions, images[looking], depth), looking, image_of_caption),
        "t2i": _Results(*search(images, captions[asked], depth), image_of_caption[asked], np.arange(len(images))),
    }
    right = _scores_of_pairs(images, captions, image_of_caption, _needed(image_of_caption, looking, asked), "cosine")
    rounding = _ROUNDING * _longest(images) * _longest(captions)
    scores = {"i2t": _best_own(right, image_of_caption)[looking], "t2i": right[asked]}
    exact, agreement = {"i2t": ranks.i2t, "t2i": ranks.t2i}, Agreement(BY_SEARCH, {}, {}, {}, {}, {})
    for name, found in results.items():
        recalls = _agreed_recalls(name, drawn[name], exact[name], found, scores[name], rounding, ks)
        _note(agreement, name, recalls, drawn[name], exact[name], found.ties(scores[name], rounding))
    return agreement


def check_sentences_against_search(
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    exact_ranks: SentenceRanks,
    ks: tuple[int, ...],
    most: int = 0,
) -> Agreement:
    """What FAISS finds for captions that query captions, after the same check as :func:`check_against_search`."""
    units, drawn = unit_rows(shared_tensor(captions)).numpy(), _drawn(len(exact_ranks.queries), most)
    queries, exact = exact_ranks.queries[drawn], exact_ranks.ranks
    # One more than needed, since each query finds itself; or, if many are equal to it, perhaps not.
    scores, rows = search(units, units[queries], max(ks) + 2)
    drop = rows == queries[:, None]
    drop[~drop.any(1), -1] = True
    scores, rows = (values[~drop].reshape(len(queries), -1) for values in (scores, rows))
    results = _Results(scores, rows, image_of_caption[queries], image_of_caption)
    right = _best_other(units, image_of_caption)[queries]
    recalls = _agreed_recalls("s2s", drawn, exact, results, right, _ROUNDING, ks)
    agreement = Agreement(BY_SEARCH, {}, {}, {}, {}, {})
    _note(agreement, "s2s", recalls, drawn, exact, results.ties(right, _ROUNDING))
    return agreement


def _drawn(n: int, most: int) -> Rows:
    """Which of ``n`` queries are looked at, in their order."""
    if not 0 < most < n:
        return np.arange(n)
    return np.sort(np.random.default_rng(0).choice(n, most, replace=False))


def _note(
    agreement: Agreement, direction: str, recalls: dict[str, float], drawn: Rows, exact: NDArray[np.int64], ties: int
) -> None:
    """Add a direction of which some queries were ``drawn`` from those of ``exact`` ranks."""
    agreement.recalls[direction] = recalls
    agreement.exact[direction] = {name: 100.0 * float(np.mean(exact[drawn] < int(name[1:]))) for name in recalls}
    agreement.queries[direction], agreement.of[direction], agreement.ties[direction] = len(drawn), len(exact), ties


def _agreed_recalls(
    direction: str,
    drawn: Rows,
    every: NDArray[np.int64],
    results: _Results,
    right: Scores,
    rounding: float,
    ks: tuple[int, ...],
) -> dict[str, float]:
    """R@K of one direction, if its exact ranks and the positions that FAISS found differ by nothing but ties.

    ``every`` are the ranks of all queries, of which some are ``drawn``; ``right`` (n_drawn,) are the scores of their right
    answers.
    """
    exact = every[drawn]
    recalls, scores, position = {}, results.scores, results.positions()
    none = np.full(len(scores), -np.inf, np.float32)
    for k in ks:
        last, following = (scores[:, n] if n < scores.shape[1] else none for n in (k - 1, k))
        too_bad = (position < k) & (exact >= k) & (following < right - rounding)  # k negatives and the positive reach it
        too_good = (position >= k) & (exact < k) & (last > right + rounding)  # k negatives are ahead of it
        if (too_bad | too_good).any():
            wrong = int(np.flatnonzero(too_bad | too_good)[0])
            by = f"rank {exact[wrong]} by exact count, {position[wrong]} by FAISS"
            raise RuntimeError(f"{direction} query {drawn[wrong]}: {by}")
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
    """What re-ranked candidates give in both directions, after checking query by query that no exact rank contradicts them.

    Images without a caption, and ``most``, are as in :func:`check_against_search`. A negative that scores higher than the
    right answer must be among those that the rank counts; all that the rank counts must tie with the right answer, score
    higher, or not be a candidate. With as many candidates as rows this leaves one rank, up to ties and rounding. A rank
    outside of these bounds is a fault of the program and raises ``RuntimeError``.
    """
    own, asking = np.arange(len(images)), np.unique(image_of_caption)
    looking, asked = _drawn(len(asking), most), _drawn(len(captions), most)
    needed = _needed(image_of_caption, asking[looking], asked)
    right = _scores_of_pairs(images, captions, image_of_caption, needed, similarity)
    best = _best_own(right, image_of_caption)
    agreement = Agreement(BY_CANDIDATES, {}, {}, {}, {}, {})
    for direction, drawn, corpus, queries, label, wanted, goal, every in (
        (
            "i2t",
            looking,
            captions,
            images[asking[looking]],
            image_of_caption,
            asking[looking],
            best[asking[looking]],
            ranks.i2t,
        ),
        ("t2i", asked, images, captions[asked], own, image_of_caption[asked], right[asked], ranks.t2i),
    ):
        exact = every[drawn]
        scores, rows = search(corpus, queries, candidates, similarity, direction=direction, candidates=candidates)
        results = _Results(scores, rows, wanted, label)
        negative = ~results.hits
        unseen = len(corpus) - np.bincount(label)[wanted] - negative.sum(1)
        margin = _ROUNDING * np.abs(goal)
        least = (negative & (scores > (goal + margin)[:, None])).sum(1)
        most_ahead = (negative & (scores >= (goal - margin)[:, None])).sum(1) + unseen
        outside = (exact < least) | (exact > most_ahead)
        if outside.any():
            wrong = int(np.flatnonzero(outside)[0])
            bounds = f"{least[wrong]} to {most_ahead[wrong]} by {rows.shape[1]} candidates"
            raise RuntimeError(f"{direction} query {drawn[wrong]}: rank {exact[wrong]} by exact count, {bounds}")
        position = results.positions()
        recalls = {f"r{k}": 100.0 * float(np.mean(position < k)) for k in ks}
        _note(agreement, direction, recalls, drawn, every, results.ties(goal, margin))
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


def _needed(image_of_caption: NDArray[np.int64], images: Rows, captions: Rows) -> Rows:
    """The captions of some images and some other captions."""
    needed = np.isin(image_of_caption, images)
    needed[captions] = True
    return np.flatnonzero(needed)


def _scores_of_pairs(
    images: NDArray[np.float32],
    captions: NDArray[np.float32],
    image_of_caption: NDArray[np.int64],
    needed: Rows,
    similarity: str,
) -> Scores:
    """The scores of the ``needed`` captions with their images, computed pair by pair; -inf of others (n_captions,)."""
    score = similarity_by_name(similarity).score
    scores = np.full(len(captions), -np.inf, np.float32)
    for start in range(0, len(needed), _PAIRS):
        some = needed[start : start + _PAIRS]
        left, right = images[image_of_caption[some]], captions[some]
        if similarity == "cosine":
            scores[some] = np.einsum("nd,nd->n", left, right)
            continue
        of_pairs = torch.empty(len(some))
        for pair, (image, caption) in enumerate(zip(torch.from_numpy(left), torch.from_numpy(right), strict=True)):
            score(image[None], caption[None], of_pairs[pair, None, None])
        scores[some] = of_pairs.numpy()
    return scores


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
