"""Scores of phrases with the candidates of their images, and the recalls of a split, against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.train.phrases.some_regions import CPU, DIM, TEXT_DIM, Caches
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.dataset.captions import iou
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.train.kinds import Kind
from vse.train.models.build import Input, Model, ModelConfig, build_model
from vse.train.phrases.localisation import PhraseSplit, recalls, score_candidates
from vse.train.phrases.pairs import phrase_pairs
from vse.train.phrases.regions import BoxFeatures, RegionInputs
from vse.train.phrases.task import cached_phrases

MODELS = {
    "cosine": {"dim": 6, "similarity": {"name": "cosine"}},
    "euclidean": {"dim": 6, "similarity": {"name": "euclidean"}},
    "network": {"dim": 6, "similarity": {"name": "network", "widths": [5]}},
}


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    inputs = Input(Kind.VECTORS, DIM, "regions"), Input(Kind.VECTORS, TEXT_DIM, "phrases")
    return build_model(ModelConfig.model_validate(MODELS[name]), *inputs).eval()


@pytest.fixture(scope="module")
def split(caches: Caches) -> PhraseSplit:
    """The training split, in which the last image has lost its candidates."""
    cache = open_cache(caches.candidates)
    dataset = load_dataset_file(cache.captions)
    pairs = phrase_pairs(dataset, dataset.split("train"))
    candidates = BoxFeatures(cache, pairs.image_ids, CPU)
    candidates.counts = candidates.counts * (np.arange(len(candidates.counts)) < len(candidates.counts) - 1)
    return PhraseSplit(pairs, RegionInputs(candidates, None, "none", CPU), cached_phrases(open_cache(caches.phrases), CPU))


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_each_phrase_alone(name: str, split: PhraseSplit) -> None:
    model, candidates = model_of(name), split.regions.candidates
    scores, offsets = score_candidates(model, split), split.offsets
    assert len(scores) == offsets[-1]
    for phrase, image in enumerate(split.pairs.image_of.tolist()):
        own = np.arange(candidates.counts[image]) + candidates.starts[image]
        found = scores[offsets[phrase] : offsets[phrase + 1]]
        assert split.candidates[offsets[phrase] : offsets[phrase + 1]].tolist() == own.tolist()
        if not len(own):
            continue
        with torch.inference_mode():
            regions = model.embed_images(split.regions.read(own))
            asked = model.embed_captions(*split.texts.read(split.pairs.text_of[phrase : phrase + 1]))
            pairwise = name == "network"
            expected = model.similarity(regions, asked)[:, 0] if pairwise else regions[0] @ asked[0][0]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-6)


def test_recalls_are_those_of_a_loop_over_phrases(split: PhraseSplit) -> None:
    scores = np.random.default_rng(0).integers(0, 5, int(split.offsets[-1])).astype(np.float32)
    boxes, found = split.regions.candidates.boxes[split.candidates], {1: 0, 5: 0, 10: 0}
    bound = n = 0
    for phrase in np.flatnonzero(split.pairs.has_box).tolist():
        own = slice(int(split.offsets[phrase]), int(split.offsets[phrase + 1]))
        right = iou(boxes[own], split.pairs.truths[phrase][None])[:, 0] >= 0.5
        order = sorted(zip(-scores[own], right.tolist(), strict=True))  # of equal scores the wrong one first
        n, bound = n + 1, bound + right.any()
        for k in found:
            found[k] += any(is_right for _, is_right in order[:k])
    measured = recalls(split.rank_phrases(scores))
    assert measured == pytest.approx(
        {**{f"phrase_r{k}": 100 * count / n for k, count in found.items()}, "rsum": 100 * sum(found.values()) / n}
    )
    assert split.recall_bound() == pytest.approx(100 * bound / n)
    assert 0 < bound < n


def test_what_is_expected_of_chance_is_near_what_it_gets(split: PhraseSplit) -> None:
    rng = np.random.default_rng(0)
    drawn = [recalls(split.rank_phrases(rng.random(int(split.offsets[-1]), dtype=np.float32)))["rsum"] for _ in range(200)]
    assert 0.7 * np.mean(drawn) < split.expected_rsum() <= np.mean(drawn) + 2
