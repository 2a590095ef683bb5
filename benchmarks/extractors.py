"""Cost of each feature of a data set: time, processor time, memory and disk, by the command that a user types.

Limit: one run for each feature, on a machine that may run other programs; ``cpu_s`` is the processor time of the command
alone.

    python benchmarks/extractors.py --dataset data/f8k/dataset.json --weights-dir weights --words glove.txt \
        --features effnet_10c hglmm 'regions weights=random shorter=224'
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from common import report

from vse.features.cache.feature_cache import open_cache
from vse.features.cache.shards import shards_folder
from vse.features.settings import load_feature_preset
from vse.pipeline.dataset.dataset import load_dataset_file


def measure(spec: str, dataset: Path, out: Path, threads: int) -> dict[str, object]:
    name, *sets = spec.split()
    config = load_feature_preset(name, load_dataset_file(dataset).name, sets)
    path = out / f"{load_dataset_file(dataset).name}_{name}.h5"
    options = [argument for setting in sets for argument in ("--set", setting)]
    command = ["vse-extract", config.extractor, "--dataset", str(dataset), "--feature", name, "--out", str(path)]
    program = str(Path(sys.executable).parent / command[0])
    started = time.perf_counter()
    process = os.posix_spawn(program, [*command, "--threads", str(threads), *options], os.environ)
    _, status, used = os.wait4(process, 0)
    wall = time.perf_counter() - started
    if status:
        sys.exit(f"{' '.join(command)} failed")
    cache = open_cache(path)
    vectors = len(cache.ids) if cache.offsets is None else int(cache.offsets[-1])
    return {
        "feature": spec,
        "rows": len(cache.ids),
        "vectors": vectors,
        "shape": "x".join(map(str, cache.row_shape)),
        "wall_s": round(wall),
        "cpu_s": round(used.ru_utime + used.ru_stime),
        "rows_per_cpu_s": round(len(cache.ids) / (used.ru_utime + used.ru_stime), 1),
        "peak_gb": round(used.ru_maxrss / 1e6, 2),
        "disk_mb": round(sum(file.stat().st_size for file in shards_folder(path).glob("*.h5")) / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--features", nargs="+", required=True, help="a preset, then key=value settings after blanks")
    parser.add_argument("--out", type=Path, default=Path("features"))
    parser.add_argument("--weights-dir", type=Path)
    parser.add_argument("--words", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    for variable, path in (("VSE_WEIGHTS_DIR", arguments.weights_dir), ("VSE_WORDS", arguments.words)):
        if path is not None:
            os.environ[variable] = str(path.resolve())
    rows = []
    for spec in arguments.features:
        rows.append(measure(spec, arguments.dataset, arguments.out, arguments.threads))
        report(f"extractors_{load_dataset_file(arguments.dataset).name}", rows)


if __name__ == "__main__":
    main()
