from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.eval.ranking.metrics import average, direction_metrics, metrics
from vse.eval.ranking.ranks import Ranks


def test_by_hand() -> None:
    found = direction_metrics(np.array([0, 0, 4, 5, 9, 10]))
    assert found["r1"] == pytest.approx(100 * 2 / 6)
    assert found["r5"] == pytest.approx(100 * 3 / 6)
    assert found["r10"] == pytest.approx(100 * 5 / 6)
    assert found["medr"] == 5  # floor(4.5) + 1
    assert found["meanr"] == pytest.approx(28 / 6 + 1)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=50))
def test_metrics_equal_their_definitions(ranks: list[int]) -> None:
    found = direction_metrics(np.asarray(ranks))
    for k in (1, 5, 10):
        assert found[f"r{k}"] == pytest.approx(100 * sum(rank < k for rank in ranks) / len(ranks))
    assert found["medr"] == statistics.median(ranks) // 1 + 1
    assert found["meanr"] == pytest.approx(statistics.mean(ranks) + 1)


def test_rsum_is_the_sum_of_six_recalls_and_nothing_more() -> None:
    found = metrics(Ranks(np.array([0, 9]), np.array([4, 20])))
    assert found["rsum"] == pytest.approx((50 + 50 + 100) + (0 + 50 + 50))
    assert found["mean_recall"] == pytest.approx(300 / 6)


def test_folds_are_averaged_figure_by_figure() -> None:
    found = average([{"i2t": {"r1": 10.0}, "rsum": 1.0}, {"i2t": {"r1": 30.0}, "rsum": 2.0}])
    assert found == {"i2t": {"r1": 20.0}, "rsum": 1.5}
