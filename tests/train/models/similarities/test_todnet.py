"""TOD-Net's scores against a loop over pairs in double precision, and their properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import normalize

from vse.pipeline.errors import UserError
from vse.train.models.similarities import todnet
from vse.train.models.similarities.base import Scores
from vse.train.models.similarities.todnet import TodNet, TodNetSettings

DIM = 6
CONDITIONS = ["target", "query", "caption", "image", "none"]
DIRECTIONAL = [name for name in CONDITIONS if name in ("target", "query")]


def vectors(n: int, seed: int, dim: int = DIM) -> Tensor:
    drawn = torch.randn(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return normalize(drawn, dim=1)


IMAGES, CAPTIONS = vectors(4, 0), vectors(7, 1)


def built(dim: int = DIM, **settings: Any) -> TodNet:
    """With small networks whose weights are drawn anywhere."""
    torch.manual_seed(0)
    made = TodNetSettings(**{"width": 5, "identity": False, **settings}).build(dim).double()
    assert isinstance(made, TodNet)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return made


def slow_scores(made: TodNet, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
    """Pair by pair, both vectors through T; i2t and t2i."""
    settings, matrices = made.settings, []
    for direction in ("i2t", "t2i"):
        deform = made.maps[0] if settings.networks == "one" or direction == "i2t" else made.maps[1]
        rows = []
        for image in images:
            row = []
            for caption in captions:
                x, c = image, caption
                if settings.normalize_before:
                    x, c = x / x.norm(), c / c.norm()
                target, query = (c, x) if direction == "i2t" else (x, c)
                condition = {"target": target, "query": query, "caption": c, "image": x, "none": None}[settings.condition]
                mapped, compared = deform(x, condition), deform(c, condition)
                score = torch.dot(mapped, compared)
                row.append(score / (mapped.norm() * compared.norm()) if settings.normalize_after else score)
            rows.append(torch.stack(row))
        matrices.append(torch.stack(rows))
    return matrices[0], matrices[1]


def both(scores: Scores) -> tuple[Tensor, Tensor]:
    return scores if isinstance(scores, tuple) else (scores, scores)


def with_gradients(score: Any, made: TodNet, images: Tensor, captions: Tensor) -> list[Tensor]:
    """Both matrices, and the gradients of all weights and sides for a sum in which each score has a weight of its own."""
    sides = [side.clone().requires_grad_() for side in (images, captions)]
    scores = torch.stack(both(score(*sides)))
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype).view_as(scores)
    return [scores.detach(), *torch.autograd.grad((scores * weights).sum(), [*sides, *made.parameters()])]


FORMS = [
    *({"condition": condition, "networks": networks} for condition in CONDITIONS for networks in ("one", "per_direction")),
    *({"condition": condition, "transform": "mlp"} for condition in CONDITIONS),
    *({"scale": scale, "kept_first": "second"} for scale in ("exp_tanh", "sigmoid", "product")),
    {"transform": "mlp", "identity": True},
    {"layers": 1, "hidden": 1},
    {"layers": 1, "kept_first": "second", "condition": "image"},
    {"normalize_before": False},
    {"normalize_after": False},
    {"normalize_after": False, "layers": 1, "condition": "caption"},
]


@pytest.mark.parametrize("settings", FORMS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_values_and_gradients_are_those_of_the_loop(settings: dict[str, Any]) -> None:
    made, images = built(**settings), 1.7 * IMAGES
    fast = with_gradients(lambda x, c: made((x,), (c,)), made, images, CAPTIONS)
    slow = with_gradients(lambda x, c: slow_scores(made, x, c), made, images, CAPTIONS)
    torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("networks", ["one", "per_direction"])
def test_there_is_a_matrix_for_each_direction_where_they_differ(condition: str, networks: str) -> None:
    found = built(condition=condition, networks=networks)((IMAGES,), (CAPTIONS,))
    assert isinstance(found, tuple) == (condition in DIRECTIONAL or networks == "per_direction")


def test_query_and_target_exchange_the_directions() -> None:
    target, query = (both(built(condition=name)((IMAGES,), (CAPTIONS,))) for name in ("target", "query"))
    torch.testing.assert_close(target, query[::-1])
    assert (target[0] - target[1]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("settings", [*({"condition": name} for name in CONDITIONS), {"transform": "mlp"}])
@given(n=st.integers(1, 5), m=st.integers(1, 6), log_block=st.integers(0, 6), gradients=st.booleans(), kept=st.booleans())
def test_a_score_does_not_depend_on_blocks_order_or_neighbours(
    settings: dict[str, Any], n: int, m: int, log_block: int, gradients: bool, kept: bool
) -> None:
    made, images, captions = built(**settings), vectors(n, 2), vectors(m, 3)
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(gradients):
        patch.setattr(todnet, "_BLOCK", {"cpu": 2**log_block})
        patch.setattr(todnet, "_KEPT", 2**40 if kept else 0)
        scores = both(made((images,), (captions,)))
        turned = both(made((images.flip(0),), (captions.flip(0),)))
    torch.testing.assert_close([one.flip(0, 1) for one in turned], list(scores), rtol=1e-9, atol=1e-10)
    for direction in range(2):
        assert scores[direction].shape == (n, m)
        for i in range(n):
            for c in range(m):
                alone = both(made((images[i : i + 1],), (captions[c : c + 1],)))[direction]
                torch.testing.assert_close(alone[0, 0], scores[direction][i, c], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("log_block", [0, 3, 20])
def test_blocks_that_are_computed_again_have_the_same_gradients(log_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = built()
    whole = with_gradients(lambda x, c: made((x,), (c,)), made, IMAGES, CAPTIONS)
    monkeypatch.setattr(todnet, "_BLOCK", {"cpu": 2**log_block})
    monkeypatch.setattr(todnet, "_KEPT", 0)
    again = with_gradients(lambda x, c: made((x,), (c,)), made, IMAGES, CAPTIONS)
    torch.testing.assert_close(again, whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("settings", [{}, {"scale": "exp_tanh"}, {"scale": "product"}, {"transform": "mlp"}])
def test_it_begins_as_the_cosine(condition: str, settings: dict[str, Any]) -> None:
    made = TodNetSettings(condition=condition, networks="per_direction", **settings).build(DIM).double()
    for scores in both(made((2 * IMAGES,), (CAPTIONS,))):
        torch.testing.assert_close(scores, IMAGES @ CAPTIONS.T, rtol=1e-13, atol=1e-14)


def test_what_is_left_open_has_the_paper_s_values() -> None:
    made = TodNetSettings().build(8)
    assert isinstance(made, TodNet)
    assert [[tuple(layer.weight.shape) for layer in network.linears] for network in made.maps[0].networks] == [
        [(8, 4 + 8), (8, 8), (8, 8)]
    ] * 3
    mlp = TodNetSettings(transform="mlp", width=5).build(8)
    shapes = [tuple(layer.weight.shape) for layer in mlp.maps[0].network.linears]  # type: ignore[union-attr]
    assert shapes == [(5, 16), (5, 5), (5, 5), (5, 5), (8, 5)]


def test_zeros_have_finite_scores_and_gradients() -> None:
    """Zero vectors, which unit length leaves as they are, at the identity: a cosine of 0."""
    made = TodNetSettings(width=5).build(DIM).double()
    images = torch.cat([IMAGES, torch.zeros(1, DIM, dtype=torch.float64)])
    scores, *gradients = with_gradients(lambda x, c: made((x,), (c,)), made, images, CAPTIONS)
    assert not scores[:, -1].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("settings", [{}, {"transform": "mlp"}])
def test_bf16_is_near_fp32(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    made = TodNetSettings(identity=False, **settings).build(32)
    images, captions = vectors(8, 0, 32).float(), vectors(9, 1, 32).float()
    exact = torch.stack(both(made((images,), (captions,))))
    with torch.autocast("cpu", torch.bfloat16):
        rough = torch.stack(both(made((images,), (captions,))))
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.03


def test_an_odd_length_is_refused_of_the_flow_alone() -> None:
    with pytest.raises(UserError, match="their length is 5"):
        TodNetSettings().build(5)
    assert isinstance(TodNetSettings(transform="mlp").build(5), TodNet)


@pytest.mark.parametrize("settings", [{"layers": 0}, {"width": 0}, {"condition": "both"}, {"scale": "softplus"}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TodNetSettings(**settings)
