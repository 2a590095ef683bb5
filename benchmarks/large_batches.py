"""Memory and time of InfoNCE and the sigmoid loss with their gradients, by blocks of scores and with all scores at once.

Claim: by blocks of 512 rows, a batch of 32,768 pairs takes under 1 GB besides its embeddings and their gradients. All at
once, it would take 4.3 GB for the scores alone, and several times that with gradients.
Limits: embeddings are made-up unit vectors, the five captions of an image are its positives, and the temperature is
learned. Only the loss and its gradients are measured, without encoders. Each row has a process of its own; ``peak_mb`` is
the growth of its resident memory beyond that with the embeddings and their gradients. If other programs run on the
machine, processor time (cpu_s, all threads) is more reliable than wall time (s).

    python benchmarks/large_batches.py --threads 1
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from common import report

from vse.training.losses import LOSSES
from vse.training.losses.base import Batch
from vse.training.models.similarities.vectors import CosineSimilarity

EACH = 5  # captions of an image
WHOLE = 0  # this block size stands for all scores at once


def resident_peak() -> float:
    """Return the peak resident memory of this process so far, in units of 1e6 bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(line[1]) * 1024 / 1e6 for line in lines if line[0] == "VmHWM:")


def measured(name: str, n: int, dim: int, block: int) -> dict[str, float]:
    """Return time and memory of the loss of one batch and its gradients."""
    generator = torch.Generator().manual_seed(0)
    sides = [torch.nn.functional.normalize(torch.randn(n, dim, generator=generator)).requires_grad_() for _ in range(2)]
    for side in sides:
        side.grad = torch.ones_like(side)  # makes its memory resident before the measurement
    image_indices = np.arange(n) // EACH
    loss = LOSSES[name].model_validate({"learned": True, "same_image": "positive", "block": block or None})
    scale = loss.build_scale()
    objective = loss.build_objective(CosineSimilarity(), scale=scale)
    before, started, cpu = resident_peak(), time.perf_counter(), time.process_time()
    cost = objective(Batch((sides[0],), (sides[1],), image_indices, np.arange(n)), 0).value
    cost.backward()
    took = {"s": round(time.perf_counter() - started, 1), "cpu_s": round(time.process_time() - cpu, 1)}
    return {"peak_mb": round(resident_peak() - before), **took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--pairs", type=int, nargs="+", default=[8_192, 32_768])
    parser.add_argument("--dense-up-to", type=int, default=8_192, help="compute larger batches only by blocks")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # loss, pairs and block size of one row
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.one:
        name, n, block = arguments.one[0], *map(int, arguments.one[1:])
        measured(name, 64, arguments.dim, block)  # torch imports modules on first use
        print(json.dumps(measured(name, n, arguments.dim, block)))
        return
    rows: list[dict[str, object]] = []
    for n in arguments.pairs:
        for name in ("infonce", "sigmoid"):
            for block in (WHOLE, arguments.block) if n <= arguments.dense_up_to else (arguments.block,):
                same = ["--threads", str(arguments.threads), "--dim", str(arguments.dim), "--one", name, str(n), str(block)]
                done = subprocess.run([sys.executable, __file__, *same], stdout=subprocess.PIPE, text=True, check=True)
                what = {"loss": name, "pairs": n, "dim": arguments.dim, "block": block or "none", "threads": arguments.threads}
                rows.append({**what, "scores_mb": round(4e-6 * n * (block or n)), **json.loads(done.stdout)})
                report("large_batches", rows)


if __name__ == "__main__":
    main()
