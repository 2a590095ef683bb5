"""Scores of pairs a tile at a time, and ranks, against the model asked pair by pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.eval.slow_ranks import slow_ranks
from tests.train.toy_similarity import ToySettings
from vse.train.kinds import Encoded, Kind, pack, select
from vse.train.models.build import Input, Model, ModelConfig, build_model
from vse.train.models.similarities import SIMILARITIES
from vse.train.models.similarities.base import Similarity, SimilaritySettings
from vse.train.solvers import encode as encode_module
from vse.train.solvers.encode import PairScores, ranks


class MeanSettings(SimilaritySettings):
    """A network on the mean of a set and on single vectors of captions, the same for both directions."""

    name: Literal["mean"] = "mean"
    images: ClassVar = Kind.SETS

    def build(self, dim: int) -> Similarity:
        return MeanOfRegions(dim)


class MeanOfRegions(Similarity):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.map = nn.Linear(dim, dim)

    def forward(self, images: Encoded, captions: Encoded) -> Tensor:
        regions, inside = images
        means = (self.map(regions).relu() * inside[:, :, None]).sum(1) / inside.sum(1)[:, None]
        return means @ captions[0].T


DIM = 6


def sets(n: int, longest: int, seed: int) -> Encoded:
    """Sets of one to ``longest`` unit vectors, some of them equal, with something other than zeros as padding."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (n,), generator=rng)
    vectors = torch.nn.functional.normalize(torch.randn(n, longest, DIM, generator=rng), dim=2)
    mask = torch.arange(longest) < lengths[:, None]
    copies = torch.randint(n, (n,), generator=rng)
    alike = torch.rand(n, generator=rng) < 0.3
    return torch.where(alike[:, None, None], vectors[copies], vectors), torch.where(alike[:, None], mask[copies], mask)


def model(similarity: str) -> Model:
    """The similarity within a model; its encoders do not matter."""
    states = "last" if similarity in ("mean", "network") else "all"
    kind = Kind.VECTORS if similarity == "network" else Kind.SETS
    config = ModelConfig.model_validate(
        {"dim": DIM, "word_dim": 2, "similarity": similarity, "caption_encoder": {"name": "gru", "states": states}}
    )
    torch.manual_seed(1)
    return build_model(config, Input(kind, 3, "x"), Input(Kind.WORDS, 5, "the captions"))


@pytest.fixture(scope="module", autouse=True)
def lines() -> Iterator[None]:
    """Two more similarities; and tiles of 8 images and 16 captions, of which the last ones are smaller."""
    for part in (ToySettings, MeanSettings):
        SIMILARITIES.add(part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_module, "TILE_IMAGES", 8)
        patch.setattr(encode_module, "TILE_CAPTIONS", 16)
        yield
    for name in ("toy", "mean"):
        SIMILARITIES.remove(name)


def sides(similarity: str, n_images: int, n_captions: int, seed: int) -> tuple[Encoded, Encoded]:
    images, captions = sets(n_images, 5, seed), sets(n_captions, 11, seed + 1)
    if similarity == "network":
        images = (images[0][:, 0],)
    return images, captions if similarity == "toy" else (captions[0][:, 0],)


def own(side: Encoded, row: int) -> Encoded:
    """One image or caption alone, without its padding."""
    one = select(side, torch.tensor([row]))
    return one if len(one) == 1 else (one[0][:, one[1][0]], one[1][:, one[1][0]])


def slow_scores(model: Model, images: Encoded, captions: Encoded) -> tuple[np.ndarray, np.ndarray]:
    """Both directions, pair by pair."""
    i2t, t2i = np.empty((2, len(images[0]), len(captions[0])))
    with torch.inference_mode():
        for i in range(len(images[0])):
            for c in range(len(captions[0])):
                scores = model.similarity(own(images, i), own(captions, c))
                i2t[i, c], t2i[i, c] = scores if isinstance(scores, tuple) else (scores, scores)
    return i2t, t2i


SIZES = [(1, 1), (3, 16), (8, 17), (9, 5), (16, 39)]


