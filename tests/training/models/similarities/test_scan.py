from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from tests.training.conftest import Patch
from vse.training.kinds import BatchVectors, select_batch_rows
from vse.training.models.similarities import scan
from vse.training.models.similarities.scan import ScanSettings

DIM = 5
FORMS = [(attention, aggregation) for attention in ("t2i", "i2t") for aggregation in ("avg", "lse", "sum", "max")]
NORMS = ["clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm", "clipped", "softmax", "no_norm"]


def sets(counts: list[int], seed: int, more: int = 0) -> BatchVectors:
    """Sets of so many unit vectors each, with anything but zeros as padding."""
    shape, generator = (len(counts), max(counts) + more, DIM), torch.Generator().manual_seed(seed)
    vectors = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return normalize(vectors, dim=2), torch.arange(max(counts) + more) < torch.tensor(counts)[:, None]


IMAGES, CAPTIONS = sets([4, 1, 3, 4], 0, more=1), sets([3, 7, 1, 5, 2, 7], 1, more=2)


def slow_score(regions: Tensor, words: Tensor, settings: ScanSettings) -> Tensor:
    """The score of one image and one caption, with attended vectors, number by number."""
    context, queries = (regions, words) if settings.attention == "t2i" else (words, regions)
    raw = [[torch.dot(v, e) for e in queries] for v in context]
    norm = settings.raw_feature_norm
    h = []
    for row in raw:
        if norm.startswith("clipped"):
            slope = 0.0 if settings.rectifier == "relu" else 0.1
            row = [a if a > 0 else slope * a for a in row]
        if norm.endswith("l2norm"):
            length = sum(a * a for a in row)
            row = [a / (torch.sqrt(length) + 1e-8) if length > 0 else a for a in row]
        elif norm.endswith("l1norm"):
            length = sum(abs(a) for a in row)
            row = [a / (length + 1e-8) for a in row]
        elif norm == "softmax":
            row = [torch.exp(a) / sum(torch.exp(b) for b in row) for a in row]
        h.append(row)
    cosines = []
    for j, query in enumerate(queries):
        attention = torch.softmax(torch.stack([settings.sharpness * row[j] for row in h]), 0)
        attended = sum(w * v for w, v in zip(attention, context, strict=True))
        assert isinstance(attended, Tensor)
        cosines.append(torch.dot(query, attended) / torch.clamp(query.norm() * attended.norm(), min=1e-8))
    relevance = torch.stack(cosines)
    if settings.aggregation == "lse":
        return torch.log(torch.exp(settings.lse_sharpness * relevance).sum()) / settings.lse_sharpness
    return {"avg": relevance.mean, "sum": relevance.sum, "max": relevance.max}[settings.aggregation]()


