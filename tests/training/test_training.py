from __future__ import annotations

import csv
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.eval.slow_ranks import slow_ranks
from tests.training import forked
from tests.training.conftest import (
    COMMAND,
    Fails,
    Log,
    Patch,
    assert_same,
    done,
    experiment,
    interrupted,
    state,
    table,
    weights,
)
from vse.pipeline.errors import Interrupted
from vse.training.cli import train_main
from vse.training.options import TrainOptions
from vse.training.run.folder import RunFolder
from vse.training.solvers import retrieval
from vse.training.solvers.base import NEGATIVE_COLUMNS
from vse.training.solvers.encode import encode_split
from vse.training.training import train
from vse.training.use.model import load_run


def test_a_run_leaves_all_its_files_and_a_second_call_changes_none(run: Path, cache: Path, own_run: Path) -> None:
    files = {path.name for path in run.iterdir()}
    assert files == {"config.yaml", "vocab.json", "metrics.csv", "best.safetensors", "last.ckpt", "run.json"}
    record = RunFolder(run).read_record()
    assert (record["state"], record["epochs"], record["seed"], record["dataset"]) == ("finished", 3, 0, "demo")
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] == 3
    rows = table(run)
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    best = max(rows, key=lambda row: float(row["rsum"]))
    assert (float(best["epoch"]), float(best["rsum"])) == (record["best_epoch"], record["best_rsum"])
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in own_run.iterdir()}
    train(cache, experiment(), out=own_run)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in own_run.iterdir()} == before


def test_other_settings_or_captions_are_another_run(cache: Path, own_run: Path, fails: Fails, own_demo: Path) -> None:
    before = weights(own_run)
    line = fails(train_main, "--features", cache, "--out", own_run, *COMMAND, "--set", "loss.margin=0.3")
    assert "loss.margin: 0.2 -> 0.3" in line
    assert "--overwrite" in line
    assert all(torch.equal(before[name], value) for name, value in weights(own_run).items())
    own_demo.write_text(own_demo.read_text().replace('"square"', '"quadrangle"'))  # the words, not the texts
    line = fails(train_main, "--features", cache, "--captions", own_demo, "--out", own_run, "--resume", *COMMAND)
    assert "captions_sha256" in line


@pytest.mark.parametrize(("file", "content"), [("config.yaml", b"[junk"), ("last.ckpt", b""), ("run.json", b"[]")])
def test_a_broken_run_is_named_and_overwritten(file: str, content: bytes, cache: Path, own_run: Path, fails: Fails) -> None:
    if file == "last.ckpt":
        (own_run / "run.json").unlink()
    (own_run / file).write_bytes(content)
    arguments = ["--features", cache, "--out", own_run, *COMMAND, "--set", "train.epochs=1"]
    assert file in fails(train_main, *arguments, "--resume")
    done(train_main, *arguments, "--overwrite")


def test_a_lost_record_does_not_cost_the_checkpoint(cache: Path, own_run: Path) -> None:
    """Snakemake deletes run.json before it starts a job again."""
    before = weights(own_run)
    (own_run / "run.json").unlink()
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval.RetrievalTrainer, "step", lambda *_: calls.append(1))
        train(cache, experiment(), out=own_run, options=TrainOptions(resume=True, overwrite=True))
    assert not calls
    assert RunFolder(own_run).read_record()["state"] == "finished"
    assert all(torch.equal(before[name], value) for name, value in weights(own_run).items())


