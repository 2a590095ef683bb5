from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from vse.features.cache.feature_cache import merge_shards, open_cache, verify_cache
from vse.features.cache.rows import Identity, Rows, sha256_bytes
from vse.features.cache.shards import read_finished_shard, shard_path, shards_folder, write_shard
from vse.features.cli import main
from vse.pipeline.errors import UserError

IDENTITY = Identity("demo", "tiny", "image", {"crops": "1c", "seed": 0})


def make(folder: Path, n_rows: int = 10, n_shards: int = 3, identity: Identity = IDENTITY) -> Path:
    """A cache whose row for id 100 + k is filled with k."""
    out = folder / "demo_tiny.h5"
    ids = np.arange(100, 100 + n_rows)
    for index in range(n_shards):
        mine = ids[n_rows * index // n_shards : n_rows * (index + 1) // n_shards]
        features = np.repeat((mine - 100)[:, None], 4, axis=1).astype(np.float16)
        sources = np.stack([sha256_bytes(str(k).encode()) for k in mine])
        write_shard(shard_path(out, index, n_shards), identity, Rows(mine, features, sources))
    return merge_shards(out, n_shards, folder / "dataset.json", ids)


def shard(cache: Path, index: int) -> Path:
    return shard_path(cache, index, 3)


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    path = make(tmp_path)
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


def test_a_cache_and_its_shards_can_be_moved_together(tmp_path: Path) -> None:
    make(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    with h5py.File(tmp_path / "b" / "demo_tiny.h5") as file:
        np.testing.assert_array_equal(file["features"][:, 3], np.arange(10))
    assert len(verify_cache(tmp_path / "b" / "demo_tiny.h5").ids) == 10


@pytest.mark.parametrize("n_shards", [1, 2, 10])
def test_rows_do_not_depend_on_the_number_of_shards(n_shards: int, tmp_path: Path) -> None:
    cache = open_cache(make(tmp_path, n_shards=n_shards))
    assert cache.ids.tolist() == list(range(100, 110))
    assert sum(shard["features"].shape[0] for shard in cache.shards) == 10


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda p: shard(p, 1).unlink(), "shard-00001-of-00003.h5: this shard is missing"),
    "truncated shard": (lambda p: shard(p, 1).write_bytes(shard(p, 1).read_bytes()[:-9]), "00001-of-00003.h5: .* bytes"),
    "missing manifest": (lambda p: (shards_folder(p) / "manifest.json").unlink(), "manifest.json: No such file"),
    "shards of another run": (
        lambda p: make(p.parent / "x", identity=Identity("demo", "tiny", "image", {})),
        "other settings",
    ),
    "no cache": (lambda p: p.unlink(), "no such feature cache"),
    "not HDF5": (lambda p: p.write_bytes(b"text"), "not a readable feature cache"),
    "other HDF5": (lambda p: h5py.File(p, "w").close(), "not a feature cache of version 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_opening_names_what_is_broken(fault: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    spoil, message = FAULTS[fault]
    spoil(path)
    if fault == "shards of another run":
        (path.parent / "x" / "demo_tiny.shards" / "manifest.json").replace(shards_folder(path) / "manifest.json")
    with pytest.raises(UserError, match=message):
        open_cache(path)


def test_a_shard_of_other_settings_among_the_others_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path)
    twin = make(tmp_path / "x", identity=Identity("demo", "tiny", "image", {"crops": "1c", "seed": 1}))
    assert shard(twin, 1).stat().st_size == shard(path, 1).stat().st_size
    shard(twin, 1).replace(shard(path, 1))
    with pytest.raises(UserError, match=r"00001-of-00003\.h5: .* other settings than the cache"):
        open_cache(path)


def test_verify_finds_one_flipped_bit(tmp_path: Path, fails: Callable[..., str]) -> None:
    path = make(tmp_path)
    content = bytearray(shard(path, 2).read_bytes())
    content[-3] ^= 1
    shard(path, 2).write_bytes(content)
    open_cache(path)
    assert "shard-00002-of-00003.h5: its bytes changed" in fails(main, "verify", path)


def test_a_shard_without_record_is_not_finished(tmp_path: Path) -> None:
    path = make(tmp_path)
    assert read_finished_shard(shard(path, 0), IDENTITY) is not None
    shard(path, 0).with_suffix(".json").unlink()
    assert read_finished_shard(shard(path, 0), IDENTITY) is None


def test_a_shard_that_changed_is_not_finished(tmp_path: Path) -> None:
    path = make(tmp_path)
    with shard(path, 0).open("ab") as stream:
        stream.write(b"x")
    assert read_finished_shard(shard(path, 0), IDENTITY) is None


def test_a_shard_of_other_settings_is_refused_with_the_setting(tmp_path: Path) -> None:
    path = make(tmp_path)
    other = Identity("demo", "tiny", "image", {"crops": "10c", "seed": 0})
    with pytest.raises(UserError, match="content.crops: 1c -> 10c"):
        read_finished_shard(shard(path, 0), other)


def test_merging_needs_every_shard(tmp_path: Path) -> None:
    path = make(tmp_path)
    shard(path, 1).unlink()
    with pytest.raises(UserError, match="shard-00001-of-00003.h5: missing or damaged; extract shard 1 of 3 again"):
        merge_shards(path, 3, tmp_path / "dataset.json", np.arange(100, 110))


def test_merging_refuses_shards_of_another_data_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its ids differ from the ids of part 0 of 3"):
        merge_shards(make(tmp_path), 3, tmp_path / "dataset.json", np.arange(10))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_that_are_not_finite_are_never_written(value: float, tmp_path: Path) -> None:
    rows = np.zeros((2, 3), np.float16)
    rows[1, 2] = value
    with pytest.raises(UserError, match="1 vectors are NaN or infinite in float16, .* id 8"):
        write_shard(tmp_path / "s.h5", IDENTITY, Rows(np.array([7, 8]), rows, np.zeros((2, 32), np.uint8)))
    assert not list(tmp_path.iterdir())


def test_the_key_depends_on_every_field() -> None:
    keys = {
        IDENTITY.key,
        Identity("f8k", "tiny", "image", IDENTITY.content).key,
        Identity("demo", "fc7", "image", IDENTITY.content).key,
        Identity("demo", "tiny", "text", IDENTITY.content).key,
        Identity("demo", "tiny", "image", {"crops": "1c", "seed": 1}).key,
    }
    assert len(keys) == 5
    assert Identity("demo", "tiny", "image", {"seed": 0, "crops": "1c"}).key == IDENTITY.key
