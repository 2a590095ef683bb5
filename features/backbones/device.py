"""Choose torch's device, precision and number of threads, report a lack of GPU memory, and list library versions."""

from __future__ import annotations

import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

import PIL
import torch
from torch import Tensor

from vse.pipeline import __version__
from vse.pipeline.command import count_allowed_cores
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import try_lock

log = logging.getLogger(__name__)


class GpuLeases:
    """The GPUs that this process reserves. Each GPU has a lock file, so that other commands choose other GPUs.

    uuids : UUID of every GPU that this process may use, in the order of torch's indices
    folder : folder of the lock files; None: the folder for temporary files
    """

    def __init__(self, uuids: Sequence[str], folder: Path | None = None) -> None:
        self._files = [(folder or Path(tempfile.gettempdir())) / f"vse-gpu-{uuid}.lock" for uuid in uuids]
        self._held: dict[int, int] = {}  # file descriptor of each locked GPU, by index

    def try_lock_gpu(self, index: int) -> bool:
        """Lock the lock file of the GPU ``uuids[index]``; return False if another process has locked this file."""
        if index in self._held:
            return True
        file = self._files[index]
        try:
            descriptor = os.open(file, os.O_RDONLY if file.exists() else os.O_RDONLY | os.O_CREAT, 0o644)
        except OSError as error:  # without a lock file, e.g. in a read-only folder, two commands may use the same GPU
            log.warning("%s: %s; other commands may compute on the same GPU", file, error.strerror)
            return True
        try:
            is_locked = try_lock(descriptor)
        except OSError as error:
            log.warning("%s: %s; other commands may compute on the same GPU", file, error.strerror)
            is_locked = True
        if not is_locked:
            os.close(descriptor)
            return False
        self._held[index] = descriptor
        return True

    def choose_gpu(self) -> int:
        """Return the index of a GPU that this process has reserved. If there is none, reserve a free GPU first.

        If other processes have reserved all GPUs, log a warning and return the index of any GPU.
        """
        if self._held:
            return min(self._held)
        free = next((index for index in range(len(self._files)) if self.try_lock_gpu(index)), None)
        if free is not None:
            return free
        shared = os.getpid() % len(self._files)
        log.warning("all %d GPUs are in use by other commands; this one shares GPU %d", len(self._files), shared)
        return shared

    def release(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


OUT_OF_MEMORY_ADVICE = "--device cpu runs without the GPU"  # for a user whose GPU has too little memory


def pick_device(name: str) -> torch.device:
    """Return the device for ``name``, the value of ``--device``. Raises UserError if torch cannot use the device.

    ``auto`` is a CUDA GPU or, without one, the CPU. An Apple GPU is never chosen, because it lacks float64. If there are
    several GPUs, ``auto`` and ``cuda`` take the first one that no other command uses. TF32 is switched off.
    """
    resolved = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        device = torch.device(resolved)
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
            device = _reserve_gpu(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: not usable here ({str(error).splitlines()[0]})") from None
    return device


def _reserve_gpu(device: torch.device) -> torch.device:
    if torch.cuda.device_count() > 1:
        if device.index is None:
            device = torch.device("cuda", _get_gpu_leases().choose_gpu())
        elif device.index < torch.cuda.device_count():
            _get_gpu_leases().try_lock_gpu(device.index)
    if device.index is not None:
        torch.cuda.set_device(device)  # otherwise torch would also reserve memory (a CUDA context) on GPU 0
    return device


@cache
def _get_gpu_leases() -> GpuLeases:
    return GpuLeases([str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())])


def describe_device(device: torch.device) -> str:
    """Return ``cpu``, or ``cuda`` with the name of the GPU's model."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. A copy to a GPU starts from pinned memory, so that other computations continue."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@contextmanager
def use_deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use slower, deterministic algorithms in the caller's ``with`` block if ``enabled``. A GPU then repeats results exactly.

    Raises UserError if an operation has no deterministic algorithm.
    """
    if not enabled or torch.are_deterministic_algorithms_enabled():  # torch's switch imports its slow compiler
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this variable when it is first used
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
def wrap_memory_errors(advice: str) -> Iterator[None]:
    """Raise UserError if the GPU runs out of memory in the caller's ``with`` block. The message ends with ``advice``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"the GPU is out of memory ({str(error).split('. ')[0].strip()}); {advice}") from None


def set_thread_count(threads: int | None) -> None:
    """Set the number of torch's threads, at most the number of available cores; None keeps torch's default number."""
    if threads is None:
        threads = torch.get_num_threads()  # set explicitly: otherwise MKL may use fewer threads, a fifth slower
    elif threads > (allowed := count_allowed_cores()):
        log.warning("%d threads are lowered to %d, the cores that this process may use", threads, allowed)
        threads = allowed
    torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for later ones, instead of returning it to the system.

    glibc keeps freed blocks up to a limit, and raises the limit to the size of the largest block that was freed, up to 32 MiB.
    With the initial limit, the system clears the memory of a network's outputs again for each batch. Clearing takes up
    to a quarter of the time of an extraction.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def collect_library_versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that every feature depends on."""
    return {
        "vse": __version__,
        "torch": torch.__version__,
        "torchvision": metadata.version("torchvision"),
        "pillow": PIL.__version__,
    }


Workload = Literal["training", "images", "texts"]

# PyTorch emulates bf16 on a processor that has AVX2 only. benchmarks/emulation.py measured the time relative to fp32.
_EMULATION_SLOWDOWNS: dict[Workload, str] = {
    "training": "a training step of linear layers takes about 14 times as long as in fp32, of VSE++ with a GRU about 32 times",
    "images": "a convolutional network such as EfficientNet-Lite0 takes about 14 times as long as in fp32",
    "texts": "a text encoder such as MiniLM takes about 4 times as long as in fp32",
}
_BF16_NAME_PARTS = ("BF16", "FP16", "AMX", "AVX10", "ALL", "DEFAULT")  # parts of oneDNN's names for CPUs with bf16


def choose_precision(device: torch.device, requested: str, workload: Workload, setting: str = "precision") -> str:
    """Return the precision to compute in: ``requested`` or, for ``auto``, ``bf16`` or ``fp32``.

    ``auto`` is ``bf16`` if the device has instructions for bf16 (:func:`has_bf16`). The choice is logged. If ``bf16`` is
    requested on a device without these instructions, a warning is logged.

    workload : kind of computation; the warning states how much slower this kind is with bf16 than with fp32
    setting : name of the precision setting in the log messages, such as ``train.precision``
    """
    native = has_bf16(device)
    if requested == "auto":
        chosen = "bf16" if native else "fp32"
        log.info("%s: auto is %s on this %s", setting, chosen, _name_device_kind(device))
        return chosen
    if requested == "bf16" and not native:
        slower = _EMULATION_SLOWDOWNS[workload] if device.type == "cpu" else "it may take several times as long as fp32"
        message = "%s: bf16 is emulated, because this %s has no instructions for it: %s; --set %s=auto selects fp32 here"
        log.warning(message, setting, _name_device_kind(device), slower, setting)
    return requested


def choose_query_precision(cache_precision: str) -> str:
    """Return the setting ``precision`` for encoding queries that are compared with the features of a cache.

    ``cache_precision`` is the precision in which the cache was computed. It is returned unchanged, except that ``bf16``
    becomes ``auto``. A device without bf16 then computes in fp32: emulated bf16 is slow, and fp32 differs only by rounding.
    """
    return "auto" if cache_precision == "bf16" else cache_precision


def has_bf16(device: torch.device) -> bool:
    """Return whether PyTorch may multiply bf16 numbers with the device's own instructions instead of emulating them.

    The instructions are ``avx512_bf16`` or ``amx_bf16`` on x86, and ``bf16`` on ARM. On x86 the environment variables
    ``ONEDNN_MAX_CPU_ISA`` and ``ATEN_CPU_CAPABILITY`` can forbid these instructions. A GPU needs compute capability 8.0.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    with_onednn: Callable[[], bool] = torch.backends.mkldnn.is_available
    if device.type != "cpu" or not with_onednn():
        return False
    instruction_sets = _list_instruction_sets()
    if "bf16" in instruction_sets:
        return True
    return bool(instruction_sets & {"avx512_bf16", "amx_bf16"}) and not _is_bf16_forbidden_by_env()


def _is_bf16_forbidden_by_env() -> bool:
    onednn_limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    torch_limit = torch.backends.cpu.get_cpu_capability()
    return torch_limit in ("DEFAULT", "NO AVX", "AVX2") or not any(name in onednn_limit.upper() for name in _BF16_NAME_PARTS)


def _list_instruction_sets() -> set[str]:
    if hasattr(torch.cpu, "get_capabilities"):  # older versions of PyTorch lack it
        return {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    cpuinfo = Path("/proc/cpuinfo")
    return parse_instruction_sets(cpuinfo.read_text()) if cpuinfo.is_file() else set()


def parse_instruction_sets(cpuinfo: str) -> set[str]:
    """Return the names of the instruction sets in the text of Linux's ``/proc/cpuinfo``."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return {name for key, _, names in lines if key.strip() in ("flags", "Features") for name in names.split()}


def describe_processor(device: torch.device) -> str:
    """Return the name of a GPU; for the CPU, its name and the instruction set that PyTorch uses, such as ``AVX512``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines()) if cpuinfo.is_file() else ()
    names = [value.strip() for key, _, value in lines if key.strip() == "model name"]
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def _name_device_kind(device: torch.device) -> str:
    return "processor" if device.type == "cpu" else "GPU"
