"""Recall and time of a search that scores only the best K candidates of a first stage, which compares pooled vectors.

For each K the table has R@K of the re-ranked lists, the loss of rsum compared with exact search, and the processor
milliseconds of a query on one thread. ``score_ms`` is with the embeddings of the complete split in memory. ``embed_ms``
is with only its pooled vectors in memory, so the candidates are embedded too. The row ``all`` scores every pair; its
``embed_ms`` embeds the complete split.
Limits: one run and its test split, whose scores ``vse-embed`` has written. Other programs share the machine, so times are
processor times.

    vse-embed runs/f8k_scan_t2i_avg_effnet/seed-0
    python benchmarks/reranking.py runs/f8k_scan_t2i_avg_effnet/seed-0
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import torch
from common import report

from vse.eval.files.embeddings import read_embeddings
from vse.eval.search.approximate import measure_reranked_search
from vse.eval.search.top_k import search_exactly
from vse.training.kinds import PackedEmbeddings, pack_embeddings
from vse.training.options import RunInputOptions
from vse.training.solvers.encode import (
    MAX_TILE_IMAGES,
    PairScores,
    encode_captions,
    encode_images,
    encode_split,
    pool_embeddings,
)
from vse.training.use.model import TrainedRun, load_run

KS = (20, 50, 100, 200, 500)
QUERIES = 20


def by_text(trained: TrainedRun, images: PackedEmbeddings, caption: PackedEmbeddings) -> None:
    pairs = PairScores(trained.model, images, caption)
    for start in range(0, len(images), MAX_TILE_IMAGES):
        pairs(slice(start, min(start + MAX_TILE_IMAGES, len(images))), None)


def by_image(trained: TrainedRun, captions: PackedEmbeddings, image: PackedEmbeddings) -> None:
    PairScores(trained.model, image, captions)(slice(0, 1), None)


def milliseconds(work: Callable[[int], object], queries: int) -> float:
    """Return the mean processor time of a query, in milliseconds."""
    started = time.process_time()
    for query in range(queries):
        work(query)
    return round(1000 * (time.process_time() - started) / queries, 1)


def times(
    trained: TrainedRun,
    side: PackedEmbeddings,
    asking: PackedEmbeddings,
    score: Callable[[TrainedRun, PackedEmbeddings, PackedEmbeddings], None],
    embed: Callable[..., PackedEmbeddings],
    k: int | None,
) -> dict[str, float]:
    """Return both times of a search in ``side``."""
    corpus, queries = pool_embeddings(side), pool_embeddings(asking)

    def near(query: int) -> np.ndarray:
        return np.sort(search_exactly(corpus, queries[query : query + 1], k or 1).rows[0])

    def one(query: int) -> PackedEmbeddings:
        return pack_embeddings([asking.unpack(torch.tensor([query]))])

    def scored(query: int) -> None:
        score(trained, side if k is None else pack_embeddings([side.unpack(torch.from_numpy(near(query)))]), one(query))

    def embedded(query: int) -> None:
        score(trained, embed() if k is None else embed(rows=near(query)), one(query))

    scored(0)
    return {"score_ms": milliseconds(scored, QUERIES), "embed_ms": milliseconds(embedded, QUERIES if k else 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--captions", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    trained = load_run(arguments.run, "test", RunInputOptions(features=arguments.features, captions=arguments.captions), "cpu")
    images, captions = encode_split(trained.model, trained.split, trained.device)
    blocks = read_embeddings(arguments.run / "test.h5").score_blocks()
    rows: list[dict[str, object]] = []
    for k in (None, *KS):
        found = measure_reranked_search(*blocks, pool_embeddings(images), pool_embeddings(captions), k or len(captions))
        for direction, side, asking, score, embed in (
            ("i2t", captions, images, by_image, partial(encode_captions, trained.model, trained.split)),
            ("t2i", images, captions, by_text, partial(encode_images, trained.model, trained.split, trained.device)),
        ):
            recalls = {name: round(found[direction][name], 1) for name in ("r1", "r5", "r10", "found")}
            spent = times(trained, side, asking, score, embed, k)
            lost = round(found["lost"]["rsum"], 1)
            rows.append({"k": k or "all", "direction": direction, "corpus": len(side), **recalls, "rsum_lost": lost, **spent})
    report("reranking_f8k", rows)


if __name__ == "__main__":
    main()
