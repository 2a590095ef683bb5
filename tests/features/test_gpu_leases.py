from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import pytest

from vse.features.backbones.device import GpuLeases

UUIDS = ["a", "b", "c"]


def test_each_takes_another_one_until_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    commands = [GpuLeases(UUIDS, tmp_path) for _ in UUIDS]
    assert [command.take_free() for command in commands] == [0, 1, 2]
    assert [command.take_free() for command in commands] == [0, 1, 2], "each keeps what it has"
    late = GpuLeases(UUIDS, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert late.take_free() in range(3)
    assert "all 3 GPUs are in use by other commands" in caplog.text
    commands[1].release()
    assert late.take_free() == 1
    for command in (*commands, late):
        command.release()


def take_and_die(folder: Path) -> None:
    GpuLeases(UUIDS, folder).take(0)
    multiprocessing.current_process().kill()


def test_a_killed_command_gives_its_gpu_back(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=take_and_die, args=(tmp_path,))
    process.start()
    process.join()
    leases = GpuLeases(UUIDS, tmp_path)
    assert leases.take_free() == 0
    leases.release()


def test_a_folder_that_takes_no_locks_is_said_and_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leases = GpuLeases(UUIDS, tmp_path / "nowhere")
    assert leases.take_free() == 0
    assert "other commands may compute on the same GPU" in caplog.text
