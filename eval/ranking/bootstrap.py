"""Bootstrap confidence intervals of metrics, and tests of the difference between two models.

All functions resample images with their captions, because the captions of one image are not independent queries. Samples
select queries only: the candidates of a query, and thus the rank, stay the same. Images are resampled within their fold.

Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13 (percentile intervals) and 15 (permutation tests);
Smucker et al., "A Comparison of Statistical Significance Tests for Information Retrieval Evaluation", CIKM 2007 (randomisation
of paired systems).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vse.eval.defaults import N_BOOTSTRAP_SAMPLES
from vse.eval.ranking.metrics import Floats, QueriesByDirection, average_metrics, fold_metrics, resample_metrics

CONFIDENCE_LEVEL = 0.95
SIGNIFICANCE_LEVEL = 0.05  # a difference with a p-value below is called significant
_MAX_WEIGHTS = 2**21  # numbers in a matrix of weights (samples, images)

SeedQueries = Sequence[QueriesByDirection]  # the queries of one seed, fold by fold


def compute_intervals(
    seed_queries: Sequence[SeedQueries], samples: int = N_BOOTSTRAP_SAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Return the 95% bootstrap interval ``[low, high]`` of each metric's mean over ``seed_queries`` (percentile method).

    All seeds use the same samples of images. The interval therefore estimates how much other test images would change the
    metric; the standard deviation over seeds estimates how much other seeds would.
    """
    seed_queries, n_images = _renumber_images(seed_queries)
    rng = np.random.default_rng(seed)
    weights = (_sample_weights(seed_queries[0], n_images, n, rng) for n in _batch_sizes(samples, n_images))
    return _map_leaves(compute_interval, _concatenate_batches([_average_seed_metrics(seed_queries, part) for part in weights]))


