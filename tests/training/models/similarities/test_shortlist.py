from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from vse.eval.ranking.metrics import Ranks
from vse.eval.ranking.ranks import blocks_from_scores, ranks_from_blocks
from vse.training.models.similarities import todnet
from vse.training.models.similarities.todnet import TodNetSettings, TodNetSimilarity, score_shortlist

N_IMAGES, EACH, DIM = 60, 3, 16


def model(strength: float, **settings: Any) -> TodNetSimilarity:
    """Build a TOD-Net that changes the scores of its backbone by an amount that grows with ``strength``."""
    torch.manual_seed(0)
    similarity = TodNetSettings(width=8, **settings).build(DIM).double()
    assert isinstance(similarity, TodNetSimilarity)
    for weight in similarity.parameters():
        torch.nn.init.normal_(weight, std=strength)
    return similarity


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor, Tensor]:
    """Images, captions near their images in an order of their own, and the image of each caption; image 7 has no caption."""
    generator = torch.Generator().manual_seed(1)
    image_of_caption = torch.arange(N_IMAGES).repeat_interleave(EACH)[torch.randperm(EACH * N_IMAGES, generator=generator)]
    image_of_caption = image_of_caption[image_of_caption != 7]
    images = normalize(torch.randn(N_IMAGES, DIM, generator=generator, dtype=torch.float64), dim=1)
    noise = torch.randn(len(image_of_caption), DIM, generator=generator, dtype=torch.float64)
    return images, normalize(4 * images[image_of_caption] + noise, dim=1), image_of_caption


def ranks(similarity: TodNetSimilarity, images: Tensor, captions: Tensor, image_of_caption: Tensor) -> Ranks:
    with torch.inference_mode():
        scores = similarity((images,), (captions,))
    sides = scores if isinstance(scores, tuple) else (scores,)
    return ranks_from_blocks(*(blocks_from_scores(one, image_of_caption) for one in sides))


@pytest.mark.parametrize("settings", [{}, {"condition": "image"}, {"transform": "mlp"}, {"networks": "per_direction"}])
def test_ranks_are_those_of_all_pairs_if_a_model_moves_scores_little(settings: dict[str, Any], data: Any) -> None:
    similarity = model(0.1, **settings)
    blocks, scored = score_shortlist(similarity, *data, min_pairs_per_round=1)
    exact, found = ranks(similarity, *data), ranks_from_blocks(*blocks)
    np.testing.assert_array_equal(found.i2t, exact.i2t)
    np.testing.assert_array_equal(found.t2i, exact.t2i)
    assert list(scored) == (["both"] if settings.get("condition") == "image" else ["i2t", "t2i"])
    assert max(scored.values()) < 0.6


@pytest.mark.parametrize("settings", [{"normalize_after": False}, {"transform": "mlp"}, {"condition": "query"}])
def test_a_pair_that_is_not_scored_can_only_improve_a_rank(settings: dict[str, Any], data: Any) -> None:
    similarity = model(0.3, scale="exp_tanh", **settings)
    blocks, _ = score_shortlist(similarity, *data, min_pairs_per_round=1)
    exact, found = ranks(similarity, *data), ranks_from_blocks(*blocks)
    for name, ranks_found in found.by_direction.items():
        assert (ranks_found <= exact.by_direction[name]).all()
        assert (ranks_found == exact.by_direction[name]).mean() > 0.95


def test_pairs_that_are_not_scored_rank_behind_the_others_in_the_order_of_the_backbone(data: Any) -> None:
    similarity = model(0.1)
    (i2t, _), scored = score_shortlist(similarity, *data, min_pairs_per_round=1)
    with torch.inference_mode():
        exact = similarity((data[0],), (data[1],))[0]
    found, cosines = i2t.score(slice(0, N_IMAGES), None), data[0] @ data[1].T
    is_scored = torch.isclose(found, exact, rtol=0, atol=1e-5)
    assert 0.05 < scored["i2t"] < 0.6
    assert float(is_scored.float().mean()) == pytest.approx(scored["i2t"], abs=1e-4)
    assert found[~is_scored].max() < found[is_scored].min()
    lowered = (cosines - found)[~is_scored]
    torch.testing.assert_close(lowered, lowered[:1].expand_as(lowered))


def test_a_model_that_ranks_unlike_its_backbone_has_its_own_ranks(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds go on as long as pairs change ranks, here to the end."""
    similarity = model(1.0, scale="exp_tanh")
    monkeypatch.setattr(todnet, "_ROWS_PER_BLOCK", 25)
    monkeypatch.setattr(todnet, "_PAIRS_PER_BLOCK", {"cpu": 2**6})
    blocks, scored = score_shortlist(similarity, *data, min_pairs_per_round=1)
    exact, found = ranks(similarity, *data), ranks_from_blocks(*blocks)
    np.testing.assert_array_equal(found.i2t, exact.i2t)
    np.testing.assert_array_equal(found.t2i, exact.t2i)
    assert min(scored.values()) > 0.6


def test_small_sets_are_scored_completely(data: Any) -> None:
    _, scored = score_shortlist(model(0.1), *data)
    assert scored == {"i2t": 1, "t2i": 1}


def test_one_image_and_one_caption_have_a_rank() -> None:
    blocks, _ = score_shortlist(model(0.1), *(torch.ones(1, DIM, dtype=torch.float64) for _ in range(2)), torch.tensor([0]))
    assert ranks_from_blocks(*blocks).t2i.tolist() == [0]
