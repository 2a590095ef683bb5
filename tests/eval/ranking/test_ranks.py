from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.eval.slow_ranks import slow_order_scores, slow_ranks
from vse.eval.ranking.metrics import Ranks
from vse.eval.ranking.ranks import (
    SIMILARITIES,
    ScoreBlocks,
    ScoreMatrix,
    blocks_from_scores,
    count_true_per_column,
    count_true_per_row,
    ranks_from_blocks,
    ranks_from_embeddings,
)
from vse.pipeline.errors import UserError


def ranks_from_scores(scores: ScoreMatrix, image_of_caption: torch.Tensor) -> Ranks:
    return ranks_from_blocks(blocks_from_scores(scores, image_of_caption))


def blocks_of(
    scores: np.ndarray,
    image_of_caption: list[int],
    rows: int,
    asked: list[str] | None = None,
    name: str = "",
    columns: int | None = None,
) -> ScoreBlocks:
    """Blocks of a matrix as a model would give them, all in one buffer; ``asked`` records what was asked for."""
    matrix, buffer = torch.from_numpy(scores), torch.empty(rows, len(image_of_caption))

    def score(some: slice, part: slice | torch.Tensor | None) -> torch.Tensor:
        wanted = matrix[some] if part is None else matrix[some][:, part]
        block = buffer.fill_(torch.nan)[: wanted.shape[0], : wanted.shape[1]]
        if asked is not None:
            named = part.tolist() if isinstance(part, torch.Tensor) else "all" if part is None else f"{part.start}:{part.stop}"
            asked.append(f"{name} {some.start} {named}")
        return block.copy_(wanted)

    return ScoreBlocks(len(scores), torch.tensor(image_of_caption), rows, score, columns)


TIES = st.sampled_from([-1.0, 0.0, 0.5, 1.0])
COLUMNS = st.none() | st.integers(1, 13)  # of a block


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """Draw a number of images, captions of some of them in any order, and the rows of a block."""
    n_images = draw(st.integers(1, 7))
    image_of_caption = draw(st.lists(st.integers(0, n_images - 1), min_size=1, max_size=12))
    return n_images, image_of_caption, draw(st.integers(1, 8))


def slow_ranks_of_queries(scores: np.ndarray, image_of_caption: list[int]) -> tuple[list[int], list[int]]:
    """Rank as :func:`slow_ranks` does, except that images without captions are no queries."""
    asking = sorted(set(image_of_caption))
    extra = [image for image in range(len(scores)) if image not in asking]
    padding = np.full((len(scores), len(extra)), -9, np.float32)  # a caption of their own, never in the way
    i2t, t2i = slow_ranks(np.hstack([scores, padding]), [*image_of_caption, *extra])
    return [i2t[image] for image in asking], t2i[: len(image_of_caption)]


@given(splits(), st.data())
def test_blocks_of_any_size_rank_each_direction_like_the_slow_count(
    split: tuple[int, list[int], int], data: st.DataObject
) -> None:
    (n_images, image_of_caption, rows), columns = split, data.draw(COLUMNS)
    shape = (n_images, len(image_of_caption))
    i2t, t2i = (data.draw(hnp.arrays(np.float32, shape, elements=TIES)) for _ in range(2))
    first, second = (blocks_of(scores, image_of_caption, rows, columns=columns) for scores in (i2t, t2i))
    expected = slow_ranks_of_queries(i2t, image_of_caption)
    assert listed(ranks_from_blocks(first)) == expected
    assert listed(ranks_from_blocks(first, second)) == (expected[0], slow_ranks_of_queries(t2i, image_of_caption)[1])
    assert listed(ranks_from_scores(torch.from_numpy(i2t), torch.tensor(image_of_caption))) == expected


