"""Where the vectors of a set lie on a photo, against what the network sees of photos with a bright square."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.conftest import TINY_FEATURE
from tests.features.conftest import as_sources, extracted_cache, shard_parts, write_cache
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.rows import FeatureRows
from vse.features.extractors.cnn import CnnExtractor, VectorBoxes, cut_crops
from vse.features.settings.images import CnnConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

SIZES = [(90, 60), (61, 120), (64, 64)]


@pytest.fixture(scope="module")
def positions(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of four vectors per image, one for each position of a CNN's grid."""
    out = tmp_path_factory.mktemp("positions") / "demo_positions.h5"
    return extracted_cache(
        few, CnnExtractor(TINY_FEATURE.model_copy(update={"name": "positions", "positions": True})), out
    ).path


def grid(cache: Path, **changed: Any) -> tuple[FeatureCache, CnnConfig]:
    opened = open_cache(cache)
    settings = {**opened.provenance["config"], **changed}
    made = replace(opened, provenance={"config": settings}, row_shape=(settings["grid"] ** 2, opened.dim))
    return made, CnnConfig(name="positions", **settings)


def with_square(size: tuple[int, int], box: np.ndarray) -> Image.Image:
    photo = Image.new("RGB", size)
    photo.paste((255, 255, 255), tuple(int(side) for side in box.round()))
    return photo


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("mode", "crop"), [("square", 72), ("shorter", 60), ("library", 72), ("library", 60)])
def test_a_cell_has_the_light_of_its_part_of_the_crop(positions: Path, size: tuple[int, int], mode: str, crop: int) -> None:
    cache, config = grid(positions, resize=72, crop=crop, grid=3, resize_mode=mode)
    boxes = VectorBoxes(cache).find_boxes(size)
    for lit in range(9):
        pixels = cut_crops(with_square(size, boxes[lit]), config)[0, 0].float().numpy()
        side = crop // 3
        light = [
            pixels[row * side : (row + 1) * side, column * side : (column + 1) * side].mean() / 255
            for row in range(3)
            for column in range(3)
        ]
        expected = np.eye(9)[lit]
        np.testing.assert_allclose(light, expected, atol=0.12)


def regions(demo: Path, folder: Path, n_shards: int, **changed: NDArray[np.int32] | None) -> Path:
    """A cache of regions: image k of the data set has k % 3 + 1, whose x1 is the number of the region in the cache."""
    ids = np.asarray([image.imgid for image in load_dataset_file(demo).images], np.int64)
    parts, first = [], 0
    for part in shard_parts(len(ids), n_shards):
        offsets = np.concatenate([[0], np.cumsum(part % 3 + 1)])
        numbers = np.arange(first, first + offsets[-1], dtype=np.float32)
        first += offsets[-1]
        places: dict[str, Any] = {
            "boxes": np.stack([numbers, numbers * 0 + 1, numbers + 10, numbers * 0 + 21], 1),
            "scores": np.ones(len(numbers), np.float32),
            "image_size": np.full((len(part), 2), (300, 100), np.int32),
        }
        features = np.ones((len(numbers), 4), np.float32)
        parts.append(FeatureRows(ids[part], features, as_sources(len(part)), offsets, **{**places, **changed}))
    return write_cache(folder / "demo_boxes.h5", parts)


@pytest.mark.parametrize("n_shards", [1, 3])
def test_regions_have_their_boxes_in_whichever_shard_they_are(demo: Path, tmp_path: Path, n_shards: int) -> None:
    places, first = VectorBoxes(open_cache(regions(demo, tmp_path, n_shards))), 0
    for number, image in enumerate(load_dataset_file(demo).images):
        expected = [[k, 1, k + 10, 21] for k in range(first, first + number % 3 + 1)]
        assert places.find_boxes((300, 100), image.imgid).tolist() == expected
        first += number % 3 + 1
    half = places.find_boxes((150, 50), image.imgid)
    np.testing.assert_allclose(half, np.asarray(expected) / 2)
    assert places.find_boxes((300, 100), 10**6).shape == places.find_boxes((300, 100)).shape == (0, 4)


def test_a_cache_that_does_not_say_where_is_refused(demo: Path, cache: Path, positions: Path, tmp_path: Path) -> None:
    for lacking in ("boxes", "image_size"):
        file = regions(demo, tmp_path / lacking, 1, **{lacking: None})
        with pytest.raises(UserError, match=r"demo_boxes\.h5: .* its boxes "):
            VectorBoxes(open_cache(file))
    for made in (open_cache(cache), grid(positions, crops="10c")[0], replace(grid(positions)[0], row_shape=(5, 64))):
        with pytest.raises(UserError, match=r"\.h5: .* its \w+ "):
            VectorBoxes(made)
    with pytest.raises(UserError, match="demo_positions.h5: not a cache of a CNN's positions, by its provenance"):
        VectorBoxes(
            replace(open_cache(positions), provenance={"config": {"extractor": "cnn", "positions": True, "grid": "two"}})
        )
    imported = replace(open_cache(positions), provenance={"imported": {"layout": "arrays"}})
    with pytest.raises(UserError, match="does not record the positions of"):
        VectorBoxes(imported)


def test_boxes_of_an_image_of_no_size_are_no_numbers(demo: Path, tmp_path: Path) -> None:
    n = len(load_dataset_file(demo).images)
    places = VectorBoxes(open_cache(regions(demo, tmp_path, 1, image_size=np.zeros((n, 2), np.int32))))
    assert not np.isfinite(places.find_boxes((300, 100), 0)).all()
