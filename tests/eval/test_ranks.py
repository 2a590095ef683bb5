from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vse.eval import ranks as ranks_module
from vse.eval.ranks import ranks_from_embeddings, ranks_from_scores
from vse.pipeline.errors import UserError


def slow_ranks(scores: np.ndarray, owners: list[int]) -> tuple[list[int], list[int]]:
    """Ranks by looking at every pair, equal scores against the model."""
    n_images, n_captions = scores.shape
    i2t = []
    for i in range(n_images):
        best = max(scores[i, c] for c in range(n_captions) if owners[c] == i)
        i2t.append(sum(1 for c in range(n_captions) if owners[c] != i and scores[i, c] >= best))
    t2i = [
        sum(1 for i in range(n_images) if i != owners[c] and scores[i, c] >= scores[owners[c], c]) for c in range(n_captions)
    ]
    return i2t, t2i


def check(scores: np.ndarray, owners: list[int]) -> None:
    found = ranks_from_scores(torch.from_numpy(scores), torch.tensor(owners))
    assert (found.i2t.tolist(), found.t2i.tolist()) == slow_ranks(scores, owners)


def test_three_images_with_one_three_and_seven_captions_by_hand() -> None:
    owners = [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    scores = np.zeros((3, 11), np.float32)
    scores[0, [0, 4]] = 1.0, 1.0  # a wrong caption ties with the right one
    scores[1, 2] = 0.5
    scores[2, 10] = 0.2
    scores[1, 10] = 0.3
    found = ranks_from_scores(torch.from_numpy(scores), torch.tensor(owners))
    assert found.i2t.tolist() == [1, 0, 0]
    assert found.t2i.tolist() == [0, 2, 0, 2, 2, 2, 2, 2, 2, 2, 1]


def test_one_image_is_always_found() -> None:
    found = ranks_from_embeddings(torch.rand(1, 4), torch.rand(3, 4), torch.zeros(3, dtype=torch.int64))
    assert (found.i2t.tolist(), found.t2i.tolist()) == ([0], [0, 0, 0])


def test_captions_may_stand_in_any_order() -> None:
    check(np.random.default_rng(0).random((3, 7)).astype(np.float32), [2, 0, 1, 0, 2, 1, 0])


@given(st.data())
def test_ranks_equal_the_slow_count_with_ties_and_any_number_of_captions(data: st.DataObject) -> None:
    n_images = data.draw(st.integers(1, 6))
    extra = data.draw(st.lists(st.integers(0, n_images - 1), max_size=8))
    owners = data.draw(st.permutations([*range(n_images), *extra]))
    values = hnp.arrays(np.float32, (n_images, len(owners)), elements=st.sampled_from([-1.0, 0.0, 0.5, 1.0]))
    check(data.draw(values), owners)


@given(st.data())
def test_embeddings_rank_like_their_score_matrix(data: st.DataObject) -> None:
    n_images, n_each = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 3, 7]))
    small = st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0])
    images = data.draw(hnp.arrays(np.float32, (n_images, 3), elements=small))
    captions = data.draw(hnp.arrays(np.float32, (n_images * n_each, 3), elements=small))
    owners = [k // n_each for k in range(n_images * n_each)]
    found = ranks_from_embeddings(torch.from_numpy(images), torch.from_numpy(captions), torch.tensor(owners))
    assert (found.i2t.tolist(), found.t2i.tolist()) == slow_ranks(images @ captions.T, owners)


@pytest.mark.parametrize("tile", [(1, 1), (3, 4), (512, 4096)])
def test_the_size_of_a_block_does_not_matter(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "TILE_IMAGES", tile[0])
    monkeypatch.setattr(ranks_module, "TILE_CAPTIONS", tile[1])
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(-3, 4, (10, 5), generator=generator).float()
    captions = torch.randint(-3, 4, (25, 5), generator=generator).float()
    owners = torch.randint(0, 10, (25,), generator=generator)
    owners[:10] = torch.arange(10)
    found = ranks_from_embeddings(images, captions, owners)
    assert (found.i2t.tolist(), found.t2i.tolist()) == slow_ranks((images @ captions.T).numpy(), owners.tolist())


@pytest.mark.parametrize("n_images", [3, 700])
def test_a_collapsed_model_gets_no_credit(n_images: int) -> None:
    one = torch.nn.functional.normalize(torch.rand(1, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    owners = torch.arange(n_images).repeat_interleave(5)
    found = ranks_from_embeddings(one.repeat(n_images, 1), one.repeat(5 * n_images, 1), owners)
    assert set(found.i2t.tolist()) == {5 * n_images - 5}
    assert set(found.t2i.tolist()) == {n_images - 1}


def test_what_cannot_be_ranked_is_named() -> None:
    owners = torch.tensor([0, 1])
    with pytest.raises(UserError, match="image row 1 are not finite"):
        ranks_from_scores(torch.tensor([[0.0, 1.0], [float("nan"), 1.0]]), owners)
    with pytest.raises(UserError, match="image row 2 has no caption"):
        ranks_from_scores(torch.zeros(3, 2), owners)
    with pytest.raises(UserError, match="image row 1, but there are 1 images"):
        ranks_from_scores(torch.zeros(1, 2), owners)
    with pytest.raises(UserError, match="images have 3 dimensions, captions 4"):
        ranks_from_embeddings(torch.zeros(2, 3), torch.zeros(2, 4), owners)
