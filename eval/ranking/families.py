"""Tests of all pairs of several systems on the same images, corrected for the number of tests.

The difference of two systems, each with one or several seeds, has two sources of chance. The first is the choice of images.
Its variance is that of the difference over bootstrap samples of the images; all systems have the same samples. The second is
the choice of seeds: s^2 / n for each system, with the variance s^2 over its n seeds. The difference, divided by the root of
the sum V, is compared with Student's t distribution, with the degrees of freedom of Welch and Satterthwaite:

    V^2 / (sum over both systems of (s^2 / n)^2 / (n - 1) + V_I^2 (1 / (N - 1) + 1 / (B - 1)))

with the variance V_I over B samples of N images.

In a simulation, 95% intervals of systems with three or five seeds cover the true difference in 95% to 97% of the cases
(``tests/eval/ranking/test_families.py``).

Satterthwaite, "An approximate distribution of estimates of variance components", Biometrics Bulletin 1946; Welch, "The
generalization of Student's problem when several different population variances are involved", Biometrika 1947; Holm, "A simple
sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 1979; Benjamini and Hochberg, "Controlling
the false discovery rate", Journal of the Royal Statistical Society B 1995; Piepho, "An algorithm for a letter-based
representation of all-pairwise comparisons", Journal of Computational and Graphical Statistics 2004.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from vse.eval.defaults import N_BOOTSTRAP_SAMPLES
from vse.eval.ranking.bootstrap import SIGNIFICANCE_LEVEL, SeedQueries, resample_seed_metric

Floats = Float[np.ndarray, "..."]


class ComparedPair(NamedTuple):
    """The difference of two systems, given by their indices, with its 95% interval, its p-value and the corrected p-value."""

    a: int
    b: int
    difference: float
    interval: tuple[float, float]
    p: float
    p_corrected: float

    @property
    def is_significant(self) -> bool:
        return self.p_corrected < SIGNIFICANCE_LEVEL


class ComparedFamily(NamedTuple):
    """The tests of all pairs of systems.

    values : (n_systems,) the metric of each system, the mean over its seeds
    pairs : the tests, in the order of ``itertools.combinations``
    smallest_visible : the median, over the pairs, of the smallest difference that would be significant
    """

    values: Floats
    pairs: list[ComparedPair]
    smallest_visible: float


def compare_all_pairs(
    systems: Sequence[Sequence[SeedQueries]],
    metric: Sequence[str],
    method: str = "holm",
    samples: int = N_BOOTSTRAP_SAMPLES,
    seed: int = 0,
) -> ComparedFamily:
    """Test the difference of every pair of systems in one metric.

    Parameters
    ----------
    systems : for each system the queries of each seed, fold by fold; all have the same images
    metric : the keys of the metric in the metrics of a fold, such as ``["i2t", "r1"]`` or ``["rsum"]``
    method : the correction of p-values: ``holm``, ``bonferroni`` (both bound the chance of any false difference) or ``fdr``
        (the share of false ones among the differences that are found, by Benjamini and Hochberg)
    samples : the number of bootstrap samples of the images
    """
    from scipy.stats import t as student

    observed, resampled = resample_seed_metric(systems, metric, samples, np.random.default_rng(seed))
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
    return ComparedFamily(values, compared, float(np.median(smallest)))


class _SeedNoise(NamedTuple):
    """The variance that the choice of seeds gives the mean of a system, and its share in the degrees of freedom."""

    variance: float
    uncertainty: float


def _estimate_seed_noise(observed: Floats, resampled: Float[np.ndarray, "n_seeds n_samples"]) -> _SeedNoise:
    """Return the noise of seeds: 0 for one seed, whose variance is unknown.

    The variance s^2 over the seeds' metrics ``observed`` (n_seeds,) also contains chance of single images. The samples of
    images have this part already. It is n / (n - 1) times the mean variance of a seed over samples less that of the mean over
    seeds. This part is subtracted from the variance, but not from the uncertainty (s^2 / n)^2 / (n - 1) of the estimate.
    """
    n = len(observed)
    if n == 1:
        return _SeedNoise(0.0, 0.0)
    total = float(observed.var(ddof=1))
    of_images = float(resampled.var(1, ddof=1).mean() - resampled.mean(0).var(ddof=1)) * n / (n - 1)
    return _SeedNoise(max(0.0, total - max(0.0, of_images)) / n, (total / n) ** 2 / (n - 1))


def correct_p_values(p_values: Floats, method: str) -> Floats:
    """Return p-values (n,) that are corrected for n tests: ``holm``, ``bonferroni`` or ``fdr``."""
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
    """Return the letters of each system: two systems share a letter exactly if their difference is not significant.

    ``differs`` says which pairs differ. The letters are in the order of the best system that has them. Piepho (2004).
    """
    groups = [frozenset(range(len(values)))]
    for a, b in combinations(range(len(values)), 2):
        if differs[a, b]:
            split = [part for group in groups for part in ([group - {a}, group - {b}] if {a, b} <= group else [group])]
            groups = [one for k, one in enumerate(split) if not any(one < other for other in split) and one not in split[:k]]
    groups.sort(key=lambda group: sorted(-values[k] for k in group))
    return ["".join(_letter(k) for k, group in enumerate(groups) if system in group) for system in range(len(values))]


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"({index + 1})"
