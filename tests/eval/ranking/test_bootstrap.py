from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.eval import DEFAULT_KS
from vse.eval.ranking.metrics import (
    MeasuredQueries,
    QueriesByDirection,
    compute_direction_metrics,
    compute_fold_metrics,
    resample_metrics,
)
from vse.eval.ranking.statistics import compute_differences, compute_intervals


def made_fold(n_images: int, seed: int, first: int = 0, highest: int = 15) -> QueriesByDirection:
    """Ranks drawn at random; image k has 1, 2 or 3 captions."""
    rng = np.random.default_rng(seed)
    images = first + np.arange(n_images)
    image_of_caption = first + np.repeat(np.arange(n_images), 1 + np.arange(n_images) % 3)
    return {
        "i2t": MeasuredQueries.from_ranks(rng.integers(0, highest, n_images), images),
        "t2i": MeasuredQueries.from_ranks(rng.integers(0, highest, len(image_of_caption)), image_of_caption),
    }


def slow_resampled(fold: QueriesByDirection, drawn: list[int]) -> dict[str, Any]:
    """Return the metrics of a sample: each query is repeated as often as its image was drawn."""
    found: dict[str, Any] = {}
    for direction, queries in fold.items():
        ranks = [rank for image in drawn for rank, own in zip(queries.ranks, queries.image_rows, strict=True) if own == image]
        found[direction] = compute_direction_metrics(np.array(ranks))
    found["rsum"] = sum(found[direction][f"r{k}"] for direction in ("i2t", "t2i") for k in DEFAULT_KS)
    return {**found, "mean_recall": found["rsum"] / 6}


@given(st.integers(1, 6), st.integers(0, 1000), st.data())
def test_a_sample_is_what_its_images_written_out_give(n_images: int, seed: int, data: st.DataObject) -> None:
    fold = made_fold(n_images, seed)
    drawn = data.draw(st.lists(st.integers(0, n_images - 1), min_size=1, max_size=8))
    weights = np.bincount(drawn, minlength=n_images)[None].astype(float)
    found = resample_metrics([fold], weights)
    slow = slow_resampled(fold, drawn)
    assert found["rsum"] == pytest.approx([slow["rsum"]])
    assert found["mean_recall"] == pytest.approx([slow["mean_recall"]])
    for direction in ("i2t", "t2i"):
        assert {name: values.tolist() for name, values in found[direction].items()} == {
            name: pytest.approx([value]) for name, value in slow[direction].items()
        }


def test_folds_count_alike_however_many_captions_they_have() -> None:
    first, second = made_fold(4, 0), made_fold(3, 1, first=4)
    found = resample_metrics([first, second], np.array([[1.0, 1, 2, 0, 0, 1, 2]]))
    slow = [slow_resampled(first, [0, 1, 2, 2]), slow_resampled(second, [5, 6, 6])]
    assert found["t2i"]["r5"][0] == pytest.approx(np.mean([one["t2i"]["r5"] for one in slow]))
    assert found["rsum"][0] == pytest.approx(np.mean([one["rsum"] for one in slow]))


def test_an_interval_is_the_percentiles_of_all_possible_samples() -> None:
    # With 3 images there are 27 equally probable samples; the percentiles of many random samples are close to theirs.
    fold = made_fold(3, 3, highest=12)
    every = [slow_resampled(fold, list(drawn)) for drawn in product(range(3), repeat=3)]
    found = compute_intervals([[fold]], samples=20_000)
    for direction, name in (("i2t", "r5"), ("t2i", "r10"), ("t2i", "medr")):
        values = np.sort([one[direction][name] for one in every])
        low, high = found[direction][name]
        # 2.5% of 27 lies within the first value, and 97.5% within the last.
        assert values[0] <= low <= values[1]
        assert values[-2] <= high <= values[-1]


def test_samples_depend_on_the_seed_alone_and_models_are_averaged_in_each() -> None:
    one, other = made_fold(30, 0), made_fold(30, 1)
    alone = compute_intervals([[one]])
    assert compute_intervals([[one], [one]]) == compute_intervals([[one]]) == alone
    assert compute_intervals([[one]], seed=1) != compute_intervals([[one]], seed=2)
    far = {direction: MeasuredQueries.from_ranks(q.ranks, q.image_rows * 1000) for direction, q in one.items()}
    assert compute_intervals([[far]]) == alone, "images without queries are not drawn"
    low, high = compute_intervals([[one], [other]])["rsum"]
    assert low < (compute_fold_metrics(one)["rsum"] + compute_fold_metrics(other)["rsum"]) / 2 < high


def slow_differences(
    first: QueriesByDirection, second: QueriesByDirection, n_images: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the difference of each metric, and the share of all 2^n swaps whose difference is at least as large."""
    found = {}
    swaps = []
    for swap in product([False, True], repeat=n_images):
        sides = []
        for flipped in (swap, [not s for s in swap]):
            side = {}
            for direction in first:
                a, b = first[direction], second[direction]
                taken = [b.ranks[k] if flipped[image] else a.ranks[k] for k, image in enumerate(a.image_rows)]
                side[direction] = compute_direction_metrics(np.array(taken))
            sides.append(side)
        swaps.append(sides)
    for direction in first:
        for name in ("r1", "r5", "r10", "medr", "meanr"):
            observed = swaps[0][0][direction][name] - swaps[0][1][direction][name]
            as_large = [abs(x[direction][name] - y[direction][name]) >= abs(observed) - 1e-9 for x, y in swaps]
            found[direction, name] = observed, float(np.mean(as_large))
    return found


@pytest.mark.parametrize("seed", range(2))
def test_p_is_the_share_of_swaps_that_make_as_large_a_difference(seed: int) -> None:
    first, second = made_fold(8, seed, highest=8), made_fold(8, seed + 100)
    found = compute_differences([[first]], [[second]], samples=4000)
    for (direction, name), (difference, p) in slow_differences(first, second, 8).items():
        leaf = found[direction][name]
        assert leaf["difference"] == pytest.approx(difference)
        assert leaf["p"] == pytest.approx(p, abs=0.035)  # 4 deviations of 4,000 tosses
        assert leaf["a"] == pytest.approx(compute_fold_metrics(first)[direction][name])
        assert leaf["b"] == pytest.approx(compute_fold_metrics(second)[direction][name])


def test_a_paired_difference_is_surer_than_two_intervals() -> None:
    """Compare two models that fail on the same images, except for seven that one of them gets right."""
    hit = np.arange(200) % 2 == 0
    better = hit | np.isin(np.arange(200), [1, 3, 5, 7, 9, 11, 13])
    a, b = ({"i2t": MeasuredQueries.from_ranks(np.where(right, 0, 20), np.arange(200))} for right in (better, hit))
    leaf = compute_differences([[a]], [[b]], samples=4000)["i2t"]["r1"]
    assert leaf["difference"] == pytest.approx(3.5)
    assert leaf["ci95"][0] > 0
    assert leaf["p"] == pytest.approx(2 / 2**7, abs=0.01)  # all seven on one side, or on the other
    (_, high_b), (low_a, _) = compute_intervals([[b]])["i2t"]["r1"], compute_intervals([[a]])["i2t"]["r1"]
    assert low_a < high_b  # unpaired, they overlap
    itself = compute_differences([[a]], [[a]], samples=500)["i2t"]["r1"]
    assert (itself["difference"], itself["ci95"], itself["p"]) == (0, [0, 0], 1)
