"""Search in a corpus of 1 million x 1024 on disk, exact and by approximate indexes, on one thread.

Claims: exact search in blocks takes less than 1 GB of memory besides the 4 GB file that it maps. An IVF index that
searches one list finds at least 90% of the exact top 10 in a tenth of the time. PQ is the fastest, and its codes take a
64th of the memory of the vectors, but by itself it finds few of the exact top 10.
Limits: data are made up: 2,000 clusters in 64 dimensions, projected at random to 1,024 dimensions, with noise, and
queries of the same distribution. Real embeddings are less regular. OPQ is left out, because its rotation takes minutes of
processor time to train. HNSW searches only the first 100,000 rows, to keep the script within minutes. Each method runs in
a process of its own. Ratios are of processor seconds, because other programs share the machine. ``own_gb`` is the peak of
the memory that belongs to no file; it mostly occurs while an index is built. ``peak_gb`` also includes the pages of the
mapped file.

A second comparison, ``index_one_query``, has one query on 1 million x 512 in memory. Exact search, which also reports
rows that are not finite, takes at most 1.1 x the time of FAISS. Both are compared with one read of all rows (``sum``).
The numbers are processor seconds, medians of rounds.

    python benchmarks/index.py
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import faiss
import numpy as np
from common import report, seconds
from numpy.typing import NDArray

from vse.eval.search.index import BuiltIndex, build_index, search_index, set_search_parameters
from vse.eval.search.top_k import TopK, search_exactly

QUERIES, K, LATENT, CLUSTERS = 1000, 10, 64, 2000
# (share of the rows, factory, parameters); without a factory, exact search, the reference for the next methods.
METHODS = (
    (1.0, "", ("",)),
    (1.0, "IVF1024,Flat", ("nprobe=1", "nprobe=4", "nprobe=16")),
    (1.0, "IVF1024,PQ64", ("nprobe=16",)),
    (0.1, "", ("",)),
    (0.1, "HNSW32", ("efSearch=32", "efSearch=128")),
)


def make(folder: Path, n_rows: int, dim: int) -> None:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CLUSTERS, LATENT), np.float32)
    projection = rng.standard_normal((LATENT, dim), np.float32) / np.float32(np.sqrt(LATENT))

    def some(n: int) -> NDArray[np.float32]:
        latent = centres[rng.integers(CLUSTERS, size=n)] + np.float32(0.5) * rng.standard_normal((n, LATENT), np.float32)
        rows = latent @ projection + np.float32(0.1) * rng.standard_normal((n, dim), np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    np.save(folder / "queries.npy", some(QUERIES))
    corpus = np.lib.format.open_memmap(folder / "corpus.npy", "w+", np.float32, (n_rows, dim))
    for start in range(0, n_rows, 20_000):
        corpus[start : start + 20_000] = some(min(20_000, n_rows - start))
    corpus.flush()


def own_memory() -> float:
    """Return the memory of this process that belongs to no file, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e6


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and processor seconds of a call."""
    started = time.process_time()
    wall = seconds(work)
    return wall, time.process_time() - started


def measure(folder: Path, share: float, factory: str, parameters: Sequence[str]) -> list[dict[str, object]]:
    """Measure one method in this process; exact search writes its results into the folder, for the next methods."""
    faiss.omp_set_num_threads(1)
    whole = np.load(folder / "corpus.npy", mmap_mode="r")
    corpus, queries = whole[: int(share * len(whole))], np.load(folder / "queries.npy")
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], own_memory())

    threading.Thread(target=watch, daemon=True).start()
    made: list[BuiltIndex] = []
    build = timed(lambda: made.append(build_index(corpus, factory))) if factory else (0.0, 0.0)
    rows = []
    for parameter in parameters:
        found: list[TopK] = []
        if factory:
            set_search_parameters(made[0].index, parameter)
            search = timed(lambda found=found: found.append(search_index(made[0].index, queries, K)))
        else:
            search = timed(lambda found=found: found.append(search_exactly(corpus, queries, K)))
            np.save(folder / "exact.npy", found[0].rows)
            (folder / "exact.json").write_text(json.dumps(search[1]))
        pairs = list(zip(found[0].rows, np.load(folder / "exact.npy"), strict=True))
        recalls = {k: np.mean([len(set(a[:k]) & set(b[:k])) / k for a, b in pairs]) for k in (1, K)}
        row = {
            "method": f"{factory} {parameter}" if factory else "exact, in blocks",
            "rows": len(corpus),
            "dim": corpus.shape[1],
            "queries": len(queries),
            "build_s": round(build[0], 1),
            "build_cpu_s": round(build[1], 1),
            "search_s": round(search[0], 3),
            "search_cpu_s": round(search[1], 3),
            "times_faster_than_exact": round(json.loads((folder / "exact.json").read_text()) / search[1], 1),
            **{f"recall_at_{k}": round(100 * float(recall), 1) for k, recall in recalls.items()},
            "own_gb": round(peak[0], 2),
            "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        }
        rows.append(row)
    done.set()
    return rows


def one_query(n_rows: int, dim: int, rounds: int = 15) -> dict[str, object]:
    """Return the times of exact search for one query, of FAISS and of one read of all rows, which take turns."""
    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    corpus, query = rng.standard_normal((n_rows, dim), np.float32), rng.standard_normal((1, dim), np.float32)
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: search_exactly(corpus, query, K),
        "faiss": lambda: faiss.knn(query, corpus, K, metric=faiss.METRIC_INNER_PRODUCT),
        "one_read": lambda: corpus.sum(),
    }
    taken = [{name: 1000 * timed(work)[1] for name, work in works.items()} for _ in range(rounds)]
    medians = {f"{name}_cpu_ms": round(float(np.median([one[name] for one in taken])), 1) for name in works}
    ratio = round(float(np.median([one["ours"] / one["faiss"] for one in taken])), 2)
    return {"rows": n_rows, "dim": dim, **medians, "ours_of_faiss": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-one-query", action="store_true", help="leave out the other methods, which take many minutes")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--one", nargs=4, metavar=("FOLDER", "SHARE", "FACTORY", "PARAMETERS"), help="used by the script")
    arguments = parser.parse_args()
    if arguments.one:
        folder, share, factory, parameters = arguments.one
        print(json.dumps(measure(Path(folder), float(share), factory, parameters.split(";"))))
        return
    report("index_one_query", [one_query(arguments.rows, 512)])
    if arguments.only_one_query:
        return
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), arguments.rows, arguments.dim)
        rows = []
        for share, factory, parameters in METHODS:
            command = [sys.executable, __file__, "--one", name, str(share), factory, ";".join(parameters)]
            rows += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(rows[-1], file=sys.stderr, flush=True)
    report("index", rows)


if __name__ == "__main__":
    main()
