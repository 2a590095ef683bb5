from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.training.losses.pairs_of_images import (
    Distance,
    Pairs,
    cost,
    euclidean,
    floored,
    one_minus_cosine,
    similarity,
    slow_caption_constraints,
    slow_image_constraints,
    slow_paper,
    top,
)
from tests.training.losses.slow_losses import RANKING, Table, numbered, ranking_loss
from vse.pipeline.errors import UserError
from vse.training.losses.base import Batch, Indices, LogisticLoss, sample_balanced_pairs

DISTANCES = [("euclidean", {}, euclidean), ("euclidean", {"floor": 1e-4}, floored), ("cosine", {}, one_minus_cosine)]


@pytest.mark.parametrize(("compared_by", "floor", "d"), DISTANCES, ids=["euclidean", "with a floor", "cosine"])
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    k=st.none() | st.integers(1, 12),
    margin=st.floats(0, 2),
    lambdas=st.tuples(*[st.just(0.0) | st.floats(0, 3)] * 4),
    n_texts=st.integers(1, 12),
)
def test_loss_and_gradients_of_any_batch_are_those_of_the_paper(
    compared_by: str,
    floor: dict[str, float],
    d: Distance,
    counts: list[int],
    seed: int,
    k: int | None,
    margin: float,
    lambdas: tuple[float, ...],
    n_texts: int,
) -> None:
    weights = {f"lambda{number}": weight for number, weight in enumerate(lambdas, 1)}
    loss, pairs = ranking_loss("top", margin=margin, k=k, same_image="mask", **weights), Pairs(counts, seed, n_texts)
    computed, slow = cost(pairs, loss, compared_by, **floor).value, slow_paper(pairs, d, loss)
    torch.testing.assert_close(pairs.with_gradients(computed), pairs.with_gradients(slow))


@pytest.mark.parametrize("same_image", ["keep", "mask"])
@pytest.mark.parametrize("name", RANKING)
def test_every_ranking_loss_takes_constraints(name: str, same_image: str) -> None:
    alone = ranking_loss(name, same_image=same_image)
    loss = alone.model_copy(update={"lambda4": 0.5, "lambda3": 0.25})
    pairs = Pairs([2, 3, 1, 2], 1, n_texts=4)
    slow = 0.25 * slow_image_constraints(pairs, one_minus_cosine, loss)
    slow = slow + 0.5 * slow_caption_constraints(pairs, one_minus_cosine, loss) + cost(pairs, alone, "cosine").value
    torch.testing.assert_close(pairs.with_gradients(cost(pairs, loss, "cosine").value), pairs.with_gradients(slow))


def authors_loss(pairs: Pairs, margin: float, k: int, factors: tuple[float, float, float]) -> Tensor:
    """The loss of retrieval_model.py of the authors' code: B images with two sentences each.

    Means over the k highest hinges of each sentence, be they 0 or not: of negative images, of negative sentences of its image,
    and of negative sentences of the sentence, whose positive is the farthest sentence of its image, itself included.
    """
    im_loss, sent_loss, sent_only_loss = [], [], []
    for a, own in enumerate(pairs.image_indices):
        image, sentence = pairs.images[own], pairs.captions[a]
        negative_images = [pairs.images[j] for j in range(len(pairs.images)) if j != own]
        negative = [pairs.captions[b] for b, other in enumerate(pairs.image_indices) if other != own]
        positive = floored(sentence, image)
        im_loss += top([torch.relu(margin + positive - floored(sentence, other)) for other in negative_images], k)
        sent_loss += top([torch.relu(margin + positive - floored(image, other)) for other in negative], k)
        together = [pairs.captions[b] for b, other in enumerate(pairs.image_indices) if other == own]
        farthest = torch.stack([floored(sentence, other) for other in together]).max()
        sent_only_loss += top([torch.relu(margin + farthest - floored(sentence, other)) for other in negative], k)
    parts = (torch.stack(part).mean() for part in (im_loss, sent_loss, sent_only_loss))
    return sum((factor * part for factor, part in zip(factors, parts, strict=True)), start=torch.zeros(()).double())


@pytest.mark.parametrize("margin", [0.05, 0.6], ids=["many hinges of 0", "few hinges of 0"])
def test_the_reduction_mean_topk_is_the_authors_code(margin: float) -> None:
    factors = (1.5, 1.0, 0.05)  # the authors' factor of images weighs the hinges whose query is a sentence
    weights = {"lambda1": factors[1], "lambda2": factors[0], "lambda4": factors[2]}
    loss = ranking_loss("top", margin=margin, k=10, reduction="mean_topk", same_image="mask", **weights)
    pairs = Pairs([2] * 13, 3)
    computed, slow = cost(pairs, loss, floor=1e-4).value, authors_loss(pairs, margin, 10, factors)
    assert slow > 0
    torch.testing.assert_close(pairs.with_gradients(computed), pairs.with_gradients(slow))


