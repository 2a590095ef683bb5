"""Processor seconds and memory of each step with 10,000 to 1,000,000 pairs, from an import to a search page.

The data are in the layout of clip-retrieval: vectors of 512 numbers in float16 for images and captions, and tables of texts,
200,000 images with five captions each at a million pairs. Each step is a command with one thread, run once. With more than a
million pairs, where the data set is a parquet file, only the import runs. ``cpu_s`` is the
processor time of the command. ``peak_gb`` is its largest resident memory, which includes mapped files. ``own_gb`` is the
largest anonymous memory, which does not: the system can drop the pages of a mapped file at any time, and processes share
them. It is read every 20 milliseconds. Files in a temporary folder in memory (tmpfs) count as anonymous memory.

    python benchmarks/large_data.py
    python benchmarks/large_data.py --pairs 10000  # a quick look
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from common import RESULTS, report

ROOT = Path(__file__).parents[1]
DIM, EACH, PART, NAME = 512, 5, 250_000, "made_up"
MAX_HELD_OUT = 1000  # images of val and of test
METER = """
import resource, subprocess, sys, time  # a small program: a command's peak begins with the memory of its parent
command, own = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL), 0
while command.poll() is None:
    with open(f"/proc/{command.pid}/status") as status:
        sizes = dict(line.split(":") for line in status)
    own = max(own, sum(int(sizes.get(name, "0").split()[0]) for name in ("RssAnon", "RssShmem")))
    time.sleep(0.02)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9, own * 1024 / 1e9)
sys.exit(command.returncode)
"""
TRAIN = ("--set", "train.epochs=1", "--set", "train.validate_images=1000", "--set", "train.on_collapse=warn", "--threads", "1")


def make_folder(folder: Path, n_pairs: int) -> None:
    """Write vectors and texts in the layout of clip-retrieval."""
    rng = np.random.default_rng(0)
    n_images = n_pairs // EACH
    n_held_out = min(MAX_HELD_OUT, n_images // 10)
    words = np.array([f"word{k}" for k in range(3_000)])
    frequency = 1 / np.arange(1, len(words) + 1) ** 1.1
    frequency /= frequency.sum()
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, n_pairs, PART)):
        n = min(PART, n_pairs - start)
        image = np.arange(start, start + n) // EACH
        directions = np.random.default_rng(1).standard_normal((n_images, 16), np.float32)[image]
        for side in ("img", "text"):
            noise = rng.standard_normal((n, DIM), np.float32) if side == "text" else np.zeros((n, DIM), np.float32)
            noise[:, :16] += 3 * directions
            vectors = noise / np.linalg.norm(noise, axis=1, keepdims=True)
            np.save(folder / f"{side}_emb_{number}.npy", vectors.astype(np.float16))
        texts = [" ".join(rng.choice(words, 9, p=frequency)) for _ in range(n)]
        split = np.where(image < n_held_out, "test", np.where(image < 2 * n_held_out, "val", "train"))
        table = {"image_path": [f"{k // 1000:05d}/{k:09d}.jpg" for k in image], "caption": texts, "split": split.tolist()}
        pyarrow.parquet.write_table(pa.table(table), folder / f"metadata_{number}.parquet")


def steps(folder: Path) -> list[tuple[str, list[str]]]:
    """Return the steps with their commands."""
    features, dataset = folder / "features", folder / "data" / NAME / "dataset.json"
    images, captions = features / f"{NAME}_img_emb.h5", features / f"{NAME}_text_emb.h5"
    parquet = folder / "parquet" / NAME / "dataset.parquet"
    imports = ["vse-data", "import", str(folder / "source"), "--name", NAME, "--out", str(dataset.parent)]
    imports += ["--out-features", str(features)]
    train = ["vse-train", "--features", str(images), "--caption-features", str(captions), *TRAIN]
    infonce = ["--experiment", "infonce_minilm_effnet", "--set", "feature=img_emb", "--set", "caption_feature=text_emb"]
    tfidf = [
        "vse-extract",
        "tfidf",
        "--dataset",
        str(dataset),
        "--feature",
        "tfidf",
        "--threads",
        "1",
        "--out",
        str(features / "made_up_tfidf.h5"),
    ]
    run = folder / "runs" / "infonce"
    return [
        ("import", imports),
        ("import again", imports),
        ("check", ["vse-data", "check", str(dataset)]),
        ("convert to parquet", ["vse-data", "convert", str(dataset), "--out", str(parquet.parent)]),
        ("check of parquet", ["vse-data", "check", str(parquet)]),
        ("tfidf", tfidf),
        ("tfidf again", tfidf),
        ("InfoNCE, one epoch", [*train, *infonce, "--out", str(run)]),
        ("embed", ["vse-embed", str(run), "--threads", "1"]),
        ("evaluate", ["vse-eval", str(run / "test.h5"), "--out", str(folder / "result.json")]),
    ]


def measure(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command. Return its processor seconds, and the peaks of its memory and of its own memory in GB."""
    done = subprocess.run([sys.executable, "-c", METER, *command], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    seconds, peak, own = map(float, done.stdout.split()[-3:])
    return {"cpu_s": round(seconds, 2), "peak_gb": round(peak, 3), "own_gb": round(own, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 3_000_000])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    arguments = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    rows = []
    for n_pairs in arguments.pairs:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_folder(folder / "source", n_pairs)
            for step, command in steps(folder)[: None if n_pairs <= 1_000_000 else 1]:
                rows.append({"step": step, "pairs": n_pairs, **measure(command, folder)})
                print(rows[-1], flush=True)
            shutil.rmtree(folder / "source")
    report("large_data", rows, arguments.out)


if __name__ == "__main__":
    main()
