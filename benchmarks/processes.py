"""One training in one process and in several, on one thread each: equality, speed and exchanged bytes.

Claims: two processes on two cores compute the same training as one. They exchange at most 1.15 times the least bytes.
With P processes, the least number of bytes for gradients is that of a ring, 2 (P - 1) times their size. Gathered embeddings of
images and captions need (P - 1) times their size. With InfoNCE the same goes for those of captions and their gradients.
Limits: data are made up, float32, on one machine, through its loopback interface. ``pairs_per_s`` is the best of ``--rounds``
epochs. ``loss_difference`` is the largest relative difference of an epoch's loss, and ``weight_difference`` that of the
weights, relative to their norm. Bytes are those that the loopback interface counts, of two epochs minus one.

    python benchmarks/processes.py
"""

from __future__ import annotations

import argparse
import csv
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from common import RESULTS, report

from training import make_up

N_IMAGES, DIM = 600, 1280
SETTINGS = {
    "vsepp, batch 128": ["vsepp", "train.batch_size=128"],
    "vsepp, batch 600": ["vsepp", "train.batch_size=600"],
    "vsepp with InfoNCE, batch 1500": ["vsepp", "train.batch_size=1500", "loss={name: infonce, learned: true}"],
}
SETS = ["train.min_count=1", "warmup.epochs=0", "train.on_collapse=warn", "train.validate_images=10"]


def loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def train(cache: Path, out: Path, size: int, epochs: int, experiment: str, *sets: str) -> int:
    """Train in ``size`` processes. Return the bytes that they exchanged."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "vse.training", "--features", str(cache), "--experiment", experiment, "--out", str(out)]
    for setting in [*SETS, *sets, f"train.epochs={epochs}"]:
        command += ["--set", setting]
    before, started = loopback_bytes(), []
    for rank in range(size):
        environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        if size > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        started.append(subprocess.Popen([*command, "--threads", "1"], env=environment, stderr=subprocess.PIPE, text=True))
    for process in started:
        _, words = process.communicate()
        if process.returncode:
            raise SystemExit(words)
    return loopback_bytes() - before


def rows_of(run: Path) -> list[dict[str, float]]:
    with (run / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "best.safetensors")


def measure(cache: Path, folder: Path, name: str, sizes: list[int], rounds: int) -> list[dict[str, object]]:
    experiment, *sets = SETTINGS[name]
    results, runs = [], {}
    for size in sizes:
        short, runs[size] = folder / f"{name}-{size}-short", folder / f"{name}-{size}"
        first = train(cache, short, size, 1, experiment, *sets)
        n_bytes = (train(cache, runs[size], size, 1 + rounds, experiment, *sets) - first) / rounds
        one, several = rows_of(runs[sizes[0]]), rows_of(runs[size])
        weights = weights_of(runs[size])
        batch = int(sets[0].partition("=")[2])
        n_steps = -(-5 * N_IMAGES // batch)
        gradients = 4 * sum(weight.numel() for weight in weights.values())
        embeddings = 4 * 5 * N_IMAGES * 1024 / n_steps
        least = (size - 1) * (2 * gradients + 2 * embeddings)
        alone = weights_of(runs[sizes[0]])
        differences = [float((weights[key] - alone[key]).norm() / alone[key].norm().clamp(min=1e-12)) for key in alone]
        speed = max(row["pairs_per_s"] for row in several)
        results.append(
            {
                "training": name,
                "processes": size,
                "pairs_per_s": speed,
                "speed_up": round(speed / max(row["pairs_per_s"] for row in one), 2),
                "loss_difference": f"{max(abs(a['loss'] / b['loss'] - 1) for a, b in zip(one, several, strict=True)):.1e}",
                "weight_difference": f"{max(differences):.1e}",
                "mb_per_step": round(n_bytes / n_steps / 1e6, 2) if size > 1 else 0,
                "least_mb_per_step": round(least / 1e6, 2),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = make_up(Path(folder), {"train": N_IMAGES, "val": 100}, DIM, 3000, 2)
        rows = [row for name in SETTINGS for row in measure(cache, Path(folder), name, arguments.processes, arguments.rounds)]
    report("processes", rows, arguments.out)


if __name__ == "__main__":
    main()
