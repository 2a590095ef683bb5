"""The commands: what they refuse, and their help."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from vse.features.shards import shards_folder
from vse.pipeline.preset_files import described_presets
from vse.train.cli import train_command, train_main


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


HELP = """
import sys
from vse.train.cli import embed_main, search_main, train_main
for main, argument in ((train_main, "--help"), (embed_main, "--help"), (search_main, "--help"), (train_main, "--sed")):
    try:
        main([argument])
    except SystemExit:
        pass
print(sorted({"torch", "torchvision", "pandas", "numpy", "pydantic", "h5py"} & sys.modules.keys()))
"""


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "No such option '--sed'" in done.stderr


@pytest.mark.parametrize("columns", [80, 100])
def test_help_lists_every_experiment_with_what_it_changes(columns: int) -> None:
    done = CliRunner().invoke(train_command, ["--help"], terminal_width=columns)
    text = done.output.partition("Experiments:")[2]
    for name, about in described_presets("experiments"):
        assert f"  {name} " in text or f"  {name}\n" in text
        assert "".join(about.split()) in "".join(text.split()), "wherever its lines are broken"
    assert max(map(len, done.output.splitlines())) <= columns