def compute_differences(
    first: Sequence[SeedQueries], second: Sequence[SeedQueries], samples: int = N_BOOTSTRAP_SAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Return the difference of two models in each metric, and whether the choice of test images may explain it.

    A metric is the mean over the seeds of a model. Both models have the same queries and equally many seeds. Seeds are paired
    in their order. For each metric the result is a dict: ``a``, ``b`` and ``difference`` (a - b); ``ci95``, the interval of
    the difference by a paired bootstrap; ``p``, the two-sided p-value of a randomisation test. In each sample, the test swaps
    the answers of both models to an image and its captions with probability 1/2. The p-value is the share of samples whose
    difference is at least as large as the observed one.
    """
    both, n_images = _renumber_images([*first, *second])
    first, second = both[: len(first)], both[len(first) :]
    merged = [
        [_merge_folds(a, b, n_images) for a, b in zip(one, two, strict=True)] for one, two in zip(first, second, strict=True)
    ]
    rng = np.random.default_rng(seed)
    resampled, swapped = [], []
    for n in _batch_sizes(samples, n_images):
        weights = _sample_weights(first[0], n_images, n, rng)
        swap = rng.integers(0, 2, (n, n_images)).astype(np.float64)
        left, right = np.hstack([1 - swap, swap]), np.hstack([swap, 1 - swap])
        resampled.append(_map_leaves(np.subtract, *(_average_seed_metrics(seeds, weights) for seeds in (first, second))))
        swapped.append(_map_leaves(np.subtract, *(_average_seed_metrics(merged, side) for side in (left, right))))
    observed = [
        average_metrics([average_metrics([fold_metrics(fold) for fold in folds]) for folds in seeds])
        for seeds in (first, second)
    ]
    return _map_leaves(_summarise_difference, *observed, _concatenate_batches(resampled), _concatenate_batches(swapped))


def resample_seed_metric(
    systems: Sequence[Sequence[SeedQueries]], metric: Sequence[str], samples: int, rng: np.random.Generator
) -> tuple[list[Floats], list[Floats]]:
    """Return a metric of each seed of each system, (n_seeds,), and in each bootstrap sample, (n_seeds, samples).

    All seeds of all systems use the same samples of images. ``metric`` are the keys of the metric in the metrics of a fold.
    """
    every, n_images = _renumber_images([queries for seeds in systems for queries in seeds])
    observed = [_pick(average_metrics([fold_metrics(fold) for fold in folds]), metric) for folds in every]
    parts: list[list[Floats]] = [[] for _ in every]
    for n in _batch_sizes(samples, n_images):
        weights = _sample_weights(every[0], n_images, n, rng)
        for part, folds in zip(parts, every, strict=True):
            part.append(_pick(resample_metrics(folds, weights), metric))
    resampled = [np.concatenate(part) for part in parts]
    ends = np.cumsum([len(seeds) for seeds in systems])
    spans = [slice(end - len(seeds), end) for end, seeds in zip(ends, systems, strict=True)]
    return [np.array(observed[span]) for span in spans], [np.stack(resampled[span]) for span in spans]


def _pick(metrics: dict[str, Any], keys: Sequence[str]) -> Any:
    value: Any = metrics
    for key in keys:
        value = value[key]
    return value


def _summarise_difference(a: float, b: float, resampled: Floats, swapped: Floats) -> dict[str, Any]:
    difference = a - b
    # A swap that only changes the order of a sum must count as equal. Metrics are in percent, and 1e-9 is no difference.
    as_large = np.abs(swapped) >= abs(difference) - 1e-9
    return {
        "a": float(a),
        "b": float(b),
        "difference": float(difference),
        "ci95": compute_interval(resampled),
        "p": float((1 + np.count_nonzero(as_large)) / (1 + len(as_large))),
    }


def _batch_sizes(samples: int, n_images: int) -> list[int]:
    size = max(1, _MAX_WEIGHTS // n_images)
    return [min(size, samples - start) for start in range(0, samples, size)]


def _average_seed_metrics(seed_queries: Sequence[SeedQueries], weights: Floats) -> dict[str, Any]:
    return average_metrics([resample_metrics(folds, weights) for folds in seed_queries])


def _concatenate_batches(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return _map_leaves(lambda *values: np.concatenate(values), *batches)


def _sample_weights(folds: SeedQueries, n_images: int, samples: int, rng: np.random.Generator) -> Floats:
    """Return how often each bootstrap sample contains each image, (samples, n_images).

    Images that have queries are drawn with replacement within their fold.
    """
    weights = np.zeros((samples, n_images))
    for fold in folds:
        images = np.unique(np.concatenate([queries.image_rows for queries in fold.values()]))
        picks = images[rng.integers(0, len(images), (samples, len(images)))] + n_images * np.arange(samples)[:, None]
        weights += np.bincount(picks.ravel(), minlength=weights.size).reshape(weights.shape)
    return weights


def _renumber_images(seed_queries: Sequence[SeedQueries]) -> tuple[list[SeedQueries], int]:
    """Return the queries with their images renumbered from 0 without gaps, and the number of these images."""
    images = np.unique(np.concatenate([queries.image_rows for fold in seed_queries[0] for queries in fold.values()]))
    return [
        [
            {direction: replace(q, image_rows=np.searchsorted(images, q.image_rows)) for direction, q in fold.items()}
            for fold in folds
        ]
        for folds in seed_queries
    ], len(images)


def _merge_folds(first: QueriesByDirection, second: QueriesByDirection, n_images: int) -> QueriesByDirection:
    """Merge the queries of two models into one fold; ``n_images`` is added to the image indices of the second model."""
    both = {}
    for direction, a in first.items():
        b = second[direction]
        values = {name: np.concatenate([a.values_by_metric[name], b.values_by_metric[name]]) for name in a.values_by_metric}
        ranks = None if a.ranks is None or b.ranks is None else np.concatenate([a.ranks, b.ranks])
        both[direction] = replace(
            a, image_rows=np.concatenate([a.image_rows, b.image_rows + n_images]), values_by_metric=values, ranks=ranks
        )
    return both


def compute_interval(values: Floats) -> list[float]:
    """Return the 95% percentile interval of a metric over samples; samples in which it is NaN (no queries) are ignored."""
    outside = 100 * (1 - CONFIDENCE_LEVEL) / 2
    low, high = np.percentile(values[~np.isnan(values)], [outside, 100 - outside])
    return [float(low), float(high)]


def _map_leaves(function: Callable[..., Any], tree: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _map_leaves(function, value, *(other[key] for other in others))
        if isinstance(value, dict)
        else function(value, *(other[key] for other in others))
        for key, value in tree.items()
    }
