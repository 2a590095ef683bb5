"""Estimate of the hours, GB and jobs for 1, 10 and 100 million pairs.

Extraction, cache and training are the estimates of ``vse-data plan`` for a data set of that size, by config/rates.yaml.
The other numbers are extrapolated from benchmarks/growth.py, benchmarks/large_data.py and benchmarks/planning.py, on the line
through the smallest and the largest point of each.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from benchmarks.schedule import expect
from benchmarks.works import table_of
from vse.features.plan import TargetPlan, estimate_plan, load_rates
from vse.pipeline.workflow import PlannedFile

FEATURE, EXPERIMENT, DIM, EACH = "effnet", "vsepp_effnet", 1024, 5
JOB_HOURS, AT_ONCE = 1, 100  # hours of a shard's job on a cluster; number of jobs that run at once
PAIRS = (10**6, 10**7, 10**8)


@contextmanager
def preset(n_images: int) -> Iterator[None]:
    """Add a data set ``millions`` with ``n_images`` training images to the presets, within the context."""
    before = os.environ.get("VSE_PRESETS")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "datasets").mkdir()
        splits = f"splits: {{ train: [{n_images}, {EACH * n_images}] }}"
        (Path(folder) / "datasets" / "millions.yaml").write_text(f"annotations: dataset.json\n{splits}\n")
        os.environ["VSE_PRESETS"] = folder
        try:
            yield
        finally:
            os.environ.pop("VSE_PRESETS") if before is None else os.environ.update(VSE_PRESETS=before)


def plan_of(n_images: int) -> TargetPlan:
    """Return the estimate of ``vse-data plan`` for an extraction and a training."""
    shard, run = f"features/millions_{FEATURE}.shards/shard-00000-of-00001.h5", f"runs/millions_{EXPERIMENT}/seed-0/run.json"
    with preset(n_images):
        return estimate_plan([PlannedFile("extract", Path(shard)), PlannedFile("train", Path(run))], load_rates())


def extended(points: pd.DataFrame, column: str, size: float) -> float:
    """Return the value at a size, on the line through the smallest and the largest point."""
    first, last = points.iloc[0], points.iloc[-1]
    return float(first[column] + (last[column] - first[column]) * (size - first["size"]) / (last["size"] - first["size"]))


def large_data_points(step: str) -> pd.DataFrame:
    """Return the points of a step of benchmarks/large_data.py, by the number of pairs."""
    table = table_of("large_data")
    return table[table["step"] == step].rename(columns={"pairs": "size"}).sort_values("size")


def planning_points() -> pd.DataFrame:
    """Return the points of benchmarks/planning.py after the extraction, by the number of photographs."""
    table = table_of("planning")
    return table[table["state"] == "extracted"].rename(columns={"photos": "size"}).sort_values("size")


def needs(n_pairs: int, growth: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """Return the needs of a data set of ``n_pairs``, with units; ``growth`` has the points of each program, by size."""
    n_images = n_pairs // EACH
    plan = plan_of(n_images)
    extraction, training = (one.seconds for one in sorted(plan.durations, key=lambda one: "features/" not in one.description))
    stored = plan.cache_sizes[0][0]
    importing, checking = (large_data_points(step) for step in ("import", "check of parquet"))
    planning = planning_points()
    jobs = math.ceil(extraction / 3600 / JOB_HOURS)
    rounds = math.ceil(jobs / AT_ONCE)
    return {
        f"images, {EACH} captions each": f"{n_images:,}",
        "import of clip-retrieval to `dataset.parquet`": span(extended(importing, "cpu_s", n_pairs)),
        "memory of this import": gigabytes(extended(importing, "own_gb", n_pairs)),
        "check of `dataset.parquet`": span(extended(checking, "cpu_s", n_pairs)),
        "memory of this check": gigabytes(extended(checking, "own_gb", n_pairs)),
        f"cache of `{FEATURE}`, float16": gigabytes(stored / 1e9),
        f"extraction of `{FEATURE}`, one machine": span(extraction),
        f"the same as jobs of {JOB_HOURS} h, {AT_ONCE} at once": f"{jobs:,} jobs, {span(rounds * extraction / jobs)}",
        **{
            f"the same, if 1% of jobs fail and 5% are slow, jobs of {minutes} min": _expected_span(extraction, 60 * minutes)
            for minutes in (60, 10)
        },
        "planning of these jobs by Snakemake": span(extended(growth["workflow"], "cpu_s", jobs)),
        "planning if all shards exist (the photographs are compared)": span(extended(planning, "cpu_s", n_images)),
        "memory of this planning": gigabytes(extended(planning, "peak_gb", n_images)),
        f"training of `{EXPERIMENT}`, one machine or job": span(training),
        f"embeddings, {DIM} numbers, float32": gigabytes((n_images + n_pairs) * DIM * 4 / 1e9),
        "an exact query among all images, 512 numbers": span(extended(growth["search"], "cpu_s", n_images)),
    }


def _expected_span(extraction: float, job_s: float) -> str:
    n_jobs = math.ceil(extraction / job_s)
    return span(expect(n_jobs, extraction / n_jobs)[0])


def span(seconds: float) -> str:
    """Return a time in a readable unit."""
    units: list[tuple[float, str, Callable[[float], str]]] = [
        (86400 * 3, "days", lambda value: f"{value / 86400:,.0f}"),
        (3600, "h", lambda value: f"{value / 3600:.1f}"),
        (120, "min", lambda value: f"{value / 60:.0f}"),
    ]
    for least, unit, shown in units:
        if seconds >= least:
            return f"{shown(seconds)} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def gigabytes(value: float) -> str:
    return f"{value:,.0f} GB" if value >= 10 else f"{value:.2g} GB"


def millions_block(growth: Mapping[str, pd.DataFrame]) -> str:
    """Return the table, with a column for each size."""
    columns = [needs(n_pairs, growth) for n_pairs in PAIRS]
    lines = [f"| pairs | {' | '.join(f'{n // 10**6} million' for n in PAIRS)} |", "|---" * (1 + len(PAIRS)) + "|"]
    lines += [f"| {what} | {' | '.join(column[what] for column in columns)} |" for what in columns[0]]
    return "\n".join([*lines, "", f"Rates of {load_rates().machine}."])
