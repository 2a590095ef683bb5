"""Evaluation of a complete COCO test set by ``vse-eval``, compared with the published code on the same embeddings.

Claim: ``vse-eval`` on 5,000 images x 25,000 captions x 1024 dimensions takes less than 10 s and 2 GB on 2 cores, with 1k
folds, the full set, 95% intervals and the check against FAISS.
Limits: the embeddings are made up. The published code (benchmarks/ranks.py) has no intervals and no check. It runs in
this process, without the start of an interpreter, and in float32.

    python benchmarks/evaluation.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from common import report
from ranks import published

from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.options import N_IMAGES_PER_FOLD
from vse.eval.ranking.metrics import Ranks, average_metrics, compute_metrics

IMAGES, EACH, DIM = 5000, 5, 1024


def made(path: Path) -> Embeddings:
    """Write embeddings of unit length in which captions resemble their images, and return them."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal((IMAGES, DIM), dtype=np.float32)
    image_of_caption = np.repeat(np.arange(IMAGES), EACH)
    images = common + 2 * rng.standard_normal((IMAGES, DIM), dtype=np.float32)
    captions = common[image_of_caption] + 3 * rng.standard_normal((IMAGES * EACH, DIM), dtype=np.float32)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    captions /= np.linalg.norm(captions, axis=1, keepdims=True)
    ids = np.arange(IMAGES * EACH)
    run = Embeddings(ids[:IMAGES], ids, image_of_caption, "coco", "test", images, captions, experiment="vsepp", seed=0)
    write_embeddings(path, run)
    return run


def command(embeddings: Path, out: Path) -> dict[str, float]:
    """Run ``vse-eval``, and return the wall time, processor time and peak memory of the process."""
    program = "from vse.eval.cli import eval_main; eval_main()"
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program, str(embeddings), "--out", str(out)])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    wall = time.perf_counter() - started
    return {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_gb": usage.ru_maxrss / 1e6}


def published_way(run: Embeddings) -> dict[str, dict[str, object]]:
    """Return the metrics of five folds and of the full set, by the published loop."""
    assert run.images is not None
    assert run.captions is not None
    folds = []
    for start in range(0, IMAGES, N_IMAGES_PER_FOLD):
        captions = run.captions[start * EACH : (start + N_IMAGES_PER_FOLD) * EACH]
        folds.append(compute_metrics(Ranks(*published(run.images[start : start + N_IMAGES_PER_FOLD], captions, EACH))))
    return {"1k": average_metrics(folds), "full": compute_metrics(Ranks(*published(run.images, run.captions, EACH)))}


def main() -> None:
    with TemporaryDirectory() as folder:
        path, out = Path(folder) / "coco.h5", Path(folder) / "coco.json"
        run = made(path)
        ours = command(path, out)
        found = json.loads(out.read_text())["protocols"]
    started, started_cpu = time.perf_counter(), time.process_time()
    theirs = published_way(run)
    wall, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    # The order of a sum changes the last bit of a score, so it can swap two candidates.
    apart = max(abs(found[name]["rsum"] - float(theirs[name]["rsum"])) for name in theirs)  # type: ignore[arg-type]
    row = {
        "images": IMAGES,
        "captions": IMAGES * EACH,
        "dim": DIM,
        "ours_s": round(ours["wall_s"], 2),
        "published_s": round(wall, 2),
        "ratio": round(wall / ours["wall_s"], 1),
        "ours_cpu_s": round(ours["cpu_s"], 1),
        "published_cpu_s": round(cpu, 1),
        "ours_peak_gb": round(ours["peak_gb"], 2),
        "largest_difference_of_rsum": round(apart, 4),
    }
    report("evaluation", [row])


if __name__ == "__main__":
    main()
