from __future__ import annotations

import math
import re

import matplotlib
import numpy as np
import pytest

from vse.eval.report.charts import (
    Bars,
    Curve,
    draw_rank_histogram,
    draw_recall_bars,
    draw_training_curves,
    rank_bins,
    rank_shares,
)

NONE = [math.nan] * 2
CHARTS = {
    "bars": lambda: draw_recall_bars("<b>", [("image to text", ["R@1", "R@5"])], [Bars([50, 80], [45, 77], [55, 84])]),
    "curves": lambda: draw_training_curves("<b>", "epoch", "loss", [Curve(0, [1, 2, 3], [9, 4, 5], best=2)]),
    "histogram": lambda: draw_rank_histogram("<b>", [np.array([0, 0, 4, 20])], 30),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_named_refers_to_nothing_elsewhere_and_is_the_same_again(name: str) -> None:
    chart = CHARTS[name]()
    assert chart.startswith('<svg role="img" aria-label="&lt;b&gt;" ')
    assert "http" not in chart
    assert "<metadata" not in chart
    assert chart == CHARTS[name]()


def test_ids_of_charts_on_one_page_differ() -> None:
    charts = [draw_training_curves(label, "epoch", "loss", [Curve(0, [1, 2], [3, 4])]) for label in ("one", "two")]
    ids = [set(re.findall(r' id="([^"]*)"', chart)) for chart in charts]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_the_user_s_settings_of_matplotlib_change_nothing_and_stay() -> None:
    before = CHARTS["bars"]()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        assert CHARTS["bars"]() == before
        assert matplotlib.rcParams["font.size"] == 30


def test_every_bar_says_its_value_and_one_without_a_value_is_left_out() -> None:
    group = [("image to text", ["R@1", "R@5"])]
    assert re.findall(r">(\d+\.\d)<", draw_recall_bars("x", group, [Bars([50.04, 80], NONE, NONE)])) == ["50.0", "80.0"]
    assert re.findall(r">(\d+\.\d)<", draw_recall_bars("x", group, [Bars([math.nan, 80], NONE, NONE)])) == ["80.0"]


def test_whiskers_are_drawn_where_there_are_intervals_alone() -> None:
    group = [("image to text", ["R@1", "R@5"])]
    whisker = "stroke: var(--ink, #1d2733)"
    assert whisker not in draw_recall_bars("x", group, [Bars([50, 80], NONE, NONE)])
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
    assert rank_bins(n) == expected


def test_every_rank_is_in_the_bin_that_ends_at_or_after_it() -> None:
    ranks = np.array([0, 1, 4, 5, 9, 10, 29])
    shares = rank_shares(ranks, rank_bins(30))
    np.testing.assert_allclose(shares, np.array([1, 2, 2, 1, 1]) / 7 * 100)


@pytest.mark.parametrize("name", CHARTS)
def test_colours_can_be_set_by_the_page_and_are_there_without_it(name: str) -> None:
    chart = CHARTS[name]()
    for colour in ("var(--a, #2a6f97)", "var(--label, #4a5560)", "var(--axis, #8a949e)"):
        assert colour in chart
    assert re.findall(r": #[0-9a-f]{6}", chart) == []


def test_the_change_of_the_loss_and_the_chance_level_have_lines() -> None:
    curve = [Curve(0, [1, 2, 3, 4], [9, 4, 5, 3])]
    plain = draw_training_curves("x", "epoch", "loss", curve)
    marked = draw_training_curves("x", "epoch", "loss", curve, warm_ups=[(0, 2)], chance=1.0)
    for word in (">warm-up<", ">chance<"):
        assert word in marked
        assert word not in plain
    group, bars = [("image to text", ["R@1", "R@5"])], [Bars([50, 80], NONE, NONE)]
    dotted = [
        chart.count("stroke-dasharray")
        for chart in (draw_recall_bars("x", group, bars), draw_recall_bars("x", group, bars, [1, 5]))
    ]
    assert dotted[0] < dotted[1]