def slow_scores(images: BatchVectors, captions: BatchVectors, settings: ScanSettings) -> Tensor:
    rows = [
        [slow_score(v[there], e[spoken], settings) for e, spoken in zip(*captions, strict=True)]
        for v, there in zip(*images, strict=True)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def with_gradients(score: Any, images: BatchVectors, captions: BatchVectors) -> list[Tensor]:
    """Scores, and the gradients of both sides for a sum in which each pair has a weight of its own."""
    sides = [side.clone().requires_grad_() for side, _ in (images, captions)]
    scores = score((sides[0], images[1]), (sides[1], captions[1]))
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype).view_as(scores)
    return [scores.detach(), *torch.autograd.grad((scores * weights).sum(), sides)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "settings",
    [
        *({"attention": attention, "aggregation": aggregation, "rectifier": "leaky_relu"} for attention, aggregation in FORMS),
        *({"attention": attention, "raw_feature_norm": norm} for attention in ("t2i", "i2t") for norm in NORMS),
        {"sharpness": 4.0, "lse_sharpness": 20.0, "aggregation": "lse", "attention": "i2t"},
        {"sharpness": 50.0, "raw_feature_norm": "no_norm"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_values_and_gradients_are_those_of_the_loop(settings: dict[str, Any]) -> None:
    config = ScanSettings(**settings)
    fast = with_gradients(config.build(DIM), IMAGES, CAPTIONS)
    slow = with_gradients(lambda i, c: slow_scores(i, c, config), IMAGES, CAPTIONS)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@settings(max_examples=40)
@given(
    form=st.sampled_from(FORMS),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    more=st.integers(0, 2),
    log_block=st.integers(0, 8),
    stored=st.sampled_from([0, 2**6, 2**26]),
    gradients=st.booleans(),
)
def test_a_score_does_not_depend_on_padding_blocks_or_neighbours(
    form: tuple[str, str], counts: list[int], lengths: list[int], more: int, log_block: int, stored: int, gradients: bool
) -> None:
    similarity = ScanSettings(attention=form[0], aggregation=form[1]).build(DIM)
    images, captions = sets(counts, 2, more), sets(lengths, 3, more)
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(gradients):
        patch.setattr(scan, "_COSINES_PER_BLOCK", {"cpu": 2**log_block})
        patch.setattr(scan, "_MAX_STORED_COSINES", stored)
        scores = similarity(images, captions)
    assert scores.shape == (len(counts), len(lengths))
    for i in range(len(counts)):
        for c in range(len(lengths)):
            (v, there), (e, spoken) = select_batch_rows(images, slice(i, i + 1)), select_batch_rows(captions, slice(c, c + 1))
            alone = similarity((v[:, there[0]], there[:, there[0]]), (e[:, spoken[0]], spoken[:, spoken[0]]))
            torch.testing.assert_close(alone, scores[i : i + 1, c : c + 1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
@pytest.mark.parametrize("stored", [0, 2**26])
@pytest.mark.parametrize("log_block", [0, 4, 20])
def test_blocks_that_are_stored_or_computed_again_have_the_same_gradients(
    log_block: int, stored: int, attention: Literal["t2i", "i2t"], monkeypatch: Patch
) -> None:
    similarity = ScanSettings(attention=attention).build(DIM)
    whole = with_gradients(similarity, IMAGES, CAPTIONS)
    monkeypatch.setattr(scan, "_COSINES_PER_BLOCK", {"cpu": 2**log_block})
    monkeypatch.setattr(scan, "_MAX_STORED_COSINES", stored)
    torch.testing.assert_close(with_gradients(similarity, IMAGES, CAPTIONS), whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("attention", "aggregation"), FORMS)
@pytest.mark.parametrize("norm", NORMS)
def test_an_image_without_a_region_has_finite_scores_and_gradients(attention: str, aggregation: str, norm: str) -> None:
    similarity = ScanSettings(attention=attention, aggregation=aggregation, raw_feature_norm=norm).build(DIM)
    nothing = torch.zeros(1, IMAGES[0].shape[1], DIM, dtype=torch.float64), torch.arange(IMAGES[0].shape[1])[None] < 1
    images = tuple(torch.cat(parts) for parts in zip(IMAGES, nothing, strict=True))
    captions = CAPTIONS[0] * torch.tensor([1.0, 1, 1, 0, 1, 1])[:, None, None], CAPTIONS[1]
    scores, *gradients = with_gradients(similarity, images, captions)
    assert all(part.isfinite().all() for part in (scores, *gradients))
    if aggregation in ("avg", "sum"):
        assert not scores[-1].any()
    torch.testing.assert_close(scores[:-1, :3], similarity(IMAGES, select_batch_rows(CAPTIONS, slice(0, 3))))


def test_cases_by_hand() -> None:
    regions = torch.eye(2, dtype=torch.float64)[None]
    half = math.sqrt(0.5)
    words = torch.tensor([[[half, half], [1.0, 0.0]]], dtype=torch.float64)
    full = torch.ones(1, 2, dtype=torch.bool)
    similarity = ScanSettings(aggregation="sum").build(2)
    first = similarity((regions, full), (words, torch.tensor([[True, False]])))
    assert first.item() == pytest.approx(1)
    attention = similarity.compute_attention(
        (regions, full), (words, torch.tensor([[True, False]])), *torch.zeros(2, 1).long()
    )
    assert attention[0, :, 0].tolist() == pytest.approx([0.5, 0.5])
    # The norms over both words: of region 1 (half, 1) / sqrt(1.5), of region 2 (half, 0) / half.
    logits = [9 * 1 / math.sqrt(1.5), 0.0]
    weights = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
    attention = similarity.compute_attention((regions, full), (words, full), *torch.zeros(2, 1).long())
    assert attention[0, :, 1].tolist() == pytest.approx(weights)
    regions = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], dtype=torch.float64)
    words = torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
    sides = (regions, torch.ones(1, 2, dtype=torch.bool)), (words, torch.ones(1, 1, dtype=torch.bool))
    scores, *gradients = with_gradients(ScanSettings().build(2), *sides)
    assert scores.item() == 0
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
def test_weights_add_up_to_one_over_what_is_attended_to(attention: str) -> None:
    similarity = ScanSettings(attention=attention).build(DIM)
    weights = similarity.compute_attention(IMAGES, CAPTIONS, torch.arange(4), torch.arange(4))
    sides = IMAGES[1], CAPTIONS[1][:4]
    inside, asked = sides if attention == "t2i" else sides[::-1]
    torch.testing.assert_close(weights.sum(1)[asked], torch.ones(int(asked.sum()), dtype=torch.float64))
    assert not weights.transpose(1, 2)[~inside[:, None].expand(-1, weights.shape[2], -1)].any()


def test_bf16_is_near_fp32() -> None:
    images, captions = ((vectors.float(), mask) for vectors, mask in (IMAGES, CAPTIONS))
    for attention in ("t2i", "i2t"):
        similarity = ScanSettings(attention=attention).build(DIM)
        exact = similarity(images, captions)
        with torch.autocast("cpu", torch.bfloat16):
            rough = similarity(images, captions)
        assert rough.dtype == torch.float32
        assert 0 < (rough - exact).abs().max() < 0.03
