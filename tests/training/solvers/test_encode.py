from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.eval.slow_ranks import slow_ranks
from tests.training.conftest import Patch, experiment, numbers
from tests.training.toy_similarity import ToySettings
from vse.eval.ranking.metrics import compute_metrics
from vse.training.kinds import BatchVectors, InputKind, pack_embeddings, select_batch_rows
from vse.training.models.build import InputSpec, Model, ModelConfig, build_model
from vse.training.models.similarities import SIMILARITIES
from vse.training.solvers import encode as encode_module
from vse.training.solvers.base import split_into_folds
from vse.training.solvers.encode import PairScores, compute_ranks, encode_split
from vse.training.training import train
from vse.training.use.model import load_run

DIM = 6


def sets(n: int, longest: int, seed: int) -> BatchVectors:
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
    states = "last" if similarity == "network" else "all"
    kind = InputKind.VECTORS if similarity == "network" else InputKind.SETS
    config = ModelConfig.model_validate(
        {"dim": DIM, "word_dim": 2, "similarity": similarity, "caption_encoder": {"name": "gru", "states": states}}
    )
    torch.manual_seed(1)
    return build_model(config, InputSpec(kind, 3, "x"), InputSpec(InputKind.WORDS, 5, "the captions"))


@pytest.fixture(scope="module", autouse=True)
def lines() -> Iterator[None]:
    """The toy similarity; and tiles of 8 images and 16 captions, of which the last ones are smaller."""
    SIMILARITIES.add(ToySettings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_module, "MAX_TILE_IMAGES", 8)
        patch.setattr(encode_module, "MAX_TILE_CAPTIONS", 16)
        yield
    SIMILARITIES.remove("toy")


def sides(similarity: str, n_images: int, n_captions: int, seed: int) -> tuple[BatchVectors, BatchVectors]:
    images, captions = sets(n_images, 5, seed), sets(n_captions, 11, seed + 1)
    if similarity == "network":
        images = (images[0][:, 0],)
    return images, captions if similarity == "toy" else (captions[0][:, 0],)


def own(side: BatchVectors, row: int) -> BatchVectors:
    """One image or caption alone, without its padding."""
    one = select_batch_rows(side, torch.tensor([row]))
    return one if len(one) == 1 else (one[0][:, one[1][0]], one[1][:, one[1][0]])


def slow_scores(model: Model, images: BatchVectors, captions: BatchVectors) -> tuple[np.ndarray, np.ndarray]:
    """Both directions, pair by pair."""
    i2t, t2i = np.empty((2, len(images[0]), len(captions[0])))
    with torch.inference_mode():
        for i in range(len(images[0])):
            for c in range(len(captions[0])):
                scores = model.similarity(own(images, i), own(captions, c))
                i2t[i, c], t2i[i, c] = scores if isinstance(scores, tuple) else (scores, scores)
    return i2t, t2i


SIZES = [(1, 1), (3, 16), (8, 17), (9, 5), (16, 39)]


@pytest.mark.parametrize("similarity", ["toy", "network"])
@pytest.mark.parametrize(("n_images", "n_captions"), SIZES)
def test_scores_are_those_of_each_pair(similarity: str, n_images: int, n_captions: int) -> None:
    made, (images, captions) = model(similarity), sides(similarity, n_images, n_captions, 3)
    slow = slow_scores(made, images, captions)
    scores = PairScores(made, pack_embeddings([images]), pack_embeddings([captions]))
    assert scores.depends_on_direction == (similarity == "toy")
    for rows in (slice(start, min(start + 8, n_images)) for start in range(0, n_images, 8)):
        for columns in (None, torch.arange(n_captions - 1, -1, -2), torch.empty(0, dtype=torch.int64)):
            for direction, fast in zip(slow, scores(rows, columns), strict=True):
                expected = direction[rows] if columns is None else direction[rows][:, columns.numpy()]
                assert fast.dtype == torch.float32
                np.testing.assert_allclose(fast, expected, atol=1e-6)


