from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.features.conftest import Edit, Fails, as_sources, succeed, write_cache
from tests.training.data.caches import drop_checksums
from vse.features.cache.feature_cache import FeatureCache, merge_shards, open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import CacheIdentity, FeatureRows, RowBlocks, sha256_bytes
from vse.features.cache.shards import shard_path, shards_folder, write_shard
from vse.features.cli import extract_main as main
from vse.pipeline.errors import UserError

IDENTITY = CacheIdentity("demo", "tiny", "image", {"crops": "1c", "seed": 0})


def make(folder: Path, n_rows: int = 10, n_shards: int = 3, identity: CacheIdentity = IDENTITY) -> Path:
    """A cache whose row for id 100 + k is filled with k."""
    out = folder / "demo_tiny.h5"
    ids = np.arange(100, 100 + n_rows)
    for index in range(n_shards):
        mine = ids[n_rows * index // n_shards : n_rows * (index + 1) // n_shards]
        features = np.repeat((mine - 100)[:, None], 4, axis=1).astype(np.float16)
        sources = np.stack([sha256_bytes(str(k).encode()) for k in mine])
        write_shard(shard_path(out, index, n_shards), identity, FeatureRows(mine, features, sources))
    return merge_shards(out, n_shards, folder / "dataset.json", ids)


def shard(cache: Path, index: int) -> Path:
    return shard_path(cache, index, 3)


def test_rows_that_are_computed_while_they_are_written_give_the_same_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    features, ids = rng.standard_normal((100, 3, 4)).astype(np.float16), np.arange(100)
    blocks = RowBlocks(features.shape, features.dtype, iter(np.split(features, [1, 50, 99])))
    for name, values in (("array", features), ("blocks", blocks)):
        write_shard(tmp_path / f"{name}.h5", IDENTITY, FeatureRows(ids, values, as_sources(100)))
    assert (tmp_path / "array.h5").read_bytes() == (tmp_path / "blocks.h5").read_bytes()
    too_few = RowBlocks(features.shape, features.dtype, iter([features[:99]]))
    with pytest.raises(ValueError, match="99 rows of features, 100 expected"):
        write_shard(tmp_path / "few.h5", IDENTITY, FeatureRows(ids, too_few, as_sources(100)))
    assert not (tmp_path / "few.h5").exists()


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    make(tmp_path / "a")
    path = (tmp_path / "a").rename(tmp_path / "b") / "demo_tiny.h5"  # with its shards
    with h5py.File(path) as file:
        assert (file.attrs["format"], file.attrs["version"]) == ("vse-features", 1)
        assert (file.attrs["dataset"], file.attrs["feature"], file.attrs["kind"]) == ("demo", "tiny", "image")
        assert file.attrs["captions"] == "dataset.json"
        assert json.loads(file.attrs["provenance"])["crops"] == "1c"
        assert file["ids"].dtype == np.int64
        assert file["features"].is_virtual
        np.testing.assert_array_equal(file["features"][:, 0], np.arange(10))
    with h5py.File(shard(path, 0)) as file:
        assert file["features"].chunks is None
    assert len(verify_cache(path).ids) == 10


def manifest(cache: Path) -> Path:
    return shards_folder(cache) / "manifest.json"


OTHER = CacheIdentity("demo", "tiny", "image", {"crops": "1c", "seed": 1})
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda p: shard(p, 1).unlink(), "shard-00001-of-00003.h5: this shard is missing"),
    "truncated shard": (lambda p: shard(p, 1).write_bytes(shard(p, 1).read_bytes()[:-9]), "00001-of-00003.h5: .* bytes"),
    "missing manifest": (lambda p: manifest(p).unlink(), "manifest.json: No such file"),
    "shards of another run": (lambda p: manifest(make(p.parent / "x", identity=OTHER)).replace(manifest(p)), "other settings"),
    "no cache": (lambda p: p.unlink(), "no such feature cache"),
    "not HDF5": (lambda p: p.write_bytes(b"text"), "not a readable feature cache"),
    "other HDF5": (lambda p: h5py.File(p, "w").close(), "not a feature cache of version 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_opening_names_what_is_broken(fault: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    spoil, message = FAULTS[fault]
    spoil(path)
    with pytest.raises(UserError, match=message):
        open_cache(path)


def test_a_shard_of_other_settings_among_the_others_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path)
    twin = make(tmp_path / "x", identity=OTHER)
    assert shard(twin, 1).stat().st_size == shard(path, 1).stat().st_size
    shard(twin, 1).replace(shard(path, 1))
    with pytest.raises(UserError, match=r"00001-of-00003\.h5: .* other settings than the cache"):
        open_cache(path)


