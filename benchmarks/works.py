"""Which benchmark, row and column each number of docs/performance.md comes from: change :data:`WORKS` to change the table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

RESULTS = Path(__file__).parent / "results"
MACHINES = {"amd-epyc": "AMD EPYC", "intel-xeon-processor": "Intel Xeon"}  # the first that has a CSV counts


@dataclass(frozen=True)
class Cell:
    """A number: the column of the only row of a benchmark's newest CSV whose other columns have these values."""

    csv: str
    column: str
    where: Mapping[str, object]


def cell(csv: str, column: str, **where: object) -> Cell:
    return Cell(csv, column, where)


@dataclass(frozen=True)
class Work:
    """A row of the table.

    unit : of all its numbers; of one with ``/`` more is better
    now, before : what ours takes, and what it took
    peer, limit : what else would be used, and what the machine could do at best, each with its name
    to_reach : ``(1.5, "limit")`` is 1.5 times as much as the limit, ``(5, "")`` is 5 of the unit
    """

    work: str
    unit: str
    now: Cell
    before: Cell | None = None
    peer: tuple[str, Cell] | None = None
    limit: tuple[str, Cell] | None = None
    to_reach: tuple[float, str] | None = None


WORKS = (
    Work(
        "exact ranks, 5,000 x 25,000 x 1,024",
        "s",
        cell("ranks", "ours_cpu_s", images=5000),
        before=cell("ranks", "before_cpu_s", images=5000),
        peer=("faiss, top 10 both ways", cell("ranks", "faiss_cpu_s", images=5000)),
        limit=("sgemm", cell("ranks", "gemm_cpu_s", images=5000)),
        to_reach=(1.5, "limit"),
    ),
    Work(
        "`vse-eval` of that size",
        "s",
        cell("evaluation", "ours_cpu_s", images=5000),
        peer=("published loop", cell("evaluation", "published_cpu_s", images=5000)),
        to_reach=(5.0, ""),
    ),
    Work(
        "training, bf16, two threads",
        "pairs/cpu-s",
        cell("training", "pairs_per_cpu_s", threads=2, loop="ours, bf16"),
        peer=("published loop", cell("training", "pairs_per_cpu_s", threads=2, loop="published, fp32")),
        limit=("its matrix products", cell("training", "pairs_per_cpu_s", threads=2, loop="limit, bf16")),
        to_reach=(2.5, "limit"),
    ),
    Work(
        "training, fp32, two threads",
        "pairs/cpu-s",
        cell("training", "pairs_per_cpu_s", threads=2, loop="ours, fp32"),
        peer=("published loop", cell("training", "pairs_per_cpu_s", threads=2, loop="published, fp32")),
        limit=("its matrix products", cell("training", "pairs_per_cpu_s", threads=2, loop="limit, fp32")),
        to_reach=(1.3, "limit"),
    ),
)


def newest(name: str) -> Path | None:
    """The CSV of a benchmark: of the first of :data:`MACHINES` that has one, that of the newest torch."""
    found, places = [], list(MACHINES)
    for path in RESULTS.glob(f"{name}_*.csv"):
        if (match := re.fullmatch(rf"{name}_([a-z0-9-]+)_(\d+)-cores_torch-([\d.]+)\w*", path.stem)) is not None:
            machine, cores, version = match.groups()
            place = places.index(machine) if machine in MACHINES else len(places)
            found.append((-place, tuple(map(int, version.split("."))), int(cores), path))
    return max(found)[-1] if found else None


def machine_of(name: str) -> str:
    """The processor and cores of a benchmark's CSV, in words."""
    path = newest(name)
    if path is None:
        return ""
    machine, cores, torch = path.stem.removeprefix(f"{name}_").split("_")
    return ", ".join((MACHINES.get(machine, machine), cores.replace("-", " "), torch.replace("-", " ")))


@cache
def table_of(name: str) -> pd.DataFrame:
    path = newest(name)
    return pd.DataFrame() if path is None else pd.read_csv(path)


def value_of(asked: Cell | None) -> float:
    """The number of a cell, NaN if it is not measured; ``ValueError`` if several rows fit."""
    if asked is None:
        return np.nan
    table = table_of(asked.csv)
    if not {asked.column, *asked.where} <= set(table.columns):
        return np.nan
    for column, wanted in asked.where.items():
        table = table[table[column] == wanted]
    if len(table) > 1:
        raise ValueError(f"{len(table)} rows of {newest(asked.csv)} fit {dict(asked.where)}")
    return np.nan if table.empty else float(table[asked.column].iloc[0])


def measured(works: Iterable[Work] = WORKS) -> pd.DataFrame:
    """A row per work: its numbers, how many times the limit (or, without one, what is to be reached) it takes, and where."""
    rows = []
    for work in works:
        peer_is, peer = work.peer or ("", None)
        limit_is, limit = work.limit or ("", None)
        numbers = {
            "before": value_of(work.before),
            "now": value_of(work.now),
            "peer": value_of(peer),
            "limit": value_of(limit),
        }
        factor, of = work.to_reach or (np.nan, "")
        goal = _times(work.unit, numbers[of], factor) if of else factor
        rows.append(
            {
                "work": work.work,
                "unit": work.unit,
                **numbers,
                "to_reach": goal,
                "peer_is": peer_is,
                "limit_is": limit_is,
                "to_reach_is": f"{factor:g} x {of}" if of else "",
                "times_limit": ratio(work.unit, numbers["now"], numbers["limit"]),
                "machine": machine_of(work.now.csv),
            }
        )
    return pd.DataFrame(rows)


def ratio(unit: str, one: float, other: float) -> float:
    """How many times as much as the other one takes: of a rate, how many times as slow it is."""
    return other / one if "/" in unit else one / other


def _times(unit: str, value: float, factor: float) -> float:
    return value / factor if "/" in unit else value * factor
