from __future__ import annotations

import fcntl
import multiprocessing
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.features.cache import merge_shards, open_cache, verify_cache
from vse.features.reader import FeatureReader
from vse.features.shards import Identity, Rows, shard_path, shard_slice, shards_folder, write_shard
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
    found = open_cache(cache)
    wanted = found.ids[[5, 0, 64]]
    assert FeatureReader(found).positions(wanted).tolist() == [5, 0, 64]


def test_an_id_without_features_is_named(cache: Path) -> None:
    with pytest.raises(UserError, match="1 of 2 images have no features, the first is id 999"):
        FeatureReader(open_cache(cache)).positions([3, 999])


@pytest.mark.parametrize("memory_gb", [0, 1])
def test_a_nan_is_named_with_its_id(own_cache: Path, memory_gb: float) -> None:
    shard = sorted(shards_folder(own_cache).glob("*.h5"))[1]
    with h5py.File(shard, "r+") as file:
        file["features"][2, 0] = np.nan
        bad = int(file["ids"][2])
    reader = FeatureReader(open_cache(own_cache), memory_gb)
    with pytest.raises(UserError, match=f"the features of id {bad} are not finite"):
        reader.refuse_not_finite(np.arange(66))


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


@given(data=st.data(), counts=st.lists(st.integers(0, 5), min_size=3, max_size=12), memory_gb=st.sampled_from([0, 2e-8, 1]))
def test_regions_are_told_from_padding_by_a_mask(
    data: st.DataObject, counts: list[int], memory_gb: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = open_cache(ragged(tmp_path_factory.mktemp("r"), counts, 3))
    positions = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=6))
    found = FeatureReader(cache, memory_gb).regions(np.asarray(positions, np.int64))
    assert found.mask.sum(axis=1).tolist() == [counts[k] for k in positions]
    for row, mask, k in zip(found.features, found.mask, positions, strict=True):
        assert (row[mask] == k).all()
        assert not row[~mask].any()
        assert not mask[counts[k] :].any(), "regions come first"


def test_a_reader_survives_a_fork_and_keeps_no_file_of_hdf5_open(cache: Path) -> None:
    found = open_cache(cache)
    reader = FeatureReader(found, memory_gb=0)
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


@pytest.mark.parametrize("memory_gb", [0, 2e-7, 1])
@pytest.mark.parametrize("n_crops", [1, 3])
def test_a_crop_of_each_image_is_drawn_from_a_bank(n_crops: int, memory_gb: float, tmp_path: Path) -> None:
    bank = np.arange(20 * n_crops * 4, dtype=np.float32).reshape(20, n_crops, 4)
    out = tmp_path / "demo_b.h5"
    for index in range(3):
        part = shard_slice(20, index, 3)
        rows = Rows(np.arange(20)[part], bank[part], np.zeros((len(bank[part]), 32), np.uint8))
        write_shard(shard_path(out, index, 3), Identity("demo", "b", "image", {}), rows)
    reader = FeatureReader(open_cache(merge_shards(out, 3, tmp_path / "dataset.json", np.arange(20))), memory_gb)
    rng = np.random.default_rng(0)
    positions, chosen = rng.integers(20, size=30), rng.integers(n_crops, size=30)
    np.testing.assert_array_equal(reader.crops(positions, chosen), bank[positions, chosen])