@given(splits(), st.data())
def test_every_caption_has_a_rank_among_those_of_other_images(split: tuple[int, list[int], int], data: st.DataObject) -> None:
    (n_images, image_of_caption, rows), columns = split, data.draw(COLUMNS)
    scores = data.draw(hnp.arrays(np.float32, (n_images, len(image_of_caption)), elements=TIES))
    blocks = blocks_of(scores, image_of_caption, rows, columns=columns)
    found = ranks_from_blocks(blocks, with_caption_ranks=True)
    assert found.by_caption.tolist() == [
        sum(1 for other, of in enumerate(image_of_caption) if of != image and scores[image, other] >= scores[image, caption])
        for caption, image in enumerate(image_of_caption)
    ]
    assert (found.i2t.tolist(), found.t2i.tolist()) == listed(ranks_from_blocks(blocks))


def test_two_directions_are_asked_in_lockstep() -> None:
    asked: list[str] = []
    scores = np.zeros((3, 3), np.float32)
    ranks_from_blocks(*(blocks_of(scores, [2, 0, 0], 2, asked, name) for name in ("i2t", "t2i")))
    positives = ["i2t 0 [1, 2]", "t2i 0 [1, 2]", "i2t 2 [0]", "t2i 2 [0]"]
    assert asked == [*positives, "i2t 0 all", "t2i 0 all", "i2t 2 all", "t2i 2 all"]
    asked.clear()
    ranks_from_blocks(*(blocks_of(scores, [2, 0, 0], 3, asked, name, columns=2) for name in ("i2t", "t2i")))
    assert asked[2:] == ["i2t 0 0:2", "t2i 0 0:2", "i2t 0 2:3", "t2i 0 2:3"]


def test_blocks_that_do_not_fit_are_refused() -> None:
    good = blocks_of(np.zeros((3, 4), np.float32), [0, 1, 2, 2], 2)
    for other in (
        replace(good, rows_per_block=3),
        replace(good, columns_per_block=3),
        replace(good, n_images=4),
        replace(good, image_of_caption=torch.tensor([0, 1, 1, 2])),
    ):
        with pytest.raises(ValueError, match="the two directions differ"):
            ranks_from_blocks(good, other)
    with pytest.raises(ValueError, match="blocks of 0 rows"):
        replace(good, rows_per_block=0)
    with pytest.raises(ValueError, match="blocks of 0 columns"):
        replace(good, columns_per_block=0)
    with pytest.raises(ValueError, match=r"shape \(2, 3\), expected \(2, 4\)"):
        ranks_from_blocks(replace(good, score=lambda rows, columns: torch.zeros(2, 3 if columns is None else len(columns))))


@pytest.mark.parametrize("bad", ["i2t", "t2i"])
def test_the_scores_of_either_direction_must_be_finite(bad: str) -> None:
    matrices = {"i2t": np.zeros((5, 5), np.float32), "t2i": np.zeros((5, 5), np.float32)}
    matrices[bad][3, 1] = np.nan
    with pytest.raises(UserError, match="the scores of image row 3 are not finite"):
        ranks_from_blocks(*(blocks_of(scores, [0, 1, 2, 3, 4], 2) for scores in matrices.values()))


SLOW = {"cosine": lambda images, captions: images @ captions.T, "order": slow_order_scores}


def listed(ranks: Ranks) -> tuple[list[int], list[int]]:
    return ranks.i2t.tolist(), ranks.t2i.tolist()


