"""Which device is taken: on machines with GPUs as far as torch's answers about them can stand in for one."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vse.features.backbones import device as hardware
from vse.features.backbones.device import (
    GpuLeases,
    describe_device,
    describe_processor,
    pick_device,
    set_thread_count,
    wrap_memory_errors,
)
from vse.pipeline.errors import UserError


class Gpus:
    """A machine with so many GPUs, as torch would speak of it; ``touched`` are the devices on which something was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.touched: list[str] = []
        self.current: list[str] = []
        empty = torch.empty

        def made(*size: int, device: torch.device | None = None, **options: object) -> torch.Tensor:
            if device is not None and device.type == "cuda":
                self.touched.append(str(device))
                return empty(*size)
            return empty(*size, **options)

        monkeypatch.setattr(torch, "empty", made)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"test-{number}"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Test 9000")
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.current.append(str(device)))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[object]:
    """Give the machine GPUs; locks lie in a folder of the test's own, and the arithmetic is set back."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    hardware._get_gpu_leases.cache_clear()
    yield lambda count: Gpus(monkeypatch, count)
    if hardware._get_gpu_leases.cache_info().currsize:
        hardware._get_gpu_leases().release()
    hardware._get_gpu_leases.cache_clear()


def test_auto_is_the_processor_or_the_one_gpu_without_a_number(gpus: object) -> None:
    gpus(0)
    assert pick_device("auto") == torch.device("cpu")
    machine = gpus(1)
    assert pick_device("auto") == torch.device("cuda")
    assert machine.touched == ["cuda"]


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_of_several_gpus_each_command_takes_one_that_no_other_has(name: str, gpus: object) -> None:
    machine = gpus(4)
    others = hardware.GpuLeases([f"test-{number}" for number in range(4)])
    assert others.try_lock_gpu(0)
    assert pick_device(name) == torch.device("cuda:1")
    assert pick_device(name) == torch.device("cuda:1"), "the second time, too"
    assert set(machine.touched) == {"cuda:1"}, "no context on another one"
    assert machine.current[0] == "cuda:1"
    others.release()


def test_a_gpu_that_was_named_is_that_one_and_counts_as_taken(gpus: object) -> None:
    machine = gpus(4)
    assert pick_device("cuda:0") == torch.device("cuda:0")
    assert machine.current == ["cuda:0"]
    others = hardware.GpuLeases([f"test-{number}" for number in range(4)])
    assert others.choose_gpu() == 1
    others.release()


def test_float32_on_a_gpu_is_no_tf32(gpus: object) -> None:
    gpus(1)
    torch.backends.cudnn.allow_tf32 = True
    device = pick_device("auto")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert describe_device(device) == "cuda (Test 9000)"
    assert describe_device(torch.device("cpu")) == "cpu"
    assert describe_processor(device) == "Test 9000"
    assert torch.backends.cpu.get_cpu_capability() in describe_processor(torch.device("cpu"))


def test_a_device_that_is_not_there_or_has_no_memory_is_one_line() -> None:
    for name in ("cuda:9", "nonsense"):
        with pytest.raises(UserError, match=f"--device {name}: not usable here"):
            pick_device(name)
    message = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 3 GiB"
    with pytest.raises(UserError, match=r"out of memory \(CUDA out of memory\); lower train.batch_size"):  # noqa: SIM117
        with wrap_memory_errors("lower train.batch_size"):
            raise torch.OutOfMemoryError(message)


def test_more_threads_than_cores_are_lowered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    try:
        set_thread_count(1)
        assert (torch.get_num_threads(), caplog.messages) == (1, [])
        set_thread_count(8)
        assert torch.get_num_threads() == 1
        assert caplog.messages == ["8 threads are lowered to 1, the cores that this process may use"]
    finally:
        torch.set_num_threads(before)


UUIDS = ["a", "b", "c"]


def test_each_takes_another_one_until_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    commands = [GpuLeases(UUIDS, tmp_path) for _ in UUIDS]
    assert [command.choose_gpu() for command in commands] == [0, 1, 2]
    assert [command.choose_gpu() for command in commands] == [0, 1, 2], "each keeps what it has"
    late = GpuLeases(UUIDS, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert late.choose_gpu() in range(3)
    assert "all 3 GPUs are in use by other commands" in caplog.text
    commands[1].release()
    assert late.choose_gpu() == 1
    for command in (*commands, late):
        command.release()


def take_and_die(folder: Path) -> None:
    GpuLeases(UUIDS, folder).try_lock_gpu(0)
    multiprocessing.current_process().kill()


def test_a_killed_command_gives_its_gpu_back(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=take_and_die, args=(tmp_path,))
    process.start()
    process.join()
    leases = GpuLeases(UUIDS, tmp_path)
    assert leases.choose_gpu() == 0
    leases.release()


def test_a_folder_that_takes_no_locks_is_said_and_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leases = GpuLeases(UUIDS, tmp_path / "nowhere")
    assert leases.choose_gpu() == 0
    assert "other commands may compute on the same GPU" in caplog.text
