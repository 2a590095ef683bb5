from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tests.training.conftest import Edit
from tests.training.data.caches import made_by_hand, spoil
from tests.training.phrases.some_regions import CPU, DIM, TEXT_DIM, Caches, World, make_caches, world_of
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.images import iou
from vse.pipeline.errors import UserError
from vse.training.kinds import InputKind
from vse.training.models.build import InputSpec, Model, ModelConfig, build_model
from vse.training.phrases.arrays import (
    KeyedSets,
    RegionFeatures,
    RegionInputs,
    build_phrase_arrays,
    check_phrase_cache,
    find_truth_regions,
    sample_one_per_row,
)
from vse.training.phrases.task import (
    PhraseSplit,
    compute_recalls,
    compute_sentence_scores,
    open_phrase_features,
    score_candidates,
)


def test_a_chain_is_of_one_image_and_a_phrase_without_one_stands_alone(own_demo: Path, edit: Edit) -> None:
    box = {"boxes": [[1, 1, 20, 20]], "first_token": 0, "n_tokens": 1}

    def mark(content: Any) -> None:
        for image in content["images"]:
            for sentence in image["sentences"]:
                sentence.pop("phrases", None)
        for image in content["images"][:2]:
            for sentence, chain in zip(image["sentences"], ("7", "7", "", ""), strict=False):
                sentence["phrases"] = [{**box, "chain": chain}]

    dataset = load_dataset_file(edit(own_demo, mark))
    found = build_phrase_arrays(dataset, dataset.images[:2]).chain_indices.tolist()
    assert [found.count(chain) for chain in found] == [2, 2, 1, 1] * 2


def test_images_without_phrases_and_truths_without_features_are_named(few: Path, world: World, caches: Caches) -> None:
    dataset = load_dataset_file(few)
    with pytest.raises(UserError, match="no phrase with a box in these images"):
        build_phrase_arrays(dataset, [], only_with_box=True)
    cache = open_cache(caches.candidates)
    other = RegionFeatures(cache, world.pairs.image_ids, CPU)
    with pytest.raises(
        UserError, match=r"x.h5: \d+ of \d+ ground-truth boxes have no features, the first is \(.*\) of image \d+"
    ):
        find_truth_regions(world.pairs, other, "x.h5")


def test_the_truth_of_a_pair_is_the_region_with_its_box(world: World) -> None:
    for pair, region in enumerate(world.truth_indices.tolist()):
        truth = region - len(world.candidates)
        assert world.truths.image_indices[truth] == world.pairs.image_indices[pair]
        assert world.truths.boxes[truth].tolist() == world.pairs.truth_boxes[pair].tolist()


def test_phrases_that_changed_since_are_one_line(own_demo: Path, tmp_path: Path, edit: Edit) -> None:
    caches = make_caches(own_demo, tmp_path / "features")
    cache = open_cache(caches.phrases)
    check_phrase_cache(cache, load_dataset_file(own_demo))
    assert len(world_of(caches).pairs)

    def rename(content: Any) -> None:
        for image in content["images"]:
            for sentence in image["sentences"]:
                sentence["tokens"] = ["crimson" if token == "red" else token for token in sentence["tokens"]]

    edit(own_demo, rename)
    with pytest.raises(UserError, match="not the phrases of .*, the first is '.*crimson.*'; extract it again"):
        check_phrase_cache(cache, load_dataset_file(own_demo))


def integers(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int64)


def test_each_place_of_a_row_and_each_other_value_of_a_key_is_as_likely() -> None:
    rng, rows = np.random.default_rng(0), integers([0, 1, 0, 1, 0])
    drawn = Counter(int(sample_one_per_row(rows, 2, rng)[0]) for _ in range(3000))
    assert set(drawn) == {0, 2, 4}
    assert min(drawn.values()) > 900
    sets, rng = KeyedSets(integers([2, 2, 2, 5]), integers([1, 4, 6, 4])), np.random.default_rng(0)
    drawn = Counter(int(sets.sample_other_values(integers([2]), integers([4]), rng)[0]) for _ in range(2000))
    assert set(drawn) == {1, 6}
    assert min(drawn.values()) > 900


MODELS = {
    "cosine": {"dim": 6, "similarity": {"name": "cosine"}},
    "euclidean": {"dim": 6, "similarity": {"name": "euclidean"}},
    "network": {"dim": 6, "similarity": {"name": "network", "widths": [5]}},
}


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    inputs = InputSpec(InputKind.VECTORS, DIM, "regions"), InputSpec(InputKind.VECTORS, TEXT_DIM, "phrases")
    return build_model(ModelConfig.model_validate(MODELS[name]), *inputs).eval()


