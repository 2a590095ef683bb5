"""Exact ranks of order embeddings in both directions, compared with the published code.

The published code computes the differences of 100 queries from all candidates at once. Claim: for 5,000 images x 25,000
captions x 1024 dimensions ours takes at most 1/10 of its time, and under 2 GB.
Limits: the vectors are random, of unit length, without signs. The published loop is reimplemented here, and takes less
memory: it works in place, where the published code holds two or three such blocks. The loop runs for the first images and
their captions, and its time is extrapolated to all of them. If 10 GB are not available, its blocks can be smaller; the
reported memory is computed for blocks of 100. Memory is the peak of a process of its own, with embeddings and libraries.
If other programs run on the machine, processor time (cpu_s, all threads) is more reliable than wall time (s).

    python benchmarks/order.py --threads 1
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from common import report, seconds
from torch import Tensor

from vse.eval.ranking.ranks import ranks_from_embeddings

EACH = 5  # captions of an image
BLOCK = 100  # queries of a published block


def made(n_images: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return images, and captions that resemble them: unit vectors without signs."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n_images, dim, generator=generator)
    captions = torch.randn(EACH * n_images, dim, generator=generator)
    captions.view(n_images, EACH, dim).mul_(5).add_(images[:, None])
    for rows in (images, captions):
        rows.div_(torch.linalg.vector_norm(rows, dim=1, keepdim=True)).abs_()
    return images, captions


def ours(images: Tensor, captions: Tensor) -> list[int]:
    """Return the rank of every image, then that of every caption."""
    found = ranks_from_embeddings(images, captions, torch.arange(len(captions)) // EACH, "order")
    return [*found.i2t.tolist(), *found.t2i.tolist()]


def published(images: Tensor, captions: Tensor, timed: int, block: int) -> list[int]:
    """Return the rank of the first images, then that of their captions."""
    ranks = []
    for start in range(0, timed, block):
        queries = images[start : min(start + block, timed)]
        errors = (captions[None] - queries[:, None]).clamp_(min=0).pow_(2).sum(2).sqrt_()
        for i, row in enumerate(errors.numpy(), start):
            ranks.append(int(np.flatnonzero(np.argsort(row) // EACH == i)[0]))
    for start in range(0, EACH * timed, block):
        queries = captions[start : min(start + block, EACH * timed)]
        errors = (queries[:, None] - images[None]).clamp_(min=0).pow_(2).sum(2).sqrt_()
        for c, row in enumerate(errors.numpy(), start):
            ranks.append(int(np.flatnonzero(np.argsort(row) == c // EACH)[0]))
    return ranks


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure one program, ``--direction``, in this process."""
    images, captions = made(arguments.images, arguments.dim)
    ranks: list[int] = []
    cpu = time.process_time()
    if arguments.direction == "ours":
        taken = seconds(lambda: ranks.extend(ours(images, captions)))
    else:
        taken = seconds(lambda: ranks.extend(published(images, captions, arguments.timed, arguments.block)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"s": taken, "cpu_s": time.process_time() - cpu, "peak_gb": peak, "ranks": ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--timed", type=int, default=200, help="images that the published loop ranks, with their captions")
    parser.add_argument("--block", type=int, default=BLOCK, help="queries of a block of the published loop")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--direction", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.direction:
        print(json.dumps(measure(arguments)))
        return
    mine, theirs = (
        json.loads(subprocess.check_output([sys.executable, *sys.argv, "--direction", direction]))
        for direction in ("ours", "published")
    )
    n_images, n_captions, timed = arguments.images, EACH * arguments.images, arguments.timed
    same = [*mine["ranks"][:timed], *mine["ranks"][n_images : n_images + EACH * timed]]
    scale = n_images / timed
    spared = (BLOCK - arguments.block) * n_captions * arguments.dim * 4 / 1e9
    row = {
        "images": n_images,
        "captions": n_captions,
        "dim": arguments.dim,
        "threads": arguments.threads,
        "ours_s": round(mine["s"], 1),
        "ours_cpu_s": round(mine["cpu_s"], 1),
        "published_images_timed": timed,
        "published_block": arguments.block,
        "published_s_extrapolated": round(theirs["s"] * scale),
        "published_cpu_s_extrapolated": round(theirs["cpu_s"] * scale),
        "ratio_s": round(theirs["s"] * scale / mine["s"], 1),
        "ratio_cpu_s": round(theirs["cpu_s"] * scale / mine["cpu_s"], 1),
        "ours_peak_gb": round(mine["peak_gb"], 2),
        "published_peak_gb_with_blocks_of_100": round(theirs["peak_gb"] + spared, 1),
        # Roots and the order of a sum change the last bits of a score, so they can swap two candidates.
        "timed_queries_whose_rank_differs": sum(a != b for a, b in zip(same, theirs["ranks"], strict=True)),
    }
    report("order", [row])


if __name__ == "__main__":
    main()
