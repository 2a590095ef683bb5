from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.training.models.similarities.sides import embeddings, unit, with_gradients
from vse.eval.ranking.ranks import write_order_scores
from vse.training.models.similarities import vectors as order_module
from vse.training.models.similarities.vectors import (
    EuclideanSettings,
    OrderSettings,
    compute_euclidean_scores,
    compute_inner_products,
    compute_order_scores,
)


def slow_euclidean(images: Tensor, captions: Tensor, floor: float) -> Tensor:
    rows = []
    for image in images:
        squares = [sum((v - c) ** 2 for v, c in zip(image, caption, strict=True)) for caption in captions]
        rows.append(torch.stack([-(square + floor).sqrt() for square in squares]))
    return torch.stack(rows)


@pytest.mark.parametrize("floor", [0.0, 1e-4, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 6)])
def test_euclidean_and_gradients_equal_nested_loops(floor: float, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    sides = unit(*embeddings(*shape, dtype=dtype))
    built = EuclideanSettings(floor=floor).build(shape[2])((sides[0],), (sides[1],))
    found = with_gradients(compute_euclidean_scores(*sides, floor), sides)
    for scores in (slow_euclidean(*sides, floor), built):
        torch.testing.assert_close(found, with_gradients(scores, sides))


def equal_pairs(dtype: torch.dtype) -> list[Tensor]:
    """Three images and the same three as captions, between others."""
    images, captions = unit(*embeddings(3, 2, 8, dtype, seed=3))
    return [images, torch.cat([captions.detach(), images.detach()]).requires_grad_()]


@pytest.mark.parametrize("vector", [[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
def test_equal_vectors_are_at_no_distance_and_have_no_gradient(vector: list[float]) -> None:
    sides = [torch.tensor([vector], requires_grad=True) for _ in range(2)]
    scores = compute_euclidean_scores(*sides)
    assert scores.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(scores.sum(), sides))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_vectors_among_others_do_no_harm_with_or_without_a_floor(dtype: torch.dtype) -> None:
    sides = equal_pairs(dtype)
    scores = compute_euclidean_scores(*sides)
    assert scores[[0, 1, 2], [2, 3, 4]].abs().max() < 10 * torch.finfo(dtype).eps ** 0.5
    for row, column in product(range(3), range(5)):
        for gradient in torch.autograd.grad(scores[row, column], sides, retain_graph=True):
            assert gradient.isfinite().all()
            assert gradient.norm() < (1e-2 if column == row + 2 else 1 + 1e-5)
    sides = equal_pairs(dtype)
    own = compute_euclidean_scores(*sides, 1e-4)[[0, 1, 2], [2, 3, 4]]
    torch.testing.assert_close(own, torch.full_like(own, -0.01), rtol=0.01, atol=0)
    for gradient in torch.autograd.grad(own.sum(), sides):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-4)


FORMS = ["squared", "norm"]


def slow_order(images: Tensor, captions: Tensor, form: str) -> Tensor:
    rows = []
    for image in images:
        row = []
        for caption in captions:
            squares = [(c - v) ** 2 for v, c in zip(image, caption, strict=True) if c > v]
            total = sum(squares, start=0 * (image.sum() + caption.sum()))
            row.append(-(total.sqrt() if form == "norm" and squares else total))
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 6)])
def test_order_and_its_gradients_equal_the_nested_loops(form: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    sides = embeddings(*shape, dtype=dtype)
    built = OrderSettings(form=form).build(shape[2])
    found, slow, of_settings = (
        with_gradients(scores, sides)
        for scores in (compute_order_scores(*sides, form), slow_order(*sides, form), built((sides[0],), (sides[1],)))
    )
    torch.testing.assert_close(found, slow)
    torch.testing.assert_close(found, of_settings)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_finite_where_pairs_tie_and_a_nan_is_not_hidden(form: str) -> None:
    images, captions = embeddings(4, 5, 3)
    captions = torch.cat([images.detach()[:2], torch.zeros(1, 3, dtype=torch.float64), captions.detach()]).requires_grad_()
    found, slow = (
        with_gradients(compute(images, captions, form), [images, captions]) for compute in (compute_order_scores, slow_order)
    )
    torch.testing.assert_close(found, slow)
    one, other = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[torch.nan, 1.0]])
    assert compute_order_scores(one, other, form).isnan().all()
    assert compute_euclidean_scores(one, other).isnan().all()
    assert compute_euclidean_scores(one, other, 1e-4).isnan().all()


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5)),
    block=st.integers(1, 200),
    form=st.sampled_from(FORMS),
)
def test_blocks_of_any_size_give_the_same(shape: tuple[int, int, int], block: int, form: str) -> None:
    sides = embeddings(*shape)
    whole = with_gradients(compute_order_scores(*sides, form), sides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(order_module._DIFFERENCES_PER_BLOCK, "cpu", block)
        parts = with_gradients(compute_order_scores(*sides, form), sides)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(("form", "far"), [("squared", [-25, -9]), ("norm", [-5, -3])])
def test_a_caption_may_be_more_general_than_its_image_but_not_less(form: str, far: list[float]) -> None:
    images = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 7.0]])
    captions = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-1.0, 2.0], [3.0, -9.0]])
    square = {"squared": -4.0, "norm": -2.0}[form]
    expected = [[far[0], 0, square, far[1]], [0, 0, 0, 0], [far[1], 0, 0, far[1]]]
    torch.testing.assert_close(compute_order_scores(images, captions, form), torch.tensor(expected, dtype=torch.float32))


