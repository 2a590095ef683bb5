"""Search of a corpus of 1 million x 1024 on disk, exactly and by approximate indexes, on one thread.

Claims: exact search in blocks holds less than 1 GB of memory of its own beside the 4 GB file that it maps; IVF that looks
into one list finds 90% of the exact top 10 and more in a tenth of the time. PQ is the fastest, and its codes are a 64th of
the vectors, but by itself it finds few of the exact top 10.
Limits: made-up data, 2,000 clusters in 64 dimensions seen through a random projection to 1,024 with noise, and queries drawn
alike (real embeddings are less regular); no OPQ, whose rotation takes minutes of processor time to train; HNSW on the first
100,000 rows, to keep the whole within minutes. Each method runs in a process of its own. Other work shares the machine:
ratios are of processor seconds. ``own_gb`` is the peak, mostly of the build, of the memory that is no file's; ``peak_gb`` has
the pages of the mapped file, too.

One query on 1 million x 512 in memory is a comparison of its own, in ``index_one_query``: exact search, which names a row that
is not finite, in at most 1.1 x the time of FAISS, beside one read of all (``sum``); processor seconds, medians of rounds.

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

from vse.eval.search.exact import TopK, exact_search
from vse.eval.search.index import BuiltIndex, build_index, search_index, set_parameters

QUERIES, K, LATENT, CLUSTERS = 1000, 10, 64, 2000
# (rows as a share of all, factory, parameters); without a factory exact search, by which those after it are judged.
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
    """GB of this process's memory that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e6


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    started = time.process_time()
    wall = seconds(work)
    return wall, time.process_time() - started


def measure(folder: Path, share: float, factory: str, parameters: Sequence[str]) -> list[dict[str, object]]:
    """One method, in a process of its own; exact results are left in the folder for those after it."""
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
            set_parameters(made[0].index, parameter)
            search = timed(lambda found=found: found.append(search_index(made[0].index, queries, K)))
        else:
            search = timed(lambda found=found: found.append(exact_search(corpus, queries, K)))
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
    """Exact search for one query beside FAISS's and a read of all, in turns."""
    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    corpus, query = rng.standard_normal((n_rows, dim), np.float32), rng.standard_normal((1, dim), np.float32)
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: exact_search(corpus, query, K),
        "faiss": lambda: faiss.knn(query, corpus, K, metric=faiss.METRIC_INNER_PRODUCT),
        "one_read": lambda: corpus.sum(),
    }
    taken = [{name: 1000 * timed(work)[1] for name, work in works.items()} for _ in range(rounds)]
    medians = {f"{name}_cpu_ms": round(float(np.median([one[name] for one in taken])), 1) for name in works}
    ratio = round(float(np.median([one["ours"] / one["faiss"] for one in taken])), 2)
    return {"rows": n_rows, "dim": dim, **medians, "ours_of_faiss": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-one-query", action="store_true", help="Leave the methods out, which take many minutes.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--one", nargs=4, metavar=("FOLDER", "SHARE", "FACTORY", "PARAMETERS"), help="Used by itself.")
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
