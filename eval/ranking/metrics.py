"""Ranks and best answers as arrays, and metrics of retrieval over the complete split or over folds of 1,000 images.

:class:`MeasuredQueries` holds the value of each metric for each query of one direction. :func:`compute_fold_metrics` averages
these values, and result files have the averages. To add a metric of the positions in a ranked list, write a function that
takes :class:`RightAnswers`, and add a line to :data:`POSITION_METRICS`. nDCG@10, MRR and mAP are defined as in trec_eval.

Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", TOIS 2002 (nDCG, here with gains 0 and 1);
Manning, Raghavan and Schütze, "Introduction to Information Retrieval", 2008, chapter 8 (mAP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.eval import DEFAULT_KS

Ints = NDArray[np.int64]  # rows, ids, ranks or counts
Scores = NDArray[np.floating]


@dataclass(frozen=True)
class Ranks:
    """0-based ranks of the queries of both directions.

    Attributes
    ----------
    i2t : (n_queries,) for each image with captions, the rank of the best of its captions. An image without captions is not a
        query, but it is a candidate for the captions.
    t2i : (n_captions,) rank of each caption's image
    by_caption : (n_captions,) rank of each caption as an answer to its image: the number of captions of other images that
        score at least as high; None if not requested. The lowest of these ranks for an image is its rank in ``i2t``.
    """

    i2t: Ints
    t2i: Ints
    by_caption: Ints | None = None

    @property
    def by_direction(self) -> dict[str, Ints]:
        return {"i2t": self.i2t, "t2i": self.t2i}


@dataclass(frozen=True)
class BestAnswers:
    """The best right and the best wrong answer to each query of one direction.

    ``queries``, ``right_answers`` and ``wrong_answers`` are row indices in the split. :meth:`with_ids` replaces rows by ids.

    Attributes
    ----------
    queries : (n,) the queries
    ranks : (n,) 0-based: the number of wrong answers that score at least as high as the best right answer
    right_answers, right_scores : (n,) the best right answer and its score; the first right answer if several tie
    wrong_answers, wrong_scores : (n,) the best wrong answer and its score; the score is -inf if the query has no wrong answer
    """

    queries: Ints
    ranks: Ints
    right_answers: Ints
    right_scores: Scores
    wrong_answers: Ints
    wrong_scores: Scores

    def with_ids(self, query_ids: Ints, answer_ids: Ints) -> BestAnswers:
        """Return the answers with ids in place of rows.

        ``query_ids`` and ``answer_ids`` have the id of each row. If a query has no wrong answer, ``wrong_answers`` has an id
        without meaning, and its score is -inf.
        """
        wrong = np.where(np.isneginf(self.wrong_scores), self.wrong_answers, answer_ids[self.wrong_answers])
        return replace(
            self, queries=query_ids[self.queries], right_answers=answer_ids[self.right_answers], wrong_answers=wrong
        )


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Direction:
    """A direction of retrieval: the kinds of its queries and candidates.

    Attributes
    ----------
    name : key of the direction in files, e.g. ``i2t``
    title : name of the direction in tables and reports, e.g. ``image to text``
    query_kind : kind of the queries: ``image``, ``caption``, ``phrase`` or ``pair``
    candidate_kind : kind of the candidates: ``image``, ``caption``, ``region`` or ``rating``
    """

    name: str
    title: str
    query_kind: str
    candidate_kind: str


DIRECTIONS = {
    direction.name: direction
    for direction in (
        Direction("i2t", "image to text", "image", "caption"),
        Direction("t2i", "text to image", "caption", "image"),
        Direction("i2i", "image to image", "image", "image"),
        Direction("t2t", "text to text", "caption", "caption"),
        Direction("s2s", "sentence to sentence", "caption", "caption"),
        Direction("phrase", "phrase to region", "phrase", "region"),
        Direction("pairs", "scores and ratings", "pair", "rating"),
    )
}
RANK_METRICS = ("medr", "meanr")  # metrics of ranks; a lower value is better
IMAGE_TEXT_DIRECTIONS = (DIRECTIONS["i2t"], DIRECTIONS["t2i"])  # the directions whose recalls rsum adds up


@dataclass(frozen=True)
class RightAnswers:
    """All right answers to some queries, ordered by query and then by their position in the query's ranked list.

    Attributes
    ----------
    query_indices : (n_right,) index of the query of each right answer, ascending from 0; every query has a right answer
    n_right_before : (n_right,) for each right answer, the number of right answers before it in the list of its query
    positions : (n_right,) 0-based position of each right answer among all candidates of its query
    n_per_query : (n_queries,) number of right answers to each query
    first_indices : (n_queries,) index of each query's first right answer in the arrays (n_right,)
    """

    query_indices: Ints
    n_right_before: Ints
    positions: Ints
    n_per_query: Ints
    first_indices: Ints

    @classmethod
    def from_wrong_counts(cls, query_indices: Ints, n_wrong_before: Ints) -> RightAnswers:
        order = np.lexsort((n_wrong_before, query_indices))
        query, wrong = query_indices[order], n_wrong_before[order]
        counts = np.bincount(query)
        first = np.cumsum(counts) - counts
        right_before = np.arange(len(query)) - first[query]
        return cls(query, right_before, wrong + right_before, counts, first)


_NDCG_DEPTH = 10
_DISCOUNTS = 1 / np.log2(np.arange(_NDCG_DEPTH) + 2)
_IDEAL_GAINS = np.cumsum(_DISCOUNTS)  # discounted gains of 1, 2, ... right answers at the top of the list


def ndcg(answers: RightAnswers) -> Floats:
    """Return nDCG@10: the sum of 1 / log2(2 + p) over positions p < 10 (from 0) of right answers, divided by its maximum."""
    counted = answers.positions < _NDCG_DEPTH
    gains = np.where(counted, _DISCOUNTS[np.minimum(answers.positions, _NDCG_DEPTH - 1)], 0)
    values: Floats = np.bincount(answers.query_indices, gains) / _IDEAL_GAINS[np.minimum(answers.n_per_query, _NDCG_DEPTH) - 1]
    return values


def reciprocal_rank(answers: RightAnswers) -> Floats:
    """Return 1 / (1 + p) for each query, whose first right answer is at position p (from 0). Its mean over queries is MRR."""
    return 1 / (1 + answers.positions[answers.first_indices])


def average_precision(answers: RightAnswers) -> Floats:
    """Return for each query the mean of the precision at the positions of its right answers. Its mean over queries is mAP."""
    precision = (1 + answers.n_right_before) / (1 + answers.positions)
    return np.bincount(answers.query_indices, precision) / answers.n_per_query


class PositionMetric(NamedTuple):
    """A metric of the positions of all right answers.

    Attributes
    ----------
    name : key of the metric in result files
    title : name of the metric in tables and reports
    compute : function that returns the value of each query, (n_queries,) from 0 to 1
    """

    name: str
    title: str
    compute: Callable[[RightAnswers], Floats]


POSITION_METRICS = {
    metric.name: metric
    for metric in (
        PositionMetric("ndcg10", "nDCG@10", ndcg),
        PositionMetric("mrr", "MRR", reciprocal_rank),
        PositionMetric("map", "mAP", average_precision),
    )
}
METRIC_TITLES = {
    **{f"r{k}": f"R@{k}" for k in DEFAULT_KS},
    "medr": "Med r",
    "meanr": "mean r",
    **{name: metric.title for name, metric in POSITION_METRICS.items()},
    "map_at_r": "mAP@R",
    "rprecision": "R-Precision",
    "r1_own": "own R@1",
    "bpref": "bpref",
    "judged10": "judged@10",
    "tau_b": "tau-b",
    "tau_c": "tau-c",
    "text_alone": "without the image",
    "text_model": "text model",
    "chance": "chance",
    "text_score": "text score",
    "image_score": "image score",
    "group_score": "group score",
    "rsum": "rsum",
    "mean_recall": "mean recall",
    "bound": "upper bound",
    "mean_iou": "mean IoU",
}


def metric_title(metric: str) -> str:
    """Return the title of a metric, e.g. ``R@50`` for ``r50``; a metric without a title is returned unchanged."""
    return METRIC_TITLES.get(metric) or (f"R@{metric[1:]}" if metric[:1] == "r" and metric[1:].isdecimal() else metric)


def compute_position_metrics(query_indices: Ints, n_wrong_before: Ints) -> dict[str, Floats]:
    """Return nDCG@10, MRR and mAP of each query, (n_queries,) in percent, by the names of the metrics in result files.

    Parameters
    ----------
    query_indices : (n_right,) for each right answer the index of its query, from 0; every query has a right answer
    n_wrong_before : (n_right,) for each right answer the number of wrong candidates that are ranked before it
    """
    answers = RightAnswers.from_wrong_counts(query_indices, n_wrong_before)
    return {name: 100 * metric.compute(answers) for name, metric in POSITION_METRICS.items()}


@dataclass(frozen=True)
class MeasuredQueries:
    """The queries of one direction, with the value of each metric for each query.

    Attributes
    ----------
    image_rows : (n,) row of each query's image (for image queries, the query itself); a bootstrap resamples these images
    values_by_metric : for each metric that is averaged over queries, such as R@K in percent, its values (n,)
    ranks : (n,) 0-based ranks; None if the median rank is not a metric of this direction
    answers : the best right and the best wrong answer to each query; None if they were not searched
    """

    image_rows: Ints
    values_by_metric: Mapping[str, Floats]
    ranks: Ints | None = None
    answers: BestAnswers | None = None

    @classmethod
    def from_ranks(
        cls,
        ranks: Ints,
        images: Ints,
        ks: Iterable[int] = DEFAULT_KS,
        more_values: Mapping[str, Floats] = MappingProxyType({}),
    ) -> MeasuredQueries:
        """Build queries from their 0-based ``ranks`` (n,), with R@K for each K in ``ks``, mean r and Med r.

        ``images`` (n,) has the row of each query's image. ``more_values`` maps further metrics to their values (n,).
        """
        values = {f"r{k}": np.where(ranks < k, 100.0, 0.0) for k in ks}
        return cls(images, {**values, "meanr": (ranks + 1).astype(np.float64), **more_values}, ranks)

    def select(self, rows: NDArray[Any]) -> MeasuredQueries:
        """Return the queries in ``rows``, which is a mask (n,) or has indices. Their ``answers`` are None."""
        ranks = None if self.ranks is None else self.ranks[rows]
        return MeasuredQueries(
            self.image_rows[rows], {name: values[rows] for name, values in self.values_by_metric.items()}, ranks
        )


# The queries of a fold (a set of images with all their captions); the keys are directions such as ``i2t``.
QueriesByDirection = Mapping[str, MeasuredQueries]


def build_fold(ranks: Ranks, image_of_caption: Ints, ks: Iterable[int] = DEFAULT_KS) -> QueriesByDirection:
    """Build the queries of a fold in both directions. ``image_of_caption`` (n_captions,) has the row of each caption's image.

    The metrics nDCG@10, MRR and mAP are included if ``ranks.by_caption``, the rank of each caption, is not None.
    """
    images, query_of_caption = np.unique(image_of_caption, return_inverse=True)
    query_images = {"i2t": images, "t2i": image_of_caption}
    more_values: dict[str, dict[str, Floats]] = {"i2t": {}, "t2i": {}}
    if ranks.by_caption is not None:
        more_values["i2t"] = compute_position_metrics(query_of_caption, ranks.by_caption)
        more_values["t2i"] = compute_position_metrics(np.arange(len(ranks.t2i)), ranks.t2i)
    return {
        name: MeasuredQueries.from_ranks(direction_ranks, query_images[name], ks, more_values[name])
        for name, direction_ranks in ranks.by_direction.items()
    }


def compute_fold_metrics(fold: QueriesByDirection) -> dict[str, Any]:
    """Return the metrics of each direction, and ``rsum`` and ``mean_recall`` if ``i2t`` and ``t2i`` have R@1, R@5 and R@10."""
    directions: dict[str, Any] = {direction: _compute_mean_metrics(queries) for direction, queries in fold.items()}
    return {**directions, **_sum_recalls(directions)}


def compute_direction_metrics(ranks: Ints) -> dict[str, float]:
    """Return ``r1``, ``r5``, ``r10``, ``medr`` (floor(median) + 1) and ``meanr`` (mean + 1) from 0-based ranks."""
    return _compute_mean_metrics(MeasuredQueries.from_ranks(ranks, np.arange(len(ranks))))


def compute_metrics(ranks: Ranks) -> dict[str, Any]:
    """Return the metrics of both directions, ``rsum`` (the sum of the six recalls) and ``mean_recall`` (a sixth of rsum)."""
    directions: dict[str, Any] = {name: compute_direction_metrics(values) for name, values in ranks.by_direction.items()}
    return {**directions, **_sum_recalls(directions)}


def average_metrics(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of every metric over several nested dicts of metrics, e.g. one per fold."""
    first = results[0]
    return {
        key: average_metrics([r[key] for r in results]) if isinstance(value, dict) else np.mean([r[key] for r in results], 0)
        for key, value in first.items()
    }


