"""Statistics of hubs (candidates near many queries), and corrections that lower the scores of hubs.

A correction finds hubs by a bank: a set of other queries, such as the captions of the training split.

Radovanović, Nanopoulos and Ivanović, "Hubs in Space", JMLR 2010 (k-occurrence); Conneau et al., "Word Translation Without
Parallel Data", ICLR 2018 (CSLS); Smith et al., "Offline Bilingual Word Vectors, Orthogonal Transformations and the Inverted
Softmax", ICLR 2017; Bogolin et al., "Cross Modal Retrieval with Querybank Normalisation", CVPR 2022 (QB-Norm); Chowdhury et
al., "Nearest Neighbor Normalization Improves Multimodal Retrieval", EMNLP 2024 (NNN).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.ranking.ranks import ScoreBlocks, ScoreMatrix, shared_tensor, split_into_slices

OCCURRENCE_DEPTH = 10  # the K-occurrence of a candidate is the number of queries for which it is among the first K
_MAX_BLOCK_SCORES = 2**24  # largest number of scores that are computed at once


def measure_hubs(i2t: ScoreBlocks, t2i: ScoreBlocks | None) -> dict[str, dict[str, float]]:
    """Return three statistics of hubs (candidates near many queries) for each of the directions ``i2t`` and ``t2i``.

    Images rank captions by ``i2t``. Captions rank images by ``t2i``, or by ``i2t`` if ``t2i`` is None.

    The 10-occurrence of a candidate is the number of queries for which it is among the first 10. ``skewness`` is the skewness
    of the 10-occurrences. ``never`` is the percentage of candidates whose 10-occurrence is 0. ``largest`` is the percentage of
    queries whose first candidate is the most frequent first candidate.
    """
    n_captions = len(i2t.image_of_caption)
    of_images: list[Tensor] = []
    best = _BestImagesSoFar(n_captions)
    for rows in i2t.row_slices:
        scores = i2t.score(rows, None).cpu()
        of_images.append(torch.topk(scores, min(OCCURRENCE_DEPTH, n_captions), 1).indices)
        if t2i is not None:
            scores = t2i.score(rows, None).cpu()
        best.update(rows, scores)
    return {
        "i2t": _compute_hub_statistics(n_captions, torch.cat(of_images)),
        "t2i": _compute_hub_statistics(i2t.n_images, best.rows.T),
    }


class _BestImagesSoFar:
    """The best images for each caption, among the images that were scored so far.

    ``rows`` : (depth, n_captions) rows of the best images for each caption, best first; the depth is at most 10.
    """

    def __init__(self, n_captions: int) -> None:
        self._scores = torch.empty(0, n_captions)
        self.rows = torch.empty(0, n_captions, dtype=torch.int64)

    def update(self, rows: slice, scores: Tensor) -> None:
        """Update the best images by the ``scores`` (n, n_captions) of n further images, whose rows are ``rows``."""
        depth = min(OCCURRENCE_DEPTH, len(scores))
        found = torch.topk(scores, depth, 0)
        both = torch.cat([self._scores, found.values.float()])
        known = torch.cat([self.rows, found.indices + rows.start])
        self._scores, chosen = torch.topk(both, min(OCCURRENCE_DEPTH, len(both)), 0)
        self.rows = known.gather(0, chosen)


_MAX_FIRST_PERCENT = 50.0  # a warning is logged if one candidate is the first for more of the queries than this
_MAX_BLOCK_NUMBERS = 2**21  # numbers that are normalised and summed at once, in double precision
_MAX_MEAN_COSINE = 0.9  # vectors with a higher mean cosine nearly all point into one direction


def diagnose_hubs(
    hubs: Mapping[str, Mapping[str, float]],
    cosines: Mapping[str, float],
    recalls: Mapping[str, float],
    chance: Mapping[str, float],
) -> Iterator[str]:
    """Yield a warning for each direction in which one candidate is first for too many queries, or R@10 is near chance.

    The warning names a likely cause. ``hubs`` has, for each direction, the percentage ``largest`` of queries whose first
    candidate is the most frequent one. ``recalls`` and ``chance`` have, for each direction, R@10 of the model and of a random
    order in percent. ``cosines`` has the mean cosine of the ``images`` and of the ``captions``; it may be empty.
    """
    narrow = [
        f"all {side} point into nearly the same direction (mean cosine {value:.4f})"
        for side, value in cosines.items()
        if value > _MAX_MEAN_COSINE
    ]
    cause = f"; {' and '.join(narrow)}, and --correct mean may help" if narrow else "; the training may have collapsed"
    for direction, facts in hubs.items():
        if facts["largest"] > _MAX_FIRST_PERCENT:
            yield f"{direction}: one candidate is the first one for {facts['largest']:.1f}% of the queries{cause}"
        elif recalls[direction] <= 1.5 * chance[direction]:
            yield f"{direction}: R@10 {recalls[direction]:.1f} is about chance, {chance[direction]:.1f}{cause}"


def _compute_hub_statistics(n_candidates: int, first: Int[Tensor, "n_queries depth"]) -> dict[str, float]:
    occurrences = np.bincount(first.numpy().ravel(), minlength=n_candidates)
    firsts = np.bincount(first[:, 0].numpy(), minlength=n_candidates)
    deviations = occurrences - occurrences.mean()
    spread = float(np.sqrt(np.mean(deviations**2)))
    return {
        "skewness": float(np.mean(deviations**3)) / spread**3 if spread else 0.0,
        "never": 100 * float(np.mean(occurrences == 0)),
        "largest": 100 * float(firsts.max() / firsts.sum()),
    }


def mean_cosine(vectors: Float[np.ndarray, "n dim"]) -> float:
    """Return the mean cosine over all pairs of two different rows; 1 if there is a single row."""
    n, total, squares = len(vectors), torch.zeros(vectors.shape[1], dtype=torch.float64), 0.0
    for rows in torch.split(shared_tensor(vectors), max(1, _MAX_BLOCK_NUMBERS // max(1, vectors.shape[1]))):
        units = rows.double()
        units /= units.norm(dim=1, keepdim=True).clamp_min(1e-300)
        total += units.sum(0)
        squares += float(units.square().sum())
    # The squared length of the sum of unit vectors is the sum of the cosines of all pairs, also of a row with itself.
    return (float(total.square().sum()) - squares) / (n * (n - 1)) if n > 1 else 1.0


@dataclass(frozen=True)
class InnerProducts:
    """The inner products of ``rows`` (n, dim) and ``columns`` (m, dim), computed when rows are read."""

    rows: NDArray[np.float32]
    columns: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), len(self.columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        scores: NDArray[Any] = (shared_tensor(self.rows[rows]) @ shared_tensor(self.columns).T).numpy()
        return scores


def compute_biases(bank: ScoreMatrix, method: str, parameters: Mapping[str, float]) -> Float[np.ndarray, " n"]:
    """Return, for each candidate, the number that a correction of hubs subtracts from all scores of the candidate.

    A hub is a candidate near many queries. ``bank`` (n, n_bank) has the scores of n candidates with the queries of a bank, a
    set such as the captions of the training split. Let S be the row of a candidate in ``bank``. The number for this candidate
    depends on ``method``; ``parameters`` has k, alpha and beta, as the method needs them:

    - ``mean``: the mean of S. The subtraction has the same effect as subtracting the mean vector of the bank from each query.
    - ``csls``: half the mean of the ``k`` largest scores in S.
    - ``nnn``: ``alpha`` times the mean of the ``k`` largest scores in S.
    - ``inverted-softmax``, ``qb-norm``: log(sum of exp(``beta`` S)) / ``beta``.
    """
    if method == "mean" and isinstance(bank, InnerProducts):  # the mean of inner products is the inner product with the mean
        return (shared_tensor(bank.rows) @ shared_tensor(bank.columns).mean(0)).numpy()
    found = np.empty(len(bank), np.float32)
    for rows in _split_candidates(bank):
        scores = shared_tensor(bank[rows])
        if method == "mean":
            found[rows] = scores.mean(1).numpy()
        elif method in ("csls", "nnn"):
            weight = 0.5 if method == "csls" else parameters["alpha"]
            found[rows] = (weight * torch.topk(scores, min(int(parameters["k"]), scores.shape[1]), 1).values.mean(1)).numpy()
        else:
            found[rows] = (torch.logsumexp(parameters["beta"] * scores, 1) / parameters["beta"]).numpy()
    return found


def mark_corrected_queries(bank: ScoreMatrix, queries: ScoreMatrix) -> Int[np.ndarray, " m"]:
    """Return 1 for each evaluated query that QB-Norm corrects, else 0.

    QB-Norm corrects a query if its first candidate is also the first candidate of a query in the bank, a set such as the
    captions of the training split. ``bank`` (n, n_bank) has the scores of the n candidates with the queries in the bank.
    ``queries`` (n, m) has the scores of the same candidates with the m evaluated queries.
    """
    activated = np.zeros(len(bank), np.int64)
    activated[_find_first_candidates(bank)] = 1
    of_queries: Int[np.ndarray, " m"] = activated[_find_first_candidates(queries)]
    return of_queries


def _find_first_candidates(scores: ScoreMatrix) -> Int[np.ndarray, " m"]:
    """Return for each of m queries the candidate with the highest score; ``scores`` is (n_candidates, m)."""
    first = np.zeros(scores.shape[1], np.int64)
    best = np.full(scores.shape[1], -np.inf, np.float32)
    for rows in _split_candidates(scores):
        found = torch.max(shared_tensor(scores[rows]), 0)
        values, places = found.values.numpy(), found.indices.numpy()
        is_better = values > best
        first[is_better], best[is_better] = places[is_better] + rows.start, values[is_better]
    return first


def _split_candidates(scores: ScoreMatrix) -> list[slice]:
    return split_into_slices(len(scores), max(1, _MAX_BLOCK_SCORES // scores.shape[1]))
