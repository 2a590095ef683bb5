"""Trainings of the demo with two seeds, one after the other on two cores, and both at once on one core each.

Claims: ``snakemake --config device=cpu threads=1`` takes at most 0.7 times the wall time of the default and 0.75 times its
processor time, and rsum is the same to one decimal.
The features are extracted before the measurement. The time is that of one ``snakemake`` command: two trainings, two
embeddings and one evaluation. The two ways take turns, and the numbers are medians over rounds.
Limits: the model of the demo is small. With a larger model, threads of one training wait less for each other. On a machine
with more cores, trainings and embeddings use only two of them; the evaluation may use all. The machine must have no GPU. The
Python package is the installed one, so install this commit first.

    python benchmarks/seeds.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from common import RESULTS, report

ROOT = Path(__file__).parents[1]
WAYS = {"one after the other": [], "both at once": ["device=cpu", "threads=1"]}
Measured = dict[str, float]


def snakemake(folder: Path, target: str, *config: str) -> None:
    """Build a file with two cores."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["snakemake", "--cores", "2", target, "--config", *config]
    subprocess.run(command, cwd=folder, env=environment, check=True)


def measure(folder: Path, *config: str) -> Measured:
    """Train and evaluate two seeds from the extracted features, and delete the folders with runs and results."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    snakemake(folder, "results/demo_vsepp.json", "seeds=[0,1]", *config)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rsum = json.loads((folder / "results" / "demo_vsepp.json").read_text())["protocols"]["full"]["rsum"]["mean"]
    for name in ("runs", "results"):
        shutil.rmtree(folder / name)
    return {"wall_s": wall, "cpu_s": cpu, "rsum": rsum}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    arguments = parser.parse_args()
    measured: dict[str, list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), name], check=True)
        snakemake(Path(name), "features/demo_fc7.h5", "device=cpu", "threads=1")
        for _ in range(arguments.rounds):
            for way, config in WAYS.items():
                measured[way].append(measure(Path(name), *config))
    table: list[dict[str, object]] = []
    for way, several in measured.items():
        numbers = {key: round(median(one[key] for one in several), 1) for key in several[0]}
        table.append({"trainings": way, **numbers})
    report("seeds", table, arguments.out)


if __name__ == "__main__":
    main()
