"""Processor seconds of `vse-search` with an index, in a new process and within one, on a data set of COCO's size.

Claim: a cold search, in a new process, of 5,000 images takes at most 1.2 s more than ``import torch``, which it needs to
embed the text. A further query in the same process takes 0.05 s, also of 118,000 images, because it reads only the images
that it displays.
Limits: captions and features are made up, and the model is trained for one epoch; its arithmetic is that of any other
model. The time of a cold search grows with the data set by one read of ``dataset.json`` and of the index, to check their
SHA-256, and by one read of the columns. Numbers are medians over rounds; within a process, medians over the queries after
the first.

    python benchmarks/searching.py
    python benchmarks/searching.py --before OTHER_CHECKOUT

With ``--before`` the package of that checkout is measured too, in turn, in a column ``before_s``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from common import report
from startup import ROOT, command_line, cpu_seconds

from vse.features.cache.feature_cache import merge_shards
from vse.features.cache.rows import CacheIdentity, FeatureRows
from vse.features.cache.shards import shard_path, write_shard
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.experiment import load_experiment
from vse.training.options import TrainOptions
from vse.training.training import train

EACH, WORDS, FEATURE, TRAINED_ON = 5, 10, 32, 128
SETS = ("train.epochs=1", "warmup.epochs=0", "train.min_count=1", "train.batch_size=64")
QUERIES = ("word1 word2", "word3 word1", "word2 word2 word5")
IN_PROCESS = """
import functools, json, sys, time
import vse
run, index, split, out, *queries = sys.argv[1:]
if hasattr(vse, "load"):
    search = vse.load(run).search
else:  # the checkout of --before has an earlier interface
    search = functools.partial(vse.search, run)
taken = []
for query in queries:
    started = time.process_time()
    search(query, index=index, split=split)
    taken.append(time.process_time() - started)
open(out, "w").write(json.dumps(taken))
"""


def make_dataset(path: Path, n_images: int, n_test: int) -> Path:
    """Write a data set with two splits to search: ``test`` with ``n_test`` images, and ``restval`` with almost all others."""
    rng = np.random.default_rng(0)
    words = [f"word{k}" for k in range(10_000)]
    drawn = (rng.zipf(1.3, (EACH * n_images, WORDS)) % len(words)).tolist()
    splits = ["test"] * n_test + ["train"] * TRAINED_ON + ["val"] * TRAINED_ON
    images = []
    for imgid in range(n_images):
        sentences = []
        for sentid in range(EACH * imgid, EACH * imgid + EACH):
            tokens = [words[word] for word in drawn[sentid]]
            sentences.append({"sentid": sentid, "imgid": imgid, "raw": " ".join(tokens), "tokens": tokens})
        split = splits[imgid] if imgid < len(splits) else "restval"
        images.append({"imgid": imgid, "filename": f"{imgid:012d}.jpg", "split": split, "sentences": sentences})
    path.parent.mkdir()
    path.write_text(json.dumps({"dataset": "made_up", "pictures": False, "images": images}))
    return path


def make_run(folder: Path, dataset: Path, n_images: int) -> Path:
    """Train a run with its preset's sizes on a cache of made-up vectors, and return its folder."""
    cache, ids, rng = folder / "made_up_vectors.h5", np.arange(n_images), np.random.default_rng(1)
    features = rng.standard_normal((n_images, FEATURE), np.float32).astype(np.float16)
    rows = FeatureRows(ids, features, np.zeros((n_images, 32), np.uint8))
    write_shard(shard_path(cache, 0, 1), CacheIdentity("made_up", "vectors", "image", {}), rows)
    merge_shards(cache, 1, dataset, ids)
    return train(cache, load_experiment("vsepp", sets=SETS), out=folder / "run", options=TrainOptions(device="cpu"))


def measured_once(tree: Path, folder: Path, splits: Sequence[str]) -> dict[str, float]:
    measured = {"import torch": cpu_seconds(["-c", "import torch"], tree, folder)}
    for split in splits:
        command = command_line(f"search run word1 --split {split} --index {split}.faiss --device cpu")
        measured[f"cold {split}"] = cpu_seconds(command, tree, folder)
        taken = folder / "taken.json"
        cpu_seconds(["-c", IN_PROCESS, "run", f"{split}.faiss", split, str(taken), *QUERIES], tree, folder)
        measured[f"in process {split}"] = median(json.loads(taken.read_text())[1:])
    return measured


def rows(rounds: dict[str, list[dict[str, float]]], sizes: dict[str, int]) -> list[dict[str, object]]:
    torch = median(measured["import torch"] for measured in rounds["now"])
    table = []
    for name in rounds["now"][0]:
        seconds = {when: median(measured[name] for measured in of) for when, of in rounds.items()}
        search, _, split = name.rpartition(" ") if name != "import torch" else (name, "", "")
        row: dict[str, object] = {"search": search, "images": sizes.get(split, 0), "cpu_s": round(seconds["now"], 3)}
        if "before" in seconds:
            row["before_s"] = round(seconds["before"], 3)
        table.append({**row, "beyond_torch_s": round(seconds["now"] - torch, 3) if search == "cold" else ""})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=123_287)
    parser.add_argument("--test", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout to measure too")
    arguments = parser.parse_args()
    trees = {"now": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    sizes = {"test": arguments.test, "restval": arguments.images - arguments.test - 2 * TRAINED_ON}
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "presets").mkdir()
        dataset = make_dataset(folder / "data" / "dataset.json", arguments.images, arguments.test)
        load_dataset_file(dataset)  # writes the file of columns
        make_run(folder, dataset, arguments.images)
        for split in sizes:
            cpu_seconds(command_line(f"search run word1 --split {split} --index {split}.faiss --device cpu"), ROOT, folder)
        for _ in range(arguments.rounds):
            for when, tree in trees.items():
                rounds[when].append(measured_once(tree, folder, list(sizes)))
    report("searching", rows(rounds, sizes))


if __name__ == "__main__":
    main()
