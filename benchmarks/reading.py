"""Speed of reading random batches from a cache of several shards.

Claims: memory-mapped, a batch takes at most 1.5x the time of one plain memory-mapped array of the same rows; h5py's own
reads take several times as long as ours. Reading from the files, which takes less memory, takes at most 4x the time. In
memory, the time is within 10% of that of a plain array. A batch is 128 random rows of 4096 float16 numbers, sorted for
h5py, which requires that. The readers take turns, for ten rounds of 50 batches; the numbers are medians. The files are in
the page cache.

Claim on checksums: verifying the blocks of a cache costs at most 3% of a first epoch. The script reads all features of a
cache with and without checksums, and compares the processor seconds with those of an epoch of a linear model on the same
cache (VSE++, five captions an image). Once every block is read, checksums cost nothing: the first table has reads from
files with and without.

    python benchmarks/reading.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
from common import report, seconds

from training import CPU, Data, OurLoop, cpu_seconds, make_up
from vse.features.cache.arrays import BlockChecker
from vse.features.cache.feature_cache import FeatureCache, merge_shards, open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import CacheIdentity, FeatureRows
from vse.features.cache.shards import shard_path, shard_slice, write_shard
from vse.training.data.images import CachedFeatures
from vse.training.experiment import load_experiment

ROWS, DIM, SHARDS, BATCH, ROUNDS, BATCHES = 32_000, 4096, 8, 128, 10, 50
IMAGES = 400


def build(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    out, ids = folder / "x_fc7.h5", np.arange(ROWS)
    plain = np.empty((ROWS, DIM), np.float16)
    for index in range(SHARDS):
        part = shard_slice(ROWS, index, SHARDS)
        features = rng.random((part.stop - part.start, DIM), np.float32).astype(np.float16)
        plain[part] = features
        rows = FeatureRows(ids[part], features, np.zeros((len(features), 32), np.uint8))
        write_shard(shard_path(out, index, SHARDS), CacheIdentity("x", "fc7", "image", {}), rows)
    np.save(folder / "plain.npy", plain)
    return merge_shards(out, SHARDS, folder / "dataset.json", ids)


def without_checksums(cache: FeatureCache) -> FeatureCache:
    """Return the same cache, as if its manifest had no checksums."""
    return replace(
        cache, block_checker=BlockChecker([replace(shard["features"], checksums=None) for shard in cache.shard_arrays])
    )


def first_epoch(folder: Path) -> None:
    path = make_up(folder, {"train": IMAGES, "val": 200}, DIM, 3000, 2)

    def read(checked: bool) -> float:
        cache = open_cache(path)
        cache = cache if checked else without_checksums(cache)
        started = time.process_time()
        CachedFeatures(FeatureReader(cache, 0, mapped=False), cache.ids, CPU, 2)
        return time.process_time() - started

    times = [(read(False), read(True)) for _ in range(4 * ROUNDS)]
    plain, checked = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    loop = OurLoop(load_experiment("vsepp"), Data.load(path, 4), 0, "fp32")
    started = cpu_seconds()
    loop.epoch()
    epoch = 1e3 * (loop.trainer.cpu_ended - started)
    found = {"epoch": epoch, "features read": plain, "features read, with checksums": checked, "checksums": checked - plain}
    rows = [
        {"work": work, "cpu_ms": round(ms, 1), "percent_of_epoch": round(100 * ms / epoch, 2)} for work, ms in found.items()
    ]
    report("reading_first_epoch", rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        first_epoch(Path(name))
    with tempfile.TemporaryDirectory() as name:
        cache = open_cache(build(Path(name)))
        mapped = np.load(Path(name) / "plain.npy", mmap_mode="r")
        memory = np.load(Path(name) / "plain.npy")
        ours_mapped, ours_memory = FeatureReader(cache, memory_gb=0), FeatureReader(cache, memory_gb=1)
        ours_files = FeatureReader(cache, memory_gb=0, mapped=False)
        no_checksums = FeatureReader(without_checksums(cache), memory_gb=0, mapped=False)
        with h5py.File(cache.path) as file:
            views = file["features"]
            readers = {
                "plain array, mapped": lambda batch: mapped[batch],
                "ours, mapped": ours_mapped.read_rows,
                "ours, from files": ours_files.read_rows,
                "ours, from files, without checksums": no_checksums.read_rows,
                "h5py, virtual views": lambda batch: views[batch],
                "plain array, in memory": lambda batch: memory[batch],
                "ours, in memory": ours_memory.read_rows,
            }
            times: dict[str, list[float]] = {reader: [] for reader in readers}
            for number in range(ROUNDS):
                for reader, read in readers.items():
                    rng = np.random.default_rng(number)
                    for _ in range(BATCHES):
                        batch = rng.choice(ROWS, BATCH, replace=False)
                        batch = np.sort(batch) if "h5py" in reader else batch
                        times[reader].append(seconds(lambda read=read, batch=batch: read(batch)))
        medians = {reader: statistics.median(values[BATCHES:]) * 1e3 for reader, values in times.items()}
        base = {reader: "plain array, in memory" if "memory" in reader else "plain array, mapped" for reader in readers}
        report(
            "reading",
            [
                {"reader": reader, "ms_per_batch": round(ms, 3), "ratio_to_plain": round(ms / medians[base[reader]], 2)}
                for reader, ms in medians.items()
            ],
        )


if __name__ == "__main__":
    main()
