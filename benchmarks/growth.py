"""Growth of time and memory with size, over three orders of magnitude; each point has a process of its own.

Claims: everything except evaluation grows in proportion to the size. Evaluation compares all images with all captions,
and the time of this comparison grows with the square of the size. Memory grows with the embeddings, the features in
memory and the texts, and with nothing else.
Measured programs, with the unit of their size in brackets:
- ``evaluation`` (images with five captions each): ``evaluate()`` on embeddings of 1,024 numbers;
- ``extraction`` (images): a small network on crops of 32 pixels, so that the time outside the network shows;
- ``Fisher vectors`` (captions): fitting and encoding the feature HGLMM, on word vectors of 50 numbers;
- ``training`` (pairs): one epoch of VSE++ with the demo's model, from opening the cache to the last checkpoint;
- ``search`` (rows): an exact query on rows of 512 numbers, memory-mapped from a file whose pages count as memory;
- ``workflow`` (shards of a feature): a dry run of Snakemake;
- ``dataset.json`` (images with five captions each): loading the file.
Limits: data are made up; one thread; one run of each point. ``cpu_s`` is the processor time of the program alone.
``start_gb`` is the memory before it starts, libraries included (0 for ``workflow``, a program of its own). ``peak_gb`` is
the peak of the resident memory.

    python benchmarks/growth.py
    python benchmarks/growth.py --works search workflow --largest 0.1  # a quick look, at smaller sizes
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import torch
from common import RESULTS, report
from numpy.typing import NDArray

from training import make_up
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.protocols.evaluate import evaluate_files
from vse.eval.search.top_k import search_exactly
from vse.features.feature_job import extract_feature
from vse.features.options import ExtractOptions, FeatureRequest
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.demo import create_demo
from vse.training.experiment import load_experiment
from vse.training.options import TrainOptions
from vse.training.training import train

ROOT = Path(__file__).parents[1]
SNAKEMAKE = """
import atexit, pathlib
from snakemake.cli import main
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text()))
main()
"""
DRAWN, EACH, DIM, ROW, N_WORDS = 110, 5, 1024, 512, 3000
SMALL_NETWORK = ["model=squeezenet1_1", "layer=features.2", "grid=2", "weights=random", "resize=32", "crop=32"]
ONE_EPOCH = ["warmup.epochs=0", "train.epochs=1", "train.min_count=1", "train.on_collapse=warn"]


def unit_rows(rng: np.random.Generator, n: int, dim: int) -> NDArray[np.float32]:
    rows = rng.standard_normal((n, dim), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def make_embeddings(folder: Path, n_images: int) -> None:
    rng, ids = np.random.default_rng(0), np.arange(EACH * n_images)
    sides = unit_rows(rng, n_images, DIM), unit_rows(rng, len(ids), DIM)
    run = Embeddings(ids[:n_images], ids, np.repeat(ids[:n_images], EACH), "coco", "test", *sides, experiment="vsepp", seed=0)
    write_embeddings(folder / "test.h5", run)


def make_photos(folder: Path, n_images: int) -> None:
    """Write a data set whose images are hard links to a few images of the demo."""
    drawn = json.loads(create_demo(folder / "drawn", DRAWN).read_text())["images"]
    (folder / "images").mkdir()
    images = []
    for k in range(n_images):
        image, captions = drawn[k % DRAWN], range(EACH * k, EACH * (k + 1))
        (folder / "images" / f"{k}.jpg").hardlink_to(folder / "drawn" / "images" / image["filename"])
        sentences = [{**one, "sentid": n, "imgid": k} for n, one in zip(captions, image["sentences"], strict=True)]
        images.append({**image, "imgid": k, "filename": f"{k}.jpg", "sentids": list(captions), "sentences": sentences})
    (folder / "dataset.json").write_text(json.dumps({"dataset": "many", "images": images}))


def make_captions(folder: Path, n_captions: int) -> None:
    """Write a data set with made-up captions, and a file with vectors of 50 numbers for their words."""
    make_up(folder, {"train": n_captions // EACH}, 4, N_WORDS, 1)
    vectors = np.random.default_rng(0).laplace(size=(N_WORDS, 50))
    lines = (f"word{k} {' '.join(f'{number:.4f}' for number in vector)}" for k, vector in enumerate(vectors))
    (folder / "words.txt").write_text("\n".join(lines))


def make_corpus(folder: Path, n_rows: int) -> None:
    rng = np.random.default_rng(0)
    corpus = np.lib.format.open_memmap(folder / "corpus.npy", "w+", np.float32, (n_rows, ROW))
    for start in range(0, n_rows, 10_000):
        corpus[start : start + 10_000] = unit_rows(rng, min(10_000, n_rows - start), ROW)
    corpus.flush()


def make_preset(folder: Path, n_shards: int) -> None:
    (folder / "datasets").mkdir()
    (folder / "datasets" / "demo.yaml").write_text(f"n_images: {4 * n_shards}\nshards: {n_shards}\n")


def extract(folder: Path) -> None:
    asked = FeatureRequest(
        dataset=folder / "dataset.json",
        feature="mobilenet",
        out=folder / "x.h5",
        sets=SMALL_NETWORK,
        shards=4,
        options=ExtractOptions(device="cpu", threads=1),
    )
    extract_feature(asked)


def encode_captions(folder: Path) -> None:
    asked = FeatureRequest(
        dataset=folder / "dataset.json",
        feature="hglmm",
        out=folder / "h.h5",
        sets=["pca=300"],
        shards=4,
        options=ExtractOptions(device="cpu", threads=1, words=folder / "words.txt"),
    )
    extract_feature(asked)


def search(folder: Path) -> None:
    query = unit_rows(np.random.default_rng(1), 1, ROW)
    search_exactly(np.load(folder / "corpus.npy", mmap_mode="r"), query, 10)


def plan_jobs(folder: Path) -> float:
    """Run a dry run of Snakemake as a program of its own, and return its peak memory in GB.

    The program reports its peak itself, because wait4 would also count the memory of this process.
    """
    command = [sys.executable, "-c", SNAKEMAKE, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    command += ["--dry-run", "--quiet", "all", "--cores", "2", "--", "features/demo_fc7.h5"]
    environment = {**os.environ, "VSE_PRESETS": str(folder)}
    said = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
    return next(int(line.split()[1]) for line in said.splitlines() if line.startswith("VmHWM")) * 1024 / 1e9


@dataclass(frozen=True)
class Work:
    """A measured program: ``make`` writes the input of a size into an empty folder, and ``run``, alone measured, reads it.

    If ``run`` starts a program of its own, it returns the program's peak memory in GB.
    """

    unit: str
    largest: int
    make: Callable[[Path, int], object]
    run: Callable[[Path], object]


WORKS = {
    "evaluation": Work(
        "images", 20_000, make_embeddings, lambda folder: evaluate_files([folder / "test.h5"], folder / "test.json")
    ),
    "extraction": Work("images", 20_000, make_photos, extract),
    "Fisher vectors": Work(
        "captions",
        300_000,
        make_captions,
        encode_captions,
    ),
    "training": Work(
        "pairs",
        50_000,
        lambda folder, pairs: make_up(folder, {"train": pairs // EACH, "val": 100}, 1280, N_WORDS, 4),
        lambda folder: train(
            folder / "made-up.h5",
            load_experiment("vsepp", dataset="demo", sets=ONE_EPOCH),
            out=folder / "run",
            options=TrainOptions(device="cpu"),
        ),
    ),
    "search": Work("rows", 1_000_000, make_corpus, search),
    "workflow": Work("jobs", 20_000, make_preset, plan_jobs),
    "dataset.json": Work(
        "images",
        123_287,
        lambda folder, images: make_up(folder, {"train": images}, 4, 20_000, 1),
        lambda folder: load_dataset_file(folder / "dataset.json"),
    ),
}


def make(name: str, folder: Path, size: int) -> None:
    WORKS[name].make(folder, size)


def cpu_seconds() -> float:
    """Return the processor time of this process and of the ended programs that it started."""
    return time.process_time() + sum(os.times()[2:4])


def measure(name: str, folder: Path) -> dict[str, float]:
    """Return processor seconds and memory of one point; if ``run`` starts a program, the memory is that program's."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    cpu, start = cpu_seconds(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    of_program = WORKS[name].run(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    if isinstance(of_program, float):
        start, peak = 0.0, of_program
    return {"cpu_s": round(cpu_seconds() - cpu, 3), "start_gb": round(start, 3), "peak_gb": round(peak, 3)}


def sizes(largest: float, points: int) -> list[int]:
    """Return sizes at equal ratios, from a thousandth of the largest to the largest.

    Sizes below 20 become 20, so that each has several shards.
    """
    return [max(20, round(largest * 10 ** (-3 + 3 * k / (points - 1)))) for k in range(points)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--largest", type=float, default=1.0, help="the largest size, as a multiple of the usual one")
    parser.add_argument("--points", type=int, default=7, help="number of sizes for each program, at least two")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:  # each call has a process of its own
        for name in arguments.works:
            for size in sizes(arguments.largest * WORKS[name].largest, arguments.points):
                with tempfile.TemporaryDirectory() as folder:
                    processes.apply(make, (name, Path(folder), size))
                    point = processes.apply(measure, (name, Path(folder)))
                rows.append({"work": name, "size": size, "unit": WORKS[name].unit, **point})
                print(rows[-1], file=sys.stderr, flush=True)
            report("growth", rows, arguments.out)


if __name__ == "__main__":
    main()
