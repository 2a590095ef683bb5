"""The metrics of ranks and of lists, against their definitions and by hand."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.eval.ranking.test_ranks import TIES, splits
from tests.eval.slow_ranks import slow_list_metrics
from vse.eval.ranking.metrics import build_fold, compute_direction_metrics
from vse.eval.ranking.ranks import blocks_from_scores, ranks_from_blocks


@given(st.lists(st.integers(0, 30), min_size=1, max_size=50))
def test_metrics_equal_their_definitions(ranks: list[int]) -> None:
    found = compute_direction_metrics(np.asarray(ranks))
    for k in (1, 5, 10):
        assert found[f"r{k}"] == pytest.approx(100 * sum(rank < k for rank in ranks) / len(ranks))
    assert found["medr"] == statistics.median(ranks) // 1 + 1
    assert found["meanr"] == pytest.approx(statistics.mean(ranks) + 1)


@given(splits(), st.data())
def test_metrics_of_lists_equal_a_loop_over_each_list(split: tuple[int, list[int], int], data: st.DataObject) -> None:
    n_images, image_of_caption, _ = split
    scores = data.draw(hnp.arrays(np.float32, (n_images, len(image_of_caption)), elements=TIES))
    blocks = blocks_from_scores(scores, torch.tensor(image_of_caption))
    fold = build_fold(ranks_from_blocks(blocks, with_caption_ranks=True), np.array(image_of_caption))
    own = {image: {c for c, of in enumerate(image_of_caption) if of == image} for image in sorted(set(image_of_caption))}
    slow = {
        "i2t": [slow_list_metrics(scores[image], right) for image, right in own.items()],
        "t2i": [slow_list_metrics(scores[:, c], {image}) for c, image in enumerate(image_of_caption)],
    }
    for direction, of_queries in slow.items():
        for name in ("ndcg10", "mrr", "map"):
            expected = [of_query[name] for of_query in of_queries]
            assert fold[direction].values_by_metric[name].tolist() == pytest.approx(expected)
