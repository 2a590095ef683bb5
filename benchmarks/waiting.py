"""What threads that sleep while they wait cost on a free machine, and save on one that has other work.

Claims: with a neighbour that keeps one core busy, as many threads as there are cores train at least 1.5 times as many pairs a
second if they sleep (``OMP_WAIT_POLICY=PASSIVE``) as if they spin, which is OpenMP's default; on a machine without other work
they lose less than 30%; and either way all cores with sleeping threads train at least 0.9 times as many pairs a second as one
thread. ``ours`` is what the commands choose at their start (``vse.pipeline.cores``): within 5% of the better of spinning and
sleeping, with and without neighbours. ``short spin`` (``GOMP_SPINCOUNT=10000``) lies between the two. The demo's model on
made-up data; every variant is a process of its own, one after another in each round, beside none, one and two neighbours; the
medians of the rounds. In ``slept`` of them the threads slept. ``load`` is what the machine had beside the benchmark when it
began: a free machine has 0, and only there do the claims about one hold.

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

from vse.pipeline.cores import allowed_cores, set_up_openmp

SPIN = "while True: pass"
NEIGHBOURS = ("none", "one busy core", "two busy cores")  # as many processes that spin
CORES = allowed_cores()
VARIANTS: dict[str, tuple[int | None, dict[str, str]]] = {
    "one thread": (1, {}),
    "spinning": (CORES, {"OMP_WAIT_POLICY": "ACTIVE"}),
    "default of OpenMP": (CORES, {}),
    "short spin": (CORES, {"GOMP_SPINCOUNT": "10000"}),
    "sleeping": (CORES, {"OMP_WAIT_POLICY": "PASSIVE"}),
    "ours": (None, {}),
}
SETS = ["model.dim=256", "model.word_dim=100", "train.epochs=2", "train.min_count=1", "train.on_collapse=warn"]


def pairs_per_second(cache: Path, threads: int | None, policy: dict[str, str]) -> tuple[float, bool]:
    """The second epoch of a training in a process of its own, and whether its threads slept while they waited."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))} | policy
    command = [sys.executable, __file__, "--cache", str(cache), *([] if threads is None else ["--threads", str(threads)])]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    rate, waiting = done.stdout.split()[-2:]
    return float(rate), waiting == "PASSIVE"


def train_once(cache: Path, threads: int | None) -> None:
    """Train with so many threads, or as the commands choose if there is no number."""
    if threads is None:
        set_up_openmp(os.environ)  # before torch is loaded
    from vse.features.backbones.device import use_threads
    from vse.train.experiment import load_experiment
    from vse.train.run.folder import RunFolder
    from vse.train.training import train

    use_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(train(cache, load_experiment("vsepp", sets=SETS), out=Path(folder) / "run", device="cpu"))
        rate = run.metrics_file.read_text().splitlines()[-1].split(",")[-1]
        print(rate, os.environ.get("OMP_WAIT_POLICY", "default"))


@contextmanager
def busy_cores(n: int) -> Iterator[None]:
    """Keep so many cores busy in this block."""
    neighbours = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(n)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def measured(cache: Path, rounds: int) -> list[dict[str, object]]:
    """A row per variant and neighbour."""
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
    parser.add_argument("--images", type=int, default=256, help="made-up training images, of five captions each")
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
