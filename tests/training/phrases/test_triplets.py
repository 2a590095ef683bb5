from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.losses.pairs_of_images import euclidean, triplets
from tests.training.phrases.some_regions import World
from vse.training.losses.base import LogisticLoss
from vse.training.losses.hinges import TopOfHinges
from vse.training.models.similarities.vectors import EuclideanSimilarity, SimilarityNetwork
from vse.training.phrases.batches import (
    LabelledBatch,
    PairSampler,
    SamplingSettings,
    TripletBatch,
    TripletSampler,
    compute_pair_cost,
    compute_triplet_cost,
)

SEEDS = st.integers(0, 999)
VARIANTS = {
    "single positive": SamplingSettings(positives="truth"),
    "single positive, sampling": SamplingSettings(positives="truth", neighbours=True),
    "augmented": SamplingSettings(positive_iou=0.5),
    "augmented, sampling": SamplingSettings(positive_iou=0.5, neighbours=True),
    "few candidates": SamplingSettings(positive_iou=0.5, neighbours=True, candidates=2),
}


def drawn(world: World, settings: SamplingSettings, seed: int, n: int = 30) -> tuple[np.ndarray, TripletBatch]:
    """Some pairs, and the triplets that are sampled for them."""
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(len(world.pairs))[:n]
    sampler = TripletSampler(world.pairs, world.candidates, world.truth_indices, settings)
    return pairs, sampler.sample(pairs, rng)


def region_queries(batch: TripletBatch) -> Iterator[tuple[int, int, set[int]]]:
    """Region, positive text and negative texts, by their numbers in the data set."""
    for region, text, negatives in zip(batch.query_regions, batch.positive_texts, batch.negative_text_mask, strict=True):
        yield int(batch.region_indices[region]), int(batch.text_indices[text]), set(batch.text_indices[negatives].tolist())


def phrase_queries(batch: TripletBatch) -> Iterator[tuple[int, int, list[int]]]:
    """Text, positive region and negative regions."""
    rows = (batch.query_texts, batch.positive_regions, batch.negative_regions, batch.negative_region_mask)
    for text, region, candidates, there in zip(*rows, strict=True):
        yield (
            int(batch.text_indices[text]),
            int(batch.region_indices[region]),
            batch.region_indices[candidates[there]].tolist(),
        )


def slow_negative_texts(world: World, batch: TripletBatch, pair: int) -> set[int]:
    """Texts of the batch that no phrase of the pair's chain has, nor one of the same ground-truth region."""
    chains, truths = world.pairs.chain_indices, world.truth_indices
    own = (k for k in range(len(world.pairs)) if chains[k] == chains[pair] or truths[k] == truths[pair])
    return set(batch.text_indices.tolist()) - {int(world.pairs.text_indices[k]) for k in own}


def slow_positives(world: World, settings: SamplingSettings, pair: int) -> set[int]:
    """The truth of a pair and, augmented, the candidates of its image that overlap it enough."""
    near = {k for k in world.candidates_of(pair) if world.overlap(k, pair) >= settings.positive_iou}
    return {int(world.truth_indices[pair])} | (near if settings.positives == "augmented" else set())


@settings(max_examples=30)
@given(name=st.sampled_from(sorted(VARIANTS)), seed=SEEDS)
def test_triplets_are_those_of_the_loops(name: str, seed: int, world: World) -> None:
    settings = VARIANTS[name]
    pairs, batch = drawn(world, settings, seed)
    queries, asked = list(region_queries(batch)), list(phrase_queries(batch))
    for k, pair in enumerate(pairs.tolist()):
        region, text, negatives = queries[k]
        assert text == world.pairs.text_indices[pair]
        assert region in slow_positives(world, settings, pair)
        assert negatives == slow_negative_texts(world, batch, pair)
        wrong = {c for c in world.candidates_of(pair) if world.overlap(c, pair) < settings.negative_iou}
        assert asked[k][:2] == (text, region)
        assert len(set(asked[k][2])) == len(asked[k][2])
        if settings.candidates is None:
            assert set(asked[k][2]) == wrong
        else:
            assert set(asked[k][2]) <= wrong
            of_image = {
                c
                for other, (_, _, found) in zip(pairs, asked, strict=False)
                for c in found
                if world.pairs.image_indices[other] == world.pairs.image_indices[pair]
            }
            assert len(of_image) <= settings.candidates, "drawn for the image, not for each of its pairs"
    assert batch.n_triplets == sum(len(n) for _, _, n in queries) + sum(len(n) for _, _, n in asked)


