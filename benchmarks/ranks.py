"""Exact ranks, both directions, beside their limit, the tools that people would take instead, and the published loop.

Claim: for 5,000 images x 25,000 captions x 1024 dimensions ours takes at most 1.5 x one matrix product of these (``sgemm``,
the limit: every pair must be scored), less than the top 10 of FAISS both ways, and a small part of the published loop.
Limits: random vectors; the published loop, a full argsort for each query, is written out here in float32 (the published code
uses float64, which is slower). Processor seconds of one thread, so that none waits for another, which would count; medians of
rounds in which all but the loop take turns; the loop has one.

    python benchmarks/ranks.py
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import faiss
import numpy as np
import torch
from common import report

from vse.eval.ranking.ranks import Ranks, ranks_from_embeddings

K = 10


def published(images: np.ndarray, captions: np.ndarray, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort every caption for every image and every image for every caption; ``each`` captions per image in order."""
    i2t = np.zeros(len(images), np.int64)
    for i in range(len(images)):
        order = np.argsort(images[i] @ captions.T)[::-1]
        i2t[i] = min(int(np.where(order == c)[0][0]) for c in range(each * i, each * (i + 1)))
    t2i = np.zeros(len(captions), np.int64)
    for i in range(len(images)):
        for c, scores in enumerate(captions[each * i : each * (i + 1)] @ images.T, start=each * i):
            t2i[c] = np.where(np.argsort(scores)[::-1] == i)[0][0]
    return i2t, t2i


def top_by_torch(images: torch.Tensor, captions: torch.Tensor) -> None:
    """The best of both directions by one product of some images at a time, and ``topk``."""
    for queries, corpus in ((images, captions), (captions, images)):
        for some in torch.split(queries, 512):
            torch.topk(some @ corpus.T, K)


def top_by_faiss(images: np.ndarray, captions: np.ndarray) -> None:
    for queries, corpus in ((images, captions), (captions, images)):
        faiss.knn(queries, corpus, K, metric=faiss.METRIC_INNER_PRODUCT)


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-loop", action="store_true", help="Leave the published loop out.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.functional.normalize(torch.randn(arguments.images, arguments.dim, generator=generator), dim=1)
    noise = torch.randn(5 * arguments.images, arguments.dim, generator=generator)
    captions = torch.nn.functional.normalize(images.repeat_interleave(5, 0) + 0.3 * noise, dim=1)
    del noise
    image_of_caption = torch.arange(5 * arguments.images) // 5
    found: list[Ranks] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = cpu_seconds(lambda: found.append(ranks_from_embeddings(images, captions, image_of_caption)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    scores = torch.empty(len(images), len(captions))
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: ranks_from_embeddings(images, captions, image_of_caption),
        "sgemm": lambda: torch.mm(images, captions.T, out=scores),
        "torch_top_10": lambda: top_by_torch(images, captions),
        "faiss_top_10": lambda: top_by_faiss(images.numpy(), captions.numpy()),
    }
    rounds = [{name: cpu_seconds(work) for name, work in works.items()} for _ in range(arguments.rounds)]
    taken = {name: statistics.median(one[name] for one in rounds) for name in works}
    row: dict[str, object] = {"images": len(images), "captions": len(captions), "dim": arguments.dim}
    row |= {f"{name}_cpu_s": round(seconds, 2) for name, seconds in taken.items()}
    row["first_cpu_s"] = round(first, 2)
    row |= {
        f"ours_of_{name}": round(statistics.median(one["ours"] / one[name] for one in rounds), 2)
        for name in works
        if name != "ours"
    }
    row["ours_extra_peak_mb"] = round(peak / 1e3)
    if not arguments.no_loop:
        slow: list[tuple[np.ndarray, np.ndarray]] = []
        loop = cpu_seconds(lambda: slow.append(published(images.numpy(), captions.numpy(), 5)))
        # Two orders of summation can swap candidates whose scores differ in the last bit.
        moved = int(np.sum(found[0].i2t != slow[0][0]) + np.sum(found[0].t2i != slow[0][1]))
        row |= {"published_cpu_s": round(loop, 1), "published_of_ours": round(loop / taken["ours"], 1)}
        row["queries_whose_rank_differs"] = moved
    report("ranks", [row])


if __name__ == "__main__":
    main()
