"""Helpers for all benchmarks: timing, the name of the machine, and a CSV whose name contains it.

With the environment variables in :data:`AVX2`, the libraries compute as on a processor with AVX2 alone, without AVX-512 and
native bf16.
"""

from __future__ import annotations

import csv
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "FAISS_OPT_LEVEL": "avx2",
    "OPENBLAS_CORETYPE": "Haswell",
}
PEERS = {
    "faiss": "FAISS",
    "h5py": "h5py",
    "sentence_transformers": "sentence-transformers",
    "sklearn": "scikit-learn",
    "timm": "timm",
}  # other programs, by module


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def instructions() -> str:
    """Return the widest vector instructions that the libraries use."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().partition("\nflags")[2].partition("\n")[0].split() if info.exists() else []
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2" or "avx512f" not in flags:
        return "AVX2" if "avx2" in flags else ""
    return "AVX-512 and bf16" if "avx512_bf16" in flags else "AVX-512"


def precisions() -> list[str]:
    """Return the precisions to measure: fp32, and bf16 where the processor has instructions for it."""
    return ["fp32", "bf16"] if "bf16" in instructions() else ["fp32"]


def machine() -> str:
    """Return processor, cores, torch version and ``avx2``, if it is the widest instruction set, as a part of a file name."""
    model = "cpu"
    if Path("/proc/cpuinfo").exists():
        names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        model = names[0] if names else platform.machine()
    words = "".join(c if c.isalnum() else " " for c in model.replace("(R)", "")).split()
    place = f"{'-'.join(words[:3]).lower()}_{os.cpu_count()}-cores_torch-{torch.__version__.split('+')[0]}"
    return f"{place}_avx2" if instructions() == "AVX2" else place


def report(name: str, rows: Sequence[Mapping[str, object]], folder: Path = RESULTS) -> Path:
    """Print the rows, and write them to ``<name>_<machine>.csv`` in ``folder``, ``benchmarks/results/`` by default.

    Each row also gets the instruction set, the load of the machine (the mean number of running threads of the last 15
    minutes), and the versions of the other programs that were imported.
    """
    path = folder / f"{name}_{machine()}.csv"
    distributions = packages_distributions()
    peers = ", ".join(f"{name} {version(distributions[module][0])}" for module, name in PEERS.items() if module in sys.modules)
    facts = {"instructions": instructions(), "running_threads": round(os.getloadavg()[2], 1), "peers": peers}
    rows = [{**row, **facts} for row in rows]
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as stream:
        table = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(path.read_text(), end="")
    return path