def test_early_stop_counts_epochs_since_the_best_validation(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    values = iter([5.0, 9.0, 9.0, 8.0, 10.0])
    nothing = dict.fromkeys(("i2t_r1", "t2i_r1"), 0.0)
    monkeypatch.setattr(retrieval.RetrievalTrainer, "validate", lambda _: {**nothing, "rsum": next(values)})
    run = train(cache, experiment("train.epochs=9", "train.early_stop=2"), out=tmp_path / "run")
    record = RunFolder(run).read_record()
    assert (record["state"], record["epochs"], record["best_epoch"]) == ("finished", 4, 2)
    (run / "run.json").unlink()
    train(cache, experiment("train.epochs=9", "train.early_stop=2"), out=run, options=TrainOptions(resume=True))
    assert RunFolder(run).read_record()["epochs"] == 4, "a resumed run does not go on behind its early stop"
    values = iter([9.0, 8.0, 7.0, 6.0])
    nothing = dict.fromkeys(("i2t_r1", "t2i_r1"), 0.0)
    monkeypatch.setattr(retrieval.RetrievalTrainer, "validate", lambda _: {**nothing, "rsum": next(values)})
    run = train(cache, experiment("train.epochs=9", "train.early_stop=3", "train.validate_every=2"), out=tmp_path / "seldom")
    assert blanks(run) == [True, False, True, False, True], "the best of epoch 2, then three epochs"
    assert RunFolder(run).read_record()["best_epoch"] == 2


def test_a_warm_up_without_end_is_told(cache: Path, tmp_path: Path, caplog: Log) -> None:
    train(cache, experiment("train.epochs=1", "warmup.epochs=1", "loss.name=max"), out=tmp_path / "run")
    assert "all 1 epochs are warm-up with the loss 'sum', so 'max' is never used" in caplog.text


def test_hard_negatives_and_events_are_written_on_request(run: Path, cache: Path, tmp_path: Path) -> None:
    listing = train(cache, experiment(), out=tmp_path / "run", options=TrainOptions(log_negatives=2, tensorboard=True))
    rows = list(csv.DictReader((listing / "negatives.csv").read_text().splitlines()))
    assert tuple(rows[0]) == NEGATIVE_COLUMNS
    queries = ("image", "image", "caption", "caption")
    assert [(row["epoch"], row["query"]) for row in rows] == [(epoch, query) for epoch in "123" for query in queries]
    assert all(row["sentid"] != row["negative_sentid"] for row in rows)
    assert_same(state(run)["model"], state(listing)["model"])
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(listing))
    events.Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("rsum")]
    assert found == [(row["epoch"], pytest.approx(row["rsum"], abs=2e-3)) for row in state(run)["rows"]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends_with_one_line(number: signal.Signals, code: int, cache: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    arguments = ["--features", str(cache), "--out", str(run), *COMMAND, "--set", "train.epochs=500", "--threads", "1"]
    process = forked.start(forked.train_main, arguments, log)
    while process.is_alive() and not (run / "metrics.csv").exists():
        process.join(0.05)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code, log.read_text()
    assert "Traceback" not in log.read_text()
    assert log.read_text().splitlines()[-1].startswith("vse-train: stopped in epoch ")
    assert log.read_text().splitlines()[-1].endswith("--resume continues from there")
    saved = RunFolder(run).read_checkpoint()
    assert saved["epoch"] * 8 + saved["step"] > 0
    assert RunFolder(run).read_record()["state"] == "running"


def test_a_second_sigterm_as_slurm_sends_it_does_not_prevent_the_checkpoint(cache: Path, tmp_path: Path) -> None:
    with interrupted(2), interrupted(2), pytest.raises(Interrupted, match="stopped in epoch 1, step 3"):
        train(cache, experiment(), out=tmp_path / "run")
    assert RunFolder(tmp_path / "run").read_checkpoint()["step"] == 3


@pytest.mark.nightly
def test_kills_do_not_change_the_last_checkpoint(cache: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """SIGKILL at random moments of the training, each time resumed; the last checkpoint must not show it."""
    rng, log = random.Random(1), tmp_path / "log.txt"

    def arguments(folder: str) -> list[str]:
        sets = [*COMMAND, "--set", "train.epochs=25"]
        return ["--features", str(cache), "--out", str(tmp_path / folder), "--resume", "--threads", "1", *sets]

    def epochs() -> int:
        metrics = tmp_path / "killed" / "metrics.csv"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    for _ in range(5 * (request.config.getoption("tries") or 2)):
        process = forked.start(forked.train_main, arguments("killed"), log)
        enough = epochs() + rng.randrange(3)
        while process.is_alive() and epochs() <= enough:
            process.join(rng.uniform(0.005, 0.05))
        process.kill()
        process.join()
    for folder in ("killed", "whole"):
        assert forked.run(forked.train_main, arguments(folder), log) == 0, log.read_text()
    assert_same(state(tmp_path / "killed"), state(tmp_path / "whole"))
    assert (tmp_path / "killed/best.safetensors").read_bytes() == (tmp_path / "whole/best.safetensors").read_bytes()


def test_mapped_features_train_the_same_weights_as_features_read_from_files(cache: Path, tmp_path: Path) -> None:
    mapped, files = (
        state(train(cache, experiment(f"train.features_in_memory={value}", "train.epochs=1"), out=tmp_path / value))
        for value in ("true", "false")
    )
    assert_same({**mapped, "files": {}}, {**files, "files": {}})  # config.yaml has the setting


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(cache: Path, tmp_path: Path) -> None:
    arguments = ["--features", str(cache), "--out", str(tmp_path / "run"), *COMMAND, "--set", "model.dim=64"]
    log = tmp_path / "log.txt"
    assert forked.run(forked.train_on_a_full_disk, arguments, log) == 2, log.read_text()
    assert f"vse-train: error: cannot write {tmp_path}/run/best.next.safetensors: File too large" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml", "vocab.json", "run.json"}


def blanks(run: Path) -> list[bool]:
    """Which epochs of ``metrics.csv`` have no recall, but a loss."""
    rows = table(run)
    assert all(float(row["loss"]) > 0 for row in rows)
    assert all((row["rsum"] == "") == (row["i2t_r1"] == "") for row in rows)
    return [row["rsum"] == "" for row in rows]


@pytest.mark.parametrize(("every", "expected"), [(2, [1, 0, 1, 0, 0]), (9, [1, 1, 1, 1, 0])])
def test_validation_every_few_epochs_and_the_last(every: int, expected: list[int], cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment("train.epochs=5", f"train.validate_every={every}"), out=tmp_path / "run")
    assert blanks(run) == expected
    validated = [row for row in table(run) if row["rsum"]]
    best = max(validated, key=lambda row: float(row["rsum"]))
    record = RunFolder(run).read_record()
    assert (record["best_epoch"], record["best_rsum"]) == (int(best["epoch"]), float(best["rsum"]))


def test_validating_less_changes_only_which_weights_are_best(run: Path, cache: Path, tmp_path: Path) -> None:
    seldom = train(cache, experiment("train.validate_every=3"), out=tmp_path / "run")
    assert_same(state(run)["model"], state(seldom)["model"])
    assert float(table(run)[-1]["rsum"]) == float(table(seldom)[-1]["rsum"])
    assert_same(weights(seldom), dict(state(run)["model"]))
    few = train(cache, experiment("train.validate_images=4"), out=tmp_path / "few")
    more = train(cache, experiment("train.validate_images=400"), out=tmp_path / "more")
    assert [row["rsum"] for row in table(more)] == [row["rsum"] for row in table(run)]
    assert_same(state(few)["model"], state(run)["model"])
    trained = load_run(few, "val", device="cpu")
    (images,), (captions,) = (side.unpack_all() for side in encode_split(trained.model, trained.split, trained.device))
    own = trained.split.pairs.image_indices < 4
    i2t, t2i = slow_ranks((images[:4] @ captions[own].T).numpy(), trained.split.pairs.image_indices[own].tolist())
    rsum = sum(100 * np.mean(np.asarray(ranks) < k) for ranks in (i2t, t2i) for k in (1, 5, 10))
    assert RunFolder(few).read_record()["best_rsum"] == pytest.approx(rsum)
