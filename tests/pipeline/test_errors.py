"""Test that error messages have at most a few lines, even if there are many valid names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import refused
from vse.features.cli import main as extract_main
from vse.features.data_cli import main as data_main
from vse.pipeline.errors import did_you_mean
from vse.train.cli import train_main


def test_few_names_are_all_listed() -> None:
    assert did_you_mean("ordr", ["order", "cosine"]) == " (did you mean 'order'? known: cosine, order)"
    assert did_you_mean("qqq", ["order", "cosine"]) == " (known: cosine, order)"


def test_of_many_names_the_nearest_five_are() -> None:
    names = [f"layer{k:03d}.conv" for k in range(500)]
    end = did_you_mean("layer123.cnv", names)
    assert end.startswith(" (did you mean 'layer123.conv'? nearest of 500: layer123.conv, ")
    assert end.count("layer") == 6
    assert did_you_mean("?", names).count("layer") == 5, "there is always something to begin with"


@pytest.mark.parametrize(
    ("settings", "near"),
    [
        (["model=timm/tf_efficientnet_lite00"], "'tf_efficientnet_lite0'"),
        (["model=timm/resnt50"], "'resnet50'"),
        (["model=resnet5"], "'resnet50'"),
        (["model=resnet50", "layer=layer4.2.cnv3"], "'layer4.2.conv3'"),
        (["model=densenet201", "layer=features.denseblock4.denselayer32.conv22"], "denselayer32.conv2"),
    ],
)
def test_a_mistyped_model_or_layer_is_answered_with_the_nearest(
    settings: list[str], near: str, few: Path, tmp_path: Path
) -> None:
    sets = [part for item in ["weights=random", *settings] for part in ("--set", item)]
    error = refused(extract_main, "cnn", "--dataset", few, "--feature", "fc7", *sets, "--out", tmp_path / "f.h5")
    assert near in error
    assert len(error) < 500


def test_a_mistyped_experiment_is_answered_in_a_line_or_two(cache: Path, tmp_path: Path) -> None:
    error = refused(train_main, "--features", cache, "--experiment", "vsep", "--out", tmp_path / "run")
    assert "did you mean 'vsepp'" in error
    assert len(error) < 1500


@pytest.mark.parametrize("main", [data_main, extract_main])
def test_a_command_without_a_sub_command_prints_its_help(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(main)
    with pytest.raises(SystemExit) as stop:
        main([])
    shown = capsys.readouterr().err
    assert stop.value.code == 2
    assert "error:" not in shown
    assert "Commands:\n" in shown
    assert len(shown.splitlines()) > 8
