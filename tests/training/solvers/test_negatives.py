from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vse.pipeline.dataset.dataset import Caption
from vse.training.losses.base import QueryScores
from vse.training.losses.ranking import build_negative_mask
from vse.training.solvers.base import HardNegatives

MARGIN = 0.2
COLUMNS = "epoch,query,cost,imgid,sentid,negative_imgid,negative_sentid,caption,negative_caption"
CAPTIONS = [Caption(100 + k, k // 2, f'the "{k}" of them, and\nmore', ()) for k in range(60)]

Batch = tuple[list[int], Tensor, Tensor]


def draw(sizes: list[int], seed: int, mask: bool = False) -> list[Batch]:
    """Batches of different pairs: their numbers, their scores, and which pairs are wrong."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(CAPTIONS), generator=generator)[: sum(sizes)].split(sizes)
    scores = [torch.rand(len(pairs), len(pairs), generator=generator) for pairs in order]
    return [(pairs.tolist(), own, build_negative_mask(pairs // 2, mask)) for pairs, own in zip(order, scores, strict=True)]


def rankings(scores: Tensor, negatives: Tensor) -> tuple[QueryScores, QueryScores]:
    """Of images as queries, and of captions."""
    positives = torch.arange(len(scores))
    return QueryScores(scores, positives, negatives), QueryScores(scores.T, positives, negatives.T)


def listed(n: int, batches: list[Batch], epoch: int = 1) -> HardNegatives:
    listing = HardNegatives(n, CAPTIONS)
    for pairs, scores, negatives in batches:
        listing.add_batch(epoch, pairs, rankings(scores, negatives), MARGIN)
    return listing


def slow_hardest(query: str, batches: list[Batch]) -> dict[int, tuple[float, int]]:
    """For each query, by sentence: the cost of its hardest negative, and the sentence of that; loops over all pairs."""
    found: dict[int, tuple[float, int]] = {}
    for pairs, scores, negatives in batches:
        for i, pair in enumerate(pairs):
            for j, other in enumerate(pairs):
                wrong, score = (negatives[i, j], scores[i, j]) if query == "image" else (negatives[j, i], scores[j, i])
                cost = max(0.0, float(MARGIN + score - scores[i, i])) if wrong else 0.0
                if cost > found.get(100 + pair, (0.0, 0))[0]:
                    found[100 + pair] = (cost, 100 + other)
    return found


@pytest.mark.parametrize("query", ["image", "caption"])
@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99), st.booleans())
def test_the_costliest_hardest_negatives_are_kept(query: str, n: int, sizes: list[int], seed: int, mask: bool) -> None:
    batches = draw(sizes, seed, mask)
    rows = [row for row in listed(n, batches).epoch_rows if row[1] == query]
    slow = slow_hardest(query, batches)
    costs = sorted((cost for cost, _ in slow.values()), reverse=True)[:n]
    assert [row[2] for row in rows] == pytest.approx(costs, abs=1e-4), "the costliest first, as many as there are"
    assert len({row[4] for row in rows}) == len(rows), "one for each query"
    for _, _, cost, imgid, sentid, negative_imgid, negative_sentid, text, negative_text in rows:
        assert (cost, negative_sentid) == (pytest.approx(slow[sentid][0], abs=1e-4), slow[sentid][1])
        right, wrong = CAPTIONS[sentid - 100], CAPTIONS[negative_sentid - 100]
        assert (imgid, text, negative_imgid, negative_text) == (right.imgid, right.raw, wrong.imgid, wrong.raw)
        assert not mask or imgid != negative_imgid


def test_an_adversary_s_candidates_are_not_listed() -> None:
    pairs, scores, negatives = draw([6], 4)[0]
    added = torch.full((6, 2), 9.0), torch.ones(6, 2) > 0
    image, caption = (
        QueryScores(torch.cat([one.scores, added[0]], 1), one.positive_columns, torch.cat([one.negative_mask, added[1]], 1))
        for one in rankings(scores.clone().requires_grad_(), negatives)
    )
    listing = HardNegatives(5, CAPTIONS)
    listing.add_batch(1, pairs, (image, caption), MARGIN)
    assert listing.epoch_rows == listed(5, [(pairs, scores, negatives)]).epoch_rows


def test_the_table_has_a_row_for_each_finding(tmp_path: Path) -> None:
    listing = listed(5, draw([9, 9], 1))
    listing.end_epoch()
    pairs, *score_pairs = draw([9], 2)[0]
    listing.add_batch(2, pairs, rankings(*score_pairs), MARGIN)  # of an epoch that is not over
    listing.write_csv(tmp_path / "negatives.csv")
    content = (tmp_path / "negatives.csv").read_text()
    assert content.splitlines()[0] == COLUMNS
    rows = list(csv.reader(content.splitlines(keepends=True)))[1:]
    assert rows == [[f"{value:.4g}" if k == 2 else str(value) for k, value in enumerate(row)] for row in listing.finished_rows]
    assert len(rows) == 2 * 5


def test_a_caption_is_no_formula_and_no_other_row(tmp_path: Path) -> None:
    texts = ['=HYPERLINK("http://x")', "+1", "@SUM(1)", "a\rb"]
    listing = HardNegatives(4, [Caption(k, k, text, ()) for k, text in enumerate(texts)])
    pairs = torch.arange(4)
    listing.add_batch(1, pairs.tolist(), rankings(torch.zeros(4, 4), build_negative_mask(pairs, False)), MARGIN)
    listing.end_epoch()
    listing.write_csv(tmp_path / "n.csv")
    with (tmp_path / "n.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["caption"] for row in rows} == {"'" + texts[0], "'+1", "'@SUM(1)", "a\nb"}
