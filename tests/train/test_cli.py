"""The commands: what they refuse, and their help."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.train.conftest import COMMAND
from vse.eval.cli import eval_main, table_main
from vse.features.cache.shards import shards_folder
from vse.pipeline.presets.preset_files import preset_descriptions
from vse.train.cli import embed_main, train_command, train_main


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


@pytest.mark.parametrize(("name", "shown"), [([], "vsepp[margin=0.1, "), (["--name", "half the margin"], "half the margin")])
def test_a_run_with_a_changed_setting_has_another_name_in_tables(
    name: list[str], shown: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, result = tmp_path / "run", tmp_path / "r.json"
    for main, arguments in (
        (train_main, ["--features", cache, "--out", run, *COMMAND, "--set", "loss.margin=0.1", *name]),
        (embed_main, [run]),
        (eval_main, [run / "test.h5", "--out", result, "--bootstrap", "0"]),
        (table_main, ["summary", result, "--out", tmp_path / "t.csv"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        assert stop.value.code == 0
    (row,) = csv.DictReader((tmp_path / "t.csv").read_text().splitlines())
    assert row["experiment"].startswith(shown)
    assert (row["feature"], row["run"]) == ("tiny", str(run))
    assert "loss.margin: 0.2 -> 0.1" in row["settings"]
    assert f"demo {row['experiment']} full: " in capsys.readouterr().err
    assert json.loads(result.read_text())["experiment"] == "vsepp", "the preset whose row it may be"


def test_a_name_is_a_line_of_text(cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    for name in ("", " ", "two\nlines", "\x1b[31mred"):
        assert "a name must be one line of printable text" in fails(
            train_main, "--features", cache, "--out", tmp_path, "--name", name
        )


@pytest.mark.parametrize("columns", [80, 100])
def test_help_lists_every_experiment_with_what_it_changes(columns: int) -> None:
    done = CliRunner().invoke(train_command, ["--help"], terminal_width=columns)
    text = done.output.partition("Experiments:")[2]
    for name, about in preset_descriptions("experiments"):
        assert f"  {name} " in text or f"  {name}\n" in text
        assert "".join(about.split()) in "".join(text.split()), "wherever its lines are broken"
    assert max(map(len, done.output.splitlines())) <= columns