def whole_numbers(n_images: int, n_captions: int, dim: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings whose scores have no rounding but many ties, and image_of_caption in any order."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(-3, 4, (n_images, dim), generator=generator).float()
    captions = torch.randint(-3, 4, (n_captions, dim), generator=generator).float()
    image_of_caption = torch.randint(0, n_images, (n_captions,), generator=generator)
    image_of_caption[:n_images] = torch.arange(n_images)
    return images, captions, image_of_caption[torch.randperm(n_captions, generator=generator)]


@pytest.mark.parametrize("similarity", SIMILARITIES)
@given(data=st.data())
def test_embeddings_rank_like_their_score_matrix(similarity: str, data: st.DataObject) -> None:
    n_images, n_each = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 3, 7]))
    small = st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0])
    images = data.draw(hnp.arrays(np.float32, (n_images, 3), elements=small))
    captions = data.draw(hnp.arrays(np.float32, (n_images * n_each, 3), elements=small))
    image_of_caption = [k // n_each for k in range(n_images * n_each)]
    found = ranks_from_embeddings(
        torch.from_numpy(images), torch.from_numpy(captions), torch.tensor(image_of_caption), similarity
    )
    assert listed(found) == slow_ranks(SLOW[similarity](images, captions), image_of_caption)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@given(tile_images=st.integers(1, 12), tile_captions=st.integers(1, 30))
def test_the_size_of_a_tile_does_not_matter(similarity: str, tile_images: int, tile_captions: int) -> None:
    images, captions, image_of_caption = whole_numbers(10, 25)
    tile = SIMILARITIES[similarity]._replace(tile_images=tile_images, tile_captions=tile_captions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIMILARITIES, similarity, tile)
        found = ranks_from_embeddings(images, captions, image_of_caption, similarity)
    assert listed(found) == listed(ranks_from_embeddings(images, captions, image_of_caption, similarity))


@given(st.integers(0, 9), st.integers(0, 70), st.integers(0, 2**16), st.booleans())
def test_counts_by_bytes_are_sums(n_rows: int, n_columns: int, seed: int, transposed: bool) -> None:
    mask = torch.rand(n_rows, n_columns, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask = mask.T if transposed else mask
    assert torch.equal(count_true_per_row(mask), mask.sum(1))
    assert torch.equal(count_true_per_column(mask), mask.sum(0))
    for n in (255, 256, 2040, 2041, 5000):  # no byte overflows
        assert count_true_per_row(torch.ones(3, n, dtype=torch.bool)).tolist() == [n] * 3
        assert count_true_per_column(torch.ones(n, 3, dtype=torch.bool)).tolist() == [n] * 3


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_collapsed_model_gets_no_credit(similarity: str) -> None:
    n_images, generator = 400, torch.Generator().manual_seed(0)
    image, caption = torch.nn.functional.normalize(torch.rand(2, 1, 64, generator=generator), dim=2)
    image_of_caption = torch.arange(n_images).repeat_interleave(5)
    found = ranks_from_embeddings(image.repeat(n_images, 1), caption.repeat(5 * n_images, 1), image_of_caption, similarity)
    assert set(found.i2t.tolist()) == {5 * n_images - 5}
    assert set(found.t2i.tolist()) == {n_images - 1}


@pytest.mark.usefixtures("shapes_unchecked")
def test_what_cannot_be_ranked_is_named() -> None:
    image_of_caption = torch.tensor([0, 1])
    with pytest.raises(UserError, match="image row 1, but there are 1 images"):
        ranks_from_scores(torch.zeros(1, 2), image_of_caption)
    with pytest.raises(UserError, match="images have 3 dimensions, captions 4"):
        ranks_from_embeddings(torch.zeros(2, 3), torch.zeros(2, 4), image_of_caption)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_embeddings_or_scores_that_are_not_finite_are_named(similarity: str, bad: float) -> None:
    zeros, spoiled, large = torch.zeros(70, 3), torch.zeros(70, 3), torch.zeros(70, 3)
    spoiled[66, 1], large[66] = bad, -3e38
    for images, captions, message in (
        (spoiled, zeros, "images row 66 is not finite"),
        (zeros, spoiled, "captions row 66 is not finite"),
        (large, torch.ones(70, 3), "the scores of image row 66 are not finite"),
    ):
        with pytest.raises(UserError, match=message):
            ranks_from_embeddings(images, captions, torch.arange(70), similarity)


# The scores of similarities, by which embeddings are ranked.


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
    rounding = 1e-7 * np.linalg.norm(images, axis=1).max() * np.linalg.norm(captions, axis=1).max()
    np.testing.assert_allclose(scores("cosine", images, captions), exact, rtol=1e-5, atol=rounding)


@pytest.mark.parametrize("dim", [1, 3, 17, 300, 1024])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_equal_embeddings_score_the_same_wherever_they_stand_in_a_tile(name: str, dim: int) -> None:
    image, caption = random(1, 1, dim)
    tile = SIMILARITIES[name]
    found = scores(name, np.repeat(image, tile.tile_images, 0), np.repeat(caption, tile.tile_captions, 0))
    assert len(np.unique(found)) == 1
