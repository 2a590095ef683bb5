"""Speed of training with threads that sleep while they wait, on an idle machine and next to other programs.

Claims: next to a program that keeps one core busy, training with as many threads as cores is at least 1.5 times as fast
if the threads sleep while they wait (``OMP_WAIT_POLICY=PASSIVE``) as if they spin, OpenMP's default. Next to this
program, sleeping threads on all cores reach at least 0.8 times the speed of one thread. On an idle machine sleeping can
be slower. ``ours`` is the choice of the commands at their start (``vse.pipeline.command``): within 20% of the better of
spinning and sleeping, with and without other programs. ``short spin`` is what ``ours`` chooses on an idle machine. The
model is that of the demo, on made-up data. Every variant has a process of its own; in each round the variants run one
after another next to zero, one and two busy programs. The numbers are medians of the rounds; ``slept`` is the number of
rounds in which the threads slept at once. ``load`` is the load of the machine before the benchmark. On an idle machine
it is 0, and the claims about an idle machine hold only there.

    python benchmarks/waiting.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vse.pipeline.command import count_allowed_cores, set_up_openmp

SPIN = "while True: pass"
NEIGHBOURS = ("none", "one busy core", "two busy cores")  # the index is the number of spinning processes
CORES = count_allowed_cores()
VARIANTS: dict[str, tuple[int | None, dict[str, str]]] = {
    "one thread": (1, {}),
    "spinning": (CORES, {"OMP_WAIT_POLICY": "ACTIVE"}),
    "default of OpenMP": (CORES, {}),
    "short spin": (CORES, {"GOMP_SPINCOUNT": "3000"}),
    "sleeping": (CORES, {"OMP_WAIT_POLICY": "PASSIVE"}),
    "ours": (None, {}),
}
SETS = ["warmup.epochs=0", "train.epochs=2", "train.min_count=1", "train.on_collapse=warn"]


def pairs_per_second(cache: Path, threads: int | None, policy: dict[str, str]) -> tuple[float, bool]:
    """Train in a new process; return the rate of the second epoch, and whether threads slept while they waited."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))} | policy
    command = [sys.executable, __file__, "--cache", str(cache), *([] if threads is None else ["--threads", str(threads)])]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    rate, waiting = done.stdout.split()[-2:]
    return float(rate), waiting == "PASSIVE"


def train_once(cache: Path, threads: int | None) -> None:
    """Train with ``threads`` threads; None: with the number and the waiting policy that the commands choose."""
    if threads is None:
        set_up_openmp(os.environ)  # before torch is loaded
    from vse.features.backbones.device import set_thread_count
    from vse.training.experiment import load_experiment
    from vse.training.options import TrainOptions
    from vse.training.run.folder import RunFolder
    from vse.training.training import train

    set_thread_count(threads)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(
            train(
                cache,
                load_experiment("vsepp", dataset="demo", sets=SETS),
                out=Path(folder) / "run",
                options=TrainOptions(device="cpu"),
            )
        )
        rate = run.metrics_file.read_text().splitlines()[-1].split(",")[-1]
        print(rate, os.environ.get("OMP_WAIT_POLICY", "default"))


@contextmanager
def busy_cores(n: int) -> Iterator[None]:
    """Keep ``n`` cores busy within the context."""
    neighbours = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(n)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def measured(cache: Path, rounds: int) -> list[dict[str, object]]:
    """Return a row for each variant and each number of busy cores."""
    load = round(os.getloadavg()[0], 1)
    runs: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for _ in range(rounds):
        for n, neighbour in enumerate(NEIGHBOURS):
            with busy_cores(n):
                for name, (threads, policy) in VARIANTS.items():
                    runs.setdefault((neighbour, name), []).append(pairs_per_second(cache, threads, policy))
                    print(neighbour, name, *runs[neighbour, name][-1], flush=True)
    medians = {key: statistics.median(rate for rate, _ in values) for key, values in runs.items()}
    return [
        {
            "neighbour": neighbour,
            "threads": VARIANTS[name][0] or CORES,
            "waiting": name,
            "pairs_per_s": round(rate),
            "ratio_to_one_thread": round(rate / medians[neighbour, "one thread"], 2),
            "slept": sum(slept for _, slept in runs[neighbour, name]),
            "rounds": rounds,
            "load": load,
        }
        for (neighbour, name), rate in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=256, help="number of made-up training images, with five captions each")
    parser.add_argument("--out", type=Path, help="folder of the CSV  [benchmarks/results]")
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cache:
        train_once(arguments.cache, arguments.threads)
        return
    from common import RESULTS, report

    from training import make_up

    with tempfile.TemporaryDirectory() as folder:
        cache = make_up(Path(folder), {"train": arguments.images, "val": 50}, 1280, 3000, 2)
        report("waiting", measured(cache, arguments.rounds), arguments.out or RESULTS)


if __name__ == "__main__":
    main()
