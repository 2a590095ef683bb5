"""Which device and how many cores torch may use, and which versions of what are installed.

On a machine with several GPUs: which one no other command computes on.

Each command holds a lock on a file that stands for its GPU, in the folder for temporary files. The system frees a lock when
the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path

import PIL
import torch
from torch import Tensor

from vse.pipeline import __version__
from vse.pipeline.cores import allowed_cores
from vse.pipeline.errors import UserError

log = logging.getLogger(__name__)


class GpuLeases:
    """The GPUs that this process has taken; ``uuids`` name those of the machine that it sees, by their numbers."""

    def __init__(self, uuids: Sequence[str], folder: Path | None = None) -> None:
        self._files = [(folder or Path(tempfile.gettempdir())) / f"vse-gpu-{uuid}.lock" for uuid in uuids]
        self._held: dict[int, int] = {}

    def take(self, number: int) -> bool:
        """Take one GPU; whether no other process had taken it."""
        if number in self._held:
            return True
        file = self._files[number]
        try:
            descriptor = os.open(file, os.O_RDONLY if file.exists() else os.O_RDONLY | os.O_CREAT, 0o644)
        except OSError as error:  # e.g. a folder that nobody may write to: GPUs are then shared as they come
            log.warning("%s: %s; other commands may compute on the same GPU", file, error.strerror)
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._held[number] = descriptor
        return True

    def first_free(self) -> int:
        """The number of the GPU that this process has, or of the first that no other has, which is taken.

        If all are taken, one is shared, and a line says so.
        """
        if self._held:
            return min(self._held)
        free = next((number for number in range(len(self._files)) if self.take(number)), None)
        if free is not None:
            return free
        shared = os.getpid() % len(self._files)
        log.warning("all %d GPUs are in use by other commands; this one shares GPU %d", len(self._files), shared)
        return shared

    def release(self) -> None:
        """Give all back."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


MEMORY_ADVICE = "--device cpu does without it"  # what a user may do whose GPU has too little memory


def pick_device(name: str) -> torch.device:
    """``auto`` is a GPU if there is one; :class:`UserError` for a device that torch does not have here.

    Of several GPUs ``auto`` and ``cuda`` are the first that no other command computes on, and ``cuda:1`` is that one. TF32,
    which cuDNN's convolutions and recurrent networks take by default for float32, is switched off. Apple's GPUs are no part of
    ``auto``, since they know no float64.
    """
    resolved = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        device = torch.device(resolved)
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
            device = _own_gpu(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: not usable here ({str(error).splitlines()[0]})") from None
    return device


def _own_gpu(device: torch.device) -> torch.device:
    """That GPU, or a free one if it has no number, as the current one, so that no other gets a context."""
    if torch.cuda.device_count() > 1:
        if device.index is None:
            device = torch.device("cuda", _leases().first_free())
        elif device.index < torch.cuda.device_count():
            _leases().take(device.index)
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


@cache
def _leases() -> GpuLeases:
    return GpuLeases([str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())])


def describe_device(device: torch.device) -> str:
    """``cpu``, or a GPU by the name of its model."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; to a GPU it is copied from pinned memory, so that the copy runs beside the computation."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """In this block, if it is ``wanted``, torch gives the same bits every time on a GPU, too, at the price of speed.

    :class:`UserError` for an operation that has no such algorithm.
    """
    if not wanted or torch.are_deterministic_algorithms_enabled():  # torch's switch imports its compiler
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS reads when it is first used
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise UserError(f"train.deterministic: {str(error).split('. ')[0]}") from None
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def memory_guard(cure: str) -> Iterator[None]:
    """In this block a GPU that runs out of memory is a :class:`UserError` that ends with ``cure``, what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"the GPU is out of memory ({str(error).split('. ')[0].strip()}); {cure}") from None


def use_threads(threads: int | None) -> None:
    """Let torch use ``threads`` cores, but no more than this process may use; None leaves their number as it is.

    Also then torch is given the number: MKL may use fewer threads until it is, and small models train a fifth slower.
    """
    if threads is None:
        threads = torch.get_num_threads()
    elif threads > (allowed := allowed_cores()):
        log.warning("%d threads are lowered to %d, the cores that this process may use", threads, allowed)
        threads = allowed
    torch.set_num_threads(threads)


def library_versions() -> dict[str, str]:
    """Versions of this package and of the libraries that every feature depends on."""
    return {
        "vse": __version__,
        "torch": torch.__version__,
        "torchvision": metadata.version("torchvision"),
        "pillow": PIL.__version__,
    }
