from __future__ import annotations

import fcntl
import json
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.features.conftest import as_sources, shard_parts, write_cache
from tests.training.data.caches import drop_checksums
from vse.features.cache.feature_cache import FeatureCache, open_cache, verify_cache
from vse.features.cache.reader import FeatureReader, RegionBoxes
from vse.features.cache.rows import FeatureKind, FeatureRows, TextUnit, list_extractor_inputs, list_row_ids
from vse.features.cache.shards import shard_slice, shards_folder
from vse.pipeline.dataset import dataset as dataset_module
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError


@given(positions=st.lists(st.integers(0, 65), max_size=20), memory_gb=st.sampled_from([0, 1e-5, 1]), mapped=st.booleans())
def test_rows_are_those_that_hdf5_reads(cache: Path, memory_gb: float, mapped: bool, positions: list[int]) -> None:
    reader = FeatureReader(open_cache(cache), memory_gb, mapped)
    with h5py.File(cache) as file:
        expected = file["features"][:][positions]
    np.testing.assert_array_equal(reader.read_rows(np.asarray(positions, np.int64)), expected)


@pytest.mark.parametrize("mapped", [True, False])
def test_many_rows_are_read_in_any_order(cache: Path, mapped: bool) -> None:
    reader = FeatureReader(open_cache(cache), 1e-5, mapped)
    with h5py.File(cache) as file:
        features = file["features"][:]
    in_order = np.tile(np.arange(66), 20)
    for rows in (in_order, np.random.default_rng(0).permutation(in_order)):
        np.testing.assert_array_equal(reader.read_rows(rows), features[rows])


def ragged(folder: Path, counts: list[int], n_shards: int, boxes: bool = True) -> FeatureCache:
    """A cache of regions: image k has ``counts[k]``; region n has a feature and a box of the number n."""
    parts, first = [], np.cumsum([0, *counts])
    for rows in shard_parts(len(counts), n_shards):
        numbers = np.arange(first[rows[0]], first[rows[-1] + 1])
        places: dict[str, Any] = {
            "boxes": (numbers[:, None] + np.arange(4)).astype(np.float32),
            "image_size": np.asarray([[100 + k, 50] for k in rows], np.int32),
        }
        features, offsets = (numbers[:, None] * np.ones(3)).astype(np.float32), first[rows[0] : rows[-1] + 2] - first[rows[0]]
        parts.append(FeatureRows(rows, features, as_sources(len(rows)), offsets, **(places if boxes else {})))
    return open_cache(write_cache(folder / "demo_r.h5", parts))


def dense(folder: Path, features: NDArray[Any], content: Mapping[str, Any]) -> FeatureCache:
    parts = [FeatureRows(k, features[k], as_sources(len(k))) for k in shard_parts(len(features), 3)]
    return open_cache(write_cache(folder / "demo_d.h5", parts, content))


def test_rows_are_found_by_id_and_an_id_without_features_is_named(cache: Path) -> None:
    opened = open_cache(cache)
    assert FeatureReader(opened).find_rows(opened.ids[[5, 0, 64]]).tolist() == [5, 0, 64]
    with pytest.raises(UserError, match="1 of 2 images have no features, the first is id 999"):
        FeatureReader(open_cache(cache)).find_rows([3, 999])


@pytest.mark.parametrize("memory_gb", [0, 1])
def test_a_nan_is_named_with_its_id(own_cache: Path, memory_gb: float) -> None:
    shard = sorted(shards_folder(drop_checksums(own_cache)).glob("*.h5"))[1]
    with h5py.File(shard, "r+") as file:
        file["features"][2, 0] = np.nan
        bad = int(file["ids"][2])
    reader = FeatureReader(open_cache(own_cache), memory_gb)
    with pytest.raises(UserError, match=f"the features of id {bad} are not finite"):
        reader.check_rows_finite(np.arange(66))


@given(st.data(), st.lists(st.integers(0, 5), min_size=3, max_size=12), st.sampled_from([0, 2e-8, 1]), st.booleans())
def test_padded_features_and_boxes_are_those_of_a_loop(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, counts: list[int], memory_gb: float, mapped: bool
) -> None:
    reader = FeatureReader(ragged(tmp_path_factory.mktemp("r"), counts, 3), memory_gb, mapped)
    positions = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=6))
    rows = np.asarray(positions, np.int64)
    first = np.cumsum([0, *counts])
    slow = [list(range(first[k], first[k + 1])) for k in positions]
    for found in (reader.read_padded_regions(rows), reader.read_sets(rows)):
        assert [features[mask, 0].tolist() for features, mask in zip(found.features, found.mask, strict=True)] == slow
        assert not found.features[~found.mask].any()
        assert (np.diff(found.mask.astype(int), axis=1) <= 0).all(), "regions come first"


def test_boxes_of_all_shards_stand_one_after_the_other(tmp_path: Path) -> None:
    cache = ragged(tmp_path, [3, 0, 2, 5, 1], 2)
    found, numbers = RegionBoxes(cache), np.asarray([7, 0, 10, 7])
    assert cache.row_kind == "sets"
    assert found.boxes[:, 0].tolist() == list(range(11))
    assert found.image_size.tolist() == [[100 + k, 50] for k in range(5)]
    assert found.offsets.tolist() == [0, 3, 3, 5, 10, 11]
    for memory_gb in (0, 1):
        assert FeatureReader(cache, memory_gb).read_vectors(numbers).tolist() == [[k] * 3 for k in numbers]
    with pytest.raises(UserError, match=r"demo_r\.h5: .* its r "):
        _ = FeatureReader(ragged(tmp_path / "x", [1, 2], 1, boxes=False)).region_boxes


