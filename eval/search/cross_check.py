"""Checks, query by query, that a search by FAISS agrees with the exact ranks.

FAISS returns answers with equal scores in any order, while exact ranks count wrong answers first. A rank by FAISS may
therefore differ from the exact rank only if the right answer and a wrong answer have the same score, up to the rounding of
float32. Any other difference is an error of the program and raises RuntimeError.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.ranking.answers import Vectors, normalise_rows
from vse.eval.ranking.metrics import BestAnswers, Ranks
from vse.eval.ranking.ranks import find_similarity, shared_tensor
from vse.eval.search.top_k import (
    N_RESCORED_CANDIDATES,
    DirectionSearch,
    RowIndices,
    Scores,
    TopK,
    build_both_searches,
    search_corpus,
)

log = logging.getLogger(__name__)

# Largest difference between two float32 scores of a pair that add up the same numbers in different orders. It is relative to
# the product of the vectors' lengths (cosine) or to the score (order).
_MAX_ROUNDING_ERROR = 1e-5
_MAX_PAIRS_PER_CALL = 512  # pairs that are scored in one call
EXACT_SEARCH_TEXT, CANDIDATES_TEXT = "an exact search by FAISS", "candidates of FAISS, re-ranked by exact scores"


@dataclass(frozen=True)
class Agreement:
    """The agreement of a FAISS search with the exact ranks. The dicts have a key for each direction.

    Attributes
    ----------
    search_description : description of the search for messages
    recalls, exact_recalls : R@K of the compared queries, by FAISS and by exact ranks
    n_compared, n_queries : number of compared queries, and number of all queries
    n_ties : number of compared queries with a wrong result that has the same score as the right answer, up to rounding
    """

    search_description: str
    recalls: dict[str, dict[str, float]] = field(default_factory=dict)
    exact_recalls: dict[str, dict[str, float]] = field(default_factory=dict)
    n_compared: dict[str, int] = field(default_factory=dict)
    n_queries: dict[str, int] = field(default_factory=dict)
    n_ties: dict[str, int] = field(default_factory=dict)


def check_against_search(
    images: Vectors, captions: Vectors, image_of_caption: RowIndices, ranks: Ranks, ks: tuple[int, ...], max_compared: int = 0
) -> Agreement:
    """Search both directions with FAISS, check every query against its exact rank, and return the agreement.

    An image without captions is a candidate but not a query, and has no rank in ``ranks.i2t``. At most ``max_compared``
    queries of each direction are compared, a random sample with a fixed seed; 0 compares all. Raises RuntimeError if a rank
    differs although no wrong answer has the same score as the right answer.
    """
    samples, searches = _build_sampled_searches(images, captions, image_of_caption, max_compared)
    right = _score_right_answers(searches, images, captions, image_of_caption, "cosine")
    longest = [float(np.sqrt(np.einsum("nd,nd->n", rows, rows).max())) for rows in (images, captions)]
    agreement = Agreement(EXACT_SEARCH_TEXT)
    for name, one in searches.items():
        top = search_corpus(one.corpus, one.queries, max(ks) + 1)
        rounding = np.full(len(right[name]), _MAX_ROUNDING_ERROR * longest[0] * longest[1])
        compared = _ComparedQueries(name, samples[name], ranks.by_direction[name], right[name], rounding)
        compared.check_and_record(agreement, top, one.image_of_query, one.image_of_row, ks)
    return agreement


def check_sentences_against_search(
    captions: Vectors, image_of_caption: RowIndices, exact: BestAnswers, ks: tuple[int, ...], max_compared: int = 0
) -> Agreement:
    """Search captions by captions with FAISS, check every query against its rank in ``exact``, and return the agreement.

    A right answer is another caption of the same image. At most ``max_compared`` queries are compared, a random sample with a
    fixed seed; 0 compares all. Raises RuntimeError if a rank differs although no wrong answer has the same score as the right
    answer.
    """
    units, sample = normalise_rows(shared_tensor(captions)).numpy(), _sample_queries(len(exact.queries), max_compared)
    queries = exact.queries[sample]
    # A query usually finds itself, so search for one more result. It may miss itself if many captions equal the query.
    scores, rows = search_corpus(units, units[queries], max(ks) + 2)
    drop = rows == queries[:, None]
    drop[~drop.any(1), -1] = True
    others = TopK(*(values[~drop].reshape(len(queries), -1) for values in (scores, rows)))
    right, rounding = _find_best_sibling_scores(units, image_of_caption)[queries], np.full(len(queries), _MAX_ROUNDING_ERROR)
    agreement = Agreement(EXACT_SEARCH_TEXT)
    compared = _ComparedQueries("s2s", sample, exact.ranks, right, rounding)
    compared.check_and_record(agreement, others, image_of_caption[queries], image_of_caption, ks)
    return agreement


def check_against_candidates(
    images: Vectors,
    captions: Vectors,
    image_of_caption: RowIndices,
    ranks: Ranks,
    ks: tuple[int, ...],
    similarity: str,
    max_compared: int = 0,
    candidates: int = N_RESCORED_CANDIDATES,
) -> Agreement:
    """Search both directions in two stages, check every query against its exact rank, and return the agreement.

    FAISS finds ``candidates`` rows for each query, and only these are scored by ``similarity``. The search therefore gives
    only a lower and an upper bound of each rank. At most ``max_compared`` queries of each direction are compared, a random
    sample with a fixed seed; 0 compares all. Raises RuntimeError if a rank is out of its bounds.
    """
    samples, searches = _build_sampled_searches(images, captions, image_of_caption, max_compared)
    right = _score_right_answers(searches, images, captions, image_of_caption, similarity)
    agreement = Agreement(CANDIDATES_TEXT)
    for name, one in searches.items():
        top = search_corpus(one.corpus, one.queries, candidates, similarity, direction=name, candidates=candidates)
        rounding = _MAX_ROUNDING_ERROR * np.abs(right[name])
        compared = _ComparedQueries(name, samples[name], ranks.by_direction[name], right[name], rounding)
        compared.check_and_record(agreement, top, one.image_of_query, one.image_of_row, ks)
    return agreement


class _ComparedQueries(NamedTuple):
    """The queries of one direction whose exact ranks are compared.

    Attributes
    ----------
    query_sample : (n_compared,) indices of the compared queries among all queries
    exact_ranks : (n_queries,) exact ranks of all queries
    right_scores, max_rounding_errors : (n_compared,) score of the right answer, and largest rounding error of a query's scores
    """

    direction: str
    query_sample: RowIndices
    exact_ranks: RowIndices
    right_scores: Scores
    max_rounding_errors: NDArray[np.floating[Any]]

    def check_and_record(
        self, agreement: Agreement, top: TopK, image_of_query: RowIndices, image_of_row: RowIndices, ks: Sequence[int]
    ) -> None:
        """Check the exact ranks against the search results ``top``, and add the recalls to ``agreement``.

        Raises RuntimeError if a rank is out of its bounds. The lower bound is the number of wrong results that score higher
        than the right answer. The upper bound is the number of wrong results that score at least as high, plus the number of
        wrong rows that are not among the results. If the search is exact, these missing rows count only if the last result
        scores at least as high as the right answer. All comparisons allow for rounding.
        """
        hits = image_of_row[top.rows] == image_of_query[:, None]
        right, rounding, exact = (
            self.right_scores[:, None],
            self.max_rounding_errors[:, None],
            self.exact_ranks[self.query_sample],
        )
        not_found = len(image_of_row) - np.bincount(image_of_row)[image_of_query] - (~hits).sum(1)
        if agreement.search_description == EXACT_SEARCH_TEXT:
            not_found = np.where(top.scores[:, -1] >= self.right_scores - self.max_rounding_errors, not_found, 0)
        lowest = (~hits & (top.scores > right + rounding)).sum(1)
        highest = (~hits & (top.scores >= right - rounding)).sum(1) + not_found
        outside = np.flatnonzero((exact < lowest) | (exact > highest))
        if len(outside):
            query = int(outside[0])
            bounds = f"rank {exact[query]} by exact count, {lowest[query]} to {highest[query]} by FAISS"
            raise RuntimeError(f"{self.direction} query {self.query_sample[query]}: {bounds}")
        positions = np.where(hits.any(1), hits.argmax(1), hits.shape[1])
        name, near = self.direction, np.abs(top.scores - right) <= rounding
        agreement.recalls[name] = {f"r{k}": 100.0 * float(np.mean(positions < k)) for k in ks}
        agreement.exact_recalls[name] = {f"r{k}": 100.0 * float(np.mean(exact < k)) for k in ks}
        agreement.n_compared[name], agreement.n_queries[name] = len(self.query_sample), len(self.exact_ranks)
        agreement.n_ties[name] = int((near & ~hits).any(1).sum())


def _build_sampled_searches(
    images: Vectors, captions: Vectors, image_of_caption: RowIndices, max_compared: int
) -> tuple[dict[str, RowIndices], dict[str, DirectionSearch]]:
    searches = build_both_searches(images, captions, image_of_caption)
    samples = {name: _sample_queries(len(one.query_rows), max_compared) for name, one in searches.items()}
    return samples, {name: one.select(samples[name]) for name, one in searches.items()}


def _sample_queries(n: int, max_compared: int) -> RowIndices:
    """Return the indices of a random sample of at most ``max_compared`` of ``n`` queries, ascending; 0 selects all."""
    if not 0 < max_compared < n:
        return np.arange(n)
    return np.sort(np.random.default_rng(0).choice(n, max_compared, replace=False))


def _score_right_answers(
    searches: Mapping[str, DirectionSearch], images: Vectors, captions: Vectors, image_of_caption: RowIndices, similarity: str
) -> dict[str, Scores]:
    """Return for each direction the score (n_queries,) of each query with its best right answer."""
    needed = np.isin(image_of_caption, searches["i2t"].query_rows)
    needed[searches["t2i"].query_rows] = True
    scores = _score_matching_pairs(images, captions, image_of_caption, np.flatnonzero(needed), similarity)
    best_of_image = np.full(int(image_of_caption.max()) + 1, -np.inf, np.float32)
    np.maximum.at(best_of_image, image_of_caption, scores)
    return {"i2t": best_of_image[searches["i2t"].query_rows], "t2i": scores[searches["t2i"].query_rows]}


def _score_matching_pairs(
    images: Vectors, captions: Vectors, image_of_caption: RowIndices, needed: RowIndices, similarity: str
) -> Scores:
    """Return the score (n_captions,) of each caption with its image; -inf for captions whose rows are not in ``needed``."""
    score = find_similarity(similarity).score
    scores = np.full(len(captions), -np.inf, np.float32)
    for start in range(0, len(needed), _MAX_PAIRS_PER_CALL):
        part = needed[start : start + _MAX_PAIRS_PER_CALL]
        left, right = images[image_of_caption[part]], captions[part]
        if similarity == "cosine":
            scores[part] = np.einsum("nd,nd->n", left, right)
            continue
        pair_scores = torch.empty(len(part))
        for pair, (image, caption) in enumerate(zip(torch.from_numpy(left), torch.from_numpy(right), strict=True)):
            score(image[None], caption[None], pair_scores[pair, None, None])
        scores[part] = pair_scores.numpy()
    return scores


def _find_best_sibling_scores(captions: Vectors, image_of_caption: RowIndices) -> Scores:
    """Return the highest score of each caption with another caption of the same image, (n_captions,); -inf without another."""
    best = np.empty(len(captions), np.float32)
    order = np.argsort(image_of_caption, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(image_of_caption[order])) + 1):
        scores = captions[own] @ captions[own].T
        np.fill_diagonal(scores, -np.inf)
        best[own] = scores.max(1)
    return best


def log_agreement(protocol: str, agreements: Sequence[Agreement]) -> None:
    """Log R@1 of a FAISS search as a mean over the folds of a protocol; ``agreements`` has an item for each fold."""
    parts = []
    for direction in agreements[0].recalls:
        found, exact = (
            np.mean([of_fold[direction]["r1"] for of_fold in recalls])
            for recalls in (
                [agreement.recalls for agreement in agreements],
                [agreement.exact_recalls for agreement in agreements],
            )
        )
        n_queries = sum(agreement.n_compared[direction] for agreement in agreements)
        exact_text = "" if agreements[0].search_description == EXACT_SEARCH_TEXT else f", exact {exact:.1f}"
        parts.append(f"{direction} {found:.1f}{exact_text} of {n_queries:,} queries")
    verb = (
        "agrees with"
        if agreements[0].search_description == EXACT_SEARCH_TEXT
        else "finds candidates that, re-ranked, do not contradict"
    )
    log.info("%s: FAISS %s the exact ranks (R@1 %s)", protocol, verb, "; ".join(parts))
