"""Bootstrap intervals of metrics, tests of the difference between two models, and tests of all pairs of several models.

All functions resample images with their captions, because the captions of one image are not independent queries. A sample
selects queries only: each query keeps all its candidates, and thus its rank. Images are resampled within their fold.

A system is a model with one or several seeds. The test of all pairs of systems counts two sources of chance. The first is the
choice of images. Its variance V_I is the variance of the difference over B bootstrap samples of the N images; all systems have
the same samples. The second is the choice of seeds. Its variance is s^2 / n for a system whose metric has the variance s^2
over n seeds. V is the sum of V_I and the seed variances of both systems. The difference, divided by the root of V, is compared
with Student's t distribution. The degrees of freedom, by Welch and Satterthwaite, are:

    V^2 / (sum over both systems of (s^2 / n)^2 / (n - 1) + V_I^2 (1 / (N - 1) + 1 / (B - 1)))

In a simulation, 95% intervals for systems with three or five seeds contain the true difference in 95% to 97% of the cases
(``tests/eval/ranking/test_families.py``).

Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13 (percentile intervals) and 15 (permutation tests);
Smucker et al., "A Comparison of Statistical Significance Tests for Information Retrieval Evaluation", CIKM 2007 (randomisation
of paired systems); Satterthwaite, "An approximate distribution of estimates of variance components", Biometrics Bulletin 1946;
Welch, "The generalization of Student's problem when several different population variances are involved", Biometrika 1947;
Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 1979; Benjamini and
Hochberg, "Controlling the false discovery rate", Journal of the Royal Statistical Society B 1995; Piepho, "An algorithm for a
letter-based representation of all-pairwise comparisons", Journal of Computational and Graphical Statistics 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from vse.eval import DEFAULT_KS
from vse.eval.options import N_BOOTSTRAP_SAMPLES
from vse.eval.ranking.metrics import Floats, QueriesByDirection, average_metrics, compute_fold_metrics, resample_metrics

CONFIDENCE_LEVEL = 0.95
SIGNIFICANCE_LEVEL = 0.05  # a difference with a lower p-value is called significant
_MAX_WEIGHTS = 2**21  # largest size of a matrix of weights (samples, images)

SeedQueries = Sequence[QueriesByDirection]  # the queries of one seed, fold by fold


def compute_intervals(
    seed_queries: Sequence[SeedQueries], samples: int = N_BOOTSTRAP_SAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Return the 95% bootstrap interval ``[low, high]`` of each metric's mean over training seeds (percentile method).

    ``seed_queries`` has the queries of each training seed. ``seed`` is the random seed of the bootstrap. All training seeds
    use the same samples of images. The interval therefore estimates how much the metric would change with other test images.
    The standard deviation over seeds estimates how much the metric would change with other seeds.
    """
    seed_queries, n_images = _renumber_images(seed_queries)
    rng = np.random.default_rng(seed)
    weights = (_draw_bootstrap_weights(seed_queries[0], n_images, n, rng) for n in _list_batch_sizes(samples, n_images))
    return _map_leaves(
        compute_percentile_interval,
        _concatenate_batches([_resample_and_average_seeds(seed_queries, part) for part in weights]),
    )


