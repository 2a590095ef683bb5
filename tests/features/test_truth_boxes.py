from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.features.drawn_phrases import TRUTHS, drawn_phrases
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cli import main
from vse.features.extraction import extract_shards, merge, verify_sources
from vse.features.extractors.boxes import BoxesExtractor
from vse.features.extractors.proposals import TruthBoxIndex, check_truth_cache, collect_truth_boxes
from vse.features.settings.images import BoxesConfig
from vse.pipeline.dataset.dataset import load_dataset_file, mentions
from vse.pipeline.errors import UserError

CANDIDATES = BoxesConfig(
    name="tiny", model="squeezenet1_1", weights="random", map="features.1", layer="features.2", pool=8, grid=2, shorter=32,
    longer=48, dtype="float32", n_boxes=6,
)  # fmt: skip
TRUTH = CANDIDATES.model_copy(update={"name": "tiny_truth", "boxes": "phrases"})


def extracted(dataset: Path, config: BoxesConfig, out: Path, n_shards: int = 1) -> FeatureCache:
    extract_shards(dataset, BoxesExtractor(config, dataset=dataset), out, n_shards)
    return open_cache(merge(dataset, out, n_shards))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of three images. Read only."""
    return drawn_phrases(tmp_path_factory.mktemp("drawn") / "data")


@pytest.fixture(scope="module")
def truths(few: Path, tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    """A cache of the ground-truth boxes of the small demo. Read only."""
    return extracted(few, TRUTH, tmp_path_factory.mktemp("truths") / "demo_tiny_truth.h5", 3)


def test_an_image_has_each_of_its_phrases_boxes_once_and_that_of_a_plural_is_the_one_around_all(drawn: Path) -> None:
    found = collect_truth_boxes(load_dataset_file(drawn))
    assert {image_id: boxes.tolist() for image_id, boxes in found.items()} == TRUTHS


def test_the_rows_of_an_image_are_its_truths_as_the_data_set_has_them(drawn: Path, tmp_path: Path) -> None:
    """Also one that reaches beyond the image, of which the part inside is read, so that it is known again by its numbers."""
    cache = extracted(drawn, TRUTH, tmp_path / "drawn_tiny_truth.h5")
    reader = FeatureReader(cache)
    assert cache.offsets.tolist() == [0, 2, 2, 4]
    assert reader.boxes.boxes.tolist() == [box for boxes in TRUTHS.values() for box in boxes]
    assert reader.boxes.image_size.tolist() == [[60, 40]] * 3
    assert cache.provenance["counts"] == {"images without a box": 1}
    (tmp_path / "inside.json").write_text('{"0": [], "1": [], "2": [[0.5, 0, 60, 40]]}')
    inside = extracted(drawn, TRUTH.model_copy(update={"boxes": str(tmp_path / "inside.json")}), tmp_path / "drawn_inside.h5")
    np.testing.assert_array_equal(reader.vectors(np.asarray([3])), FeatureReader(inside).vectors(np.asarray([0])))


def test_a_truth_is_looked_up_by_image_and_box(few: Path, truths: FeatureCache) -> None:
    boxed = [mention for mention in mentions(load_dataset_file(few)) if mention.phrase.truth is not None]
    wanted = np.asarray([mention.phrase.truth for mention in boxed])
    images = [mention.image.imgid for mention in boxed]
    numbers = TruthBoxIndex(truths).indices(images, wanted)
    reader = FeatureReader(truths)
    np.testing.assert_array_equal(reader.boxes.boxes[numbers], wanted.astype(np.float32))
    rows = reader.positions(images)
    assert ((truths.offsets[rows] <= numbers) & (numbers < truths.offsets[rows + 1])).all()
    regions = reader.regions(rows[:1])
    np.testing.assert_array_equal(reader.vectors(numbers[:1])[0], regions.features[0, numbers[0] - truths.offsets[rows[0]]])


def test_a_box_that_the_cache_lacks_is_named(truths: FeatureCache) -> None:
    with pytest.raises(UserError, match=r"no ground-truth box \[1.0, 2.0, 3.0, 4.0\] of image 5; extract it again"):
        TruthBoxIndex(truths).indices([5], np.asarray([[1.0, 2, 3, 4]]))


def test_boxes_that_changed_make_a_cache_stale(
    drawn: Path, tmp_path: Path, edit: Callable[..., Path], fails: Callable[..., str]
) -> None:
    """The photographs are what they were."""
    own = drawn_phrases(tmp_path / "data")
    out = tmp_path / "features" / "drawn_tiny_truth.h5"
    cache = extracted(own, TRUTH, out, 2)
    assert verify_sources(cache) == "unchanged"

    def widen(content: Any) -> None:
        content["images"][2]["sentences"][0]["phrases"][0]["boxes"] = [[10, 10, 21, 20]]

    edit(own, widen)
    with pytest.raises(UserError, match="content.boxes_sha256"):
        extract_shards(own, BoxesExtractor(TRUTH, dataset=own), out, 2)
    assert f"{out} was made from another data set: boxes of its phrases differ" in fails(main, "verify", out)
    other = extracted(own, TRUTH, tmp_path / "other" / "drawn_tiny_truth.h5")
    assert other.key != cache.key


def test_captions_that_change_beside_the_boxes_do_not(drawn: Path, tmp_path: Path, edit: Callable[..., Path]) -> None:
    own = drawn_phrases(tmp_path / "data")
    out = tmp_path / "features" / "drawn_tiny_truth.h5"
    key = extracted(own, TRUTH, out).key
    edit(
        own, lambda content: content["images"][1]["sentences"][0].update(raw="the full beach", tokens=["the", "full", "beach"])
    )
    assert extracted(own, TRUTH, out).key == key


def test_a_data_set_without_boxes_has_no_truths(
    tmp_path: Path, edit: Callable[..., Path], fails: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    def bare(content: Any) -> None:
        for image in content["images"]:
            for sentence in image["sentences"]:
                del sentence["phrases"]

    own = edit(drawn_phrases(tmp_path / "data"), bare)
    line = fails(main, "boxes", "--dataset", own, "--feature", "boxes_truth", "--out", tmp_path / "x.h5", *TINY_SETS)
    assert f"{own}: no caption marks a phrase with a box, so there are no ground-truth boxes to read" in line
    caplog.set_level(logging.INFO, "vse")
    assert "upper_bound" not in extracted(own, CANDIDATES, tmp_path / "drawn_tiny.h5").provenance
    assert "IoU" not in caplog.text


TINY_SETS = [
    argument
    for setting in (
        "model=squeezenet1_1", "weights=random", "map=features.1", "layer=features.2", "pool=8", "grid=2", "shorter=32",
        "longer=48",
    )
    for argument in ("--set", setting)
]  # fmt: skip


def test_a_truth_outside_its_image_is_named(tmp_path: Path, edit: Callable[..., Path]) -> None:
    def outside(content: Any) -> None:
        content["images"][2]["sentences"][0]["phrases"][0]["boxes"] = [[70, 10, 80, 20]]

    own = edit(drawn_phrases(tmp_path / "data"), outside)
    with pytest.raises(UserError, match=r"image 2: the box \[70.0, 10.0, 80.0, 20.0\] .* does not overlap the image"):
        extract_shards(own, BoxesExtractor(TRUTH, dataset=own), tmp_path / "x.h5", 1)


def test_truths_go_with_candidates_that_were_read_alike(few: Path, truths: FeatureCache, tmp_path: Path) -> None:
    check_truth_cache(truths, extracted(few, CANDIDATES, tmp_path / "demo_tiny.h5"))
    wide = extracted(few, CANDIDATES.model_copy(update={"name": "wide", "shorter": 40}), tmp_path / "demo_wide.h5")
    with pytest.raises(UserError, match="demo_wide.h5 .* shorter"):
        check_truth_cache(truths, wide)
    seeded = extracted(few, CANDIDATES.model_copy(update={"name": "seeded", "seed": 1}), tmp_path / "demo_seeded.h5")
    with pytest.raises(UserError, match="weights_sha256"):
        check_truth_cache(truths, seeded)
    with pytest.raises(UserError, match="ground-truth boxes are needed .*boxes: phrases"):
        check_truth_cache(wide, truths)
    with pytest.raises(UserError, match="ground-truth boxes are needed"):
        TruthBoxIndex(wide)


def test_truths_of_another_data_set_are_refused(drawn: Path, truths: FeatureCache, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'drawn', .*'demo'"):
        check_truth_cache(extracted(drawn, TRUTH, tmp_path / "drawn_tiny_truth.h5"), truths)