@pytest.fixture(scope="module")
def split(caches: Caches) -> PhraseSplit:
    """The training split, in which the last image has lost its candidates."""
    cache = open_cache(caches.candidates)
    dataset = load_dataset_file(cache.dataset_file)
    pairs = build_phrase_arrays(dataset, dataset.split("train"))
    candidates = RegionFeatures(cache, pairs.image_ids, CPU)
    candidates.region_counts = candidates.region_counts * (
        np.arange(len(candidates.region_counts)) < len(candidates.region_counts) - 1
    )
    return PhraseSplit(
        pairs, RegionInputs(candidates, None, "none", CPU), open_phrase_features(open_cache(caches.phrases), CPU)
    )


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_each_phrase_alone(name: str, split: PhraseSplit) -> None:
    model, candidates = model_of(name), split.region_inputs.candidates
    scores, offsets = score_candidates(model, split), split.score_offsets
    assert len(scores) == offsets[-1]
    for phrase, image in enumerate(split.phrases.image_indices.tolist()):
        own = np.arange(candidates.region_counts[image]) + candidates.region_starts[image]
        found = scores[offsets[phrase] : offsets[phrase + 1]]
        assert split.candidate_indices[offsets[phrase] : offsets[phrase + 1]].tolist() == own.tolist()
        if not len(own):
            continue
        with torch.inference_mode():
            regions = model.embed_images(split.region_inputs.read(own))
            asked = model.embed_captions(*split.text_inputs.read(split.phrases.text_indices[phrase : phrase + 1]))
            pairwise = name == "network"
            expected = model.similarity(regions, asked)[:, 0] if pairwise else regions[0] @ asked[0][0]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-6)


def test_recalls_are_those_of_a_loop_over_phrases(split: PhraseSplit) -> None:
    scores = np.random.default_rng(0).integers(0, 5, int(split.score_offsets[-1])).astype(np.float32)
    boxes, found = split.region_inputs.candidates.boxes[split.candidate_indices], {1: 0, 5: 0, 10: 0}
    bound = n = 0
    for phrase in np.flatnonzero(split.phrases.true_box_mask).tolist():
        own = slice(int(split.score_offsets[phrase]), int(split.score_offsets[phrase + 1]))
        right = iou(boxes[own], split.phrases.truth_boxes[phrase][None])[:, 0] >= 0.5
        order = sorted(zip(-scores[own], right.tolist(), strict=True))  # of equal scores the wrong one first
        n, bound = n + 1, bound + right.any()
        for k in found:
            found[k] += any(is_right for _, is_right in order[:k])
    measured = compute_recalls(split.rank_candidates(scores))
    assert measured == pytest.approx(
        {**{f"phrase_r{k}": 100 * count / n for k, count in found.items()}, "rsum": 100 * sum(found.values()) / n}
    )
    assert split.compute_recall_bound() == pytest.approx(100 * bound / n)
    assert 0 < bound < n


def test_what_is_expected_of_chance_is_near_what_it_gets(split: PhraseSplit) -> None:
    rng = np.random.default_rng(0)
    drawn = [
        compute_recalls(split.rank_candidates(rng.random(int(split.score_offsets[-1]), dtype=np.float32)))["rsum"]
        for _ in range(200)
    ]
    assert 0.7 * np.mean(drawn) < split.compute_random_rsum() <= np.mean(drawn) + 2


def captions(split: PhraseSplit) -> tuple[np.ndarray, int]:
    """The number of each phrase's caption, and how many captions there are: the last has no phrase."""
    ids, caption_indices = np.unique(split.phrases.caption_ids, return_inverse=True)
    return caption_indices, len(ids) + 1


def slow_score(model: Model, split: PhraseSplit, image: int, phrases: list[int]) -> float:
    """The mean over phrases of the score with the best region, one pair at a time."""
    candidates, best = split.region_inputs.candidates, []
    own = np.arange(candidates.region_counts[image]) + candidates.region_starts[image]
    for phrase in phrases:
        text = model.embed_captions(*split.text_inputs.read(split.phrases.text_indices[phrase : phrase + 1]))
        scores = []
        for region in own:
            seen = model.embed_images(split.region_inputs.read(np.asarray([region])))
            if model.scores_every_pair:
                scores.append(float(model.similarity(seen, text)))
            else:
                scores.append(-float((seen[0].double() - text[0].double()).norm()))
        best.append(max(scores))
    return float(np.mean(best))


@pytest.mark.parametrize("name", MODELS)
def test_a_sentence_scores_as_the_mean_of_its_phrases_with_their_best_regions(name: str, split: PhraseSplit) -> None:
    model, (caption_indices, n_captions) = model_of(name), captions(split)
    found = compute_sentence_scores(model, split, caption_indices, n_captions)
    assert found.shape == (len(split.phrases.image_ids), n_captions)
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        for image, caption in zip(rng.integers(0, len(found) - 1, 40), rng.integers(0, n_captions - 1, 40), strict=True):
            expected = slow_score(model, split, image, np.flatnonzero(caption_indices == caption).tolist())
            assert found[image, caption] == pytest.approx(expected, abs=2e-4)