def resample_metrics(folds: Sequence[QueriesByDirection], weights: Floats) -> dict[str, Any]:
    """Return every metric of a protocol, averaged over folds, for each bootstrap sample of the images.

    The result is a nested dict, such as ``{"i2t": {"r1": ...}, "rsum": ...}``. Each metric is an array (n_samples,), with NaN
    for a sample without a query. ``weights`` (n_samples, n_images) is the number of times that each sample contains each
    image.
    """
    results = []
    for fold in folds:
        images = np.unique(np.concatenate([queries.image_rows for queries in fold.values()]))
        fold_weights = np.ascontiguousarray(weights[:, images].T)
        directions: dict[str, Any] = {
            direction: _compute_weighted_means(queries, np.searchsorted(images, queries.image_rows), fold_weights)
            for direction, queries in fold.items()
        }
        results.append({**directions, **_sum_recalls(directions)})
    return average_metrics(results)


def _compute_mean_metrics(queries: MeasuredQueries) -> dict[str, float]:
    if not len(queries.image_rows):
        raise ValueError("no queries")
    means = {name: float(np.mean(values)) for name, values in queries.values_by_metric.items()}
    if queries.ranks is None:
        return means
    return _insert_median(means, float(np.floor(np.median(queries.ranks)) + 1))


