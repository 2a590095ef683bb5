"""A run that did not finish is embedded and evaluated only if one asks for that, and the result says so."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.train.conftest import COMMAND, experiment
from tests.train.use.test_other_data import done
from vse.eval.cli import eval_main, table_main
from vse.pipeline.errors import Interrupted, UserError
from vse.train.cli import embed_main, report_main, search_main, train_main
from vse.train.run.folder import RunFolder
from vse.train.solvers import adam
from vse.train.training import train


def stopped(cache: Path, out: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> Path:
    """A run that ends in its second epoch."""
    real, steps = adam.Trainer.step, iter(range(100))

    def step(self: adam.Trainer, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        loss, collapsed = real(self, *arguments)  # type: ignore[arg-type]
        if next(steps) >= 10:
            if how == "running":
                os.kill(os.getpid(), signal.SIGTERM)
            elif how == "diverged":
                return loss * torch.nan, collapsed
        return loss, collapsed

    with monkeypatch.context() as patch:
        patch.setattr(adam.Trainer, "step", step)
        if how == "collapsed":
            patch.setattr(adam.Trainer, "_is_collapsed", lambda self, row, _: row["epoch"] == 2)
        with pytest.raises((Interrupted, UserError)):
            train(cache, experiment(), out=out)
    return out


@pytest.mark.parametrize("how", ["running", "diverged", "collapsed"])
def test_an_unfinished_run_is_used_only_if_one_asks_for_that(
    how: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]
) -> None:
    run = stopped(cache, tmp_path / "run", monkeypatch, how)
    assert RunFolder(run).record()["state"] == how
    line = fails(embed_main, run)
    assert f"did not finish (state: {how})" in line
    assert "--unfinished" in line
    assert not (run / "test.h5").exists()
    done(embed_main, run, "--unfinished")
    out = tmp_path / "r.json"
    line = fails(eval_main, run / "test.h5", "--out", out)
    assert f"did not finish (state: {how})" in line
    assert not out.exists()
    done(eval_main, run / "test.h5", "--bootstrap", 100, "--unfinished", "--out", out)
    assert json.loads(out.read_text())["unfinished"] == [{"file": "run/test.h5", "state": how}]
    done(table_main, "summary", out, "--out", tmp_path / "t.csv")
    assert pd.read_csv(tmp_path / "t.csv")["unfinished"].tolist() == [how]
    done(report_main, out, "--out", tmp_path / "page.html")
    assert f"the training did not finish ({how})" in (tmp_path / "page.html").read_text()


def test_a_search_with_an_unfinished_run_says_so(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = stopped(cache, tmp_path / "run", monkeypatch, "running")
    done(search_main, run, "a red circle")
    assert "its training did not finish (state: running)" in caplog.text


def test_a_run_that_was_continued_is_like_any_other(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(cache, tmp_path / "run", monkeypatch, "running")
    done(train_main, "--features", cache, "--out", run, *COMMAND, "--resume")
    done(embed_main, run)
    done(eval_main, run / "test.h5", "--bootstrap", 0, "--out", tmp_path / "r.json")
    assert "unfinished" not in json.loads((tmp_path / "r.json").read_text())


def test_a_comparison_asks_too(
    cache: Path, own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]
) -> None:
    run = stopped(cache, tmp_path / "stopped", monkeypatch, "running")
    done(embed_main, run, "--unfinished")
    done(embed_main, own_run)
    both = [own_run / "test.h5", run / "test.h5", "--compare", "--bootstrap", 20, "--out", tmp_path / "c.json"]
    assert "did not finish" in fails(eval_main, *both)
    done(eval_main, *both, "--unfinished")
    assert json.loads((tmp_path / "c.json").read_text())["unfinished"] == [{"file": "stopped/test.h5", "state": "running"}]
