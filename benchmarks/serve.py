"""Time of a query to vse-serve on 100,000 images: over HTTP, from sending the text to reading the JSON.

Claim: a query takes less than 0.1 s with a model that compares vectors of 1,024 numbers, by inner products or by order
scores (for these, 200 candidates are scored). ``scan`` scores the 200 best candidates by pooled vectors among 10,000
images of 36 regions each, because the sets of 100,000 images would take 15 GB. Its time beyond the search of vectors does
not depend on the number of images.
Limits: features are made up (32 numbers; the model maps them to 1,024). Models are trained for one epoch; their
arithmetic is that of any other model. No photos are sent, because their time is mostly that of the CNN. ``captions`` has
no model and no HTTP: it searches the vector of a photo among 500,000 captions. Every query is another text, and the first
one is left out. Other programs share the machine: ``cpu_ms`` is the mean processor time of client and server, and
``fastest_ms`` is the best estimate for an idle machine.

    python benchmarks/serve.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
from common import report, seconds

from vse.eval.search.index import BuiltIndex, IndexVectors, build_index
from vse.eval.search.top_k import search_corpus
from vse.features.cache.feature_cache import merge_shards
from vse.features.cache.rows import CacheIdentity, FeatureRows
from vse.features.cache.shards import shard_path, write_shard
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.experiment import load_experiment
from vse.training.options import RunInputOptions, TrainOptions
from vse.training.serve.answers import ServedRuns
from vse.training.serve.app import create_app
from vse.training.serve.server import PageServer
from vse.training.training import train
from vse.training.use.searcher import SearcherOptions

TRAINED_ON, REGIONS, FEATURE = 256, 36, 32
WORDS = ["a", "red", "blue", "green", "large", "small", "circle", "square", "star", "above", "below", "two", "man", "dog"]
SCAN = (
    "model.similarity={name: scan, attention: t2i}",
    "model.caption_encoder={name: gru, states: all, bidirectional: true}",
)
VECTORS: dict[str, tuple[str, ...]] = {"inner products": (), "order": ("model.similarity=order",)}
SETS_OF_REGIONS = {"scan, the best 200": SCAN}
SETS = ("train.epochs=1", "warmup.epochs=0", "train.min_count=1", "train.batch_size=64")


def make_dataset(folder: Path, n_images: int) -> Path:
    """Write a data set of ``n_images`` test images without files, with one caption each."""
    rng, images = np.random.default_rng(0), []
    for k in range(n_images + 2 * TRAINED_ON):
        split = "test" if k < n_images else "train" if k < n_images + TRAINED_ON else "val"
        text = " ".join(rng.choice(WORDS, 8))
        sentence = {"sentid": k, "imgid": k, "raw": text, "tokens": text.split()}
        images.append({"imgid": k, "filename": f"{k}.jpg", "split": split, "sentences": [sentence]})
    path = folder / "data" / "dataset.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"dataset": "made_up", "pictures": False, "images": images}))
    return path


def make_cache(dataset: Path, sets: bool) -> Path:
    """Write a cache of made-up vectors, or of made-up regions."""
    name = "regions" if sets else "vectors"
    ids = np.asarray([image.imgid for image in load_dataset_file(dataset).images], np.int64)
    out, rng = dataset.parent.parent / f"made_up_{name}.h5", np.random.default_rng(1)
    n, of_region = len(ids) * (REGIONS if sets else 1), {}
    if sets:
        boxes = np.tile(np.asarray([[0, 0, 32, 32]], np.float32), (n, 1))
        of_region = {
            "offsets": np.arange(len(ids) + 1) * REGIONS,
            "boxes": boxes,
            "scores": np.ones(n, np.float32),
            "image_size": np.full((len(ids), 2), 64, np.int32),
        }
    features = rng.standard_normal((n, FEATURE), np.float32).astype(np.float16)
    rows = FeatureRows(ids, features, np.zeros((len(ids), 32), np.uint8), **of_region)
    write_shard(shard_path(out, 0, 1), CacheIdentity("made_up", name, "image", {}), rows)
    return merge_shards(out, 1, dataset, ids)


def times(ask: Callable[[int], object], n: int) -> dict[str, float]:
    """Return the mean processor time and the quantiles of the wall time of ``n`` queries after a first one, in ms."""
    ask(0)
    taken, started = [], time.process_time()
    for k in range(1, n + 1):
        taken.append(1000 * seconds(lambda k=k: ask(k)))
    cpu = 1000 * (time.process_time() - started) / n
    taken.sort()
    named = {
        "cpu_ms": cpu,
        "fastest_ms": taken[0],
        "median_ms": statistics.median(taken),
        "p95_ms": taken[int(0.95 * len(taken))],
    }
    named["longest_ms"] = taken[-1]
    return {name: round(value, 1) for name, value in named.items()}


def of_model(name: str, sets: Sequence[str], cache: Path, n: int) -> dict[str, object]:
    """Train and serve a run of this model, send ``n`` queries, and return a row of the table."""
    run = train(
        cache,
        load_experiment("vsepp", sets=[*SETS, *sets]),
        out=cache.parent / name.replace(" ", "_"),
        options=TrainOptions(device="cpu"),
    )
    served: list[ServedRuns] = []
    options = SearcherOptions(n_reranked=200, expects_many_queries=True)
    load_s = seconds(lambda: served.append(ServedRuns([run], "test", [RunInputOptions()], options, "cpu")))
    server = PageServer(create_app(served[0]), "127.0.0.1", 0, 2**20)
    thread = threading.Thread(target=server.run)
    thread.start()
    rng = np.random.default_rng(2)

    def ask(_: int) -> None:
        query = urlencode({"q": " ".join(rng.choice(WORDS, 8)), "as": "json", "k": 10})
        with urlopen(f"{server.url}search?{query}") as answer:
            assert len(json.load(answer)["runs"][0]["hits"]) == 10

    try:
        taken = times(ask, n)
    finally:
        server.stop()
        thread.join()
        server.close()
    return {"model": name, "searched": served[0].n_images, "dim": 1024, "queries": n, "load_s": round(load_s, 1), **taken}


def of_captions(n_captions: int, n: int) -> dict[str, object]:
    """Search one vector among those of captions, ``n`` times, and return a row of the table."""
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((n_captions, 1024), np.float32)
    built: list[BuiltIndex] = []
    load_s = seconds(lambda: built.append(build_index(vectors, "Flat")))
    index = built[0].index
    rows, queries = IndexVectors(index), rng.standard_normal((n + 1, 1, 1024), np.float32)
    taken = times(lambda k: search_corpus(rows, queries[k], 10, direction="i2t", index=index), n)
    return {"model": "captions", "searched": n_captions, "dim": 1024, "queries": n, "load_s": round(load_s, 1), **taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=100)
    arguments = parser.parse_args()
    rows = [of_captions(5 * arguments.images, arguments.queries)]
    with tempfile.TemporaryDirectory() as name:
        for n_images, models in ((arguments.images, VECTORS), (arguments.images // 10, SETS_OF_REGIONS)):
            dataset = make_dataset(Path(name) / str(n_images), n_images)
            cache = make_cache(dataset, sets=models is SETS_OF_REGIONS)
            rows += [of_model(model, sets, cache, arguments.queries) for model, sets in models.items()]
    report("serve", rows)


if __name__ == "__main__":
    main()