def test_sentences_without_phrases_or_regions_score_as_the_worst_and_repeated_phrases_count_twice(split: PhraseSplit) -> None:
    caption_indices, n_captions = captions(split)
    found = compute_sentence_scores(model_of("euclidean"), split, caption_indices, n_captions)
    worst = found[:-1, :-1].min()
    assert (found[-1] == worst).all()  # its image has no candidates
    assert (found[:, -1] == worst).all()
    caption_indices, n_captions = captions(split)
    once = compute_sentence_scores(model_of("cosine"), split, caption_indices, n_captions)
    both = np.where(caption_indices == 1, 0, caption_indices)  # the phrases of the second caption are those of the first, too
    together = compute_sentence_scores(model_of("cosine"), split, both, n_captions)
    n = [np.count_nonzero(caption_indices == k) for k in (0, 1)]
    expected = (n[0] * once[:-1, 0] + n[1] * once[:-1, 1]) / sum(n)
    np.testing.assert_allclose(together[:-1, 0], expected, rtol=1e-5)


def by_image(file: Path, name: str) -> dict[int, np.ndarray]:
    with h5py.File(file) as cache:
        offsets = cache["offsets"][:]
        return {
            image: cache[name][offsets[row] : offsets[row + 1]].astype(np.float64)
            for row, image in enumerate(cache["ids"][:].tolist())
        }


@pytest.mark.parametrize("memory_gb", [0.0, 1.0])
def test_regions_are_those_of_the_images_in_their_order(caches: Caches, memory_gb: float) -> None:
    cache = open_cache(caches.candidates)
    ids = cache.ids[[5, 0, 3]]
    found = RegionFeatures(cache, ids, CPU, memory_gb)
    vectors, boxes = (by_image(caches.candidates, name) for name in ("features", "boxes"))
    assert len(found) == found.region_counts.sum() == sum(len(vectors[image]) for image in ids.tolist())
    np.testing.assert_array_equal(found.boxes, np.concatenate([boxes[image] for image in ids.tolist()]))
    some = np.random.default_rng(0).permutation(len(found))[:9]
    expected = np.concatenate([vectors[image] for image in ids.tolist()])[some]
    np.testing.assert_allclose(found.read_region_vectors(some), expected, rtol=1e-6)
    assert found.read_region_vectors(some[:0]).shape == (0, DIM)


@pytest.mark.parametrize("coordinates", ["none", "appended", "alone"])
def test_truths_stand_behind_the_candidates(caches: Caches, coordinates: str) -> None:
    sides = [RegionFeatures(cache, cache.ids, CPU) for cache in map(open_cache, (caches.candidates, caches.truths))]
    inputs = RegionInputs(*sides, coordinates, CPU)
    n = len(sides[0])
    found = inputs.read(np.asarray([n + 2, 1, n, 0]))
    assert found.shape == (4, inputs.dim)
    for row, (side, region) in enumerate(((1, 2), (0, 1), (1, 0), (0, 0))):
        width, height = sides[side].image_sizes[sides[side].image_indices[region]]
        x1, y1, x2, y2 = sides[side].boxes[region].tolist()
        place = [x1 / width, y1 / height, x2 / width, y2 / height, (x2 - x1) * (y2 - y1) / (width * height)]
        vector = sides[side].read_region_vectors(np.asarray([region]))[0].tolist()
        expected = {"none": vector, "appended": [*vector, *place], "alone": place}[coordinates]
        assert found[row].tolist() == pytest.approx(expected, rel=1e-5)


def test_missing_boxes_and_vectors_that_are_not_finite_are_named(caches: Caches, tmp_path: Path, few: Path) -> None:
    plain = made_by_hand(tmp_path, np.ones((4, 3), np.float32), range(4))
    with pytest.raises(UserError, match=r"hand_made.h5 holds 4 image rows of 3 float32; regions with boxes are needed"):
        RegionFeatures(plain, plain.ids, CPU)
    own = make_caches(few, tmp_path)
    spoil(own.candidates, int(open_cache(own.candidates).ids[2]), np.nan)
    cache = open_cache(own.candidates)
    found = RegionFeatures(cache, cache.ids, CPU)
    with pytest.raises(UserError, match=f"the features of id {cache.ids[2]} are not finite"):
        found.read_region_vectors(np.arange(len(found)))
    assert torch.isfinite(found.read_region_vectors(np.asarray([0]))).all()