@pytest.mark.parametrize("similarity", ["toy", "network"])
@given(n_images=st.integers(1, 8), per_image=st.integers(1, 4), seed=st.integers(0, 99))
@example(n_images=1, per_image=2, seed=0)  # fewer captions than a kernel computes at once
def test_a_pair_scores_the_same_whatever_it_is_scored_with(similarity: str, n_images: int, per_image: int, seed: int) -> None:
    n_captions = n_images * per_image
    made, (images, captions) = model(similarity), sides(similarity, n_images, n_captions, seed)
    scores = PairScores(made, pack_embeddings([images]), pack_embeddings([captions]))
    whole = [direction.clone() for direction in scores(slice(0, n_images), None)]
    columns = torch.randperm(n_captions)[: max(1, n_captions // 2)]
    for one, all_of_them in zip(scores(slice(0, n_images), columns), whole, strict=True):
        assert torch.equal(one, all_of_them[:, columns])
    for a in range(n_captions):
        for b in range(a):
            if all(torch.equal(x, y) for x, y in zip(own(captions, a), own(captions, b), strict=True)):
                assert all(torch.equal(direction[:, a], direction[:, b]) for direction in whole)


@pytest.mark.parametrize("similarity", ["toy", "network"])
@pytest.mark.parametrize("n_images", [1, 8, 17])
def test_ranks_are_those_of_the_whole_matrix(similarity: str, n_images: int) -> None:
    image_of_caption = torch.arange(n_images).repeat_interleave(3)
    made, (images, captions) = model(similarity), sides(similarity, n_images, 3 * n_images, n_images)
    scores = PairScores(made, pack_embeddings([images]), pack_embeddings([captions]))
    parts = [scores(slice(start, min(start + 4, n_images)), None) for start in range(0, n_images, 4)]
    i2t, t2i = (torch.cat([part[k] for part in parts]).numpy() for k in (0, 1))
    fast = compute_ranks(made, pack_embeddings([images]), pack_embeddings([captions]), image_of_caption)
    assert fast.i2t.tolist() == slow_ranks(i2t, image_of_caption.tolist())[0]
    assert fast.t2i.tolist() == slow_ranks(t2i, image_of_caption.tolist())[1]


def test_large_sets_are_scored_in_smaller_tiles(monkeypatch: Patch) -> None:
    monkeypatch.setattr(encode_module, "_MAX_TILE_PAIRS", 8 * 5 * 16 * 4)
    made, (images, captions) = model("toy"), sides("toy", 3, 40, 2)
    slow = slow_scores(made, images, captions)
    shapes = []
    scores = PairScores(made, pack_embeddings([images]), pack_embeddings([captions]))
    made.similarity.register_forward_pre_hook(lambda _, sides: shapes.append((*sides[0][1].shape, *sides[1][1].shape)))
    for direction, fast in zip(slow, scores(slice(0, 3), None), strict=True):
        np.testing.assert_allclose(fast, direction, atol=1e-6)
    assert max(a * b * c * d for a, b, c, d in shapes) <= 8 * 5 * 16 * 4
    assert len({shape[3] for shape in shapes}) > 1


def test_folds_are_consecutive_images_with_their_captions() -> None:
    images, image_indices = torch.arange(7.0)[:, None], torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 6])
    captions = 10 * torch.arange(11.0)[:, None]
    folds = list(split_into_folds(pack_embeddings([(images,)]), pack_embeddings([(captions,)]), image_indices, 3))
    assert [fold[0].vectors[:, 0].tolist() for fold in folds] == [[0, 1, 2], [3, 4, 5]]
    assert [fold[1].vectors[:, 0].tolist() for fold in folds] == [[0, 10, 20, 30, 40, 50], [60, 70, 80, 90]]
    assert [fold[2].tolist() for fold in folds] == [[0, 0, 1, 2, 2, 2], [0, 1, 1, 2]]


