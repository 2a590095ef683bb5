"""What threads that sleep while they wait cost on a free machine, and save on one that has other work.

Claims: with a neighbour that keeps one core busy, as many threads as there are cores train at least 1.5 times as many pairs a
second if they sleep (``OMP_WAIT_POLICY=PASSIVE``, which the commands set) as if they spin, which is OpenMP's default; on a
machine without other work they lose less than 30%; and either way all cores with sleeping threads train at least 0.9 times as
many pairs a second as one thread. ``short spin`` (``GOMP_SPINCOUNT=10000``) lies between the two. The demo's model on made-up
data; every variant is a process of its own, one after another in each round, with and without the neighbour; the medians of
the rounds. ``load`` is what the machine had beside the benchmark when it began: a free machine has 0, and only there do the
claims about one hold.

    python benchmarks/waiting.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SPIN = "while True: pass"
CORES = len(os.sched_getaffinity(0))
VARIANTS = {
    "one thread": (1, {}),
    "spinning": (CORES, {"OMP_WAIT_POLICY": "ACTIVE"}),
    "default of OpenMP": (CORES, {}),
    "short spin": (CORES, {"GOMP_SPINCOUNT": "10000"}),
    "sleeping": (CORES, {"OMP_WAIT_POLICY": "PASSIVE"}),
}
SETS = ["model.dim=256", "model.word_dim=100", "train.epochs=2", "train.min_count=1", "train.on_collapse=warn"]


def pairs_per_second(cache: Path, threads: int, policy: dict[str, str]) -> float:
    """The second epoch of a training in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))} | policy
    command = [sys.executable, __file__, "--cache", str(cache), "--threads", str(threads)]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()[-1])


def train_once(cache: Path, threads: int) -> None:
    import torch

    from vse.train.experiment import load_experiment
    from vse.train.run.folder import RunFolder
    from vse.train.training import train

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(train(cache, load_experiment("vsepp", sets=SETS), out=Path(folder) / "run", device="cpu"))
        print(run.metrics_file.read_text().splitlines()[-1].split(",")[-1])


def measured(cache: Path, rounds: int) -> list[dict[str, object]]:
    """A row per variant and neighbour."""
    load = round(os.getloadavg()[0], 1)
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for neighbour in ("none", "one busy core"):
            busy = None if neighbour == "none" else subprocess.Popen([sys.executable, "-c", SPIN])
            try:
                for name, (threads, policy) in VARIANTS.items():
                    rates.setdefault((neighbour, name), []).append(pairs_per_second(cache, threads, policy))
                    print(neighbour, name, rates[neighbour, name][-1], flush=True)
            finally:
                if busy is not None:
                    busy.kill()
                    busy.wait()
    medians = {key: statistics.median(values) for key, values in rates.items()}
    return [
        {
            "neighbour": neighbour,
            "threads": VARIANTS[name][0],
            "waiting": name,
            "pairs_per_s": round(rate),
            "ratio_to_one_thread": round(rate / medians[neighbour, "one thread"], 2),
            "rounds": rounds,
            "load": load,
        }
        for (neighbour, name), rate in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=256, help="made-up training images, of five captions each")
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cache:
        train_once(arguments.cache, arguments.threads)
        return
    from common import report
    from training import make_up

    with tempfile.TemporaryDirectory() as folder:
        cache = make_up(Path(folder), {"train": arguments.images, "val": 50}, 1280, 3000, 2)
        report("waiting", measured(cache, arguments.rounds))


if __name__ == "__main__":
    main()
