from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from tests.training.conftest import Patch
from vse.pipeline.errors import UserError
from vse.training.models.deformations import (
    SCALES_WITH_IDENTITY_INPUT,
    ConditionalFlow,
    ConditionalMlp,
    ConditionalNetwork,
)
from vse.training.models.similarities import todnet
from vse.training.models.similarities.base import Scores
from vse.training.models.similarities.todnet import TodNetSettings, TodNetSimilarity

DIM = 6
CONDITIONS = ["target", "query", "caption", "image", "none"]


def vectors(n: int, seed: int, dim: int = DIM) -> Tensor:
    drawn = torch.randn(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return normalize(drawn, dim=1)


IMAGES, CAPTIONS = vectors(4, 0), vectors(7, 1)


def built(dim: int = DIM, **settings: Any) -> TodNetSimilarity:
    """With small networks whose weights are drawn anywhere."""
    torch.manual_seed(0)
    made = TodNetSettings(**{"width": 5, "identity": False, **settings}).build(dim).double()
    assert isinstance(made, TodNetSimilarity)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return made


def slow_scores(made: TodNetSimilarity, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
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


def with_gradients(score: Any, made: TodNetSimilarity, images: Tensor, captions: Tensor) -> list[Tensor]:
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


@pytest.mark.sampled(8)
@pytest.mark.parametrize("settings", FORMS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_values_and_gradients_are_those_of_the_loop(settings: dict[str, Any]) -> None:
    made, images = built(**settings), 1.7 * IMAGES
    fast = with_gradients(lambda x, c: made((x,), (c,)), made, images, CAPTIONS)
    slow = with_gradients(lambda x, c: slow_scores(made, x, c), made, images, CAPTIONS)
    torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-9)


@given(
    settings=st.sampled_from([{"condition": "target"}, {"condition": "image"}, {"transform": "mlp"}]),
    n=st.integers(1, 4),
    m=st.integers(1, 5),
    log_block=st.integers(0, 6),
    gradients=st.booleans(),
    kept=st.booleans(),
)
def test_scores_ignore_neighbours(
    settings: dict[str, Any], n: int, m: int, log_block: int, gradients: bool, kept: bool
) -> None:
    made, images, captions = built(**settings), vectors(n, 2), vectors(m, 3)
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(gradients):
        patch.setattr(todnet, "_PAIRS_PER_BLOCK", {"cpu": 2**log_block})
        patch.setattr(todnet, "_MAX_STORED_NUMBERS", 2**40 if kept else 0)
        scores = both(made((images,), (captions,)))
        turned = both(made((images.flip(0),), (captions.flip(0),)))
    torch.testing.assert_close([one.flip(0, 1) for one in turned], list(scores), rtol=1e-9, atol=1e-10)
    assert [one.shape for one in scores] == [(n, m)] * 2
    for i in range(n):
        for c in range(m):
            alone = both(made((images[i : i + 1],), (captions[c : c + 1],)))
            torch.testing.assert_close([one[0, 0] for one in alone], [one[i, c] for one in scores], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("log_block", [0, 3, 20])
def test_blocks_that_are_computed_again_have_the_same_gradients(log_block: int, monkeypatch: Patch) -> None:
    made = built()
    whole = with_gradients(lambda x, c: made((x,), (c,)), made, IMAGES, CAPTIONS)
    monkeypatch.setattr(todnet, "_PAIRS_PER_BLOCK", {"cpu": 2**log_block})
    monkeypatch.setattr(todnet, "_MAX_STORED_NUMBERS", 0)
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
    assert isinstance(made, TodNetSimilarity)
    assert [[tuple(layer.weight.shape) for layer in network.linears] for network in made.maps[0].networks] == [
        [(8, 4 + 8), (8, 8), (8, 8)]
    ] * 3
    mlp = TodNetSettings(transform="mlp", width=5).build(8)
    shapes = [tuple(layer.weight.shape) for layer in mlp.maps[0].network.linears]  # type: ignore[union-attr]
    assert shapes == [(5, 16), (5, 5), (5, 5), (5, 5), (8, 5)]


def test_zeros_have_finite_scores_and_gradients() -> None:
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


def test_the_flow_needs_an_even_length_and_a_product_is_inverted_where_no_factor_is_zero() -> None:
    with pytest.raises(UserError, match="their length is 5"):
        TodNetSettings().build(5)
    assert isinstance(TodNetSettings(transform="mlp").build(5), TodNetSimilarity)
    made, x, c = flow("product"), normal(3, DIM), normal(3, OF_CONDITION)
    torch.testing.assert_close(made.inverse(made(x, c), c), x, rtol=1e-6, atol=1e-6)


OF_CONDITION = 4
HOW = {
    "exp": torch.exp,
    "exp_tanh": lambda s: s.tanh().exp(),
    "sigmoid": lambda s: 1 / (1 + torch.exp(-s - 2)),
    "product": lambda s: s,
}


def slow_network(network: ConditionalNetwork, inputs: Tensor) -> Tensor:
    *hidden, last = network.linears
    for layer in hidden:
        inputs = (inputs @ layer.weight.T + layer.bias).relu()
    return inputs @ last.weight.T + last.bias


def slow_flow(made: ConditionalFlow, x: Tensor, condition: Tensor, scale: str, kept: int) -> Tensor:
    halves = list(x.chunk(2, dim=1))
    for network in made.networks:
        s, t = slow_network(network, torch.cat([halves[kept], condition], 1)).chunk(2, dim=1)
        halves[1 - kept] = halves[1 - kept] * HOW[scale](s) + t
        kept = 1 - kept
    return torch.cat(halves, 1)


def drawn(module: torch.nn.Module, seed: int = 0) -> None:
    """Weights and biases anywhere, in double precision."""
    torch.manual_seed(seed)
    module.double()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.4)


def flow(
    scale: str = "exp", layers: int = 3, kept: int = 0, condition_dim: int = OF_CONDITION, seed: int = 0
) -> ConditionalFlow:
    made = ConditionalFlow(DIM, condition_dim, layers, [5, 7], scale, identity=False, kept_half=kept)
    drawn(made, seed)
    return made


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", SCALES_WITH_IDENTITY_INPUT)
@pytest.mark.parametrize(("layers", "kept"), [(1, 0), (2, 1), (3, 0), (3, 1)])
def test_a_flow_follows_its_equations(scale: str, layers: int, kept: int) -> None:
    made, x, c = flow(scale, layers, kept), normal(4, DIM), normal(4, OF_CONDITION, seed=2)
    torch.testing.assert_close(made(x, c), slow_flow(made, x, c, scale, kept), rtol=1e-10, atol=1e-10)


def test_an_mlp_is_one_of_both_inputs_and_begins_as_the_identity_on_request() -> None:
    made, x, c = ConditionalMlp(DIM, OF_CONDITION, [5, 3, 4, 2], identity=False), normal(3, DIM), normal(3, OF_CONDITION)
    drawn(made)
    torch.testing.assert_close(made(x, c), slow_network(made.network, torch.cat([x, c], 1)), rtol=1e-10, atol=1e-10)
    assert len(made.network.linears) == 5
    made = ConditionalMlp(DIM, OF_CONDITION, [5], identity=True).double()
    x = normal(4, DIM)
    assert torch.equal(made(x, normal(4, OF_CONDITION)), x)


@given(
    scale=st.sampled_from(["exp", "exp_tanh", "sigmoid"]),
    layers=st.integers(1, 5),
    kept=st.integers(0, 1),
    condition_dim=st.sampled_from([0, OF_CONDITION]),
    seed=st.integers(0, 10**6),
)
def test_the_inverse_is_exact(scale: str, layers: int, kept: int, condition_dim: int, seed: int) -> None:
    made, x = flow(scale, layers, kept, condition_dim, seed), normal(3, DIM, seed=seed)
    condition = normal(3, condition_dim, seed=seed + 1) if condition_dim else None
    with torch.no_grad():
        y = made(x, condition)
        torch.testing.assert_close(made.inverse(y, condition), x, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(made(made.inverse(x, condition), condition), x, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_the_measured_distance_is_the_mean_over_pairs_sides_and_directions(form: dict[str, Any]) -> None:
    made = built(**form)
    settings, distances = made.settings, []
    for x, c in zip(IMAGES, CAPTIONS[: len(IMAGES)], strict=True):
        if settings.normalize_before:
            x, c = x / x.norm(), c / c.norm()
        for direction in (0, 1):
            target, query = (c, x) if direction == 0 else (x, c)
            conditions = {"target": target, "query": query, "caption": c, "image": x, "none": None}
            for vector in (x, c):
                deformed = made.maps[0 if settings.networks == "one" else direction](vector, conditions[settings.condition])
                before, after = (vector, deformed)
                if settings.normalize_after:
                    before, after = vector / vector.norm(), deformed / deformed.norm()
                distances.append((after - before).norm().item())
    measured = made.measure_pairs((IMAGES,), (CAPTIONS[: len(IMAGES)],))
    assert measured == {"deformation": pytest.approx(sum(distances) / len(distances))}


def test_the_measured_distance_is_zero_before_training() -> None:
    torch.manual_seed(0)
    made = TodNetSettings(width=5).build(DIM).double()
    assert made.measure_pairs((IMAGES,), (CAPTIONS[:4],))["deformation"] == pytest.approx(0, abs=1e-12)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("log_block", [0, 3, 11])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_listed_pairs_have_the_scores_of_the_loop(form: dict[str, Any], log_block: int, monkeypatch: Patch) -> None:
    made, images = built(**form), 1.7 * IMAGES
    if not made.has_condition:
        return
    monkeypatch.setattr(todnet, "_PAIRS_PER_BLOCK", {"cpu": 2**log_block})
    rows, columns = torch.tensor([3, 0, 0, 2, 1, 3, 3, 0, 1]), torch.tensor([6, 0, 1, 1, 5, 6, 2, 4, 0])
    for direction, slow in enumerate(slow_scores(made, images, CAPTIONS)):
        scorer = made.build_pair_scorer(direction, (images,), (CAPTIONS,))
        for some in (slice(None), slice(4, 5), slice(0, 0)):
            expected = slow[rows[some], columns[some]]
            torch.testing.assert_close(scorer(rows[some], columns[some]), expected, rtol=1e-8, atol=1e-9)
