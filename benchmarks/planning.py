"""Processor time and memory of a dry run of Snakemake, by number of photographs.

States of the photographs:
- ``new``: no shard is extracted;
- ``extracted``: all shards are there, and older than none of the photographs;
- ``touched``: all photographs have a new time, and the same content;
- ``touched, again``: the second dry run after that.
Limits: the photographs are hard links to a few small files, the shards hold one number for each, and the data are in one
folder of the temporary directory. One run of each point. ``photos_opened`` is the number of photographs that were opened,
and ``import_cpu_s`` the time of a program that only imports Snakemake, after each dry run.

    python benchmarks/planning.py
    python benchmarks/planning.py --sizes 110 2000  # a quick look
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import RESULTS, report
from PIL import Image

from vse.features.cache.rows import CacheIdentity, FeatureRows, sha256_bytes
from vse.features.cache.shards import shard_path, shard_slice, write_shard
from vse.pipeline.dataset.dataset import load_dataset_file

ROOT = Path(__file__).parents[1]
SIZES, SHARDS, LINKS, FEATURE = [110, 2_000, 123_287, 1_000_000], 64, 5_000, "effnet"
SNAKEMAKE = """
import atexit, pathlib, sys
opened = [0]
def count(event, arguments):
    opened[0] += event == "open" and "/images/" in str(arguments[0])
sys.addaudithook(count)
from snakemake.cli import main
def tell():
    print("photos_opened", opened[0])
    print(pathlib.Path("/proc/self/status").read_text())
atexit.register(tell)
main()
"""


def make_photos(folder: Path, n: int) -> list[Path]:
    """Write a data set of ``n`` photographs; return the files that they are links to."""
    images, files = folder / "images", []
    images.mkdir(parents=True)
    entries = []
    for k in range(n):
        if k % LINKS == 0:
            files.append(folder / f"photo-{k}.png")
            Image.new("RGB", (8, 8)).save(files[-1])
        (images / f"{k}.png").hardlink_to(files[-1])
        sentence = {"sentid": k, "imgid": k, "raw": "a dog", "tokens": ["a", "dog"]}
        split = "train" if k % 10 else ("val", "test")[k // 10 % 2]
        entries.append({"imgid": k, "filename": f"{k}.png", "split": split, "sentids": [k], "sentences": [sentence]})
    (folder / "dataset.json").write_text(json.dumps({"dataset": "demo", "images": entries}))
    return files


def make_shards(cache: Path, n: int, photo: Path) -> None:
    identity = CacheIdentity("demo", FEATURE, "image", {})
    for index in range(SHARDS):
        ids = np.arange(n)[shard_slice(n, index, SHARDS)]
        hashes = np.broadcast_to(sha256_bytes(photo.read_bytes()), (len(ids), 32)).copy()
        path = shard_path(cache, index, SHARDS)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shard(path, identity, FeatureRows(ids, np.zeros((len(ids), 1), np.float16), hashes))


def plan(folder: Path, n: int, state: str) -> dict[str, object]:
    command = [sys.executable, "-c", SNAKEMAKE, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    command += ["--dry-run", "--quiet", "all", "--cores", "2", "--", f"features/demo_{FEATURE}.h5"]
    environment = {**os.environ, "VSE_PRESETS": str(folder)}
    before = children_cpu_seconds()
    told = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout.split()
    between = children_cpu_seconds()
    subprocess.run([sys.executable, "-c", "import snakemake.cli"], check=True)
    after = children_cpu_seconds()
    peak = int(told[told.index("VmHWM:") + 1]) * 1024 / 1e9
    opened = int(told[told.index("photos_opened") + 1])
    return {
        "photos": n,
        "state": state,
        "cpu_s": round(between - before, 2),
        "import_cpu_s": round(after - between, 2),
        "peak_gb": round(peak, 3),
        "photos_opened": opened,
    }


def children_cpu_seconds() -> float:
    """Return the processor seconds of all processes that this one started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(n: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "datasets").mkdir()
        (folder / "datasets" / "demo.yaml").write_text(f"n_images: {n}\nshards: {SHARDS}\n")
        files = make_photos(folder / "data" / "demo", n)
        load_dataset_file(folder / "data" / "demo" / "dataset.json")  # writes the copy that later commands read
        rows = [plan(folder, n, "new")]
        make_shards(folder / "features" / f"demo_{FEATURE}.h5", n, files[0])
        rows.append(plan(folder, n, "extracted"))
        for file in files:
            os.utime(file)
        return [*rows, plan(folder, n, "touched"), plan(folder, n, "touched, again")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    asked = parser.parse_args()
    report("planning", [row for n in asked.sizes for row in measure(n)], asked.out)


if __name__ == "__main__":
    main()
