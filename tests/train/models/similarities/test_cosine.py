from __future__ import annotations

import torch

from tests.train.models.similarities.sides import embeddings, with_gradients
from vse.train.models.similarities.vectors import CosineSettings, cosine


def test_scores_and_gradients_are_those_of_inner_products_number_by_number() -> None:
    for shape in ((1, 1, 1), (1, 4, 3), (4, 1, 3), (5, 3, 6)):
        sides = embeddings(*shape)
        rows = [torch.stack([sum(v * c for v, c in zip(i, j, strict=True)) for j in sides[1]]) for i in sides[0]]
        torch.testing.assert_close(with_gradients(cosine(*sides), sides), with_gradients(torch.stack(rows), sides))


def test_the_part_gives_the_same() -> None:
    images, captions = embeddings(3, 4, 5)
    assert torch.equal(CosineSettings().build(5)((images,), (captions,)), cosine(images, captions))


def test_a_side_may_be_empty() -> None:
    for sizes in ((0, 3), (3, 0)):
        assert cosine(*embeddings(*sizes, 4)).shape == sizes
