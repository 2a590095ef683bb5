"""The metrics of ranks and of lists, against their definitions and by hand."""

from __future__ import annotations

import statistics
from math import log2

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.eval.ranking.test_ranks import TIES, splits
from tests.eval.slow_ranks import slow_list_metrics
from vse.eval.ranking.metrics import average, build_fold, direction_metrics, metrics, position_metrics
from vse.eval.ranking.ranks import Ranks, blocks_from_scores, ranks_from_blocks


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
    folds = average([{"i2t": {"r1": 10.0}, "rsum": 1.0}, {"i2t": {"r1": 30.0}, "rsum": 2.0}])
    assert folds == {"i2t": {"r1": 20.0}, "rsum": 1.5}


@given(splits(), st.data())
def test_metrics_of_lists_equal_a_loop_over_each_list(split: tuple[int, list[int], int], data: st.DataObject) -> None:
    n_images, image_of_caption, _ = split
    scores = data.draw(hnp.arrays(np.float32, (n_images, len(image_of_caption)), elements=TIES))
    blocks = blocks_from_scores(scores, torch.tensor(image_of_caption))
    fold = build_fold(ranks_from_blocks(blocks, caption_ranks=True), np.array(image_of_caption))
    own = {image: {c for c, of in enumerate(image_of_caption) if of == image} for image in sorted(set(image_of_caption))}
    slow = {
        "i2t": [slow_list_metrics(scores[image], right) for image, right in own.items()],
        "t2i": [slow_list_metrics(scores[:, c], {image}) for c, image in enumerate(image_of_caption)],
    }
    for direction, of_queries in slow.items():
        for name in ("ndcg10", "mrr", "map"):
            expected = [of_query[name] for of_query in of_queries]
            assert fold[direction].values[name].tolist() == pytest.approx(expected)


def test_metrics_of_lists_by_hand() -> None:
    """Check one query with right answers at places 1, 4 and 12, another with one at place 2, and perfect lists."""
    found = position_metrics(np.array([0, 0, 0, 1]), np.array([0, 2, 9, 1]))
    assert found["mrr"].tolist() == pytest.approx([100, 50])
    assert found["map"].tolist() == pytest.approx([100 * (1 + 2 / 4 + 3 / 12) / 3, 50])
    best = 1 + 1 / log2(3) + 1 / 2
    assert found["ndcg10"].tolist() == pytest.approx([100 * (1 + 1 / log2(5)) / best, 100 / log2(3)])
    for n_right in (1, 10, 25):
        perfect = position_metrics(np.zeros(n_right, np.int64), np.zeros(n_right, np.int64))
        assert [perfect[name].tolist() for name in ("ndcg10", "mrr", "map")] == [pytest.approx([100])] * 3
