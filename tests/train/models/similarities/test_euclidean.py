"""Minus the Euclidean distance against nested loops, values and gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.train.models.similarities.sides import embeddings, unit, with_gradients
from vse.train.models.similarities.vectors import EuclideanSettings, cosine, euclidean


def slow_euclidean(images: Tensor, captions: Tensor, floor: float) -> Tensor:
    """Pair by pair, coordinate by coordinate."""
    rows = []
    for image in images:
        squares = [sum((v - c) ** 2 for v, c in zip(image, caption, strict=True)) for caption in captions]
        rows.append(torch.stack([-(square + floor).sqrt() for square in squares]))
    return torch.stack(rows)


@pytest.mark.parametrize("floor", [0.0, 1e-4, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 4, 3), (4, 1, 3), (5, 3, 6)])
def test_euclidean_and_its_gradients_equal_the_nested_loops(
    floor: float, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    sides = unit(*embeddings(*shape, dtype=dtype))
    found, slow = (with_gradients(compute(*sides, floor), sides) for compute in (euclidean, slow_euclidean))
    torch.testing.assert_close(found, slow)


def test_euclidean_is_minus_the_distance_and_has_the_gradients_of_finite_differences() -> None:
    sides = embeddings(4, 5, 3)
    torch.testing.assert_close(euclidean(*sides), -torch.cdist(*sides))
    for floor in (0.0, 1e-4):
        assert torch.autograd.gradcheck(lambda images, captions, floor=floor: euclidean(images, captions, floor), sides)


def test_unit_vectors_rank_by_their_distance_as_by_their_cosine() -> None:
    sides = unit(*embeddings(6, 9, 4))
    for dim in (0, 1):
        found, expected = (compute(*sides).argsort(dim) for compute in (euclidean, cosine))
        assert torch.equal(found, expected)


def equal_pairs(dtype: torch.dtype) -> list[Tensor]:
    """Three images and the same three as captions, between others."""
    images, captions = unit(*embeddings(3, 2, 8, dtype, seed=3))
    return [images, torch.cat([captions.detach(), images.detach()]).requires_grad_()]


@pytest.mark.parametrize("vector", [[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
def test_equal_vectors_are_at_no_distance_and_have_no_gradient(vector: list[float]) -> None:
    sides = [torch.tensor([vector], requires_grad=True) for _ in range(2)]
    scores = euclidean(*sides)
    assert scores.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(scores.sum(), sides))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_vectors_among_others_do_no_harm(dtype: torch.dtype) -> None:
    """Rounding may leave them a root of it apart; nothing becomes NaN, and no gradient is longer than 1, as of a distance."""
    sides = equal_pairs(dtype)
    scores = euclidean(*sides)
    assert scores[[0, 1, 2], [2, 3, 4]].abs().max() < 10 * torch.finfo(dtype).eps ** 0.5
    for row, column in product(range(3), range(5)):
        for gradient in torch.autograd.grad(scores[row, column], sides, retain_graph=True):
            assert gradient.isfinite().all()
            assert gradient.norm() < (1e-2 if column == row + 2 else 1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_a_floor_equal_vectors_are_at_its_root_and_have_no_gradient(dtype: torch.dtype) -> None:
    sides = equal_pairs(dtype)
    own = euclidean(*sides, 1e-4)[[0, 1, 2], [2, 3, 4]]
    torch.testing.assert_close(own, torch.full_like(own, -0.01), rtol=0.01, atol=0)
    for gradient in torch.autograd.grad(own.sum(), sides):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-4)


@pytest.mark.parametrize("floor", [0.0, 1e-4])
def test_a_nan_is_not_hidden_in_a_distance(floor: float) -> None:
    images, captions = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[torch.nan, 1.0], [1.0, 0.0]])
    assert euclidean(images, captions, floor).isnan().tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_a_side_may_be_empty(sizes: tuple[int, int]) -> None:
    sides = embeddings(*sizes, 4)
    scores = euclidean(*sides)
    assert scores.shape == sizes
    assert not any(gradient.any() for gradient in torch.autograd.grad(scores.sum(), sides))


@pytest.mark.parametrize("floor", [0.0, 1e-4])
def test_the_settings_name_the_floor(floor: float) -> None:
    images, captions = embeddings(3, 4, 5, torch.float32)
    scores = EuclideanSettings(floor=floor).build(5)((images,), (captions,))
    assert torch.equal(scores, euclidean(images, captions, floor))


def test_a_floor_is_not_below_zero() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        EuclideanSettings(floor=-1)