def compute_differences(
    first: Sequence[SeedQueries], second: Sequence[SeedQueries], samples: int = N_BOOTSTRAP_SAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Return the difference of two models in each metric, and whether the choice of test images may explain the difference.

    ``first`` and ``second`` have the queries of each training seed of the models. Both models must have the same queries and
    equally many seeds. Seeds are paired in their order. ``seed`` is the random seed of the samples.

    The result has a dict for each metric. ``a`` and ``b`` are the means over each model's seeds, and ``difference`` is a - b.
    ``ci95`` is the 95% interval of the difference by a paired bootstrap. ``p`` is the two-sided p-value of a randomisation
    test. In each sample of the test, the two models' answers to an image and its captions are swapped with probability 1/2,
    for each image. The p-value is the share of samples whose absolute difference is at least the observed absolute difference.
    The observed difference counts as one of the samples.
    """
    both, n_images = _renumber_images([*first, *second])
    first, second = both[: len(first)], both[len(first) :]
    merged = [
        [_merge_model_queries(a, b, n_images) for a, b in zip(one, two, strict=True)]
        for one, two in zip(first, second, strict=True)
    ]
    rng = np.random.default_rng(seed)
    resampled, swapped = [], []
    for n in _list_batch_sizes(samples, n_images):
        weights = _draw_bootstrap_weights(first[0], n_images, n, rng)
        swap = rng.integers(0, 2, (n, n_images)).astype(np.float64)
        left, right = np.hstack([1 - swap, swap]), np.hstack([swap, 1 - swap])
        resampled.append(_map_leaves(np.subtract, *(_resample_and_average_seeds(seeds, weights) for seeds in (first, second))))
        swapped.append(_map_leaves(np.subtract, *(_resample_and_average_seeds(merged, side) for side in (left, right))))
    observed = [
        average_metrics([average_metrics([compute_fold_metrics(fold) for fold in folds]) for folds in seeds])
        for seeds in (first, second)
    ]
    return _map_leaves(_summarise_difference, *observed, _concatenate_batches(resampled), _concatenate_batches(swapped))


def bootstrap_seed_metrics(
    systems: Sequence[Sequence[SeedQueries]], metric: Sequence[str], samples: int, rng: np.random.Generator
) -> tuple[list[Floats], list[Floats]]:
    """Return a metric of the seeds of each system, and the same metric on bootstrap samples of the images.

    A system is a model with one or several seeds. Both lists have an array for each system: (n_seeds,) in the first list, and
    (n_seeds, samples) in the second. All systems have the same samples of images. ``metric`` has the keys of the metric, such
    as ``["i2t", "r1"]``, in the result of :func:`vse.eval.ranking.metrics.compute_fold_metrics`.
    """
    every, n_images = _renumber_images([queries for seeds in systems for queries in seeds])
    observed = [_get_metric(average_metrics([compute_fold_metrics(fold) for fold in folds]), metric) for folds in every]
    parts: list[list[Floats]] = [[] for _ in every]
    for n in _list_batch_sizes(samples, n_images):
        weights = _draw_bootstrap_weights(every[0], n_images, n, rng)
        for part, folds in zip(parts, every, strict=True):
            part.append(_get_metric(resample_metrics(folds, weights), metric))
    resampled = [np.concatenate(part) for part in parts]
    ends = np.cumsum([len(seeds) for seeds in systems])
    spans = [slice(end - len(seeds), end) for end, seeds in zip(ends, systems, strict=True)]
    return [np.array(observed[span]) for span in spans], [np.stack(resampled[span]) for span in spans]


def _get_metric(metrics: dict[str, Any], keys: Sequence[str]) -> Any:
    value: Any = metrics
    for key in keys:
        value = value[key]
    return value


def _summarise_difference(a: float, b: float, resampled: Floats, swapped: Floats) -> dict[str, Any]:
    difference = a - b
    # The tolerance covers rounding: a swap may change only the order of a sum. Metrics are in percent.
    as_large = np.abs(swapped) >= abs(difference) - 1e-9
    return {
        "a": float(a),
        "b": float(b),
        "difference": float(difference),
        "ci95": compute_percentile_interval(resampled),
        "p": float((1 + np.count_nonzero(as_large)) / (1 + len(as_large))),
    }


def _list_batch_sizes(samples: int, n_images: int) -> list[int]:
    size = max(1, _MAX_WEIGHTS // n_images)
    return [min(size, samples - start) for start in range(0, samples, size)]


def _resample_and_average_seeds(seed_queries: Sequence[SeedQueries], weights: Floats) -> dict[str, Any]:
    return average_metrics([resample_metrics(folds, weights) for folds in seed_queries])


def _concatenate_batches(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return _map_leaves(lambda *values: np.concatenate(values), *batches)


def _draw_bootstrap_weights(folds: SeedQueries, n_images: int, samples: int, rng: np.random.Generator) -> Floats:
    """Return the number of times that each bootstrap sample contains each image, (samples, n_images).

    Images with queries are drawn with replacement from their own fold.
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


def _merge_model_queries(first: QueriesByDirection, second: QueriesByDirection, n_images: int) -> QueriesByDirection:
    """Join the queries of two models in each direction; the second model's image rows follow the ``n_images`` of the first."""
    both = {}
    for direction, a in first.items():
        b = second[direction]
        values = {name: np.concatenate([a.values_by_metric[name], b.values_by_metric[name]]) for name in a.values_by_metric}
        ranks = None if a.ranks is None or b.ranks is None else np.concatenate([a.ranks, b.ranks])
        both[direction] = replace(
            a, image_rows=np.concatenate([a.image_rows, b.image_rows + n_images]), values_by_metric=values, ranks=ranks
        )
    return both


def compute_percentile_interval(values: Floats) -> list[float]:
    """Return the 95% percentile interval of a metric over samples. Samples without queries have NaN, and are ignored."""
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


class ComparedPair(NamedTuple):
    """The difference in a metric between the systems with the indices ``a`` and ``b``, with its 95% interval and p-values.

    ``p_corrected`` is the p-value corrected for the number of tests.
    """

    a: int
    b: int
    difference: float
    interval: tuple[float, float]
    p: float
    p_corrected: float

    @property
    def is_significant(self) -> bool:
        return self.p_corrected < SIGNIFICANCE_LEVEL


class PairwiseTests(NamedTuple):
    """The tests of all pairs of systems. A system is a model with one or several seeds.

    values : (n_systems,) the metric of each system as a mean over its seeds
    pairs : the test of each pair, in the order of ``itertools.combinations``
    smallest_significant_difference : the smallest difference of a pair that would be significant, as a median over the pairs
    """

    values: Floats
    pairs: list[ComparedPair]
    smallest_significant_difference: float


def compare_all_pairs(
    systems: Sequence[Sequence[SeedQueries]],
    metric: Sequence[str],
    method: str = "holm",
    samples: int = N_BOOTSTRAP_SAMPLES,
    seed: int = 0,
) -> PairwiseTests:
    """Test the difference of every pair of systems in one metric.

    Parameters
    ----------
    systems : for each system the queries of each training seed, fold by fold; all systems have the same images
    metric : the keys of the metric in the nested metrics of a fold, such as ``["i2t", "r1"]`` or ``["rsum"]``
    method : the correction of p-values. ``holm`` and ``bonferroni`` bound the probability of a false difference in any pair.
        ``fdr``, by Benjamini and Hochberg, bounds the expected share of false differences among the significant differences.
    samples : the number of bootstrap samples of the images
    seed : the random seed of the bootstrap
    """
    from scipy.stats import t as student

    observed, resampled = bootstrap_seed_metrics(systems, metric, samples, np.random.default_rng(seed))
    n_images = len(np.unique(np.concatenate([one.image_rows for fold in systems[0][0] for one in fold.values()])))
    values = np.array([of_seeds.mean() for of_seeds in observed])
    noises = [_estimate_seed_noise(*of_system) for of_system in zip(observed, resampled, strict=True)]
    pairs = list(combinations(range(len(systems)), 2))
    level = SIGNIFICANCE_LEVEL / (1 if method == "fdr" else len(pairs))
    intervals, p_values, smallest = [], [], []
    for a, b in pairs:
        difference = float(values[a] - values[b])
        of_images = float((resampled[a].mean(0) - resampled[b].mean(0)).var(ddof=1)) * n_images / (n_images - 1)
        variance = of_images + noises[a].variance + noises[b].variance
        uncertainty = noises[a].uncertainty + noises[b].uncertainty + of_images**2 * (1 / (n_images - 1) + 1 / (samples - 1))
        of_t = student(variance**2 / uncertainty if uncertainty else np.inf)
        error = variance**0.5
        p_values.append(2 * float(of_t.sf(abs(difference) / error)) if error else float(difference == 0))
        width = float(of_t.isf(SIGNIFICANCE_LEVEL / 2)) * error
        intervals.append((difference - width, difference + width))
        smallest.append(float(of_t.isf(level / 2)) * error)
    corrected = correct_p_values(np.array(p_values), method)
    compared = [
        ComparedPair(a, b, float(values[a] - values[b]), interval, p, float(q))
        for (a, b), interval, p, q in zip(pairs, intervals, p_values, corrected, strict=True)
    ]
    return PairwiseTests(values, compared, float(np.median(smallest)))


class _SeedNoise(NamedTuple):
    """The noise in a model's mean metric over n seeds that comes from the choice of seeds.

    ``variance`` is the variance of this noise. ``uncertainty`` is the model's summand (s^2 / n)^2 / (n - 1) in the
    Welch-Satterthwaite formula for the degrees of freedom; s^2 is the variance of the metric over the seeds.
    """

    variance: float
    uncertainty: float


def _estimate_seed_noise(observed: Floats, resampled: Float[np.ndarray, "n_seeds n_samples"]) -> _SeedNoise:
    """Return the noise that comes from the choice of training seeds; 0 for a single seed, whose variance is unknown.

    ``observed`` (n_seeds,) has the metric of each of n seeds. ``resampled`` has the metric of each seed on bootstrap samples
    of the images. The variance s^2 of ``observed`` also contains a share that the choice of images causes. The test counts
    this share already, in the variance over bootstrap samples. It is therefore subtracted from s^2 in the variance, but not in
    the uncertainty (s^2 / n)^2 / (n - 1). The share is estimated as (M - V) n / (n - 1). M is the mean over seeds of the
    variance over samples, and V is the variance over samples of the mean over seeds.
    """
    n = len(observed)
    if n == 1:
        return _SeedNoise(0.0, 0.0)
    total = float(observed.var(ddof=1))
    of_images = float(resampled.var(1, ddof=1).mean() - resampled.mean(0).var(ddof=1)) * n / (n - 1)
    return _SeedNoise(max(0.0, total - max(0.0, of_images)) / n, (total / n) ** 2 / (n - 1))


def correct_p_values(p_values: Floats, method: str) -> Floats:
    """Return p-values (n,) corrected for n tests by ``method``: ``holm``, ``bonferroni`` or ``fdr``."""
    n = len(p_values)
    order = np.argsort(p_values, kind="stable")
    ascending = p_values[order]
    if method == "bonferroni":
        corrected = n * ascending
    elif method == "holm":
        corrected = np.maximum.accumulate((n - np.arange(n)) * ascending)
    else:
        corrected = np.minimum.accumulate((n / (1 + np.arange(n)) * ascending)[::-1])[::-1]
    result = np.empty(n)
    result[order] = np.minimum(corrected, 1)
    return result


def assign_letters(values: Floats, differs: Bool[np.ndarray, "n n"]) -> list[str]:
    """Return one or more letters for each system, such as ``ab``, which tables display next to its metric.

    Two systems have a letter in common if, and only if, they do not differ significantly: ``differs[a, b]`` is False for the
    systems a and b. ``values`` has the metric of each system. The system with the highest metric has the letter ``a``
    (algorithm of Piepho, 2004).
    """
    groups = [frozenset(range(len(values)))]
    for a, b in combinations(range(len(values)), 2):
        if differs[a, b]:
            split = [part for group in groups for part in ([group - {a}, group - {b}] if {a, b} <= group else [group])]
            groups = [one for k, one in enumerate(split) if not any(one < other for other in split) and one not in split[:k]]
    groups.sort(key=lambda group: sorted(-values[k] for k in group))
    return [
        "".join(_get_group_letter(k) for k, group in enumerate(groups) if system in group) for system in range(len(values))
    ]


def _get_group_letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"({index + 1})"


def compute_random_hit_probability(k: int, n_candidates: int, n_right: int = 1) -> float:
    """Return the probability that, in a random order, one of ``n_right`` right answers is among the first ``k`` candidates."""
    missed = 1.0
    for n in range(n_right):
        missed *= max(0, n_candidates - k - n) / max(1, n_candidates - n)
    return 1.0 - missed


def captions_per_image(n_images: int, n_captions: int) -> int:
    """Return the mean number of captions of an image, rounded, at least 1."""
    return max(1, round(n_captions / max(1, n_images)))


def chance_recall(direction: str, k: int, n_images: int, n_captions: int) -> float:
    """Return R@``k`` of a random order in percent, in the direction ``i2t`` or ``t2i``."""
    if direction == "t2i":
        return 100.0 * compute_random_hit_probability(k, n_images)
    return 100.0 * compute_random_hit_probability(k, n_captions, captions_per_image(n_images, n_captions))


def chance_rsum(n_images: int, n_captions: int) -> float:
    """Return rsum of a random order: the sum of R@1, R@5 and R@10 in both directions."""
    return sum(chance_recall(direction, k, n_images, n_captions) for direction in ("i2t", "t2i") for k in DEFAULT_KS)
