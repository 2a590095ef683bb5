from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.features.conftest import Edit, Fails, extracted_cache, sets
from tests.features.drawn_phrases import TRUTHS, drawn_phrases, without_phrases
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureReader
from vse.features.cli import extract_main as main
from vse.features.extraction import count_covered_phrases, extract_shards, verify_inputs
from vse.features.extractors.boxes import BoxesExtractor
from vse.features.extractors.proposals import check_truth_cache, collect_truth_boxes
from vse.features.settings.images import BoxesConfig
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError

CANDIDATES = BoxesConfig(
    name="tiny", model="squeezenet1_1", weights="random", map="features.1", layer="features.2", pool=8, grid=2, shorter=32,
    longer=48, dtype="float32", n_boxes=6,
)  # fmt: skip
TRUTH = CANDIDATES.model_copy(update={"name": "tiny_truth", "boxes": "phrases"})


def extracted(dataset: Path, config: BoxesConfig, out: Path, n_shards: int = 1) -> FeatureCache:
    return extracted_cache(dataset, BoxesExtractor(config, dataset=dataset), out, n_shards)


@pytest.fixture(scope="module")
def truths(few: Path, tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return extracted(few, TRUTH, tmp_path_factory.mktemp("truths") / "demo_tiny_truth.h5", 3)


def test_an_image_has_each_of_its_phrases_boxes_once_and_that_of_a_plural_is_the_one_around_all(drawn: Path) -> None:
    found = collect_truth_boxes(load_dataset_file(drawn))
    assert {image_id: boxes.tolist() for image_id, boxes in found.items()} == TRUTHS


def test_the_rows_of_an_image_are_its_truths_as_the_data_set_has_them(drawn: Path, tmp_path: Path) -> None:
    cache = extracted(drawn, TRUTH, tmp_path / "drawn_tiny_truth.h5")
    assert "upper_bound" not in cache.provenance
    reader = FeatureReader(cache)
    assert cache.offsets.tolist() == [0, 2, 2, 4]
    assert reader.region_boxes.boxes.tolist() == [box for boxes in TRUTHS.values() for box in boxes]
    assert reader.region_boxes.image_size.tolist() == [[60, 40]] * 3
    assert cache.provenance["counts"] == {"images without a box": 1}
    (tmp_path / "inside.json").write_text('{"0": [], "1": [], "2": [[0.5, 0, 60, 40]]}')
    inside = extracted(drawn, TRUTH.model_copy(update={"boxes": str(tmp_path / "inside.json")}), tmp_path / "drawn_inside.h5")
    np.testing.assert_array_equal(reader.read_vectors(np.asarray([3])), FeatureReader(inside).read_vectors(np.asarray([0])))


def test_boxes_that_changed_make_a_cache_stale(tmp_path: Path, edit: Edit, fails: Fails) -> None:
    own = drawn_phrases(tmp_path / "data")
    out = tmp_path / "features" / "drawn_tiny_truth.h5"
    cache = extracted(own, TRUTH, out, 2)
    assert verify_inputs(cache) == "unchanged"
    new = {"raw": "the full beach", "tokens": ["the", "full", "beach"]}
    edit(own, lambda content: content["images"][1]["sentences"][0].update(new))
    assert extracted(own, TRUTH, out, 2).key == cache.key, "a caption beside the boxes"

    def put(box: list[int]) -> Callable[[Any], None]:
        return lambda content: content["images"][2]["sentences"][0]["phrases"][0].update(boxes=[box])

    edit(own, put([10, 10, 21, 20]))
    with pytest.raises(UserError, match="content.boxes_sha256"):
        extract_shards(own, BoxesExtractor(TRUTH, dataset=own), out, 2)
    assert f"{out} was made from another data set: boxes of its phrases differ" in fails(main, "verify", out)
    other = extracted(own, TRUTH, tmp_path / "other" / "drawn_tiny_truth.h5")
    assert other.key != cache.key
    edit(own, put([70, 10, 80, 20]))
    with pytest.raises(UserError, match=r"image 2: the box \[70.0, 10.0, 80.0, 20.0\] .* does not overlap the image"):
        extract_shards(own, BoxesExtractor(TRUTH, dataset=own), tmp_path / "x.h5", 1)


def test_without_boxes_there_are_no_truths(tmp_path: Path, fails: Fails, caplog: pytest.LogCaptureFixture) -> None:
    own = without_phrases(tmp_path / "data")
    options = sets("model=squeezenet1_1", "weights=random", "map=features.1", "layer=features.2", "pool=8", "grid=2")
    line = fails(main, "boxes", "--dataset", own, "--feature", "boxes_truth", "--out", tmp_path / "x.h5", *options)
    assert f"{own}: no caption marks a phrase with a box, so there are no ground-truth boxes to read" in line
    caplog.set_level(logging.INFO, "vse")
    assert "upper_bound" not in extracted(own, CANDIDATES, tmp_path / "drawn_tiny.h5").provenance
    assert "IoU" not in caplog.text


@pytest.mark.nightly
def test_truths_go_with_candidates_that_were_read_alike(few: Path, drawn: Path, truths: FeatureCache, tmp_path: Path) -> None:
    check_truth_cache(truths, extracted(few, CANDIDATES, tmp_path / "demo_tiny.h5"))
    wide = extracted(few, CANDIDATES.model_copy(update={"name": "wide", "shorter": 40}), tmp_path / "demo_wide.h5")
    with pytest.raises(UserError, match="demo_wide.h5 .* shorter"):
        check_truth_cache(truths, wide)
    seeded = extracted(few, CANDIDATES.model_copy(update={"name": "seeded", "seed": 1}), tmp_path / "demo_seeded.h5")
    with pytest.raises(UserError, match="weights_sha256"):
        check_truth_cache(truths, seeded)
    with pytest.raises(UserError, match="ground-truth boxes are needed .*boxes: phrases"):
        check_truth_cache(wide, truths)
    with pytest.raises(UserError, match="'drawn', .*'demo'"):
        check_truth_cache(extracted(drawn, TRUTH, tmp_path / "drawn_tiny_truth.h5"), truths)


@pytest.fixture(scope="module")
def loaded(few: Path) -> Dataset:
    return load_dataset_file(few)


def flat(boxes_of: dict[int, list[list[float]]]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Ids, offsets and boxes as a cache has them."""
    offsets = np.cumsum([0, *map(len, boxes_of.values())], dtype=np.int64)
    boxes = np.asarray([box for boxes in boxes_of.values() for box in boxes], np.float32).reshape(-1, 4)
    return np.asarray(list(boxes_of), np.int64), offsets, boxes


def test_half_an_overlap_is_enough(drawn: Path) -> None:
    for height, covered in ((20, 2), (19, 0)):
        found = count_covered_phrases(load_dataset_file(drawn), *flat({0: [[0, 0, 20, height]], 2: []}))
        assert found == {"train": {"phrases": 3, "covered": covered}, "test": {"phrases": 2, "covered": 0}}


def slow_iou(a: list[float], b: list[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


SIDE = st.tuples(st.integers(0, 100), st.integers(1, 60))
BOX = st.tuples(SIDE, SIDE).map(lambda xy: [float(v) for v in (xy[0][0], xy[1][0], sum(xy[0]), sum(xy[1]))])


@given(
    boxes=st.dictionaries(st.integers(0, 11), st.lists(BOX, max_size=3)),
    threshold=st.sampled_from([0.05, 0.2, 0.5]),
    some=st.none() | st.sets(st.integers(0, 11)),
)
def test_the_upper_bound_is_that_of_loops(
    loaded: Dataset, boxes: dict[int, list[list[float]]], threshold: float, some: set[int] | None
) -> None:
    expected: dict[str, dict[str, int]] = {}
    for image in loaded.images:
        for phrase in (phrase for caption in image.captions for phrase in caption.phrases):
            if phrase.truth_box is None or (some is not None and image.imgid not in some):
                continue
            of_split = expected.setdefault(image.split, {"phrases": 0, "covered": 0})
            of_split["phrases"] += 1
            truth = list(phrase.truth_box)
            of_split["covered"] += any(slow_iou(truth, box) >= threshold for box in boxes.get(image.imgid, []))
    assert count_covered_phrases(loaded, *flat(boxes), some, threshold) == expected


def test_the_upper_bound_is_in_the_log_and_the_cache(tmp_path: Path, edit: Edit, caplog: pytest.LogCaptureFixture) -> None:
    own = drawn_phrases(tmp_path / "data")
    caplog.set_level(logging.INFO, "vse")
    (tmp_path / "b.json").write_text(json.dumps({"0": [[0, 0, 20, 40]], "2": [[0, 0, 60, 40], [1, 1, 5, 5]]}))
    config = CANDIDATES.model_copy(update={"boxes": str(tmp_path / "b.json")})
    out = tmp_path / "drawn_tiny.h5"
    cache = extracted(own, config, out, 3)
    assert cache.provenance["upper_bound"] == {
        "iou": 0.5,
        "splits": {"train": {"phrases": 3, "covered": 2, "share": 2 / 3}, "test": {"phrases": 2, "covered": 1, "share": 0.5}},
    }
    said = "phrases with a box of IoU >= 0.5: "
    assert f"{out}: {said}train 66.7% of 3, test 50.0% of 2" in caplog.text
    shard = out.with_suffix(".shards") / "shard-0000"
    assert f"{shard}0-of-00003.h5: {said}train 66.7% of 3\n" in caplog.text
    assert f"{shard}2-of-00003.h5: {said}test 50.0% of 2\n" in caplog.text
    assert f"{shard}1-of-00003.h5: {said}" not in caplog.text, "no phrase of its image has a box"
    edit(own, lambda content: content["images"][0]["sentences"][1].update(phrases=[]))
    again = extracted(own, config, out, 3)
    assert again.key == cache.key, "changed phrases make no cache of candidates stale"
    assert again.provenance["upper_bound"]["splits"]["train"]["phrases"] == 2
