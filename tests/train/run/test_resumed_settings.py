"""A resume continues with the settings that the run began with, or says which ones differ."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.train.conftest import COMMAND, experiment
from vse.pipeline.errors import Interrupted
from vse.train.cli import train_main
from vse.train.run.resume import Extras
from vse.train.solvers import adam
from vse.train.training import train


@pytest.fixture
def stopped(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Train with this number of listed negatives, and stop in the first epoch."""

    def stop(log_negatives: int) -> Path:
        with monkeypatch.context() as patch, suppress(Interrupted):
            real = adam.Trainer.step

            def step(self: adam.Trainer, *arguments: object) -> object:
                os.kill(os.getpid(), signal.SIGTERM)
                return real(self, *arguments)  # type: ignore[arg-type]

            patch.setattr(adam.Trainer, "step", step)
            train(cache, experiment(), out=tmp_path / "run", extras=Extras(log_negatives))
        return tmp_path / "run"

    return stop


@pytest.mark.parametrize("record", ["kept", "lost"])
@pytest.mark.parametrize(("began", "resumed"), [(0, 3), (3, 0), (3, 2)])
def test_another_number_of_listed_negatives_is_refused(
    began: int, resumed: int, record: str, stopped: Callable[[int], Path], cache: Path, fails: Callable[..., str]
) -> None:
    run = stopped(began)
    if record == "lost":
        (run / "run.json").unlink()
    arguments = ["--features", cache, *COMMAND, "--out", run, "--resume", "--log-negatives"]
    line = fails(train_main, *arguments, resumed)
    assert f"with --log-negatives {began}, not {resumed}; continue it with --resume --log-negatives {began}" in line
    with pytest.raises(SystemExit) as stop:
        train_main([str(argument) for argument in [*arguments, began]])
    assert stop.value.code == 0
    assert (run / "negatives.csv").exists() == (began > 0)


@pytest.mark.parametrize("record", ["kept", "lost"])
@pytest.mark.parametrize("setting", ["rows", "title"])
def test_an_edited_row_or_title_is_refused(
    setting: str, record: str, stopped: Callable[[int], Path], cache: Path, fails: Callable[..., str]
) -> None:
    """Compare settings that change no weights, but name the row of a paper's table that a result stands for."""
    run = stopped(0)
    if record == "lost":
        (run / "run.json").unlink()
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings[setting] = {"rows": [], "title": "another"}[setting]
    (run / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    line = fails(train_main, "--features", cache, *COMMAND, "--out", run, "--resume")
    assert "config.yaml: not what the training wrote" in line


def test_an_edited_title_of_a_finished_run_is_refused(own_run: Path, cache: Path, fails: Callable[..., str]) -> None:
    text = (own_run / "config.yaml").read_text()
    (own_run / "config.yaml").write_text(text.replace("title: ", "title: another ", 1))
    record = json.loads((own_run / "run.json").read_text())
    assert "config.yaml: not what the training wrote" in fails(train_main, "--features", cache, *COMMAND, "--out", own_run)
    assert json.loads((own_run / "run.json").read_text()) == record
