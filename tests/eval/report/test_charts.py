from __future__ import annotations

import itertools
import math
import re

import matplotlib
import numpy as np
import pytest

from vse.eval.ranking.statistics import captions_per_image, chance_recall, chance_rsum, compute_random_hit_probability
from vse.eval.report.charts import (
    Bars,
    Curve,
    compute_shares_per_bin,
    draw_rank_histogram,
    draw_recall_bars,
    draw_training_curves,
    list_rank_bin_ends,
)

NONE = [math.nan] * 2
CHARTS = {
    "bars": lambda: draw_recall_bars("<b>", [("image to text", ["R@1", "R@5"])], [Bars([50, 80], [45, 77], [55, 84])]),
    "curves": lambda: draw_training_curves("<b>", "epoch", "loss", [Curve(0, [1, 2, 3], [9, 4, 5], best_x=2)]),
    "histogram": lambda: draw_rank_histogram("<b>", [np.array([0, 0, 4, 20])], 30),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_named_refers_to_nothing_elsewhere_and_is_the_same_again(name: str) -> None:
    chart = CHARTS[name]()
    assert chart.startswith('<svg role="img" aria-label="&lt;b&gt;" ')
    assert ("http" in chart, "<metadata" in chart) == (False, False)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):  # the user's settings
        assert CHARTS[name]() == chart
        assert matplotlib.rcParams["font.size"] == 30
    assert "var(--a, #2a6f97)" in chart, "the page can set colours"
    assert re.findall(r": #[0-9a-f]{6}", chart) == []
    one, two = (set(re.findall(r' id="([^"]*)"', each)) for each in (chart, draw_rank_histogram("other", [np.array([0])], 3)))
    assert not one & two, "ids on a page differ"


def test_bars_have_their_values_and_whiskers_where_there_are_intervals() -> None:
    group, whisker = [("image to text", ["R@1", "R@5"])], "stroke: var(--ink, #1d2733)"
    chart = draw_recall_bars("x", group, [Bars([50.04, 80], NONE, NONE)])
    assert (re.findall(r">(\d+\.\d)<", chart), whisker in chart) == (["50.0", "80.0"], False)
    assert re.findall(r">(\d+\.\d)<", draw_recall_bars("x", group, [Bars([math.nan, 80], NONE, NONE)])) == ["80.0"]
    assert whisker in draw_recall_bars("x", group, [Bars([50, 80], [49, math.nan], [51, math.nan])])


def test_the_kept_epoch_has_a_ring() -> None:
    plain, kept, elsewhere = (
        draw_training_curves("x", "epoch", "rsum", [Curve(0, [1, 2], [3, 4], best)]).count("<use") for best in (None, 2, 7)
    )
    assert kept == plain + 1
    assert elsewhere == plain


@pytest.mark.parametrize(
    ("n", "expected"), [(1, [1]), (3, [1, 3]), (5, [1, 5]), (30, [1, 5, 10, 20, 30]), (100, [1, 5, 10, 20, 50, 100])]
)
def test_bins_grow_and_end_with_all_candidates(n: int, expected: list[int]) -> None:
    assert list_rank_bin_ends(n) == expected
    shares = compute_shares_per_bin(np.array([0, 1, 4, 5, 9, 10, 29]), list_rank_bin_ends(30))
    np.testing.assert_allclose(shares, np.array([1, 2, 2, 1, 1]) / 7 * 100)


@pytest.mark.parametrize(("n", "n_right"), [(1, 1), (5, 1), (5, 2), (6, 3), (4, 4)])
def test_the_first_right_answer_is_where_all_orders_have_it_on_average(n: int, n_right: int) -> None:
    firsts = [min(order[:n_right]) for order in itertools.permutations(range(n))]
    for k in range(1, n + 2):
        assert compute_random_hit_probability(k, n, n_right) == pytest.approx(sum(first < k for first in firsts) / len(firsts))


def test_chance_recalls_of_a_thousand_images() -> None:
    assert chance_recall("t2i", 10, 1000, 5000) == pytest.approx(1.0)
    assert chance_recall("i2t", 10, 1000, 5000) == pytest.approx(0.996, abs=1e-3)
    assert chance_rsum(1000, 5000) == pytest.approx(0.1 + 0.5 + 1.0 + 0.1 + 0.499 + 0.996, abs=2e-3)
    assert captions_per_image(5000, 25010) == 5
