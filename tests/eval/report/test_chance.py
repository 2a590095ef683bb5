from __future__ import annotations

import itertools

import pytest

from vse.eval.report.charts import captions_per_image, chance_recall, chance_rsum, chance_within


@pytest.mark.parametrize(("n", "n_right"), [(1, 1), (5, 1), (5, 2), (6, 3), (4, 4)])
def test_the_first_right_answer_is_where_all_orders_have_it_on_average(n: int, n_right: int) -> None:
    firsts = [min(order[:n_right]) for order in itertools.permutations(range(n))]
    for k in range(1, n + 2):
        assert chance_within(k, n, n_right) == pytest.approx(sum(first < k for first in firsts) / len(firsts))


def test_recalls_of_a_thousand_images() -> None:
    assert chance_recall("t2i", 10, 1000, 5000) == pytest.approx(1.0)
    assert chance_recall("i2t", 1, 1000, 5000) == pytest.approx(0.1)
    assert chance_recall("i2t", 10, 1000, 5000) == pytest.approx(0.996, abs=1e-3)
    assert chance_rsum(1000, 5000) == pytest.approx(0.1 + 0.5 + 1.0 + 0.1 + 0.499 + 0.996, abs=2e-3)
    assert captions_per_image(5000, 25010) == 5
