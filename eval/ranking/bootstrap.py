"""What the choice of test images does to a metric: bootstrap intervals, and tests of the difference of two models.

All of it resamples images, and a caption goes where its image goes: the captions of one image are no independent
queries. What a query searches stays the whole split, and in folds images are drawn from their own fold.

Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13 (percentile intervals) and 15 (permutation
tests); Smucker et al., "A Comparison of Statistical Significance Tests for Information Retrieval Evaluation", CIKM 2007
(randomisation of paired systems).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.defaults import BOOTSTRAP_SAMPLES
from vse.eval.ranking.metrics import Fold, average, fold_metrics, resample_metrics

LEVEL = 0.95
ALPHA = 0.05  # a difference is called significant if p is below
_WEIGHTS = 2**21  # of images in samples, held at once

Run = Sequence[Fold]  # the queries of one seed, a fold after the other


def intervals(runs: Sequence[Run], samples: int = BOOTSTRAP_SAMPLES, seed: int = 0) -> dict[str, Any]:
    """For each metric the percentile interval ``[low, high]`` that holds 95% of its means over ``runs``.

    The seeds of a model are resample_metrics together: the interval says what other test images would have given, the standard
    deviation over seeds what other seeds would have.
    """
    runs, n_images = _compacted(runs)
    rng = np.random.default_rng(seed)
    return _each(_joined([_means(runs, _drawn(runs[0], n_images, n, rng)) for n in _portions(samples, n_images)]), _interval)


def differences(
    first: Sequence[Run], second: Sequence[Run], samples: int = BOOTSTRAP_SAMPLES, seed: int = 0
) -> dict[str, Any]:
    """How far two models' metrics, means over as many seeds, are apart on the same queries.

    For each metric a dict: ``a``, ``b`` and ``difference`` (a - b); ``ci95``, the interval of the difference by a paired
    bootstrap; ``p``, the two-sided p-value of a randomisation test: how often the difference is as large when the answers
    of both models to an image and its captions are swapped by the toss of a coin. Seeds are paired in their order.
    """
    both, n_images = _compacted([*first, *second])
    first, second = both[: len(first)], both[len(first) :]
    mixed = [
        [_side_by_side(a, b, n_images) for a, b in zip(one, two, strict=True)] for one, two in zip(first, second, strict=True)
    ]
    rng = np.random.default_rng(seed)
    portions = []
    for n in _portions(samples, n_images):
        weights = _drawn(first[0], n_images, n, rng)
        swap = rng.integers(0, 2, (n, n_images)).astype(np.float64)
        left, right = _means(mixed, np.hstack([1 - swap, swap])), _means(mixed, np.hstack([swap, 1 - swap]))
        portions.append({"drawn": [_means(first, weights), _means(second, weights)], "swapped": [left, right]})
    drawn, swapped = (
        _each(_joined([part[kind][0] for part in portions]), np.subtract, _joined([part[kind][1] for part in portions]))
        for kind in ("drawn", "swapped")
    )
    observed = [average([average([fold_metrics(fold) for fold in run]) for run in runs]) for runs in (first, second)]
    return _each(observed[0], _difference, observed[1], drawn, swapped)


def _difference(a: float, b: float, drawn: NDArray[np.float64], swapped: NDArray[np.float64]) -> dict[str, Any]:
    difference = a - b
    # Swapping that only reorders a sum must count as equal: metrics are percents, and 1e-9 of one is no difference.
    as_large = np.abs(swapped) >= abs(difference) - 1e-9
    return {
        "a": float(a),
        "b": float(b),
        "difference": float(difference),
        "ci95": _interval(drawn),
        "p": float((1 + np.count_nonzero(as_large)) / (1 + len(as_large))),
    }


def _portions(samples: int, n_images: int) -> list[int]:
    """Samples in portions of ``_WEIGHTS`` weights at most."""
    size = max(1, _WEIGHTS // n_images)
    return [min(size, samples - start) for start in range(0, samples, size)]


def _means(runs: Sequence[Run], weights: NDArray[np.float64]) -> dict[str, Any]:
    """Every metric (n_samples,), average over seeds."""
    return average([resample_metrics(run, weights) for run in runs])


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return _each(parts[0], lambda *values: np.concatenate(values), *parts[1:])


def _drawn(run: Run, n_images: int, samples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """How often each image (samples, n_images) is drawn, with replacement, among those of its fold that have queries."""
    weights = np.zeros((samples, n_images))
    for fold in run:
        images = np.unique(np.concatenate([queries.images for queries in fold.values()]))
        picks = images[rng.integers(0, len(images), (samples, len(images)))] + n_images * np.arange(samples)[:, None]
        weights += np.bincount(picks.ravel(), minlength=weights.size).reshape(weights.shape)
    return weights


def _compacted(runs: Sequence[Run]) -> tuple[list[Run], int]:
    """The runs with their images renumbered, and how many there are: those that have queries."""
    images = np.unique(np.concatenate([queries.images for fold in runs[0] for queries in fold.values()]))
    return [
        [{direction: replace(q, images=np.searchsorted(images, q.images)) for direction, q in fold.items()} for fold in run]
        for run in runs
    ], len(images)


def _side_by_side(first: Fold, second: Fold, n_images: int) -> Fold:
    """The queries of both models as one fold, the second's images numbered after the first's."""
    both = {}
    for direction, a in first.items():
        b = second[direction]
        values = {name: np.concatenate([a.values[name], b.values[name]]) for name in a.values}
        ranks = None if a.ranks is None or b.ranks is None else np.concatenate([a.ranks, b.ranks])
        both[direction] = replace(a, images=np.concatenate([a.images, b.images + n_images]), values=values, ranks=ranks)
    return both


def _interval(values: NDArray[np.float64]) -> list[float]:
    """Of the samples in which there is such a query: NaN is the metric of the others."""
    outside = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(values[~np.isnan(values)], [outside, 100 - outside])
    return [float(low), float(high)]


def _each(tree: dict[str, Any], function: Any, *others: dict[str, Any]) -> dict[str, Any]:
    """``function`` of every leaf of some nested dicts of the same keys."""
    return {
        key: _each(value, function, *(other[key] for other in others))
        if isinstance(value, dict)
        else function(value, *(other[key] for other in others))
        for key, value in tree.items()
    }
