"""Blocks of a cache's features are compared with their checksums when they are read, and once in each process."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.train.data.caches import drop_checksums
from vse.features.cache.feature_cache import FeatureCache, merge_shards, open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import Identity, Rows
from vse.features.cache.shards import shard_path, write_shard
from vse.features.cli import main
from vse.pipeline.errors import UserError

N, DIM = 8, 200_000  # rows of 400,000 bytes: a block holds 2.6 of them


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Write a cache of rows that cross blocks, in two shards of 4 rows (1.6 MB) each."""
    out, ids = tmp_path / "demo_large.h5", np.arange(N)
    for shard in range(2):
        mine = ids[4 * shard : 4 * shard + 4]
        features = np.repeat(mine[:, None], DIM, axis=1).astype(np.float16)
        write_shard(
            shard_path(out, shard, 2),
            Identity("demo", "large", "image", {}),
            Rows(mine, features, np.zeros((4, 32), np.uint8)),
        )
    return merge_shards(out, 2, tmp_path / "dataset.json", ids)


def change(cache: FeatureCache, row: int, number: int, value: float = 99) -> None:
    """Write a number into a row, where it lies in its shard."""
    stored = cache.shards[row // 4]["features"]
    with stored.path.open("r+b") as file:
        file.seek(stored.offset + 2 * (row % 4 * DIM + number))
        file.write(np.float16(value).tobytes())


READERS: dict[str, Callable[[FeatureCache], FeatureReader]] = {
    "mapped": lambda cache: FeatureReader(cache, 0),
    "from files": lambda cache: FeatureReader(cache, 0, mapped=False),
    "one shard in memory": lambda cache: FeatureReader(cache, 2e-3),
}


@pytest.mark.parametrize("number", [0, DIM - 1])
@pytest.mark.parametrize("how", READERS)
def test_the_first_and_the_last_number_of_every_row_are_compared(how: str, number: int, large: Path) -> None:
    for row in range(N):
        change(open_cache(large), row, number)
        with pytest.raises(UserError, match=rf"shard-0000{row // 4}-of-00002.h5: its bytes \d+ to \d+ have changed since"):
            READERS[how](open_cache(large)).rows(np.asarray([row]))
        change(open_cache(large), row, number, row)
    np.testing.assert_array_equal(READERS[how](open_cache(large)).rows(np.arange(N))[:, 7], np.arange(N))


def test_only_blocks_that_are_read_are_compared(large: Path) -> None:
    change(open_cache(large), 3, DIM - 1)
    reader = FeatureReader(open_cache(large), 0)
    assert reader.rows(np.asarray([0, 7]))[:, 0].tolist() == [0, 7]
    with pytest.raises(UserError, match="shard-00000"):
        reader.rows(np.asarray([3]))


def test_a_block_is_compared_once_by_all_readers_of_a_cache(large: Path) -> None:
    cache = open_cache(large)
    FeatureReader(cache, 0).rows(np.asarray([0]))
    change(cache, 0, 0)
    assert FeatureReader(cache, 0).rows(np.asarray([0]))[0, 0] == 99


def test_another_process_compares_again(large: Path) -> None:
    cache = open_cache(large)
    reader = FeatureReader(cache, 0)
    reader.rows(np.asarray([0]))
    change(cache, 0, 0)
    elsewhere = pickle.loads(pickle.dumps(reader))
    with pytest.raises(UserError, match="have changed since they were"):
        elsewhere.rows(np.asarray([0]))


@pytest.mark.parametrize("name", ["boxes", "image_size"])
def test_boxes_and_sizes_are_compared(name: str, tmp_path: Path) -> None:
    boxes = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows = Rows(
        np.arange(2), np.ones((3, 5), np.float16), np.zeros((2, 32), np.uint8), np.asarray([0, 1, 3]), boxes, boxes[:, 0],
        np.full((2, 2), 32, np.int32),
    )  # fmt: skip
    out = tmp_path / "demo_r.h5"
    write_shard(shard_path(out, 0, 1), Identity("demo", "r", "image", {}), rows)
    cache = open_cache(merge_shards(out, 1, tmp_path / "dataset.json", np.arange(2)))
    assert FeatureReader(cache).boxes.boxes.tolist() == boxes.tolist()
    with h5py.File(cache.shards[0][name].path, "r+") as file:
        file[name][0, 0] = 31
    with pytest.raises(UserError, match="have changed since they were"):
        _ = FeatureReader(open_cache(out)).boxes


def test_an_old_cache_is_read_and_verify_adds_its_checksums(
    own_cache: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = own_cache.with_suffix(".shards") / "manifest.json"
    new = manifest.read_bytes()
    drop_checksums(own_cache)
    old = manifest.read_bytes()
    caplog.set_level("INFO", "vse")
    assert len(FeatureReader(open_cache(own_cache)).rows(np.arange(66))) == 66
    assert "vse-extract verify --write adds them" in caplog.text
    verified(own_cache)
    assert manifest.read_bytes() == old
    verified(own_cache, "--write")
    assert json.loads(manifest.read_bytes()) == json.loads(new)
    assert "sound, 66 image rows" in capsys.readouterr().out
    before = manifest.stat()
    verified(own_cache, "--write")
    assert manifest.stat() == before, "what is there is kept"


def verified(cache: Path, *options: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(cache), *options])
    assert stop.value.code == 0


def test_a_damaged_shard_gets_no_checksums(own_cache: Path, fails: Callable[..., str]) -> None:
    manifest = drop_checksums(own_cache).with_suffix(".shards") / "manifest.json"
    before, stored = manifest.read_bytes(), open_cache(own_cache).shards[1]["features"]
    with stored.path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(os.urandom(64))
    assert "its bytes changed (sha256 differs)" in fails(main, "verify", "--write", own_cache)
    assert manifest.read_bytes() == before


def test_changed_checksums_are_named_and_written_again(own_cache: Path, fails: Callable[..., str]) -> None:
    manifest = own_cache.with_suffix(".shards") / "manifest.json"
    content = json.loads(manifest.read_bytes())
    content["shards"][2]["xxh3_64"]["features"] = "0" * 16
    manifest.write_text(json.dumps(content))
    assert "the checksums of shard-00002-of-00003.h5 changed" in fails(main, "verify", own_cache)
    verified(own_cache, "--write")
    verify_cache(own_cache)


@pytest.mark.parametrize("checksums", [None, 3, {}, {"features": 3}, {"features": "xyz"}, {"features": ""}, {"boxes": ""}])
def test_what_are_no_checksums_is_one_line(checksums: object, own_cache: Path, fails: Callable[..., str]) -> None:
    manifest = own_cache.with_suffix(".shards") / "manifest.json"
    content = json.loads(manifest.read_bytes())
    content["shards"][0]["xxh3_64"] = checksums
    manifest.write_text(json.dumps(content))
    fails(main, "verify", own_cache)


def test_a_byte_above_7f_in_a_provenance_is_one_line(own_cache: Path, fails: Callable[..., str]) -> None:
    content = own_cache.read_bytes()
    at = content.index(b'"squeezenet1_1"')
    own_cache.write_bytes(content[: at + 3] + b"\xe4" + content[at + 4 :])
    assert "demo_tiny.h5: not a readable feature cache" in fails(main, "verify", own_cache)