@settings(max_examples=30)
@given(name=st.sampled_from(sorted(VARIANTS)), seed=SEEDS)
def test_neighbourhood_sampling_gives_each_region_and_each_phrase_a_second_match(name: str, seed: int, world: World) -> None:
    settings = VARIANTS[name]
    pairs, batch = drawn(world, settings, seed)
    n, of = len(pairs), world.pairs
    queries, asked = list(region_queries(batch)), list(phrase_queries(batch))
    if not settings.neighbours:
        assert (len(queries), len(asked)) == (n, n)
        return
    for region in {region for region, _, _ in queries[:n]}:
        own = [pair for pair, query in zip(pairs, queries, strict=False) if query[0] == region]
        texts = {query[1] for query in queries if query[0] == region}
        of_chain = {int(of.text_indices[k]) for k in range(len(of)) if of.chain_indices[k] == of.chain_indices[own[0]]}
        assert len(texts) >= min(2, len(of_chain))
    for region, text, negatives in queries[n:]:
        sources = [pair for pair, query in zip(pairs, queries, strict=False) if query[0] == region]
        mentioned = {
            int(of.text_indices[k])
            for k in range(len(of))
            for pair in sources
            if of.chain_indices[k] == of.chain_indices[pair]
        }
        assert text in mentioned, "of the same chain"
        assert text not in negatives
    for text in {text for text, _, _ in asked[:n]}:
        own = [pair for pair, query in zip(pairs, asked, strict=False) if query[0] == text]
        regions = {region for query, region, _ in asked if query == text}
        assert len(regions) >= min(2, len(slow_positives(world, settings, own[0])))
    for text, region, negatives in asked[n:]:
        sources = [pair for pair, query in zip(pairs, asked, strict=False) if query[0] == text]
        source = next(pair for pair in sources if region in slow_positives(world, settings, pair))
        assert all(world.overlap(c, source) < settings.negative_iou for c in negatives)


def test_an_augmented_positive_is_any_as_likely(world: World) -> None:
    settings, pair = SamplingSettings(positive_iou=0.3), 0
    counts = [len(slow_positives(world, settings, k)) for k in range(len(world.pairs))]
    pair = int(np.argmax(counts))
    sampler, rng = TripletSampler(world.pairs, world.candidates, world.truth_indices, settings), np.random.default_rng(0)
    batches = (sampler.sample(np.asarray([pair]), rng) for _ in range(200 * counts[pair]))
    found = Counter(int(batch.region_indices[batch.query_regions[0]]) for batch in batches)
    assert counts[pair] > 1
    assert set(found) == slow_positives(world, settings, pair)
    assert min(found.values()) > 140


def embedded(batch: TripletBatch) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    sides = (torch.randn(len(numbers), 5, dtype=torch.float64) for numbers in (batch.region_indices, batch.text_indices))
    return tuple(torch.nn.functional.normalize(side, dim=1).requires_grad_() for side in sides)