def test_a_reader_survives_a_fork_and_keeps_no_file_of_hdf5_open(cache: Path) -> None:
    reader = FeatureReader(open_cache(cache), memory_gb=0)
    expected = reader.read_rows(np.arange(66))
    assert not h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)
    orders = [np.random.default_rng(k).permutation(66) for k in range(8)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for order, rows in zip(orders, pool.map(reader.read_rows, orders), strict=True):
            np.testing.assert_array_equal(rows, expected[order])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(reader.read_rows, (np.arange(5),)), expected[:5])


@pytest.mark.parametrize("what", ["cache", "shard"])
def test_a_file_that_another_process_has_locked_is_read(what: str, own_cache: Path) -> None:
    for folder in (own_cache.parent, shards_folder(own_cache)):
        for file in folder.iterdir():
            file.chmod(0o555 if file.is_dir() else 0o444)
    path = own_cache if what == "cache" else sorted(shards_folder(own_cache).glob("*.h5"))[0]
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            h5py.File(path, "r")
        assert len(FeatureReader(verify_cache(own_cache), memory_gb=0).read_rows(np.arange(66))) == 66
    shards_folder(own_cache).chmod(0o755)


@pytest.mark.parametrize("memory_gb", [0, 1])
def test_positions_are_sets_of_equal_size_without_padding(memory_gb: float, tmp_path: Path) -> None:
    grid = np.random.default_rng(0).random((20, 4, 3)).astype(np.float32)
    reader = FeatureReader(dense(tmp_path, grid, {"config": {"crops": "1c", "positions": True}}), memory_gb)
    positions = np.asarray([7, 0, 19, 7])
    sets = reader.read_sets(positions)
    np.testing.assert_array_equal(sets.features, grid[positions])
    assert sets.mask.shape == (4, 4)
    assert sets.mask.all()
    assert reader.read_sets(np.empty(0, np.int64)).mask.shape == (0, 4)


@pytest.mark.parametrize(
    ("shape", "content", "kind"),
    [
        ((6, 3), {"config": {"crops": "10c"}}, "vectors"),
        ((6, 3), {"imported": {"layout": "arrays"}}, "vectors"),
        ((6, 2, 3), {"config": {"crops": "10c_bank", "positions": False}}, "crops"),
        ((6, 2, 3), {"config": {"crops": "rc_bank"}}, "crops"),
        ((6, 2, 3), {"config": {"crops": "1c", "positions": True}}, "sets"),
        ((6, 2, 3), {"imported": {"layout": "arrays"}}, "sets"),
    ],
)
def test_a_cache_says_what_its_rows_are(shape: tuple[int, ...], content: Mapping[str, Any], kind: str, tmp_path: Path) -> None:
    opened = dense(tmp_path, np.zeros(shape, np.float32), content)
    assert opened.row_kind == kind
    if kind != "sets":
        with pytest.raises(AssertionError, match=f"rows are {kind}"):
            FeatureReader(opened).read_sets(np.arange(2))


@pytest.mark.parametrize("memory_gb", [0, 2e-7, 1])
@pytest.mark.parametrize("n_crops", [1, 3])
def test_a_crop_of_each_image_is_drawn_from_a_bank(n_crops: int, memory_gb: float, tmp_path: Path) -> None:
    bank = np.arange(20 * n_crops * 4, dtype=np.float32).reshape(20, n_crops, 4)
    reader = FeatureReader(dense(tmp_path, bank, {"config": {"crops": "rc_bank"}}), memory_gb)
    rng = np.random.default_rng(0)
    positions, chosen = rng.integers(20, size=30), rng.integers(n_crops, size=30)
    np.testing.assert_array_equal(reader.read_crops(positions, chosen), bank[positions, chosen])


KINDS: list[tuple[FeatureKind, bool, TextUnit]] = [
    ("image", False, "captions"),
    ("text", False, "captions"),
    ("text", True, "captions"),
    ("text", False, "phrases"),
]


@pytest.mark.parametrize(("kind", "raw", "of"), KINDS)
def test_the_rows_of_shards_are_all_rows(kind: FeatureKind, raw: bool, of: TextUnit, demo: Path) -> None:
    dataset = load_dataset_file(demo)
    every = list_extractor_inputs(dataset, kind, raw, of)
    for n in (1, 3, 7, 60):
        parts = [list_extractor_inputs(dataset, kind, raw, of, shard_slice(len(every), index, n)) for index in range(n)]
        assert [item for part in parts for item in part] == every
    assert list_row_ids(dataset, kind, of).tolist() == [item.id for item in every]


@pytest.mark.parametrize("from_columns", [False, True])
def test_images_have_any_number_of_captions(from_columns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, sentid = [], 100
    for imgid, count in enumerate([0, 2, 0, 0, 5, 1, 0]):
        sentences = [{"sentid": sentid + k, "imgid": imgid, "raw": f"{imgid} {k}", "tokens": ["a"]} for k in range(count)]
        sentid += count
        images.append({"imgid": imgid, "filename": f"{imgid}.jpg", "split": "test", "sentences": sentences})
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps({"dataset": "made_up", "images": images}))
    monkeypatch.setattr(dataset_module, "MIN_LARGE_JSON_BYTES", 0 if from_columns else 2**23)
    for _ in range(2):
        dataset = load_dataset_file(path)
        every = np.arange(100, 108)
        assert list_row_ids(dataset, "text").tolist() == every.tolist()
        for start in range(9):
            for stop in range(start, 9):
                found = [item.id for item in list_extractor_inputs(dataset, "text", True, "captions", slice(start, stop))]
                assert found == every[start:stop].tolist()