def test_the_sentence_itself_is_the_positive_of_one_that_is_alone() -> None:
    weights = {"lambda1": 0, "lambda2": 0, "lambda4": 1}
    loss = ranking_loss("top", margin=2, k=2, reduction="mean_topk", same_image="mask", **weights)
    pairs = Pairs([1, 1, 2, 1], 2)
    computed, slow = cost(pairs, loss, floor=1e-4).value, authors_loss(pairs, 2, 2, (0, 0, 1))
    assert slow > 0
    torch.testing.assert_close(pairs.with_gradients(computed), pairs.with_gradients(slow))


@pytest.mark.parametrize(("counts", "reduction"), [([1, 1, 1], "sum"), ([4], "sum"), ([4], "mean_topk")])
def test_a_query_without_a_neighbour_or_without_anything_outside_costs_nothing(counts: list[int], reduction: Any) -> None:
    weights = {"lambda1": 0, "lambda2": 0, "lambda4": 1}
    loss = ranking_loss("top", margin=2, reduction=reduction, same_image="mask", **weights)
    pairs = Pairs(counts)
    assert not any(part.any() for part in pairs.with_gradients(cost(pairs, loss).value))


def test_the_logistic_loss_of_large_scores_is_finite() -> None:
    scores = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = LogisticLoss().cost(scores, torch.tensor([-1.0, -1.0]))
    assert loss.item() == pytest.approx(1e4)
    assert torch.autograd.grad(loss, scores)[0].tolist() == [1, 0]


@pytest.mark.parametrize("compared_by", ["cosine", "euclidean", "order", "network"])
def test_any_similarity_is_taught_each_pair_and_its_image_with_a_caption_of_another(compared_by: str) -> None:
    """Eq. 7."""
    pairs, compare = Pairs([2, 3, 1]), similarity(compared_by).double()
    computed = LogisticLoss().build_objective(compare)(pairs.batch(), 4)
    rows, columns = sample_balanced_pairs(pairs.image_indices, np.random.default_rng(4))
    scores = compare(pairs.batch().image_embeddings, pairs.batch().caption_embeddings)
    slow = 0 * pairs.captions.sum()
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        slow = slow + torch.log(1 + torch.exp(-(1 if row == column else -1) * scores[row, column]))
    assert computed.query_scores is None
    assert computed.collapsed_value.item() == pytest.approx(len(rows) * np.log(2))
    torch.testing.assert_close(pairs.with_gradients(computed.value), pairs.with_gradients(slow), check_dtype=False)


@st.composite
def image_numbers(draw: st.DrawFn) -> Indices:
    counts = draw(st.lists(st.integers(1, 6), min_size=2, max_size=9))
    return np.random.default_rng(draw(st.integers(0, 99))).permutation(np.repeat(5 * np.arange(len(counts)), counts))


@given(image_indices=image_numbers(), seed=st.integers(0, 99))
def test_there_is_a_negative_pair_for_each_positive_one(image_indices: Indices, seed: int) -> None:
    rows, columns = sample_balanced_pairs(image_indices, np.random.default_rng(seed))
    n = len(image_indices)
    assert rows.tolist() == [*range(n), *range(n)]
    assert columns[:n].tolist() == list(range(n))
    assert (image_indices[rows[n:]] != image_indices[columns[n:]]).all(), "never another caption of the same image"


def test_every_caption_of_another_image_is_as_likely() -> None:
    image_indices = np.asarray([7, 2, 7, 2, 2, 9, 7, 4])
    rng, n_draws = np.random.default_rng(0), 2000
    drawn = Counter[tuple[int, int]]()
    for _ in range(n_draws):
        rows, columns = (side[len(image_indices) :].tolist() for side in sample_balanced_pairs(image_indices, rng))
        drawn.update(zip(rows, columns, strict=True))
    for row, own in enumerate(image_indices):
        negative = np.flatnonzero(image_indices != own)
        expected = n_draws / len(negative)
        counts = [drawn.pop((row, int(column))) for column in negative]
        assert sum((count - expected) ** 2 / expected for count in counts) < 26, "chi square of 6 at most: 2 in 10,000"
    assert not drawn


def test_a_batch_of_one_image_costs_nothing_and_a_direction_is_refused() -> None:
    rows, columns = sample_balanced_pairs(np.asarray([3, 3, 3]), np.random.default_rng(0))
    assert len(rows) == len(columns) == 0
    pairs = Pairs([3])
    computed = LogisticLoss().build_objective(similarity("network", widths=[5, 3]).double())(pairs.batch(), 0)
    assert computed.value.item() == computed.collapsed_value.item() == 0
    assert not any(part.any() for part in pairs.with_gradients(computed.value))
    batch = Batch(numbered(0, 3), numbered(0, 3), np.arange(3), np.arange(3))
    with pytest.raises(UserError, match="a loss of single pairs has no direction, but this similarity has a score for each"):
        LogisticLoss().build_objective(Table(torch.rand(3, 3), torch.rand(3, 3)))(batch, 0)