@pytest.mark.parametrize("similarity", ["toy", "mean", "network"])
@pytest.mark.parametrize(("n_images", "n_captions"), SIZES)
def test_scores_are_those_of_each_pair(similarity: str, n_images: int, n_captions: int) -> None:
    made, (images, captions) = model(similarity), sides(similarity, n_images, n_captions, 3)
    slow = slow_scores(made, images, captions)
    scores = PairScores(made, pack([images]), pack([captions]))
    assert scores.has_directions == (similarity == "toy")
    for rows in (slice(start, min(start + 8, n_images)) for start in range(0, n_images, 8)):
        for columns in (None, torch.arange(n_captions - 1, -1, -2), torch.empty(0, dtype=torch.int64)):
            for direction, fast in zip(slow, scores(rows, columns), strict=True):
                expected = direction[rows] if columns is None else direction[rows][:, columns.numpy()]
                assert fast.dtype == torch.float32
                np.testing.assert_allclose(fast, expected, atol=1e-6)


@pytest.mark.parametrize("similarity", ["toy", "mean", "network"])
@given(n_images=st.integers(1, 8), per_image=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_pair_scores_the_same_whatever_it_is_scored_with(similarity: str, n_images: int, per_image: int, seed: int) -> None:
    """Bit for bit, and equal captions as well: ranks with ties depend on it."""
    n_captions = n_images * per_image
    made, (images, captions) = model(similarity), sides(similarity, n_images, n_captions, seed)
    scores = PairScores(made, pack([images]), pack([captions]))
    whole = [direction.clone() for direction in scores(slice(0, n_images), None)]
    columns = torch.randperm(n_captions)[: max(1, n_captions // 2)]
    for one, all_of_them in zip(scores(slice(0, n_images), columns), whole, strict=True):
        assert torch.equal(one, all_of_them[:, columns])
    for a in range(n_captions):
        for b in range(a):
            if all(torch.equal(x, y) for x, y in zip(own(captions, a), own(captions, b), strict=True)):
                assert all(torch.equal(direction[:, a], direction[:, b]) for direction in whole)


@pytest.mark.parametrize("similarity", ["toy", "mean", "network"])
@pytest.mark.parametrize("n_images", [1, 8, 17])
def test_ranks_are_those_of_the_whole_matrix(similarity: str, n_images: int) -> None:
    image_of_caption = torch.arange(n_images).repeat_interleave(3)
    made, (images, captions) = model(similarity), sides(similarity, n_images, 3 * n_images, n_images)
    scores = PairScores(made, pack([images]), pack([captions]))
    parts = [scores(slice(start, min(start + 4, n_images)), None) for start in range(0, n_images, 4)]
    i2t, t2i = (torch.cat([part[k] for part in parts]).numpy() for k in (0, 1))
    fast = ranks(made, pack([images]), pack([captions]), image_of_caption)
    assert fast.i2t.tolist() == slow_ranks(i2t, image_of_caption.tolist())[0]
    assert fast.t2i.tolist() == slow_ranks(t2i, image_of_caption.tolist())[1]


def test_both_directions_are_computed_at_once() -> None:
    made, (images, captions) = model("toy"), sides("toy", 4, 12, 0)
    i2t, t2i = PairScores(made, pack([images]), pack([captions])).blocks(torch.arange(4).repeat_interleave(3))
    calls = []
    made.similarity.register_forward_hook(lambda *_: calls.append(1))
    i2t.score(slice(0, 4), None)
    once = len(calls)
    t2i.score(slice(0, 4), None)
    assert len(calls) == once > 0


def test_large_sets_are_scored_in_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the pairs of their vectors stay few, whatever the similarity does with them."""
    monkeypatch.setattr(encode_module, "_TILE_PAIRS", 8 * 5 * 16 * 4)
    made, (images, captions) = model("toy"), sides("toy", 3, 40, 2)
    slow = slow_scores(made, images, captions)
    shapes = []
    scores = PairScores(made, pack([images]), pack([captions]))
    made.similarity.register_forward_pre_hook(lambda _, sides: shapes.append((*sides[0][1].shape, *sides[1][1].shape)))
    for direction, fast in zip(slow, scores(slice(0, 3), None), strict=True):
        np.testing.assert_allclose(fast, direction, atol=1e-6)
    assert max(a * b * c * d for a, b, c, d in shapes) <= 8 * 5 * 16 * 4
    assert len({shape[3] for shape in shapes}) > 1
