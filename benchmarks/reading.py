"""How fast random batches are read from a cache of several shards.

Claims: mapped, within 1.5x of one plain memory-mapped array of the same rows (h5py's own reads take several times as long as
ours); from the files, which takes less memory, within 4x; in memory, within 10% of a plain array. Batches of 128 rows of 4096
float16 at random (in order for h5py, which takes no other); the readers in turn, ten rounds of 50 batches each, the median
of all; the files are in the page cache.

    python benchmarks/reading.py
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import h5py
import numpy as np
from common import report, seconds

from vse.features.cache import merge_shards, open_cache
from vse.features.reader import FeatureReader
from vse.features.rows import Identity, Rows
from vse.features.shards import shard_path, shard_slice, write_shard

ROWS, DIM, SHARDS, BATCH, ROUNDS, BATCHES = 32_000, 4096, 8, 128, 10, 50


def build(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    out, ids = folder / "x_fc7.h5", np.arange(ROWS)
    plain = np.empty((ROWS, DIM), np.float16)
    for index in range(SHARDS):
        part = shard_slice(ROWS, index, SHARDS)
        features = rng.random((part.stop - part.start, DIM), np.float32).astype(np.float16)
        plain[part] = features
        rows = Rows(ids[part], features, np.zeros((len(features), 32), np.uint8))
        write_shard(shard_path(out, index, SHARDS), Identity("x", "fc7", "image", {}), rows)
    np.save(folder / "plain.npy", plain)
    return merge_shards(out, SHARDS, folder / "dataset.json", ids)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        cache = open_cache(build(Path(name)))
        mapped = np.load(Path(name) / "plain.npy", mmap_mode="r")
        memory = np.load(Path(name) / "plain.npy")
        ours_mapped, ours_memory = FeatureReader(cache, memory_gb=0), FeatureReader(cache, memory_gb=1)
        ours_files = FeatureReader(cache, memory_gb=0, mapped=False)
        with h5py.File(cache.path) as file:
            views = file["features"]
            readers = {
                "plain array, mapped": lambda batch: mapped[batch],
                "ours, mapped": ours_mapped.rows,
                "ours, from files": ours_files.rows,
                "h5py, virtual views": lambda batch: views[batch],
                "plain array, in memory": lambda batch: memory[batch],
                "ours, in memory": ours_memory.rows,
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