def test_a_tie_beside_a_coordinate_that_exceeds_does_no_harm() -> None:
    images = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    captions = torch.tensor([[1.0, 5.0, 0.0]], requires_grad=True)
    scores = compute_order_scores(images, captions, "norm")
    assert scores.item() == -3
    assert [g.tolist() for g in torch.autograd.grad(scores, (images, captions))] == [[[0, 1, 0]], [[0, -1, 0]]]


class Kept:
    """How many numbers each tensor has that is kept for a backward pass."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.sizes.append(tensor.numel())
        return tensor

    def __enter__(self) -> Kept:
        self.hooks.__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        self.hooks.__exit__(*problem)


@pytest.mark.parametrize("form", FORMS)
def test_no_difference_of_a_pair_is_kept_for_the_backward_pass(form: str) -> None:
    n_images, n_captions, dim = 5, 7, 50
    images, captions = embeddings(n_images, n_captions, dim)
    with Kept() as kept:
        compute_order_scores(images, captions, form)
    with Kept() as plain:
        (captions[None] - images[:, None]).clamp(min=0).square().sum(2)
    assert max(plain.sizes) == n_images * n_captions * dim
    assert 0 < max(kept.sizes) <= n_captions * dim


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
@pytest.mark.parametrize("form", FORMS)
def test_a_side_may_be_empty(form: str, sizes: tuple[int, int]) -> None:
    sides = embeddings(*sizes, 4)
    for scores in (compute_order_scores(*sides, form), compute_inner_products(*sides), compute_euclidean_scores(*sides)):
        assert scores.shape == sizes
        assert not any(gradient.any() for gradient in torch.autograd.grad(scores.sum(), sides))


@pytest.mark.parametrize("form", FORMS)
def test_either_form_ranks_as_evaluation_does(form: Any) -> None:
    images, captions = (side.detach().abs() for side in embeddings(6, 9, 5, torch.float32))
    assert OrderSettings(form=form).ranking_similarity == "order"
    ranked = torch.empty(6, 9)
    write_order_scores(images, captions, ranked)
    scores = OrderSettings(form=form).build(5)((images,), (captions,))
    for dim in (0, 1):
        assert torch.equal(scores.argsort(dim=dim, stable=True), ranked.argsort(dim=dim, stable=True))