def test_merging_needs_every_shard_of_this_data_set(tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(UserError, match="its ids differ from the ids of part 0 of 3"):
        merge_shards(path, 3, tmp_path / "dataset.json", np.arange(10))
    shard(path, 1).unlink()
    with pytest.raises(UserError, match="shard-00001-of-00003.h5: missing or damaged; extract shard 1 of 3 again"):
        merge_shards(path, 3, tmp_path / "dataset.json", np.arange(100, 110))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_that_are_not_finite_are_never_written(value: float, tmp_path: Path) -> None:
    rows = np.zeros((2, 3), np.float16)
    rows[1, 2] = value
    with pytest.raises(UserError, match="1 vectors are NaN or infinite in float16, .* id 8"):
        write_shard(tmp_path / "s.h5", IDENTITY, FeatureRows(np.array([7, 8]), rows, np.zeros((2, 32), np.uint8)))
    assert not list(tmp_path.iterdir())


def test_the_key_depends_on_every_field() -> None:
    keys = {
        IDENTITY.sha256,
        CacheIdentity("f8k", "tiny", "image", IDENTITY.content).sha256,
        CacheIdentity("demo", "fc7", "image", IDENTITY.content).sha256,
        CacheIdentity("demo", "tiny", "text", IDENTITY.content).sha256,
        OTHER.sha256,
    }
    assert len(keys) == 5
    assert CacheIdentity("demo", "tiny", "image", {"seed": 0, "crops": "1c"}).sha256 == IDENTITY.sha256


N, DIM = 8, 200_000  # rows of 400,000 bytes: a block holds 2.6 of them


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Write a cache of rows that cross blocks, in two shards of 4 rows (1.6 MB) each."""
    features = np.repeat(np.arange(N)[:, None], DIM, axis=1).astype(np.float16)
    parts = [FeatureRows(np.arange(k, k + 4), features[k : k + 4], as_sources(4)) for k in (0, 4)]
    return write_cache(tmp_path / "demo_large.h5", parts)


def change(cache: FeatureCache, row: int, number: int, value: float = 99) -> None:
    """Write a number into a row, where it lies in its shard."""
    stored = cache.shard_arrays[row // 4]["features"]
    with stored.path.open("r+b") as file:
        file.seek(stored.offset + 2 * (row % 4 * DIM + number))
        file.write(np.float16(value).tobytes())


READERS: dict[str, Callable[[FeatureCache], FeatureReader]] = {
    "mapped": lambda cache: FeatureReader(cache, 0),
    "from files": lambda cache: FeatureReader(cache, 0, mapped=False),
    "one shard in memory": lambda cache: FeatureReader(cache, 2e-3),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [0, DIM - 1])
@pytest.mark.parametrize("how", READERS)
def test_the_first_and_the_last_number_of_every_row_are_compared(how: str, number: int, large: Path) -> None:
    for row in range(N):
        change(open_cache(large), row, number)
        with pytest.raises(UserError, match=rf"shard-0000{row // 4}-of-00002.h5: its bytes \d+ to \d+ have changed since"):
            READERS[how](open_cache(large)).read_rows(np.asarray([row]))
        change(open_cache(large), row, number, row)
    np.testing.assert_array_equal(READERS[how](open_cache(large)).read_rows(np.arange(N))[:, 7], np.arange(N))


def test_a_block_is_compared_once_in_each_process(large: Path) -> None:
    cache = open_cache(large)
    reader = FeatureReader(cache, 0)
    reader.read_rows(np.asarray([0]))
    change(cache, 0, 0)
    assert FeatureReader(cache, 0).read_rows(np.asarray([0]))[0, 0] == 99
    with pytest.raises(UserError, match="have changed since they were written"):
        pickle.loads(pickle.dumps(reader)).read_rows(np.asarray([0]))


@pytest.mark.parametrize("name", ["boxes", "image_size"])
def test_boxes_and_sizes_are_compared(name: str, tmp_path: Path) -> None:
    boxes = np.arange(12, dtype=np.float32).reshape(3, 4)
    places = (np.asarray([0, 1, 3]), boxes, boxes[:, 0], np.full((2, 2), 32, np.int32))
    out = write_cache(tmp_path / "demo_r.h5", [FeatureRows(np.arange(2), np.ones((3, 5), np.float16), as_sources(2), *places)])
    cache = open_cache(out)
    assert FeatureReader(cache).region_boxes.boxes.tolist() == boxes.tolist()
    with h5py.File(cache.shard_arrays[0][name].path, "r+") as file:
        file[name][0, 0] = 31
    with pytest.raises(UserError, match="have changed since they were written"):
        _ = FeatureReader(open_cache(out)).region_boxes


def test_verify_adds_checksums_to_an_old_cache(
    own_cache: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    listed = manifest(own_cache)
    new = listed.read_bytes()
    drop_checksums(own_cache)
    old = listed.read_bytes()
    caplog.set_level("INFO", "vse")
    assert len(FeatureReader(open_cache(own_cache)).read_rows(np.arange(66))) == 66
    assert "vse-extract verify --write adds them" in caplog.text
    succeed(main, "verify", own_cache)
    assert listed.read_bytes() == old
    succeed(main, "verify", own_cache, "--write")
    assert json.loads(listed.read_bytes()) == json.loads(new)
    assert "sound, 66 image rows" in capsys.readouterr().out
    before = listed.stat()
    succeed(main, "verify", own_cache, "--write")
    assert listed.stat() == before, "what is there is kept"


def test_a_damaged_shard_gets_no_checksums(own_cache: Path, fails: Fails) -> None:
    listed = manifest(drop_checksums(own_cache))
    before, stored = listed.read_bytes(), open_cache(own_cache).shard_arrays[1]["features"]
    with stored.path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(os.urandom(64))
    assert "its bytes changed (sha256 differs)" in fails(main, "verify", "--write", own_cache)
    assert listed.read_bytes() == before


def test_changed_checksums_are_named_and_written_again(own_cache: Path, edit: Edit, fails: Fails) -> None:
    edit(manifest(own_cache), lambda content: content["shards"][2]["xxh3_64"].update(features="0" * 16))
    assert "the checksums of shard-00002-of-00003.h5 changed" in fails(main, "verify", own_cache)
    succeed(main, "verify", own_cache, "--write")
    verify_cache(own_cache)


@pytest.mark.parametrize("checksums", [None, 3, {}, {"features": 3}, {"features": "xyz"}, {"features": ""}, {"boxes": ""}])
def test_what_are_no_checksums_is_one_line(checksums: object, own_cache: Path, edit: Edit, fails: Fails) -> None:
    edit(manifest(own_cache), lambda content: content["shards"][0].update(xxh3_64=checksums))
    fails(main, "verify", own_cache)
