"""Peak memory of exact ranks by the number of images, over two orders of magnitude, and under a memory limit.

Claims: the memory of ranking, without the embeddings, does not grow with their number, except for some bytes for each
caption. Embeddings that are memory-mapped from a file can be ranked by a process that may not allocate a fifth of their
size.
Limits: the vectors are random, with 5 captions for each image. Each size has a process of its own, which maps a file.
``own_mb`` is the peak of the memory that belongs to no file (``RssAnon``), minus its value before. ``limit_mb`` is what
RLIMIT_DATA allows beyond that value. Seconds are processor time, and ``per_pair_ns`` is the time of one pair. With
``--before`` the package of another checkout is measured too, without a limit, in a column ``before_mb``.

    python benchmarks/ranks_memory.py
    python benchmarks/ranks_memory.py --before OTHER_CHECKOUT
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from common import report

from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings
from vse.eval.ranking.ranks import ranks_from_embeddings

ROOT = Path(__file__).parents[1]
EACH, SIZES, LIMIT = 5, (500, 1000, 5000, 20_000, 50_000), 200


def status(name: str) -> float:
    """Return a memory size of this process in MB, from the line ``name`` of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1e3


def made(path: Path, n_images: int, dim: int) -> None:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((n_images, dim), np.float32)
    image_of_caption = np.repeat(np.arange(n_images), EACH)
    captions = images[image_of_caption] + 3 * rng.standard_normal((n_images * EACH, dim), np.float32)
    ids = np.arange(n_images * EACH)
    write_embeddings(path, Embeddings(ids[:n_images], ids, image_of_caption, "made_up", "test", images, captions))


def measure(path: Path, limited: bool) -> dict[str, object]:
    """Rank the embeddings in a file in this process, and return a row of the CSV."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    torch.mm(torch.ones(512, 64), torch.ones(64, 512))  # lets the library allocate its buffers
    run = read_embeddings(path)
    assert run.vectors is not None
    image_of_caption = torch.from_numpy(run.image_of_caption())
    before, peak, done = status("RssAnon"), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], status("RssAnon"))

    threading.Thread(target=watch, daemon=True).start()
    time.sleep(0.05)
    if limited:
        limit = int(1e6 * (status("VmData") + LIMIT))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    started = time.process_time()
    ranks_from_embeddings(*map(torch.from_numpy, run.vectors), image_of_caption)
    taken = time.process_time() - started
    done.set()
    n_images, dim = run.vectors[0].shape
    n_captions = len(run.vectors[1])
    return {
        "images": n_images,
        "captions": n_captions,
        "dim": dim,
        "embeddings_mb": round((n_images + n_captions) * dim * 4 / 1e6),
        "limit_mb": LIMIT,
        "own_mb": round(peak[0] - before),
        "ranks_cpu_s": round(taken, 2),
        "per_pair_ns": round(1e9 * taken / (n_images * n_captions), 2),
    }


def in_a_process(path: Path, tree: Path, *options: str) -> dict[str, object]:
    """Return the result of :func:`measure` in a new process, with the package of a checkout."""
    command = [sys.executable, __file__, "--one", str(path), *options]
    environment = {**os.environ, "PYTHONPATH": str(tree / "_vse")}
    said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured: dict[str, object] = json.loads(said)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of images")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--before", type=Path, help="another checkout to measure too")
    parser.add_argument("--one", type=Path, help="used by the script itself")
    parser.add_argument("--limited", action="store_true", help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.limited)))
        return
    rows = []
    for n_images in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "made_up.h5"
            made(path, n_images, arguments.dim)
            rows.append(in_a_process(path, ROOT, "--limited"))
            if arguments.before:
                rows[-1]["before_mb"] = in_a_process(path, arguments.before.resolve())["own_mb"]
        print(rows[-1], file=sys.stderr, flush=True)
    report("ranks_memory", rows)


if __name__ == "__main__":
    main()