def test_validation_takes_means_over_folds(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment("train.epochs=1", "train.validate_fold=3"), out=tmp_path / "run")
    opened = load_run(run, "val", device="cpu")
    images, captions = encode_split(opened.model, opened.split, opened.device)
    found = []
    for first in (0, 3):
        image_indices = torch.arange(3).repeat_interleave(5)
        own = (
            pack_embeddings([(images.vectors[first : first + 3],)]),
            pack_embeddings([(captions.vectors[5 * first : 5 * first + 15],)]),
        )
        found.append(compute_metrics(compute_ranks(opened.model, *own, image_indices))["rsum"])
    assert numbers(run)[0]["rsum"] == pytest.approx(np.mean(found))


KEPT_DIM = 3


def kept_sets(counts: list[int], seed: int = 0, n_padding: int = 0) -> BatchVectors:
    """Sets of so many vectors each, with zeros as padding."""
    longest = max(counts) + n_padding
    mask = torch.arange(longest) < torch.tensor(counts)[:, None]
    vectors = torch.randn(*mask.shape, KEPT_DIM, generator=torch.Generator().manual_seed(seed))
    return vectors * mask[:, :, None], mask


def members(encoded: BatchVectors) -> list[list[list[float]]]:
    """The vectors of each set, without the padding."""
    vectors, mask = encoded
    return [one[inside].tolist() for one, inside in zip(vectors, mask, strict=True)]


def test_stored_vectors_follow_each_other_and_members_need_not_come_first() -> None:
    parts = [torch.randn(n, KEPT_DIM) for n in (2, 0, 3)]
    kept = pack_embeddings([(part,) for part in parts])
    assert (len(kept), kept.lengths) == (5, None)
    (whole,) = kept.unpack_all()
    assert torch.equal(whole, torch.cat(parts))
    (some,) = kept.unpack(torch.tensor([4, 0]), longest=9)
    assert torch.equal(some, whole[[4, 0]])
    vectors, mask = torch.arange(6.0).view(1, 3, 2), torch.tensor([[True, False, True]])
    assert members(pack_embeddings([(vectors, mask)]).unpack_all()) == [[[0, 1], [4, 5]]]


@given(
    counts=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    n_more=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_stored_sets_keep_their_vectors_and_are_padded(counts: list[list[int]], n_more: int, seed: int) -> None:
    parts = [kept_sets(part, seed, n_padding=k % 3) for k, part in enumerate(counts)]
    kept = pack_embeddings(parts)
    assert len(kept.vectors) == sum(map(sum, counts))
    expected = [one for part in parts for one in members(part)]
    vectors, mask = kept.unpack_all()
    assert members((vectors, mask)) == expected
    assert mask.shape[1] == vectors.shape[1] == max(map(max, counts))
    assert not vectors[~mask].any()
    rows = torch.randint(len(expected), (3,), generator=torch.Generator().manual_seed(seed))
    longest = max(len(expected[row]) for row in rows.tolist())
    vectors, mask = kept.unpack(rows, longest + n_more)
    assert members((vectors, mask)) == [expected[row] for row in rows.tolist()]
    assert mask.shape == vectors.shape[:2] == (3, longest + n_more)
    assert mask.dtype == torch.bool
    assert not vectors[~mask].any()


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=6), data=st.data())
def test_some_of_the_stored_rows_are_stored_as_they_would_be_alone(counts: list[int], data: st.DataObject) -> None:
    rng = torch.Generator().manual_seed(0)
    kept_sets = [(torch.randn(1, count, 3, generator=rng), torch.ones(1, count, dtype=torch.bool)) for count in counts]
    rows = data.draw(st.lists(st.integers(0, len(counts) - 1), min_size=1))
    some = pack_embeddings(kept_sets).select_rows(torch.tensor(rows))
    alone = pack_embeddings([kept_sets[row] for row in rows])
    assert torch.equal(some.vectors, alone.vectors)
    assert torch.equal(some.lengths, alone.lengths)
    vectors = pack_embeddings([(part[0][:, 0],) for part in kept_sets])
    assert torch.equal(vectors.select_rows(torch.tensor(rows)).vectors, vectors.vectors[rows])