def slow_cost(world: World, batch: TripletBatch, regions: Tensor, phrases: Tensor, loss: TopOfHinges) -> Tensor:
    """Eq. 6 of the two-branch paper, triplet by triplet."""
    region = {int(number): vector for number, vector in zip(batch.region_indices, regions, strict=True)}
    phrase = {int(number): vector for number, vector in zip(batch.text_indices, phrases, strict=True)}
    total = torch.zeros((), dtype=torch.float64)
    for x, y, wrong_texts in region_queries(batch):
        total = total + loss.lambda1 * triplets(region[x], phrase[y], [phrase[n] for n in wrong_texts], euclidean, loss)
    for y, x, wrong_regions in phrase_queries(batch):
        total = total + loss.lambda2 * triplets(phrase[y], region[x], [region[n] for n in wrong_regions], euclidean, loss)
    matches = [
        (int(batch.region_indices[r]), int(batch.text_indices[t]), int(truth))
        for r, t, truth in zip(batch.pair_regions, batch.pair_texts, batch.pair_truths, strict=True)
    ]
    texts_of = {r: {t for own, t, _ in matches if own == r} for r, _, _ in matches}
    truths_of = {t: {truth for _, own, truth in matches if own == t} for _, t, _ in matches}
    truth_indices = {r: next(truth for own, _, truth in matches if own == r) for r, _, _ in matches}
    for weight, vectors, partners, same in (
        (loss.lambda3, region, texts_of, lambda a, b: truth_indices[a] == truth_indices[b]),
        (loss.lambda4, phrase, truths_of, lambda a, b: False),
    ):
        for a in partners:
            outside = [c for c in partners if not partners[a] & partners[c] and not same(a, c)]
            for b in partners:
                if b != a and partners[a] & partners[b]:
                    negatives = [vectors[c] for c in outside]
                    total = total + weight * triplets(vectors[a], vectors[b], negatives, euclidean, loss)
    return total


LOSSES = {
    "one direction": TopOfHinges(margin=0.3, k=4, lambda1=0, lambda2=1),
    "both directions": TopOfHinges(margin=0.3, k=4, lambda1=1, lambda2=4),
    "constraints": TopOfHinges(margin=0.3, k=3, lambda1=1, lambda2=4, lambda3=0.1, lambda4=0.2),
    "all triplets": TopOfHinges(margin=0.3, k=None, lambda1=1, lambda2=4),
}


