"""The demo, from a fresh clone to its report: processor seconds, wall time and memory.

Claims: the demo takes at most 200 processor seconds, 90 of them before the training, and no process needs more than 1.2 GB.
The command is that of the README, without ``pip install``. Snakemake runs twice, first for the features and then for the
report. All numbers of a row count from the start; ``peak_gb`` is the peak of the largest process so far.
Limits: one run, on all cores. The clone is made from the last commit. The Python package is the installed one, so install
this commit first.

    python benchmarks/demo.py
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import report

ROOT = Path(__file__).parents[1]
TARGETS = {"features": "features/demo_fc7.h5", "report": "results/demo_vsepp.html"}


def main() -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    rows: list[dict[str, object]] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), name], check=True)
        for until, target in TARGETS.items():
            subprocess.run(["snakemake", "--cores", "all", target], cwd=name, env=environment, check=True)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of all programs so far
            row: dict[str, object] = {"until": until, "cpu_s": round(used.ru_utime + used.ru_stime, 1)}
            row |= {"wall_s": round(time.perf_counter() - started, 1), "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 3)}
            rows.append(row)
    report("demo", rows)


if __name__ == "__main__":
    main()
