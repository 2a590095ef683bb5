"""R@K, Med r, mean r and rsum from what became of each query, over the whole split or over folds of 1,000 images.

What directions and metrics are called, where people read them.

nDCG@10, MRR and mAP: metrics of the positions of all right answers to a query, as trec_eval defines them.

Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", TOIS 2002 (nDCG, here of gains 0 and 1);
Manning, Raghavan and Schütze, "Introduction to Information Retrieval", 2008, chapter 8 (mAP).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.defaults import RECALLS
from vse.eval.ranking.answers import BestAnswers
from vse.eval.ranking.ranks import Ranks

DIRECTIONS = {
    "i2t": "image to text",
    "t2i": "text to image",
    "i2i": "image to image",
    "t2t": "text to text",
    "s2s": "sentence to sentence",
    "phrase": "phrase to region",
}
METRIC_TITLES = {f"r{k}": f"R@{k}" for k in RECALLS} | {
    "medr": "Med r",
    "meanr": "mean r",
    "ndcg10": "nDCG@10",
    "mrr": "MRR",
    "map": "mAP",
    "map_at_r": "mAP@R",
    "rprecision": "R-Precision",
    "rsum": "rsum",
    "mean_recall": "mean recall",
    "bound": "upper bound",
    "mean_iou": "mean IoU",
}


def metric_title(metric: str) -> str:
    """What people call a metric: ``R@50`` for ``r50``, say; the metric itself if there is no other name."""
    return METRIC_TITLES.get(metric) or (f"R@{metric[1:]}" if metric[:1] == "r" and metric[1:].isdecimal() else metric)


DEPTH = 10  # of nDCG
POSITION_METRICS = ("ndcg10", "mrr", "map")
_DISCOUNTS = 1 / np.log2(np.arange(DEPTH) + 2)
_BEST = np.cumsum(_DISCOUNTS)  # discounted gain of 1, 2, ... right answers that come first


def position_metrics(query_of: NDArray[np.int64], wrong_before: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """The metrics of each query (n_queries,), in percent, from all its right answers.

    MRR has 1 / (1 + p) for the first right position p, which starts at 0; AP is the mean, over all right answers, of the share
    of right ones up to each; nDCG@10 is the sum of 1 / log2(2 + p) over right positions below 10, as a share of the most
    that so many right answers can have.

    Parameters
    ----------
    query_of : (n_right,) for each right answer the number of its query, from 0; every query has one
    wrong_before : (n_right,) how many wrong candidates come before it
    """
    order = np.lexsort((wrong_before, query_of))
    of, wrong = query_of[order], wrong_before[order]
    n_right = np.bincount(of)
    first = np.cumsum(n_right) - n_right
    right_before = np.arange(len(of)) - first[of]
    positions = wrong + right_before
    precision = (1 + right_before) / (1 + positions)
    gains = np.where(positions < DEPTH, _DISCOUNTS[np.minimum(positions, DEPTH - 1)], 0)
    values = {
        "ndcg10": np.bincount(of, gains) / _BEST[np.minimum(n_right, DEPTH) - 1],
        "mrr": 1 / (1 + positions[first]),
        "map": np.bincount(of, precision) / n_right,
    }
    return {name: 100 * of_query for name, of_query in values.items()}


@dataclass(frozen=True)
class Queries:
    """What became of the queries of one direction.

    images : (n,) the row of the image that each query is or belongs to, with which it is resample_metrics
    values : of each metric that is a mean over queries, such as R@K in percent, the value (n,) of each query
    ranks : (n,) 0-based, where the median is a metric, too
    answers : the best right and wrong answers, by ids, where they were asked for
    """

    images: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]
    ranks: NDArray[np.int64] | None = None
    answers: BestAnswers | None = None

    @classmethod
    def from_ranks(
        cls,
        ranks: NDArray[np.int64],
        images: NDArray[np.int64],
        ks: Iterable[int] = RECALLS,
        of_lists: Mapping[str, NDArray[np.float64]] = MappingProxyType({}),
    ) -> Queries:
        """Queries whose metrics are R@K, mean r and Med r of their 0-based ranks, and those ``of_lists`` (n,) of answers."""
        values = {f"r{k}": np.where(ranks < k, 100.0, 0.0) for k in ks}
        return cls(images, {**values, "meanr": (ranks + 1).astype(np.float64), **of_lists}, ranks)

    def select(self, rows: NDArray[Any]) -> Queries:
        """Some of the queries, by a mask (n,) or by their numbers."""
        ranks = None if self.ranks is None else self.ranks[rows]
        return Queries(self.images[rows], {name: values[rows] for name, values in self.values.items()}, ranks)


# The queries of each direction among the same candidates: the whole split, or a fold of it.
Fold = Mapping[str, Queries]


def build_fold(ranks: Ranks, image_of_caption: NDArray[np.int64], ks: Iterable[int] = RECALLS) -> Fold:
    """The queries in both directions among some images and all their captions; ``image_of_caption`` is (n_captions,).

    With the ranks of all own captions (:attr:`vse.eval.ranking.ranks.Ranks.own`) there are nDCG@10, MRR and mAP, too.
    """
    images, image = np.unique(image_of_caption, return_inverse=True)
    i2t, t2i = {}, {}
    if ranks.own is not None:
        i2t, t2i = position_metrics(image, ranks.own), position_metrics(np.arange(len(ranks.t2i)), ranks.t2i)
    return {
        "i2t": Queries.from_ranks(ranks.i2t, images, ks, i2t),
        "t2i": Queries.from_ranks(ranks.t2i, image_of_caption, ks, t2i),
    }


def fold_metrics(fold: Fold) -> dict[str, Any]:
    """The metrics of each direction; where both are there with their recalls, also ``rsum`` and ``mean_recall``."""
    directions: dict[str, Any] = {direction: _means(queries) for direction, queries in fold.items()}
    return {**directions, **_sums(directions)}


def direction_metrics(ranks: NDArray[np.int64]) -> dict[str, float]:
    """Metrics of one direction from 0-based ranks.

    ``r1``, ``r5``, ``r10`` = 100 x the share of queries whose rank is below K; ``medr`` = floor(median) + 1;
    ``meanr`` = mean + 1.
    """
    return _means(Queries.from_ranks(ranks, np.arange(len(ranks))))


def metrics(ranks: Ranks) -> dict[str, Any]:
    """The metrics of both directions, ``rsum`` (the sum of the six recalls) and ``mean_recall`` (a sixth of it)."""
    directions: dict[str, Any] = {"i2t": direction_metrics(ranks.i2t), "t2i": direction_metrics(ranks.t2i)}
    return {**directions, **_sums(directions)}


def average(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every metric over folds."""
    first = results[0]
    return {
        key: average([r[key] for r in results]) if isinstance(value, dict) else np.mean([r[key] for r in results], 0)
        for key, value in first.items()
    }


