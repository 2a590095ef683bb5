from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.features.drawn_phrases import drawn_phrases
from tests.features.test_truth_boxes import CANDIDATES, TRUTH, extracted
from vse.features.extraction import split_upper_bounds
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of three images. Read only."""
    return drawn_phrases(tmp_path_factory.mktemp("drawn") / "data")


@pytest.fixture(scope="module")
def loaded(few: Path) -> Dataset:
    """The small demo. Read only."""
    return load_dataset_file(few)


def flat(boxes_of: dict[int, list[list[float]]]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Ids, offsets and boxes as a cache has them."""
    offsets = np.cumsum([0, *map(len, boxes_of.values())], dtype=np.int64)
    boxes = np.asarray([box for boxes in boxes_of.values() for box in boxes], np.float32).reshape(-1, 4)
    return np.asarray(list(boxes_of), np.int64), offsets, boxes


@pytest.mark.parametrize(
    ("boxes_of", "covered"),
    [
        ({0: [[0, 0, 20, 40]], 2: [[10, 10, 20, 20]]}, {"train": 2, "test": 1}),
        ({0: [[0, 0, 20, 20]], 2: []}, {"train": 2, "test": 0}),  # half of the man: an IoU of 0.5 is enough
        ({0: [[0, 0, 20, 19]], 2: []}, {"train": 0, "test": 0}),
        ({0: [[30, 0, 40, 10], [50, 20, 60, 30]], 2: []}, {"train": 0, "test": 0}),  # each ball, but not the two balls
        ({0: [[30, 0, 60, 30]]}, {"train": 1, "test": 0}),  # the image 2 is not there at all
        ({2: [[0, 0, 60, 40]], 1: [[0, 0, 20, 40]], 0: []}, {"train": 0, "test": 1}),
    ],
)
def test_a_phrase_is_covered_if_a_box_of_its_image_overlaps_its_truth_by_half(
    boxes_of: dict[int, list[list[float]]], covered: dict[str, int], drawn: Path
) -> None:
    found = split_upper_bounds(load_dataset_file(drawn), *flat(boxes_of))
    assert found == {"train": {"phrases": 3, "covered": covered["train"]}, "test": {"phrases": 2, "covered": covered["test"]}}


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
def test_it_is_what_loops_over_phrases_and_boxes_count(
    loaded: Dataset, boxes: dict[int, list[list[float]]], threshold: float, some: set[int] | None
) -> None:
    expected: dict[str, dict[str, int]] = {}
    for image in loaded.images:
        for phrase in (phrase for caption in image.captions for phrase in caption.phrases):
            if phrase.truth is None or (some is not None and image.imgid not in some):
                continue
            of_split = expected.setdefault(image.split, {"phrases": 0, "covered": 0})
            of_split["phrases"] += 1
            truth = list(phrase.truth)
            of_split["covered"] += any(slow_iou(truth, box) >= threshold for box in boxes.get(image.imgid, []))
    assert split_upper_bounds(loaded, *flat(boxes), some, threshold) == expected


def test_it_is_reported_at_extraction_and_in_the_cache(drawn: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vse")
    (tmp_path / "b.json").write_text(json.dumps({"0": [[0, 0, 20, 40]], "2": [[0, 0, 60, 40], [1, 1, 5, 5]]}))
    config = CANDIDATES.model_copy(update={"boxes": str(tmp_path / "b.json")})
    out = tmp_path / "drawn_tiny.h5"
    cache = extracted(drawn, config, out, 3)
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


def test_it_is_that_of_the_phrases_as_they_are_and_makes_no_cache_stale(drawn: Path, tmp_path: Path) -> None:
    own = drawn_phrases(tmp_path / "data")
    first = extracted(own, CANDIDATES, tmp_path / "drawn_tiny.h5")
    content = json.loads(own.read_text())
    content["images"][0]["sentences"][1]["phrases"] = []
    own.write_text(json.dumps(content))
    again = extracted(own, CANDIDATES, tmp_path / "drawn_tiny.h5")
    assert again.key == first.key
    assert again.provenance["upper_bound"]["splits"]["train"]["phrases"] == 2


def test_the_truths_themselves_have_none(drawn: Path, tmp_path: Path) -> None:
    assert "upper_bound" not in extracted(drawn, TRUTH, tmp_path / "drawn_tiny_truth.h5").provenance
