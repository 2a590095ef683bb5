"""Slow-down of matrix products on a processor without AVX-512, and so without native bf16.

A run as if on a processor with AVX2 alone and a normal run take turns. Environment variables keep oneDNN, PyTorch and MKL
from using AVX-512; ``precision: auto`` then chooses fp32. Numbers are medians of the processor time of one thread, as in
``before.py``, and ``times_slower`` is the median of the ratios of the rounds. PyTorch emulates bf16 products, which takes
minutes.

    python benchmarks/avx2.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from before import COMPARED, HERE, cpu_seconds, make_inputs
from common import report

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
WORKS = ("ranks", "training, fp32", "training, bf16", "extraction", "extraction, bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--works", nargs="+", choices=COMPARED, default=list(WORKS))
    arguments = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        make_inputs(Path(folder))
        for name in arguments.works:
            work, rounds = COMPARED[name], []
            for _ in range(arguments.rounds):
                rounds.append([cpu_seconds(HERE.parent, work, Path(folder), limits) for limits in ({}, AVX2)])
                print(name, rounds[-1], flush=True)
            now, limited = (round(work.number(median(seconds)), 3) for seconds in zip(*rounds, strict=True))
            slower = round(median(one[1] / one[0] for one in rounds), 2)
            rows.append({"work": name, "unit": work.unit, "now": now, "avx2": limited, "times_slower": slower})
    report("avx2", rows)


if __name__ == "__main__":
    main()
