"""Two trainings of one folder, started together: one of them trains it, and the other ends without having written."""

from __future__ import annotations

from pathlib import Path

from tests.train import forked
from tests.train.conftest import COMMAND, assert_same, state
from vse.train.run.folder import RunFolder


def test_two_trainings_of_one_folder_do_not_mix(cache: Path, tmp_path: Path) -> None:
    def arguments(seed: int, out: Path) -> list[object]:
        return ["--features", cache, "--out", out, *COMMAND, "--seed", seed, "--threads", "1"]

    logs = [tmp_path / f"log-{seed}.txt" for seed in (0, 1)]
    processes = [
        forked.start(forked.train_main, arguments(seed, tmp_path / "run"), log) for seed, log in zip((0, 1), logs, strict=True)
    ]
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    assert sorted(codes) == [0, 2], [log.read_text() for log in logs]
    won = codes.index(0)
    said = logs[1 - won].read_text()
    assert "is writing it" in said or "holds a run with other settings" in said
    assert RunFolder(tmp_path / "run").record()["seed"] == won
    assert forked.run(forked.train_main, arguments(won, tmp_path / "alone"), logs[0]) == 0
    assert_same(state(tmp_path / "run"), state(tmp_path / "alone"))
    both = [(tmp_path / name / "best.safetensors").read_bytes() for name in ("run", "alone")]
    assert both[0] == both[1]
