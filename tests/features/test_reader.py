from __future__ import annotations

import fcntl
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.train.data.caches import drop_checksums
from vse.features.cache.feature_cache import merge_shards, open_cache, verify_cache
from vse.features.cache.reader import FeatureReader, PaddedSets
from vse.features.cache.rows import Identity, Rows
from vse.features.cache.shards import shard_path, shard_slice, shards_folder, write_shard
from vse.pipeline.errors import UserError


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("memory_gb", [0, 1e-5, 1])
@given(positions=st.lists(st.integers(0, 65), max_size=20))
def test_rows_are_those_of_hdf5_from_memory_maps_or_files(
    cache: Path, memory_gb: float, mapped: bool, positions: list[int]
) -> None:
    reader = FeatureReader(open_cache(cache), memory_gb, mapped)
    with h5py.File(cache) as file:
        expected = file["features"][:][positions]
    np.testing.assert_array_equal(reader.rows(np.asarray(positions, np.int64)), expected)


def test_rows_are_found_by_id_not_by_position(cache: Path) -> None:
    opened = open_cache(cache)
    assert FeatureReader(opened).positions(opened.ids[[5, 0, 64]]).tolist() == [5, 0, 64]


def test_an_id_without_features_is_named(cache: Path) -> None:
    with pytest.raises(UserError, match="1 of 2 images have no features, the first is id 999"):
        FeatureReader(open_cache(cache)).positions([3, 999])


@pytest.mark.parametrize("memory_gb", [0, 1])
def test_a_nan_is_named_with_its_id(own_cache: Path, memory_gb: float) -> None:
    shard = sorted(shards_folder(drop_checksums(own_cache)).glob("*.h5"))[1]
    with h5py.File(shard, "r+") as file:
        file["features"][2, 0] = np.nan
        bad = int(file["ids"][2])
    reader = FeatureReader(open_cache(own_cache), memory_gb)
    with pytest.raises(UserError, match=f"the features of id {bad} are not finite"):
        reader.check_finite(np.arange(66))


def ragged(folder: Path, counts: list[int], n_shards: int) -> Path:
    """A cache of regions: image 10 + k has ``counts[k]`` of them, filled with k."""
    out = folder / "demo_r.h5"
    identity = Identity("demo", "r", "image", {})
    ids = np.arange(10, 10 + len(counts))
    for index in range(n_shards):
        part = shard_slice(len(ids), index, n_shards)
        of_shard, k = np.asarray(counts[part], np.int64), np.arange(len(counts))[part]
        features = np.repeat(k, of_shard)[:, None].astype(np.float16) * np.ones((1, 3), np.float16)
        rows = Rows(
            ids=ids[part],
            features=features,
            sources=np.zeros((len(of_shard), 32), np.uint8),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(of_shard)]),
            boxes=np.zeros((len(features), 4), np.float32),
        )
        write_shard(shard_path(out, index, n_shards), identity, rows)
    return merge_shards(out, n_shards, folder / "dataset.json", ids)


@pytest.mark.parametrize("read", [FeatureReader.regions, FeatureReader.sets])
@given(data=st.data(), counts=st.lists(st.integers(0, 5), min_size=3, max_size=12), memory_gb=st.sampled_from([0, 2e-8, 1]))
def test_a_mask_marks_the_regions_among_the_padding(
    read: Callable[[FeatureReader, NDArray[np.int64]], PaddedSets],
    data: st.DataObject,
    counts: list[int],
    memory_gb: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cache = open_cache(ragged(tmp_path_factory.mktemp("r"), counts, 3))
    positions = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=6))
    regions = read(FeatureReader(cache, memory_gb), np.asarray(positions, np.int64))
    assert regions.mask.sum(axis=1).tolist() == [counts[k] for k in positions]
    for row, mask, k in zip(regions.features, regions.mask, positions, strict=True):
        assert (row[mask] == k).all()
        assert not row[~mask].any()
        assert not mask[counts[k] :].any(), "regions come first"


