"""Helpers for all benchmarks: timing, the name of the machine, and a CSV whose name contains it."""

from __future__ import annotations

import csv
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def machine() -> str:
    """Return processor, cores and torch version as a part of a file name."""
    model = "cpu"
    if Path("/proc/cpuinfo").exists():
        names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        model = names[0] if names else platform.machine()
    words = "".join(c if c.isalnum() else " " for c in model.replace("(R)", "")).split()
    return f"{'-'.join(words[:3]).lower()}_{len(os.sched_getaffinity(0))}-cores_torch-{torch.__version__.split('+')[0]}"


def report(name: str, rows: Sequence[Mapping[str, object]], folder: Path = RESULTS) -> Path:
    """Print the rows, and write them to ``<name>_<machine>.csv`` in ``folder``, ``benchmarks/results/`` by default."""
    path = folder / f"{name}_{machine()}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as stream:
        table = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(path.read_text(), end="")
    return path