def resample_metrics(folds: Sequence[Fold], weights: NDArray[np.float64]) -> dict[str, Any]:
    """Every metric of :func:`fold_metrics`, average over folds, with each image counted as often as it weighs.

    ``weights`` is (n_samples, n_images), of integers. A metric becomes (n_samples,); one of no query at all is NaN.
    """
    results = []
    for fold in folds:
        images = np.unique(np.concatenate([queries.images for queries in fold.values()]))
        own = np.ascontiguousarray(weights[:, images].T)
        directions: dict[str, Any] = {
            direction: _weighted(queries, np.searchsorted(images, queries.images), own) for direction, queries in fold.items()
        }
        results.append({**directions, **_sums(directions)})
    return average(results)


def _means(queries: Queries) -> dict[str, float]:
    if not len(queries.images):
        raise ValueError("no queries")
    means = {name: float(np.mean(values)) for name, values in queries.values.items()}
    if queries.ranks is None:
        return means
    return _ordered(means, float(np.floor(np.median(queries.ranks)) + 1))


def _weighted(queries: Queries, images: NDArray[np.int64], weights: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Means and the median of queries that count as often as their ``images`` weigh (n_images, n_samples)."""
    n_images = len(weights)
    counts = np.bincount(images, minlength=n_images)
    sums = [np.bincount(images, values, n_images) for values in queries.values.values()]
    count, *totals = np.stack([counts, *sums]) @ weights
    with np.errstate(invalid="ignore"):
        means = {name: total / count for name, total in zip(queries.values, totals, strict=True)}
    if queries.ranks is None:
        return means
    return _ordered(means, _weighted_median_rank(queries.ranks, images, weights))


def _weighted_median_rank(
    ranks: NDArray[np.int64], images: NDArray[np.int64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """floor(median) + 1 of ranks that count as often as their images weigh."""
    from scipy.sparse import csr_array

    values, which = np.unique(ranks, return_inverse=True)
    of_each_rank = csr_array((np.ones(len(ranks)), (which, images)), shape=(len(values), len(weights)))
    up_to = np.cumsum(of_each_rank @ weights, axis=0)
    total = up_to[-1]
    middle = [values[(up_to > np.floor(position)).argmax(0)] for position in ((total - 1) / 2, total / 2)]
    return np.where(total > 0, np.floor((middle[0] + middle[1]) / 2) + 1, np.nan)


def _ordered(means: Mapping[str, Any], medr: Any) -> dict[str, Any]:
    """Recalls first, then Med r, then mean r and what else there is, as result files have them."""
    recalls = {name: value for name, value in means.items() if name[0] == "r"}
    return {**recalls, "medr": medr, **{name: value for name, value in means.items() if name not in recalls}}


def _sums(directions: Mapping[str, Any]) -> dict[str, Any]:
    recalls = [directions.get(direction, {}).get(f"r{k}") for direction in ("i2t", "t2i") for k in RECALLS]
    if any(recall is None for recall in recalls):
        return {}
    rsum = sum(recalls)
    return {"rsum": rsum, "mean_recall": rsum / 6}
