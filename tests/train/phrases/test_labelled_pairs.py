"""Algorithm 1 for the similarity network: positive and negative pairs of a batch, and their loss, against loops."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.train.phrases.some_regions import World
from tests.train.phrases.test_triplets import SEEDS, slow_positives
from vse.train.losses.pair_loss import Logistic
from vse.train.models.similarities.network import SimilarityNetwork
from vse.train.phrases.batches import LabelledBatch, PairSampler, SamplingSettings, pair_cost


def drawn(world: World, settings: SamplingSettings, seed: int, n: int = 25) -> tuple[list[int], LabelledBatch]:
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(len(world.pairs))[:n]
    return pairs.tolist(), PairSampler(world.pairs, world.candidates, world.truth_of, settings).batch(pairs, rng)


def labelled(batch: LabelledBatch, label: int) -> list[tuple[int, int]]:
    """Region and text of the pairs with a label, by their numbers in the data set."""
    there = batch.labels == label
    rows = zip(batch.regions[batch.region_of_pair[there]], batch.texts[batch.text_of_pair[there]], strict=True)
    return [(int(region), int(text)) for region, text in rows]


def wrong_of(world: World, settings: SamplingSettings, pair: int) -> set[int]:
    return {c for c in world.candidates_of(pair) if world.overlap(c, pair) < settings.negative_iou}


@pytest.mark.parametrize("positives", ["truth", "augmented"])
@given(seed=SEEDS, candidates=st.sampled_from([None, 2]))
def test_a_batch_has_all_positive_pairs_and_as_many_negative_ones(
    positives: str, seed: int, candidates: int | None, world: World
) -> None:
    settings = SamplingSettings(positives=positives, positive_iou=0.5, candidates=candidates)
    pairs, batch = drawn(world, settings, seed)
    text_of = world.pairs.text_of.tolist()
    expected = Counter((region, text_of[pair]) for pair in pairs for region in slow_positives(world, settings, pair))
    assert Counter(labelled(batch, 1)) == expected
    negative = labelled(batch, -1)
    assert len(negative) == len(labelled(batch, 1))
    allowed = {(region, text_of[pair]) for pair in pairs for region in wrong_of(world, settings, pair)}
    assert set(negative) <= allowed
    assert sorted(set(batch.regions.tolist())) == batch.regions.tolist()


@given(seed=SEEDS)
def test_each_positive_pair_has_a_negative_of_its_own_phrase_if_there_is_one(seed: int, world: World) -> None:
    settings = SamplingSettings(positive_iou=0.5)
    pairs, batch = drawn(world, settings, seed)
    having = [pair for pair in pairs if wrong_of(world, settings, pair)]
    least = Counter(int(world.pairs.text_of[pair]) for pair in having for _ in slow_positives(world, settings, pair))
    found = Counter(text for _, text in labelled(batch, -1))
    assert all(found[text] >= count for text, count in least.items())


def test_all_negatives_are_those_of_every_pair(world: World) -> None:
    settings = SamplingSettings(positives="truth", negatives="all")
    pairs, batch = drawn(world, settings, 1)
    text_of = world.pairs.text_of.tolist()
    expected = Counter((region, text_of[pair]) for pair in pairs for region in wrong_of(world, settings, pair))
    assert Counter(labelled(batch, -1)) == expected
    assert len(labelled(batch, -1)) > len(labelled(batch, 1))


def test_where_no_pair_has_a_negative_there_is_none(world: World) -> None:
    _, batch = drawn(world, SamplingSettings(negative_iou=1e-12, positives="truth"), 0, n=1)
    pair = labelled(batch, -1)
    assert len(pair) in (0, 1)
    assert len(labelled(batch, 1)) == 1


def test_the_loss_and_its_gradients_are_those_of_the_loops(world: World) -> None:
    """Eq. 7 of the two-branch paper, pair by pair."""
    _, batch = drawn(world, SamplingSettings(positive_iou=0.5), 2)
    torch.manual_seed(0)
    network = SimilarityNetwork(6, [5]).double()
    regions, phrases = (torch.randn(len(n), 6, dtype=torch.float64, requires_grad=True) for n in (batch.regions, batch.texts))
    fast = pair_cost(batch, regions, phrases, network, Logistic())
    slow = torch.zeros((), dtype=torch.float64)
    for row, column, label in zip(batch.region_of_pair, batch.text_of_pair, batch.labels, strict=True):
        hidden = torch.relu(network.linears[0](regions[int(row)] * phrases[int(column)]))
        slow = slow + torch.log(1 + torch.exp(-int(label) * network.linears[1](hidden)[0].float().double()))
    assert fast.loss.item() == pytest.approx(slow.item(), rel=1e-5)
    assert fast.collapsed.item() == pytest.approx(len(batch.labels) * math.log(2), rel=1e-6)
    parameters = [regions, phrases, *network.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(cost, parameters) for cost in (fast.loss, slow)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
