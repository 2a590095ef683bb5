"""The neighbourhood constraints against loops written from the two-branch paper's equations and from its authors' code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.train.losses.pairs_of_images import (
    Distance,
    Pairs,
    cost,
    euclidean,
    floored,
    one_minus_cosine,
    slow_caption_constraints,
    slow_image_constraints,
    slow_paper,
    top,
)
from tests.train.losses.slow_losses import RANKING, ranking_loss
from vse.train.losses.ranking import find_neighbours

DISTANCES = [("euclidean", {}, euclidean), ("euclidean", {"floor": 1e-4}, floored), ("cosine", {}, one_minus_cosine)]
COUNTS = [[1, 2, 3, 4], [2, 2, 2, 2, 2], [1, 1, 1], [4, 1], [3]]
WEIGHTS = {
    "both directions": {"lambda1": 1.0, "lambda2": 1.5},
    "captions for an image": {"lambda1": 1.0, "lambda2": 0.0},
    "images for a caption": {"lambda1": 0.0, "lambda2": 0.7},
    "constraints among captions": {"lambda2": 1.5, "lambda4": 0.05},
    "constraints among images": {"lambda1": 0.0, "lambda2": 0.0, "lambda3": 2.0},
    "all": {"lambda1": 0.9, "lambda2": 1.5, "lambda3": 0.3, "lambda4": 0.2},
}


@pytest.mark.parametrize("k", [1, 2, 10, None])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("compared_by", "floor", "d"), DISTANCES, ids=["euclidean", "with a floor", "cosine"])
def test_the_loss_and_its_gradients_are_those_of_the_paper(
    compared_by: str, floor: dict[str, float], d: Distance, weights: str, k: int | None
) -> None:
    loss = ranking_loss("top", margin=0.4, k=k, same_image="mask", **WEIGHTS[weights])
    for seed, counts in enumerate(COUNTS):
        pairs = Pairs(counts, seed, n_texts=5)
        computed, slow = cost(pairs, loss, compared_by, **floor).loss, slow_paper(pairs, d, loss)
        torch.testing.assert_close(pairs.with_gradients(computed), pairs.with_gradients(slow))


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    k=st.none() | st.integers(1, 12),
    margin=st.floats(0, 2),
    lambdas=st.tuples(*[st.floats(0, 3)] * 4),
    n_texts=st.integers(1, 12),
)
def test_any_batch_costs_what_the_paper_says(
    counts: list[int], seed: int, k: int | None, margin: float, lambdas: tuple[float, ...], n_texts: int
) -> None:
    weights = {f"lambda{number}": weight for number, weight in enumerate(lambdas, 1)}
    loss = ranking_loss("top", margin=margin, k=k, same_image="mask", **weights)
    pairs = Pairs(counts, seed, n_texts)
    torch.testing.assert_close(cost(pairs, loss).loss, slow_paper(pairs, euclidean, loss))


@pytest.mark.parametrize("same_image", ["keep", "mask"])
@pytest.mark.parametrize("name", RANKING)
def test_every_ranking_loss_takes_constraints(name: str, same_image: str) -> None:
    alone = ranking_loss(name, same_image=same_image)
    loss = alone.model_copy(update={"lambda4": 0.5, "lambda3": 0.25})
    pairs = Pairs([2, 3, 1, 2], 1, n_texts=4)
    slow = 0.25 * slow_image_constraints(pairs, one_minus_cosine, loss)
    slow = slow + 0.5 * slow_caption_constraints(pairs, one_minus_cosine, loss) + cost(pairs, alone, "cosine").loss
    torch.testing.assert_close(pairs.with_gradients(cost(pairs, loss, "cosine").loss), pairs.with_gradients(slow))


def authors_loss(pairs: Pairs, margin: float, k: int, factors: tuple[float, float, float]) -> Tensor:
    """The loss of retrieval_model.py of the authors' code: B images with two sentences each.

    Means over the k highest hinges of each sentence, be they 0 or not: of negative images, of negative sentences of its image,
    and of negative sentences of the sentence, whose positive is the farthest sentence of its image, itself included.
    """
    im_loss, sent_loss, sent_only_loss = [], [], []
    for a, own in enumerate(pairs.image_of):
        image, sentence = pairs.images[own], pairs.captions[a]
        negative_images = [pairs.images[j] for j in range(len(pairs.images)) if j != own]
        negative = [pairs.captions[b] for b, other in enumerate(pairs.image_of) if other != own]
        positive = floored(sentence, image)
        im_loss += top([torch.relu(margin + positive - floored(sentence, other)) for other in negative_images], k)
        sent_loss += top([torch.relu(margin + positive - floored(image, other)) for other in negative], k)
        farthest = torch.stack(
            [floored(sentence, pairs.captions[b]) for b, other in enumerate(pairs.image_of) if other == own]
        ).max()
        sent_only_loss += top([torch.relu(margin + farthest - floored(sentence, other)) for other in negative], k)
    parts = (torch.stack(part).mean() for part in (im_loss, sent_loss, sent_only_loss))
    return sum((factor * part for factor, part in zip(factors, parts, strict=True)), start=torch.zeros(()).double())


@pytest.mark.parametrize("margin", [0.05, 0.6], ids=["many hinges of 0", "few hinges of 0"])
@pytest.mark.parametrize("factors", [(1.5, 1.0, 0.05), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_the_reduction_mean_topk_is_the_authors_code(factors: tuple[float, float, float], margin: float) -> None:
    lambda2, lambda1, lambda4 = factors  # the authors' factor of images weighs the hinges whose query is a sentence
    weights = {"lambda1": lambda1, "lambda2": lambda2, "lambda4": lambda4}
    loss = ranking_loss("top", margin=margin, k=10, reduction="mean_topk", same_image="mask", **weights)
    pairs = Pairs([2] * 13, 3)
    computed, slow = cost(pairs, loss, floor=1e-4).loss, authors_loss(pairs, margin, 10, factors)
    assert slow > 0
    torch.testing.assert_close(pairs.with_gradients(computed), pairs.with_gradients(slow))


def test_the_sentence_itself_is_the_positive_of_one_that_is_alone() -> None:
    weights = {"lambda1": 0, "lambda2": 0, "lambda4": 1}
    loss = ranking_loss("top", margin=2, k=2, reduction="mean_topk", same_image="mask", **weights)
    pairs = Pairs([1, 1, 2, 1], 2)
    computed, slow = cost(pairs, loss, floor=1e-4).loss, authors_loss(pairs, 2, 2, (0, 0, 1))
    assert slow > 0
    torch.testing.assert_close(pairs.with_gradients(computed), pairs.with_gradients(slow))


@pytest.mark.parametrize(("counts", "reduction"), [([1, 1, 1], "sum"), ([4], "sum"), ([4], "mean_topk")])
def test_a_query_without_a_neighbour_or_without_anything_outside_costs_nothing(counts: list[int], reduction: Any) -> None:
    weights = {"lambda1": 0, "lambda2": 0, "lambda4": 1}
    loss = ranking_loss("top", margin=2, reduction=reduction, same_image="mask", **weights)
    pairs = Pairs(counts)
    assert not any(part.any() for part in pairs.with_gradients(cost(pairs, loss).loss))


def slow_related(own: list[int], others: list[int]) -> tuple[list[int], list[list[bool]], list[list[bool]]]:
    items = sorted(set(own))
    partners = [{other for one, other in zip(own, others, strict=True) if one == item} for item in items]
    share = [[bool(a & b) for b in partners] for a in partners]
    neighbours = [[share[i][j] and i != j for j in range(len(items))] for i in range(len(items))]
    return [own.index(item) for item in items], neighbours, [[not one for one in row] for row in share]


@given(pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_what_shares_a_partner_is_related(pairs: list[tuple[int, int]]) -> None:
    own, others = ([pair[side] for pair in pairs] for side in (0, 1))
    parts = find_neighbours(torch.tensor(own), torch.tensor(others))
    assert tuple(part.tolist() for part in parts) == slow_related(own, others)
