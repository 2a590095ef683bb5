"""Exact ranks in both directions, compared with their limit, with common alternatives, and with the published loop.

Claim: for 5,000 images x 25,000 captions x 1024 dimensions ours takes at most 1.5 x the time of their matrix product
(``sgemm``, the limit, since every pair must be scored). It takes less time than FAISS for the top 10 in both directions,
and a small part of the time of the published loop.
Limits: the vectors are random. The published loop, a full argsort for each query, is reimplemented here in float32; the
published code uses the slower float64. Numbers are processor seconds of one thread, because threads that wait for each
other would count. They are medians of rounds in which all programs except the loop take turns; the loop runs once.

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

from vse.eval.ranking.metrics import Ranks
from vse.eval.ranking.ranks import ranks_from_embeddings

K = 10


def published(images: np.ndarray, captions: np.ndarray, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks by sorting all captions for every image, which has ``each``, and all images for every caption."""
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
    """Find the best candidates of both directions by ``topk`` of one product for each block of queries."""
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
    parser.add_argument("--no-loop", action="store_true", help="leave out the published loop")
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
        # The order of a sum changes the last bit of a score, so it can swap two candidates.
        moved = int(np.sum(found[0].i2t != slow[0][0]) + np.sum(found[0].t2i != slow[0][1]))
        row |= {"published_cpu_s": round(loop, 1), "published_of_ours": round(loop / taken["ours"], 1)}
        row["queries_whose_rank_differs"] = moved
    report("ranks", [row])


if __name__ == "__main__":
    main()
