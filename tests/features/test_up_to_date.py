"""An extraction of captions that has nothing left to do changes no file; everything else is repaired or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.features.conftest import Fails, succeed
from tests.test_killed import content
from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cache.shards import read_shard_record, shard_path, shards_folder
from vse.features.cli import extract_main as main
from vse.features.data_checks import compute_data_checksums
from vse.features.feature_job import choose_shard_count
from vse.pipeline.dataset.columns import Caption, Image
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file

N_SHARDS = 3


def arguments(dataset: Path, out: Path) -> list[object]:
    return ["tfidf", "--dataset", dataset, "--out", out, "--set", "min_count=1"]


@pytest.fixture
def out(few: Path, tmp_path: Path) -> Path:
    out = tmp_path / "demo_tfidf.h5"
    succeed(main, *arguments(few, out), "--shards", N_SHARDS)
    return out


def shard(out: Path, index: int = 1) -> Path:
    return shard_path(out, index, N_SHARDS)


def states(out: Path) -> dict[Path, tuple[int, int]]:
    """The identity and the time of each file."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.parent.rglob("*") if path.is_file()}


def contents(out: Path) -> dict[Path, bytes]:
    return {path: content(path, out.parent) for path in states(out)}


def flip_last_byte(path: Path, keep_time: bool = False) -> None:
    status, old = path.stat(), path.read_bytes()
    path.write_bytes(old[:-1] + bytes([old[-1] ^ 1]))
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_repeated_extraction_changes_no_file(few: Path, out: Path) -> None:
    before = states(out)
    succeed(main, *arguments(few, out))  # the cache has three shards, so that number is the default
    assert states(out) == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: flip_last_byte(shard(out)),
        lambda out: flip_last_byte(out.with_suffix(".encoder.safetensors"), keep_time=True),
        lambda out: shard(out).unlink(),
        lambda out: shard(out).with_suffix(".json").unlink(),
        lambda out: out.unlink(),
        lambda out: (shards_folder(out) / "manifest.json").unlink(),
    ],
    ids=["changed shard", "changed encoder", "no shard", "no record", "no cache", "no manifest"],
)
def test_each_fault_is_repaired(spoil: Callable[[Path], None], few: Path, out: Path) -> None:
    before = contents(out)
    spoil(out)
    succeed(main, *arguments(few, out), "--shards", N_SHARDS)
    assert contents(out) == before
    verify_cache(out)


def test_a_shard_with_another_time_is_hashed_and_kept(few: Path, out: Path) -> None:
    inode = shard(out).stat().st_ino
    os.utime(shard(out), ns=(0, 0))
    succeed(main, *arguments(few, out))
    assert shard(out).stat().st_ino == inode
    record = read_shard_record(shard(out))
    assert record is not None
    assert record.mtime_ns == 0


def test_verify_finds_a_change_that_left_the_time(few: Path, out: Path, fails: Fails) -> None:
    flip_last_byte(shard(out), keep_time=True)
    succeed(main, *arguments(few, out))
    assert "its bytes changed (sha256 differs)" in fails(main, "verify", out)


def test_other_settings_are_refused(few: Path, out: Path, fails: Fails) -> None:
    assert "min_count" in fails(main, *arguments(few, out), "--set", "min_count=2")


def test_checksums_of_a_cache_are_those_of_its_data_set(few: Path, out: Path, tmp_path: Path) -> None:
    dataset, cache = load_dataset_file(few), open_cache(out)
    copy = tmp_path / "copy" / "dataset.json"
    copy.parent.mkdir()
    copy.write_text(few.read_text() + "\n")  # another file with the same captions, which are hashed again
    assert compute_data_checksums(cache, load_dataset_file(copy)) == compute_data_checksums(cache, dataset)


@pytest.mark.parametrize(("n_images", "expected"), [(2, 2), (100, 4), (40_000, 4), (40_001, 5), (200_000, 20)])
def test_the_number_of_shards_grows_with_the_captions(n_images: int, expected: int, tmp_path: Path) -> None:
    captions = (Caption(0, 0, "a gull", ("a", "gull")),) * 5
    dataset = Dataset("gulls", tmp_path / "dataset.json", [Image(0, "0.jpg", "train", captions)] * n_images, False, "")
    assert choose_shard_count(dataset, tmp_path / "gulls_tfidf.h5") == expected
