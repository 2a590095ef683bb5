from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import TINY_FEATURE
from tests.training.conftest import COMMAND, Crash, Fails, Patch, assert_same, experiment, interrupted, options, state, weights
from vse.features.backbones.device import describe_processor, has_bf16
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.cnn import CnnExtractor
from vse.pipeline.errors import UserError
from vse.training.cli import train_main
from vse.training.experiment import list_changed_settings, load_experiment
from vse.training.options import RunInputOptions, TrainOptions
from vse.training.run.folder import RunFolder
from vse.training.training import train
from vse.training.use.open_run import open_run

AUTO, SHORT = "train.precision=auto", "train.epochs=1"
needs_bf16 = pytest.mark.skipif(not has_bf16(torch.device("cpu")), reason="this processor has no bf16")


@pytest.fixture
def without_bf16(monkeypatch: Patch) -> None:
    """Make the processor one with AVX2 alone for oneDNN."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


@pytest.fixture
def with_warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the warnings so far."""
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def get_network_precision(run: Path) -> str:
    """Return the precision of a run; its files must agree in it."""
    config = yaml.safe_load((run / "config.yaml").read_text())["train"]["precision"]
    record = RunFolder(run).read_record()
    assert record["precision"] == config
    assert record["processor"] == describe_processor(torch.device("cpu"))
    return str(config)


@pytest.mark.parametrize("limited", [pytest.param(False, marks=needs_bf16), True])
def test_a_run_records_the_precision_that_was_used(
    limited: bool, cache: Path, tmp_path: Path, monkeypatch: Patch, with_warnings: Callable[[], list[str]]
) -> None:
    if limited:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    used = "fp32" if limited else "bf16"
    run = train(cache, experiment(AUTO, SHORT), out=tmp_path / "auto")
    assert get_network_precision(run) == used
    assert with_warnings() == []
    named = train(cache, experiment(f"train.precision={used}", SHORT), out=tmp_path / "named")
    assert_same(weights(run), weights(named))


@pytest.mark.usefixtures("without_bf16")
def test_emulated_bf16_trains_after_one_warning(cache: Path, tmp_path: Path, with_warnings: Callable[[], list[str]]) -> None:
    run = train(cache, experiment("train.precision=bf16", SHORT), out=tmp_path / "run")
    assert get_network_precision(run) == "bf16"
    assert RunFolder(run).read_record()["state"] == "finished"
    (warning,) = with_warnings()
    assert "train.precision: bf16 is emulated" in warning
    assert "--set train.precision=auto" in warning


@pytest.mark.nightly
def test_another_precision_names_the_setting(cache: Path, tmp_path: Path, monkeypatch: Patch, fails: Fails) -> None:
    whole = train(cache, experiment("train.precision=bf16"), out=tmp_path / "whole")
    run = _stopped(cache, tmp_path / "run", "bf16")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    command = ["--features", cache, "--out", run, *COMMAND, "--resume", "--set"]
    for precision in ("auto", "fp32"):
        line = fails(train_main, *command, f"train.precision={precision}")
        assert "its precision is bf16, here it would be fp32; add --set train.precision=bf16 to continue" in line
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    train(cache, experiment("train.precision=bf16"), out=run, options=TrainOptions(resume=True))
    assert_same(state(run), state(whole))


def _stopped(cache: Path, run: Path, precision: str) -> Path:
    """Train the first epoch of a run, and crash in the second."""
    with interrupted(11, crash=True), pytest.raises(Crash):
        train(cache, experiment(f"train.precision={precision}"), out=run)
    return run


@pytest.mark.usefixtures("without_bf16")
def test_an_overwriting_resume_starts_again(cache: Path, tmp_path: Path, with_warnings: Callable[[], list[str]]) -> None:
    run = _stopped(cache, tmp_path / "run", "bf16")
    train(cache, experiment(AUTO), out=run, options=TrainOptions(resume=True, overwrite=True))
    assert get_network_precision(run) == "fp32"
    assert "add --set train.precision=bf16 to continue it" in with_warnings()[-1]
    assert with_warnings()[-1].endswith("Training starts from the beginning")


@pytest.mark.usefixtures("without_bf16")
def test_auto_keeps_a_finished_run_of_another_machine(
    cache: Path, tmp_path: Path, fails: Fails, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(cache, experiment("train.precision=bf16", SHORT), out=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    caplog.set_level(logging.INFO)
    for permitted in (TrainOptions(), TrainOptions(resume=True), TrainOptions(resume=True, overwrite=True)):
        train(cache, experiment(AUTO, SHORT), out=run, options=permitted)
        assert "was trained in bf16 by auto on its machine; here auto is fp32" in caplog.text
        caplog.clear()
    sets = options(SHORT, "train.precision=fp32")
    line = fails(train_main, "--features", cache, "--out", run, *COMMAND, *sets, "--resume")
    assert "--set train.precision=bf16" in line
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_precision_that_auto_chose_is_no_change_of_the_preset(precision: str) -> None:
    chosen, paper = (load_experiment(name, "coco").with_precision(precision) for name in ("vsepp_effnet", "vsepp"))
    assert [change for change in list_changed_settings(chosen, "coco") if "precision" in change] == []
    changes = [change for change in list_changed_settings(paper, "coco") if "precision" in change]
    assert changes == ([] if precision == "fp32" else ["train.precision: fp32 -> bf16"])


@pytest.mark.parametrize("said", ["auto", "fp32"])
def test_features_of_other_machines(said: str, demo: Path, cache: Path, run: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    presets = tmp_path / "presets" / "features"
    presets.mkdir(parents=True)
    (presets / "tiny.yaml").write_text(yaml.safe_dump({**TINY_FEATURE.model_dump(mode="json"), "precision": said}))
    monkeypatch.setenv("VSE_PRESETS", str(presets.parent))
    out = tmp_path / "demo_tiny.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update={"precision": "bf16"})), out, 1)
    merge_feature(demo, out, 1)
    places = RunInputOptions(features=out, captions=demo)
    if said == "auto":
        assert open_run(run, places).image_cache.provenance["config"]["precision"] == "bf16"
    else:
        with pytest.raises(UserError, match="config.precision: fp32 -> bf16"):
            open_run(run, places)
