"""From a cache and an experiment to a run folder: its files, what is there already, early stops, listings, signals."""

from __future__ import annotations

import csv
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from tests.train.conftest import COMMAND, assert_same, experiment, state, table, weights
from vse.train.cli import train_main
from vse.train.run.folder import RunFolder
from vse.train.solvers import adam
from vse.train.solvers.negatives import COLUMNS
from vse.train.training import Existing, Extras, train


def test_a_run_leaves_all_its_files(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    files = {path.name for path in run.iterdir()}
    assert files == {"config.yaml", "vocab.json", "metrics.csv", "best.safetensors", "last.ckpt", "run.json"}
    record = RunFolder(run).record()
    assert (record["state"], record["epochs"], record["seed"], record["dataset"]) == ("finished", 3, 0, "demo")
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] == 3
    rows = table(run)
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    best = max(rows, key=lambda row: float(row["rsum"]))
    assert (float(best["epoch"]), float(best["rsum"])) == (record["best_epoch"], record["best_rsum"])


def test_a_second_call_of_a_finished_run_changes_nothing(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()}
    train(cache, experiment(), out=run)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()} == before


def test_other_settings_do_not_overwrite_a_run(cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    before = weights(run)
    line = fails(train_main, "--features", cache, "--out", run, *COMMAND, "--set", "loss.margin=0.3")
    assert "loss.margin: 0.2 -> 0.3" in line
    assert "--overwrite" in line
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


def test_other_captions_are_another_run(cache: Path, own_demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    own_demo.write_text(own_demo.read_text().replace("square", "quadrangle"))
    line = fails(train_main, "--features", cache, "--captions", own_demo, "--out", run, "--resume", *COMMAND)
    assert "captions_sha256" in line


@pytest.mark.parametrize("file", ["config.yaml", "last.ckpt", "run.json"])
@pytest.mark.parametrize("content", [b"", b"[junk", b"[]"])
def test_a_broken_run_is_named_and_can_be_overwritten(
    file: str, content: bytes, cache: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run")
    if file == "last.ckpt":
        (run / "run.json").unlink()
    (run / file).write_bytes(content)
    arguments = ["--features", cache, "--out", run, *COMMAND, "--set", "train.epochs=1"]
    assert file in fails(train_main, *arguments, "--resume")
    with pytest.raises(SystemExit) as stop:
        train_main([str(a) for a in [*arguments, "--overwrite"]])
    assert stop.value.code == 0


def test_a_lost_record_does_not_cost_the_checkpoint(cache: Path, tmp_path: Path) -> None:
    """Snakemake deletes run.json before it starts a job again."""
    run = train(cache, experiment(), out=tmp_path / "run")
    before = weights(run)
    (run / "run.json").unlink()
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam.Trainer, "step", lambda *_: calls.append(1))
        train(cache, experiment(), out=run, existing=Existing(resume=True, overwrite=True))
    assert not calls
    assert RunFolder(run).record()["state"] == "finished"
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


def test_early_stop_waits_for_a_better_rsum(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([5.0, 9.0, 9.0, 8.0, 10.0])
    nothing = dict.fromkeys(("i2t_r1", "t2i_r1"), 0.0)
    monkeypatch.setattr(adam.Trainer, "validate", lambda _: {**nothing, "rsum": next(values)})
    run = train(cache, experiment("train.epochs=9", "train.early_stop=2"), out=tmp_path / "run")
    record = RunFolder(run).record()
    assert (record["state"], record["epochs"], record["best_epoch"]) == ("finished", 4, 2)
    (run / "run.json").unlink()
    train(cache, experiment("train.epochs=9", "train.early_stop=2"), out=run, existing=Existing(resume=True))
    assert RunFolder(run).record()["epochs"] == 4, "a resumed run does not go on behind its early stop"


def test_a_warm_up_without_end_is_told(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(cache, experiment("train.epochs=1", "warmup.epochs=1", "loss.name=max"), out=tmp_path / "run")
    assert "all 1 epochs are warm-up with the loss 'sum', and 'max' is never used" in caplog.text


def test_hard_negatives_are_listed_per_epoch_and_direction(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(), out=tmp_path / "run", extras=Extras(log_negatives=2))
    rows = list(csv.DictReader((run / "negatives.csv").read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["epoch"], row["query"]) for row in rows] == [
        (epoch, query) for epoch in "123" for query in ("image", "image", "caption", "caption")
    ]
    assert all(row["sentid"] != row["negative_sentid"] for row in rows)
    plain = train(cache, experiment(), out=tmp_path / "plain")
    assert_same(state(run)["model"], state(plain)["model"])


def test_events_can_be_read_by_tensorboard(cache: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(cache, experiment(), out=tmp_path / "run", extras=Extras(tensorboard=True))
    events = accumulator.EventAccumulator(str(run))
    events.Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("rsum")]
    assert found == [(row["epoch"], pytest.approx(row["rsum"], abs=2e-3)) for row in state(run)["rows"]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends_with_one_line(number: signal.Signals, code: int, cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vse.train", "--features", str(cache), "--out", str(tmp_path / "run"), *COMMAND]
    command += ["--set", "train.epochs=500", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (tmp_path / "run" / "metrics.csv").exists():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.05)
        process.send_signal(number)
        _, log = process.communicate()
    assert process.returncode == code, log
    assert "Traceback" not in log
    assert log.splitlines()[-1].startswith("vse-train: stopped in epoch ")
    assert log.splitlines()[-1].endswith("--resume continues there")
    saved = RunFolder(tmp_path / "run").checkpoint()
    assert saved["epoch"] * 8 + saved["step"] > 0
    assert RunFolder(tmp_path / "run").record()["state"] == "running"


@pytest.mark.slow
def test_killed_ten_times_then_resumed_gives_the_same_weights(cache: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments of the training, each time resumed; the final weights must not show it."""
    chance = random.Random(1)

    def command(folder: str) -> list[str]:
        arguments = ["--features", str(cache), "--out", str(tmp_path / folder), "--resume", "--threads", "1", *COMMAND]
        arguments += ["--set", "train.epochs=25"]
        return [sys.executable, "-c", "from vse.train.cli import train_main; train_main()", *arguments]

    def epochs() -> int:
        table = tmp_path / "killed" / "metrics.csv"
        return len(table.read_text().splitlines()) if table.exists() else 0

    for _ in range(10):
        process = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        enough = epochs() + chance.randrange(3)
        while process.poll() is None and epochs() <= enough:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=chance.uniform(0.005, 0.05))
        process.kill()
        process.communicate()
    for folder in ("killed", "whole"):
        subprocess.run(command(folder), check=True, capture_output=True)
    killed, whole = (RunFolder(tmp_path / folder) for folder in ("killed", "whole"))
    a, b = killed.checkpoint(), whole.checkpoint()
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in b["model"])
    assert killed.best_file.read_bytes() == whole.best_file.read_bytes()


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(cache: Path, tmp_path: Path) -> None:
    """No file of this process may grow beyond 20,000 bytes, which the system reports like a full disk: in the write."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    arguments = ["--features", str(cache), "--out", str(tmp_path / "run"), *COMMAND, "--set", "model.dim=64"]
    command = [sys.executable, "-c", limit + "from vse.train.cli import train_main; train_main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"vse-train: error: cannot write {tmp_path}/run/best.safetensors: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml", "vocab.json", "run.json"}