def test_a_reader_survives_a_fork_and_keeps_no_file_of_hdf5_open(cache: Path) -> None:
    reader = FeatureReader(open_cache(cache), memory_gb=0)
    expected = reader.rows(np.arange(66))
    assert not h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)
    orders = [np.random.default_rng(k).permutation(66) for k in range(8)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for order, rows in zip(orders, pool.map(reader.rows, orders), strict=True):
            np.testing.assert_array_equal(rows, expected[order])


def test_a_reader_can_be_sent_to_another_process(cache: Path) -> None:
    reader = FeatureReader(open_cache(cache), memory_gb=0)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(reader.rows, (np.arange(5),)), reader.rows(np.arange(5)))


@pytest.mark.parametrize("what", ["cache", "shard"])
def test_a_file_that_another_process_has_locked_is_read(what: str, own_cache: Path) -> None:
    """As on a file system without locks, where asking for one fails."""
    path = own_cache if what == "cache" else sorted(shards_folder(own_cache).glob("*.h5"))[0]
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            h5py.File(path, "r")
        assert len(FeatureReader(verify_cache(own_cache)).rows(np.arange(66))) == 66


def test_a_read_only_folder_is_read(own_cache: Path) -> None:
    for path in (own_cache.parent, shards_folder(own_cache)):
        for file in path.iterdir():
            file.chmod(0o555 if file.is_dir() else 0o444)
    assert len(FeatureReader(verify_cache(own_cache), memory_gb=0).rows(np.arange(66))) == 66
    shards_folder(own_cache).chmod(0o755)


def dense(folder: Path, features: NDArray[Any], content: Mapping[str, Any], n_shards: int = 3) -> Path:
    """A cache of one array, (n, dim) or (n, m, dim), of images 0 to n - 1."""
    out, n = folder / "demo_d.h5", len(features)
    for index in range(n_shards):
        part = shard_slice(n, index, n_shards)
        rows = Rows(np.arange(n)[part], features[part], np.zeros((len(features[part]), 32), np.uint8))
        write_shard(shard_path(out, index, n_shards), Identity("demo", "d", "image", content), rows)
    return merge_shards(out, n_shards, folder / "dataset.json", np.arange(n))


def test_images_without_a_region_give_sets_that_are_all_padding(tmp_path: Path) -> None:
    reader = FeatureReader(open_cache(ragged(tmp_path, [0, 2, 0, 0], 2)))
    one_of_two = reader.sets(np.asarray([0, 1]))
    assert one_of_two.mask.tolist() == [[False, False], [True, True]]
    alone = reader.sets(np.asarray([2, 0]))
    assert alone.features.shape == (2, 1, 3)
    assert not alone.mask.any()
    assert not alone.features.any()


@pytest.mark.parametrize("memory_gb", [0, 1])
def test_positions_are_sets_of_equal_size_without_padding(memory_gb: float, tmp_path: Path) -> None:
    grid = np.random.default_rng(0).random((20, 4, 3)).astype(np.float32)
    reader = FeatureReader(open_cache(dense(tmp_path, grid, {"config": {"crops": "1c", "positions": True}})), memory_gb)
    positions = np.asarray([7, 0, 19, 7])
    sets = reader.sets(positions)
    np.testing.assert_array_equal(sets.features, grid[positions])
    assert sets.mask.shape == (4, 4)
    assert sets.mask.all()
    assert reader.sets(np.empty(0, np.int64)).mask.shape == (0, 4)


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
    opened = open_cache(dense(tmp_path, np.zeros(shape, np.float32), content))
    assert opened.row_kind == kind
    if kind != "sets":
        with pytest.raises(AssertionError, match=f"rows are {kind}"):
            FeatureReader(opened).sets(np.arange(2))


def test_regions_are_sets(tmp_path: Path) -> None:
    assert open_cache(ragged(tmp_path, [1, 2, 0], 1)).row_kind == "sets"


@pytest.mark.parametrize("memory_gb", [0, 2e-7, 1])
@pytest.mark.parametrize("n_crops", [1, 3])
def test_a_crop_of_each_image_is_drawn_from_a_bank(n_crops: int, memory_gb: float, tmp_path: Path) -> None:
    bank = np.arange(20 * n_crops * 4, dtype=np.float32).reshape(20, n_crops, 4)
    reader = FeatureReader(open_cache(dense(tmp_path, bank, {"config": {"crops": "rc_bank"}})), memory_gb)
    rng = np.random.default_rng(0)
    positions, chosen = rng.integers(20, size=30), rng.integers(n_crops, size=30)
    np.testing.assert_array_equal(reader.crops(positions, chosen), bank[positions, chosen])
