"""Peak memory of training on a cache of COCO's size: 113,287 x 4096 float16, 566,435 training captions.

Claim: under 4 GB. Limit: made-up features and captions; some steps of one epoch, then a validation, which is when
memory peaks.

    python benchmarks/memory.py --steps 50
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import report

from vse.features.cache import Identity, merge_shards, shard_path, write_shard

SPLITS = {"train": 113_287, "val": 5_000, "test": 5_000}


def make_up(folder: Path, dim: int, n_shards: int = 64) -> Path:
    """A data set and a cache of COCO's size."""
    rng = np.random.default_rng(0)
    words = np.asarray([f"word{k}" for k in range(11_000)])
    images, sentid = [], 0
    for split, count in SPLITS.items():
        for _ in range(count):
            sentences = []
            for _ in range(5):
                tokens = words[(rng.pareto(1.0, rng.integers(8, 16)) * 10).astype(np.int64) % len(words)].tolist()
                sentences.append({"sentid": sentid, "imgid": len(images), "raw": " ".join(tokens), "tokens": tokens})
                sentid += 1
            imgid = len(images)
            sentids = [s["sentid"] for s in sentences]
            images.append(
                {"imgid": imgid, "filename": f"{imgid}.jpg", "split": split, "sentids": sentids, "sentences": sentences}
            )
    (folder / "dataset.json").write_text(json.dumps({"dataset": "made-up", "images": images}))
    ids = np.arange(len(images))
    identity = Identity("made-up", "fc7", "image", {})
    for k in range(n_shards):
        mine = ids[len(ids) * k // n_shards : len(ids) * (k + 1) // n_shards]
        rows = rng.random((len(mine), dim), np.float32).astype(np.float16)
        write_shard(shard_path(folder / "fc7.h5", k, n_shards), identity, mine, rows)
    return merge_shards(folder / "fc7.h5", n_shards, folder / "dataset.json", ids)


def train_some(cache: Path, memory_gb: float, steps: int) -> None:
    """Runs in a process of its own; prints its peak resident memory in GB."""
    from itertools import islice

    from vse.pipeline.presets import load_experiment
    from vse.train import trainer

    every_pair = trainer.shuffled
    trainer.shuffled = lambda *arguments: islice(every_pair(*arguments), steps)
    experiment = load_experiment("vsepp", sets=["train.epochs=1", f"train.memory_gb={memory_gb}"])
    trainer.train(cache, experiment, out=cache.parent / f"run-{memory_gb}")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory-gb", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        train_some(arguments.run, arguments.memory_gb, arguments.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        cache = make_up(Path(folder), arguments.dim)
        rows = []
        for memory_gb in (2.0, 0.0):
            command = [sys.executable, __file__, "--run", str(cache), "--memory-gb", str(memory_gb)]
            done = subprocess.run([*command, "--steps", str(arguments.steps)], check=True, stdout=subprocess.PIPE, text=True)
            peak = float(done.stdout.split()[-1])
            rows.append({"train_memory_gb": memory_gb, "steps": arguments.steps, "peak_resident_gb": round(peak, 2)})
        report("memory", rows)


if __name__ == "__main__":
    main()
