"""The commands: what they refuse, and their help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vse.features.shards import shards_folder
from vse.train.cli import train_main


def test_bad_usage_is_one_line(cache: Path, tmp_path: Path, own_cache: Path, fails: Callable[..., str]) -> None:
    out = ["--out", tmp_path / "run"]
    assert "no such feature cache" in fails(train_main, "--features", tmp_path / "x.h5")
    assert "did you mean 'vsepp'" in fails(train_main, "--features", cache, *out, "--experiment", "vspp")
    assert "did you mean 'loss.margin'" in fails(train_main, "--features", cache, *out, "--set", "loss.marign=1")
    assert "did you mean 'max'" in fails(train_main, "--features", cache, *out, "--set", "loss.name=maks")
    assert "Missing option '--features'" in fails(train_main)
    sorted(shards_folder(own_cache).glob("*.h5"))[1].unlink()
    assert "this shard is missing" in fails(train_main, "--features", own_cache, *out)
    assert not (tmp_path / "run").exists()


def test_an_unknown_device_is_one_line(cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "--device foo: not usable here" in fails(
        train_main, "--features", cache, "--out", tmp_path / "r", "--device", "foo"
    )
