"""Which device is taken: on machines with GPUs as far as torch's answers about them can stand in for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vse.features.backbones import device as hardware
from vse.features.backbones.device import describe_device, memory_guard, move_tensor, pick_device, use_threads
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
    hardware._leases.cache_clear()
    yield lambda count: Gpus(monkeypatch, count)
    if hardware._leases.cache_info().currsize:
        hardware._leases().release()
    hardware._leases.cache_clear()


def test_auto_is_the_processor_where_there_is_no_gpu(gpus: object) -> None:
    gpus(0)
    assert pick_device("auto") == torch.device("cpu")


def test_one_gpu_is_shared_without_a_number(gpus: object) -> None:
    machine = gpus(1)
    assert pick_device("auto") == torch.device("cuda")
    assert machine.touched == ["cuda"]


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_of_several_gpus_each_command_takes_one_that_no_other_has(name: str, gpus: object) -> None:
    machine = gpus(4)
    others = hardware.GpuLeases([f"test-{number}" for number in range(4)])
    assert others.take(0)
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
    assert others.take_free() == 1
    others.release()


def test_float32_on_a_gpu_is_no_tf32(gpus: object) -> None:
    gpus(1)
    torch.backends.cudnn.allow_tf32 = True
    device = pick_device("auto")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert describe_device(device) == "cuda (Test 9000)"
    assert describe_device(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize("name", ["cuda:9", "nonsense"])
def test_a_device_that_is_not_there_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match=f"--device {name}: not usable here"):
        pick_device(name)


def test_copies_to_a_gpu_are_made_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **how: calls.append((str(device), how)) or tensor)
    pixels = torch.zeros(3)
    assert move_tensor(pixels, torch.device("cuda:1")) is pixels
    assert calls == ["pinned", ("cuda:1", {"non_blocking": True})]
    calls.clear()
    move_tensor(pixels, torch.device("cpu"))
    assert calls == [("cpu", {})]


def test_a_gpu_without_memory_is_one_line_with_what_to_lower() -> None:
    message = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 3 GiB"
    with pytest.raises(UserError, match=r"out of memory \(CUDA out of memory\); lower train.batch_size"):  # noqa: SIM117
        with memory_guard("lower train.batch_size"):
            raise torch.OutOfMemoryError(message)


def test_more_threads_than_cores_are_lowered_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    try:
        use_threads(1)
        assert (torch.get_num_threads(), caplog.messages) == (1, [])
        use_threads(8)
        assert torch.get_num_threads() == 1
        assert caplog.messages == ["8 threads are lowered to 1, the cores that this process may use"]
    finally:
        torch.set_num_threads(before)


def test_tests_see_no_gpu_unless_they_are_marked() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()