def _compute_weighted_means(queries: MeasuredQueries, images: Ints, weights: Floats) -> dict[str, Floats]:
    """Return the mean of each metric over the queries, and their median rank, for each bootstrap sample.

    ``images`` (n,) has the row of each query's image. ``weights`` (n_images, n_samples) is the number of times that each
    sample contains each image.
    """
    n_images = len(weights)
    counts = np.bincount(images, minlength=n_images)
    sums = [np.bincount(images, values, n_images) for values in queries.values_by_metric.values()]
    count, *totals = np.stack([counts, *sums]) @ weights
    with np.errstate(invalid="ignore"):
        means = {name: total / count for name, total in zip(queries.values_by_metric, totals, strict=True)}
    if queries.ranks is None:
        return means
    return _insert_median(means, _compute_weighted_median_rank(queries.ranks, images, weights))


def _compute_weighted_median_rank(ranks: Ints, images: Ints, weights: Floats) -> Floats:
    import torch  # lazy: tables of result files do not need it

    values, value_of_query = np.unique(ranks, return_inverse=True)
    positions = torch.from_numpy(np.stack([value_of_query, images]))
    ones = torch.ones(len(ranks), dtype=torch.float64)
    queries_by_rank = torch.sparse_coo_tensor(positions, ones, (len(values), len(weights)), check_invariants=False)
    cumulative = np.cumsum((queries_by_rank @ torch.from_numpy(weights)).numpy(), axis=0)
    total = cumulative[-1]
    middle = [values[(cumulative > np.floor(position)).argmax(0)] for position in ((total - 1) / 2, total / 2)]
    return np.where(total > 0, np.floor((middle[0] + middle[1]) / 2) + 1, np.nan)


def _insert_median(means: Mapping[str, Any], medr: Any) -> dict[str, Any]:
    """Add Med r to the metrics ``means``, after the recalls and before all other metrics, as result files order them."""
    recalls = {name: value for name, value in means.items() if name[0] == "r"}
    return {**recalls, "medr": medr, **{name: value for name, value in means.items() if name not in recalls}}


def _sum_recalls(directions: Mapping[str, Any]) -> dict[str, Any]:
    recalls = [directions.get(direction.name, {}).get(f"r{k}") for direction in IMAGE_TEXT_DIRECTIONS for k in DEFAULT_KS]
    if any(recall is None for recall in recalls):
        return {}
    rsum = sum(recalls)
    return {"rsum": rsum, "mean_recall": rsum / 6}
