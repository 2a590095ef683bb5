"""The precision of a device: bf16 where it has the instructions, fp32 elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

log = logging.getLogger(__name__)

Workload = Literal["training", "images", "texts"]

# PyTorch emulates bf16 on a processor with AVX2 alone: how many times as long as in fp32 that takes (benchmarks/avx2.py).
_EMULATED: dict[Workload, str] = {
    "training": "a training step of linear layers takes about 4 times as long as in fp32, one of a GRU about 14 times",
    "images": "a convolutional network takes about 19 times as long as in fp32",
    "texts": "a text encoder such as MiniLM takes about 7 times as long as in fp32",
}
_WITH_BF16 = ("BF16", "FP16", "AMX", "AVX10", "ALL", "DEFAULT")  # in names of oneDNN's instruction sets that have bf16


def choose_precision(device: torch.device, asked: str, work: Workload, setting: str = "precision") -> str:
    """Return the precision that ``device`` computes in: ``asked`` or, for ``auto``, ``bf16`` or ``fp32``.

    ``auto`` is ``bf16`` if the device has the instructions (:func:`has_bf16`). The log has the choice, and a warning if
    ``bf16`` is asked for without them. ``setting`` is the name that a user gives the setting.
    """
    native = has_bf16(device)
    if asked == "auto":
        chosen = "bf16" if native else "fp32"
        log.info("%s: auto is %s on this %s", setting, chosen, _noun(device))
        return chosen
    if asked == "bf16" and not native:
        slower = _EMULATED[work] if device.type == "cpu" else "it may take several times as long as fp32"
        log.warning(
            "%s: bf16 is emulated, because this %s has no instructions for it: %s; --set %s=auto takes fp32 here",
            setting,
            _noun(device),
            slower,
            setting,
        )
    return asked


def query_precision(recorded: str) -> str:
    """Return the precision to ask for, of a network that made a cache in the ``recorded`` one and reads a query now.

    A device without bf16 would emulate it for longer than fp32 takes, and the vectors differ by rounding alone.
    """
    return "auto" if recorded == "bf16" else recorded


def has_bf16(device: torch.device) -> bool:
    """Return whether a device has instructions for products of bf16, and PyTorch may use them.

    On x86 these are ``avx512_bf16`` or ``amx_bf16``, on ARM ``bf16``; a GPU has them from compute capability 8.0 on.
    On x86 the environment variables ``ONEDNN_MAX_CPU_ISA`` and ``ATEN_CPU_CAPABILITY`` can forbid them. Devices other than
    CPUs and CUDA GPUs count as without them.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    with_onednn: Callable[[], bool] = torch.backends.mkldnn.is_available
    if device.type != "cpu" or not with_onednn():
        return False
    instructions = _instructions()
    if "bf16" in instructions:
        return True
    return bool(instructions & {"avx512_bf16", "amx_bf16"}) and not _limited()


def _limited() -> bool:
    """Return whether an environment variable keeps oneDNN or PyTorch itself from AVX-512 with bf16."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    of_torch = torch.backends.cpu.get_cpu_capability()
    return of_torch in ("DEFAULT", "NO AVX", "AVX2") or not any(name in most.upper() for name in _WITH_BF16)


def _instructions() -> set[str]:
    """Return the names of the processor's instruction sets."""
    if hasattr(torch.cpu, "get_capabilities"):  # which older versions of PyTorch lack
        return {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    cpuinfo = Path("/proc/cpuinfo")
    return parse_cpuinfo(cpuinfo.read_text()) if cpuinfo.is_file() else set()


def parse_cpuinfo(cpuinfo: str) -> set[str]:
    """Return the names of instruction sets in the text of Linux's ``/proc/cpuinfo``."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return {name for key, _, names in lines if key.strip() in ("flags", "Features") for name in names.split()}


def _noun(device: torch.device) -> str:
    return "processor" if device.type == "cpu" else "GPU"
