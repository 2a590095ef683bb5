"""Losses of single pairs: which pairs are drawn, and the logistic loss of a similarity network over them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.train.losses.pairs_of_images import Pairs, cost, similarity
from tests.train.losses.slow_losses import Table, numbered
from vse.pipeline.errors import UserError
from vse.train.losses.base import Batch
from vse.train.losses.pair_loss import Indices, Logistic, balanced_pairs
from vse.train.models.similarities.network import SimilarityNetwork


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_logistic_loss_is_a_sum_over_pairs(dtype: torch.dtype) -> None:
    """Eq. 7 of the two-branch paper."""
    scores = torch.tensor([-2.0, 0.3, 0.0, 1.5, -0.4], dtype=dtype, requires_grad=True)
    labels = torch.tensor([1, -1, 1, 1, -1], dtype=dtype)
    computed = Logistic().cost(scores, labels)
    slow = sum((torch.log(1 + torch.exp(-z * p)) for p, z in zip(scores, labels, strict=True)), start=0 * scores.sum())
    torch.testing.assert_close(computed, slow)
    torch.testing.assert_close(torch.autograd.grad(computed, scores), torch.autograd.grad(slow, scores))


def test_the_logistic_loss_of_large_scores_is_finite() -> None:
    scores = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = Logistic().cost(scores, torch.tensor([-1.0, -1.0]))
    assert loss.item() == pytest.approx(1e4)
    assert torch.autograd.grad(loss, scores)[0].tolist() == [1, 0]


def slow_network(network: SimilarityNetwork, image: Tensor, caption: Tensor) -> Tensor:
    """Layer by layer, number by number."""
    vector = [v * c for v, c in zip(image, caption, strict=True)]
    for number, layer in enumerate(network.linears):
        vector = [
            sum((w * x for w, x in zip(row, vector, strict=True)), start=bias)
            for row, bias in zip(layer.weight, layer.bias, strict=True)
        ]
        vector = [torch.relu(x) for x in vector] if number < len(network.linears) - 1 else vector
    return vector[0]


@pytest.mark.parametrize("counts", [[1, 2, 3, 4], [2, 2, 2, 2, 2], [1, 1, 1], [4, 1], [3]])
def test_the_logistic_loss_of_a_network_equals_a_loop_over_its_pairs(counts: list[int]) -> None:
    """Eq. 7, of each positive pair, and of its image with a caption of another image."""
    pairs, network = Pairs(counts), similarity("network", widths=[5, 3])
    assert isinstance(network, SimilarityNetwork)
    pairs.images, pairs.captions = (side.detach().float().requires_grad_() for side in (pairs.images, pairs.captions))
    parameters = [pairs.images, pairs.captions, *network.parameters()]
    for seed in range(3):
        computed = Logistic().objective(network)(pairs.batch(), seed)
        rows, columns = balanced_pairs(pairs.image_of, np.random.default_rng(seed))
        slow = 0 * pairs.captions.sum()
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            z = 1 if row == column else -1
            p = slow_network(network, pairs.images[pairs.image_of[row]], pairs.captions[column])
            slow = slow + torch.log(1 + torch.exp(-z * p))
        assert computed.rankings is None
        torch.testing.assert_close(computed.loss, slow)
        assert computed.collapsed.item() == pytest.approx(len(rows) * np.log(2))
        gradients, slow_gradients = (
            torch.autograd.grad(loss, parameters, materialize_grads=True) for loss in (computed.loss, slow)
        )
        torch.testing.assert_close(gradients, slow_gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compared_by", ["cosine", "euclidean", "order"])
def test_any_similarity_can_be_taught_single_pairs(compared_by: str) -> None:
    pairs = Pairs([2, 3, 1])
    computed = cost(pairs, Logistic(), compared_by, seed=4)
    rows, columns = balanced_pairs(pairs.image_of, np.random.default_rng(4))
    batch = pairs.batch()
    scores = similarity(compared_by)(batch.images, batch.captions)[rows, columns]
    labels = torch.where(torch.from_numpy(rows == columns), 1.0, -1.0)
    torch.testing.assert_close(computed.loss, torch.log(1 + torch.exp(-labels * scores)).sum(), check_dtype=False)


def test_a_similarity_with_a_direction_is_refused() -> None:
    batch = Batch(numbered(0, 3), numbered(0, 3), np.arange(3), np.arange(3))
    with pytest.raises(UserError, match="a loss of single pairs has no direction, but this similarity has a score for each"):
        Logistic().objective(Table(torch.rand(3, 3), torch.rand(3, 3)))(batch, 0)


@st.composite
def image_numbers(draw: st.DrawFn) -> Indices:
    counts = draw(st.lists(st.integers(1, 6), min_size=2, max_size=9))
    return np.random.default_rng(draw(st.integers(0, 99))).permutation(np.repeat(5 * np.arange(len(counts)), counts))


@given(image_of=image_numbers(), seed=st.integers(0, 99))
def test_there_is_a_negative_pair_for_each_positive_one(image_of: Indices, seed: int) -> None:
    rows, columns = balanced_pairs(image_of, np.random.default_rng(seed))
    n = len(image_of)
    assert rows.tolist() == [*range(n), *range(n)]
    assert columns[:n].tolist() == list(range(n))
    assert (image_of[rows[n:]] != image_of[columns[n:]]).all(), "never another caption of the same image"


def test_every_caption_of_another_image_is_as_likely() -> None:
    image_of = np.asarray([7, 2, 7, 2, 2, 9, 7, 4])
    rng, n_draws = np.random.default_rng(0), 2000
    drawn = Counter[tuple[int, int]]()
    for _ in range(n_draws):
        rows, columns = (side[len(image_of) :].tolist() for side in balanced_pairs(image_of, rng))
        drawn.update(zip(rows, columns, strict=True))
    for row, own in enumerate(image_of):
        negative = np.flatnonzero(image_of != own)
        expected = n_draws / len(negative)
        counts = [drawn.pop((row, int(column))) for column in negative]
        assert sum((count - expected) ** 2 / expected for count in counts) < 26, "chi square of 6 at most: 2 in 10,000"
    assert not drawn


def test_a_batch_of_one_image_has_no_pairs_and_costs_nothing() -> None:
    rows, columns = balanced_pairs(np.asarray([3, 3, 3]), np.random.default_rng(0))
    assert len(rows) == len(columns) == 0
    pairs = Pairs([3])
    computed = Logistic().objective(similarity("network", widths=[5, 3]).double())(pairs.batch(), 0)
    assert computed.loss.item() == computed.collapsed.item() == 0
    assert not any(part.any() for part in pairs.with_gradients(computed.loss))
