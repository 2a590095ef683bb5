from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.features.cache.feature_cache import FeatureCache, merge_shards, open_cache
from vse.features.cache.reader import FeatureReader, RegionBoxes
from vse.features.cache.rows import Identity, Rows
from vse.features.cache.shards import shard_path, write_shard
from vse.pipeline.errors import UserError

COUNTS = [3, 0, 2, 5, 1]


def regions(folder: Path, boxes: bool = True) -> FeatureCache:
    """A cache of five images in two shards; region k has a feature and a box of the number k."""
    out, first = folder / "demo_r.h5", np.cumsum([0, *COUNTS])
    for index, rows in enumerate((range(2), range(2, 5))):
        numbers = np.arange(first[rows[0]], first[rows[-1] + 1])
        made = Rows(
            ids=np.asarray(rows, np.int64),
            features=(numbers[:, None] * np.ones(3)).astype(np.float32),
            sources=np.zeros((len(rows), 32), np.uint8),
            offsets=first[rows[0] : rows[-1] + 2] - first[rows[0]],
            boxes=(numbers[:, None] + np.arange(4)).astype(np.float32) if boxes else None,
            image_size=np.asarray([[100 + k, 50] for k in rows], np.int32) if boxes else None,
        )
        write_shard(shard_path(out, index, 2), Identity("demo", "r", "image", {}), made)
    return open_cache(merge_shards(out, 2, folder / "dataset.json", np.arange(5)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    """The cache of five images. Read only."""
    return regions(tmp_path_factory.mktemp("regions"))


def test_boxes_and_sizes_of_all_shards_stand_one_after_the_other(cache: FeatureCache) -> None:
    found = RegionBoxes(cache)
    assert found.boxes[:, 0].tolist() == list(range(11))
    assert found.image_size.tolist() == [[100 + k, 50] for k in range(5)]
    assert found.offsets.tolist() == np.cumsum([0, *COUNTS]).tolist()


@pytest.mark.parametrize("at_most", [None, 1, 2, 9])
@given(positions=st.lists(st.integers(0, 4), max_size=6))
def test_features_and_boxes_of_some_images_stand_at_the_same_places(
    cache: FeatureCache, positions: list[int], at_most: int | None
) -> None:
    """Of each image the first so many, which are the best."""
    reader, rows = FeatureReader(cache), np.asarray(positions, np.int64)
    found = reader.regions(rows, at_most=at_most)
    boxes = reader.boxes.padded_boxes(rows, at_most)
    first = np.cumsum([0, *COUNTS])
    slow = [list(range(first[k], first[k + 1]))[:at_most] for k in positions]
    assert [features[mask, 0].tolist() for features, mask in zip(found.features, found.mask, strict=True)] == slow
    assert [of_image[mask, 0].tolist() for of_image, mask in zip(boxes, found.mask, strict=True)] == slow
    assert not boxes[~found.mask].any()


@pytest.mark.parametrize("memory_gb", [0, 1])
@given(numbers=st.lists(st.integers(0, 10), max_size=8))
def test_single_regions_are_read_by_their_numbers(cache: FeatureCache, numbers: list[int], memory_gb: float) -> None:
    found = FeatureReader(cache, memory_gb).vectors(np.asarray(numbers, np.int64))
    assert found.tolist() == [[k] * 3 for k in numbers]


def test_regions_without_boxes_are_refused(tmp_path: Path) -> None:
    reader = FeatureReader(regions(tmp_path, boxes=False))
    with pytest.raises(UserError, match=r"demo_r\.h5: .* its r "):
        _ = reader.boxes
