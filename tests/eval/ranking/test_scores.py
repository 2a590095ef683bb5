from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.eval.slow_ranks import slow_order_scores
from vse.eval.ranking.scores import SIMILARITIES


def scores(name: str, images: np.ndarray, captions: np.ndarray) -> np.ndarray:
    out = torch.full((len(images), len(captions)), torch.nan)
    SIMILARITIES[name].score(torch.from_numpy(images), torch.from_numpy(captions), out)
    return out.numpy()


def random(n_images: int, n_captions: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n_images, dim)).astype(np.float32), rng.normal(size=(n_captions, dim)).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (1, 9, 1024), (9, 1, 1024), (11, 32, 1024), (3, 5, 70_000)])
def test_scores_equal_a_loop_over_all_pairs(shape: tuple[int, int, int]) -> None:
    images, captions = random(*shape)
    np.testing.assert_allclose(scores("order", images, captions), slow_order_scores(images, captions), rtol=1e-5)
    exact = images.astype(np.float64) @ captions.T.astype(np.float64)
    np.testing.assert_allclose(scores("cosine", images, captions), exact, rtol=1e-5, atol=1e-4)


FEW = st.sampled_from([-1.5, -0.1, 0.0, 0.1, 0.3, 2.0])


@given(st.data())
def test_order_is_never_positive_and_zero_exactly_if_the_image_dominates(data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 4))
    images = data.draw(hnp.arrays(np.float32, (data.draw(st.integers(1, 4)), dim), elements=FEW))
    captions = data.draw(hnp.arrays(np.float32, (data.draw(st.integers(1, 4)), dim), elements=FEW))
    found = scores("order", images, captions)
    assert (found <= 0).all()
    np.testing.assert_array_equal(found == 0, (images[:, None] >= captions).all(2))


@pytest.mark.parametrize("dim", [1, 3, 17, 300, 1024])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_equal_embeddings_score_the_same_wherever_they_stand_in_a_tile(name: str, dim: int) -> None:
    image, caption = random(1, 1, dim)
    tile = SIMILARITIES[name]
    found = scores(name, np.repeat(image, tile.tile_images, 0), np.repeat(caption, tile.tile_captions, 0))
    assert len(np.unique(found)) == 1
