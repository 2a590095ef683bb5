"""SIGKILL at each kind of moment of a training and of an extraction of captions; the next call gives the whole result."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.kills import Forks
from tests.test_killed import files
from tests.training.conftest import COMMAND, assert_same
from vse.training.run.folder import RunFolder

EPOCHS = 2
TRAIN = [*COMMAND, "--set", f"train.epochs={EPOCHS}", "--set", "train.batch_size=128", "--threads", "1", "--resume"]
EXTRACT = ["tfidf", "--set", "min_count=1", "--shards", "2", "--threads", "1"]
N_MOMENTS = 5  # of an extraction
MOMENTS = {
    "before the first checkpoint",
    "in the middle of an epoch",
    "while a checkpoint is written",
    "between epochs",
    "at the end",
}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks(["vse.training.cli", "vse.training.training", "vse.features.cli", "vse.features.extraction"])
    yield forks
    forks.close()


def moment(run: Path) -> str:
    """The moment of a training at which it was killed, by the files that it has left."""
    folder = RunFolder(run)
    if any(".ckpt." in path.name for path in run.glob(".*.tmp")):
        return "while a checkpoint is written"
    if not folder.checkpoint_file.exists():
        return "before the first checkpoint"
    saved = folder.read_checkpoint()
    if saved["step"]:
        return "in the middle of an epoch"
    return "at the end" if saved["epoch"] == EPOCHS else "between epochs"


@pytest.mark.nightly
def test_a_training_killed_at_any_moment_ends_with_the_same_weights(cache: Path, forks: Forks, tmp_path: Path) -> None:
    def train(run: Path, kill_at: int | None = None) -> tuple[int, int]:
        sets = ["--set", "train.save_minutes=1e-9"]  # a checkpoint after each step
        arguments = ["--features", cache, "--out", run, *TRAIN, *sets]
        return forks.run("vse.training.cli:train_main", arguments, tmp_path / "log", kill_at)

    code, n_changes = train(tmp_path / "whole")
    assert code == 0, (tmp_path / "log").read_text()
    expected = RunFolder(tmp_path / "whole")
    tried: set[str] = set()
    for kill_at in sorted(range(n_changes), key=lambda k: (0 < k < n_changes - 1, abs(k - n_changes // 2))):
        if len(tried) == len(MOMENTS):
            break
        run = tmp_path / f"killed-{kill_at}"
        assert train(run, kill_at)[0] == -signal.SIGKILL
        if moment(run) in tried:
            continue
        tried.add(moment(run))
        assert train(run)[0] == 0, (tmp_path / "log").read_text()
        assert RunFolder(run).best_weights_file.read_bytes() == expected.best_weights_file.read_bytes(), tried
        for name in ("model", "optimizer", "epoch", "step"):
            assert_same(RunFolder(run).read_checkpoint()[name], expected.read_checkpoint()[name])
    assert tried == MOMENTS


@pytest.mark.nightly
def test_an_extraction_killed_at_any_moment_gives_the_same_cache(demo: Path, forks: Forks, tmp_path: Path) -> None:
    def extract(folder: Path, kill_at: int | None = None) -> tuple[int, int]:
        arguments = [*EXTRACT, "--dataset", demo, "--out", folder / "demo_tfidf.h5"]
        return forks.run("vse.features.cli:extract_main", arguments, tmp_path / "log", kill_at)

    code, n_changes = extract(tmp_path / "whole")
    assert code == 0, (tmp_path / "log").read_text()
    expected = files(tmp_path / "whole")
    for number in range(N_MOMENTS):
        folder, kill_at = tmp_path / f"killed-{number}", number * (n_changes - 1) // (N_MOMENTS - 1)
        assert extract(folder, kill_at)[0] == -signal.SIGKILL
        for path, found in files(folder, finished=True).items():
            assert found == expected[path], f"{path}, killed before change {kill_at}"
        assert extract(folder)[0] == 0, (tmp_path / "log").read_text()
        assert files(folder) == expected, f"killed before change {kill_at}"