@pytest.mark.parametrize("name", ["augmented", "augmented, sampling"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_loss_and_its_gradients_are_those_of_the_loops(name: str, loss: TopOfHinges, world: World) -> None:
    _, batch = drawn(world, VARIANTS[name], 5, n=20)
    regions, phrases = embedded(batch)
    fast = compute_triplet_cost(batch, regions, phrases, EuclideanSimilarity(0.0), loss)
    slow = slow_cost(world, batch, regions, phrases, loss)
    assert fast.value.item() == pytest.approx(slow.item(), rel=1e-9)
    gradients = [torch.autograd.grad(cost, (regions, phrases), retain_graph=True) for cost in (fast.value, slow)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    assert slow > 0


def test_the_collapsed_loss_is_that_of_equal_embeddings(world: World) -> None:
    _, batch = drawn(world, VARIANTS["augmented, sampling"], 5, n=20)
    loss = LOSSES["constraints"]
    regions, phrases = (
        torch.ones(len(numbers), 5, dtype=torch.float64) / 5**0.5 for numbers in (batch.region_indices, batch.text_indices)
    )
    cost = compute_triplet_cost(batch, regions, phrases, EuclideanSimilarity(0.0), loss)
    assert cost.collapsed_value.item() == pytest.approx(slow_cost(world, batch, regions, phrases, loss).item(), rel=1e-6)


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_without_negatives_costs_nothing_or_little(n: int, world: World) -> None:
    _, batch = drawn(world, SamplingSettings(negative_iou=1e-9), 5, n=n)
    regions, phrases = embedded(batch)
    cost = compute_triplet_cost(batch, regions, phrases, EuclideanSimilarity(0.0), LOSSES["constraints"])
    assert torch.isfinite(cost.value)
    cost.value.backward()


def drawn_pairs(world: World, settings: SamplingSettings, seed: int, n: int = 25) -> tuple[list[int], LabelledBatch]:
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(len(world.pairs))[:n]
    return pairs.tolist(), PairSampler(world.pairs, world.candidates, world.truth_indices, settings).sample(pairs, rng)


def labelled(batch: LabelledBatch, label: int) -> list[tuple[int, int]]:
    """Region and text of the pairs with a label, by their numbers in the data set."""
    there = batch.labels == label
    rows = zip(batch.region_indices[batch.pair_regions[there]], batch.text_indices[batch.pair_texts[there]], strict=True)
    return [(int(region), int(text)) for region, text in rows]


def wrong_of(world: World, settings: SamplingSettings, pair: int) -> set[int]:
    return {c for c in world.candidates_of(pair) if world.overlap(c, pair) < settings.negative_iou}


@pytest.mark.parametrize("positives", ["truth", "augmented"])
@given(seed=SEEDS, candidates=st.sampled_from([None, 2]))
def test_a_batch_has_as_many_negative_as_positive_pairs(
    positives: str, seed: int, candidates: int | None, world: World
) -> None:
    settings = SamplingSettings(positives=positives, positive_iou=0.5, candidates=candidates)
    pairs, batch = drawn_pairs(world, settings, seed)
    text_indices = world.pairs.text_indices.tolist()
    expected = Counter((region, text_indices[pair]) for pair in pairs for region in slow_positives(world, settings, pair))
    assert Counter(labelled(batch, 1)) == expected
    negative = labelled(batch, -1)
    assert len(negative) == len(labelled(batch, 1))
    allowed = {(region, text_indices[pair]) for pair in pairs for region in wrong_of(world, settings, pair)}
    assert set(negative) <= allowed
    assert sorted(set(batch.region_indices.tolist())) == batch.region_indices.tolist()


@given(seed=SEEDS)
def test_each_positive_pair_has_a_negative_of_its_own_phrase_if_there_is_one(seed: int, world: World) -> None:
    settings = SamplingSettings(positive_iou=0.5)
    pairs, batch = drawn_pairs(world, settings, seed)
    having = [pair for pair in pairs if wrong_of(world, settings, pair)]
    least = Counter(int(world.pairs.text_indices[pair]) for pair in having for _ in slow_positives(world, settings, pair))
    found = Counter(text for _, text in labelled(batch, -1))
    assert all(found[text] >= count for text, count in least.items())


def test_all_negatives_are_those_of_every_pair_and_there_may_be_none(world: World) -> None:
    settings = SamplingSettings(positives="truth", negatives="all")
    pairs, batch = drawn_pairs(world, settings, 1)
    text_indices = world.pairs.text_indices.tolist()
    expected = Counter((region, text_indices[pair]) for pair in pairs for region in wrong_of(world, settings, pair))
    assert Counter(labelled(batch, -1)) == expected
    assert len(labelled(batch, -1)) > len(labelled(batch, 1))
    _, batch = drawn_pairs(world, SamplingSettings(negative_iou=1e-12, positives="truth"), 0, n=1)
    pair = labelled(batch, -1)
    assert len(pair) in (0, 1)
    assert len(labelled(batch, 1)) == 1


def test_the_loss_of_pairs_and_its_gradients_are_those_of_the_loops(world: World) -> None:
    """Eq. 7 of the two-branch paper, pair by pair."""
    _, batch = drawn_pairs(world, SamplingSettings(positive_iou=0.5), 2)
    torch.manual_seed(0)
    network = SimilarityNetwork(6, [5]).double()
    regions, phrases = (
        torch.randn(len(n), 6, dtype=torch.float64, requires_grad=True) for n in (batch.region_indices, batch.text_indices)
    )
    fast = compute_pair_cost(batch, regions, phrases, network, LogisticLoss())
    slow = torch.zeros((), dtype=torch.float64)
    for row, column, label in zip(batch.pair_regions, batch.pair_texts, batch.labels, strict=True):
        hidden = torch.relu(network.linears[0](regions[int(row)] * phrases[int(column)]))
        slow = slow + torch.log(1 + torch.exp(-int(label) * network.linears[1](hidden)[0].float().double()))
    assert fast.value.item() == pytest.approx(slow.item(), rel=1e-5)
    assert fast.collapsed_value.item() == pytest.approx(len(batch.labels) * math.log(2), rel=1e-6)
    parameters = [regions, phrases, *network.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(cost, parameters) for cost in (fast.value, slow)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
