"""Regions of images by number, from memory and from files, with and without coordinates."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.train.data.caches import made_by_hand, spoil
from tests.train.phrases.some_regions import CPU, DIM, Caches, make_caches
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.errors import UserError
from vse.train.phrases.regions import BoxFeatures, RegionInputs


def by_image(file: Path, name: str) -> dict[int, np.ndarray]:
    """What HDF5 itself reads of each image's regions."""
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
    found = BoxFeatures(cache, ids, CPU, memory_gb)
    vectors, boxes = (by_image(caches.candidates, name) for name in ("features", "boxes"))
    assert len(found) == found.counts.sum() == sum(len(vectors[image]) for image in ids.tolist())
    np.testing.assert_array_equal(found.boxes, np.concatenate([boxes[image] for image in ids.tolist()]))
    some = np.random.default_rng(0).permutation(len(found))[:9]
    expected = np.concatenate([vectors[image] for image in ids.tolist()])[some]
    np.testing.assert_allclose(found.vectors(some), expected, rtol=1e-6)
    assert found.vectors(some[:0]).shape == (0, DIM)


def test_an_image_is_read_once_for_all_its_regions(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(caches.candidates)
    found, read = BoxFeatures(cache, cache.ids, CPU), []
    real = found._reader.regions
    monkeypatch.setattr(found._reader, "regions", lambda rows: (read.extend(rows.tolist()), real(rows))[1])
    found.vectors(np.arange(len(found))[::-1].copy())
    assert sorted(read) == list(range(len(cache.ids)))


@pytest.mark.parametrize("coordinates", ["none", "appended", "alone"])
def test_truths_stand_behind_the_candidates(caches: Caches, coordinates: str) -> None:
    sides = [BoxFeatures(cache, cache.ids, CPU) for cache in map(open_cache, (caches.candidates, caches.truths))]
    inputs = RegionInputs(*sides, coordinates, CPU)
    n = len(sides[0])
    found = inputs.read(np.asarray([n + 2, 1, n, 0]))
    assert found.shape == (4, inputs.dim)
    for row, (side, region) in enumerate(((1, 2), (0, 1), (1, 0), (0, 0))):
        width, height = sides[side].sizes[sides[side].image_of[region]]
        x1, y1, x2, y2 = sides[side].boxes[region].tolist()
        place = [x1 / width, y1 / height, x2 / width, y2 / height, (x2 - x1) * (y2 - y1) / (width * height)]
        vector = sides[side].vectors(np.asarray([region]))[0].tolist()
        expected = {"none": vector, "appended": [*vector, *place], "alone": place}[coordinates]
        assert found[row].tolist() == pytest.approx(expected, rel=1e-5)


def test_what_has_no_boxes_is_one_line(caches: Caches, tmp_path: Path) -> None:
    plain = made_by_hand(tmp_path, np.ones((4, 3), np.float32), range(4))
    with pytest.raises(UserError, match=r"hand_made.h5 holds 4 image rows of 3 float32; regions with boxes are needed"):
        BoxFeatures(plain, plain.ids, CPU)


def test_a_vector_that_is_not_finite_is_named(few: Path, tmp_path: Path) -> None:
    own = make_caches(few, tmp_path)
    spoil(own.candidates, int(open_cache(own.candidates).ids[2]), np.nan)
    cache = open_cache(own.candidates)
    found = BoxFeatures(cache, cache.ids, CPU)
    with pytest.raises(UserError, match=f"the features of id {cache.ids[2]} are not finite"):
        found.vectors(np.arange(len(found)))
    assert torch.isfinite(found.vectors(np.asarray([0]))).all()
