"""Queries to vse-serve by 1, 8 and 32 clients, compared with one read of all vectors and with FAISS alone.

Claims: for 100,000 images with vectors of 512 numbers, the exact search of a query takes at most 1.3 times one read of the
vectors. With 32 clients, the server answers four times as many queries per second as with one client, because it answers
all waiting queries by one matrix product. The answers are the same: each client compares them with those to a single client.

Rows with clients are queries to a server in a process of its own, over HTTP with open connections. They also take the time to
encode the text, by VSE++ with a GRU. ``cpu_ms`` is the processor time of the server for a query. Rows without clients are
searches of one vector in this process: ``search`` is the part of the server. FAISS runs with one and with two threads.
A second table, ``clients_precision``, has the bytes of a vector in smaller indexes, the recalls that they lose on a drawn
demo with 2,500 images, and their processor time.

Limits: vectors are made up, and the model is trained for one epoch; its arithmetic is that of any other model. All programs
take turns. Other programs share the machine, so that wall times are too long: compare ratios, and processor times. The
server has one thread for matrix products; clients use the other core. Numbers are medians over rounds.

    python benchmarks/clients.py
    python benchmarks/clients.py --before OTHER_CHECKOUT
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from urllib.parse import urlencode, urlsplit

import faiss
import numpy as np
import torch
from common import RESULTS, report
from serve import SETS, WORDS, make_cache, make_dataset
from startup import ROOT, command_line

import vse
from vse.eval.files.embeddings import read_embeddings
from vse.eval.search.approximate import measure_index_recalls
from vse.eval.search.matrix import VectorMatrix
from vse.training.experiment import load_experiment
from vse.training.options import TrainOptions
from vse.training.training import train

DIM, CLIENTS, N_TEXTS = 512, (1, 8, 32), 64
INDEXES = {"Flat": "", "SQfp16": "", "SQ8": "", "SQ8,RFlat": "k_factor_rf=4"}  # FAISS strings and their parameters
BYTES = {"Flat": 4 * DIM, "SQfp16": 2 * DIM, "SQ8": DIM, "SQ8,RFlat": 5 * DIM}
DEMO_FEATURE = {"model": "squeezenet1_1", "layer": "features.2", "grid": 2, "weights": "random", "resize": 32, "crop": 32}
Numbers = dict[str, float]


@contextmanager
def serve(tree: Path, run: Path, index_type: str = "") -> Iterator[tuple[str, int]]:
    """Serve a run with the package of a checkout; yield the host with its port, and the id of the process."""
    options = f" --index-type {index_type}" if index_type else ""
    options += f" --index-parameters {INDEXES[index_type]}" if INDEXES.get(index_type) else ""
    command = command_line(f"serve {run} --port 0 --device cpu --threads 1{options}")
    environment = {**os.environ, "PYTHONPATH": str(tree / "_vse")}
    with subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield urlsplit(process.stdout.readline().strip()).netloc, process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def cpu_ms(process: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def find(connection: HTTPConnection, text: str) -> object:
    connection.request("GET", "/search?" + urlencode({"q": text, "as": "json", "k": 10}))
    return json.load(connection.getresponse())["runs"][0]["hits"]


def ask(netloc: str, process: int, texts: list[str], clients: int, queries: int, right: Mapping[str, object]) -> Numbers:
    """Send ``queries`` texts by some clients at once. Raises AssertionError if an answer is not that to a single client."""

    def send(client: int) -> list[float]:
        taken = []
        connection = HTTPConnection(netloc, timeout=600)
        for number in range(client, queries, clients):
            text = texts[number % len(texts)]
            started = time.perf_counter()
            hits = find(connection, text)
            taken.append(1000 * (time.perf_counter() - started))
            assert hits == right.get(text, hits), text
        connection.close()
        return taken

    before, started = cpu_ms(process), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        taken = sorted(one for client in pool.map(send, range(clients)) for one in client)
    seconds = time.perf_counter() - started
    return {
        "per_s": queries / seconds,
        "median_ms": median(taken),
        "p95_ms": taken[int(0.95 * len(taken))],
        "cpu_ms": (cpu_ms(process) - before) / queries,
    }


def timed(work: Callable[[], object], n: int = 10) -> Numbers:
    """Return the mean times of a call."""
    work()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(n):
        work()
    return {"median_ms": 1000 * (time.perf_counter() - wall) / n, "cpu_ms": 1000 * (time.process_time() - cpu) / n}


def search_alone(n_images: int) -> dict[str, Callable[[], Numbers]]:
    """Return measurements of searches for one vector, and of one read of all vectors."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((n_images, DIM), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    query, matrix = vectors[:1].copy(), VectorMatrix(vectors)

    def knn(threads: int) -> Numbers:
        faiss.omp_set_num_threads(threads)
        return timed(lambda: faiss.knn(query, vectors, 10, metric=faiss.METRIC_INNER_PRODUCT))

    return {
        "one read": lambda: timed(vectors.sum),
        "search": lambda: timed(lambda: matrix.search(query, [10])),
        "FAISS, one thread": lambda: knn(1),
        "FAISS, two threads": lambda: knn(2),
    }


def make_run(folder: Path, n_images: int) -> Path:
    cache = make_cache(make_dataset(folder, n_images), sets=False)
    experiment = load_experiment("vsepp", sets=[*SETS, f"model.dim={DIM}"])
    return train(cache, experiment, out=folder / "run", options=TrainOptions(device="cpu"))


def measure_clients(run: Path, trees: Mapping[str, Path], n_images: int, rounds: int) -> list[dict[str, object]]:
    """Return the rows of the table ``clients``."""
    rng = np.random.default_rng(2)
    texts = [" ".join(rng.choice(WORDS, 8)) for _ in range(N_TEXTS)]
    alone = search_alone(n_images)
    measured: dict[tuple[str, int, str], list[Numbers]] = defaultdict(list)
    with ExitStack() as stack:
        servers = {when: stack.enter_context(serve(tree, run)) for when, tree in trees.items()}
        right = {}
        for when, (netloc, _) in servers.items():
            connection = HTTPConnection(netloc, timeout=600)
            right[when] = {text: find(connection, text) for text in texts}
            connection.close()
        for _ in range(rounds):
            for name, measure in alone.items():
                measured[name, 0, "now"].append(measure())
            for when, (netloc, process) in servers.items():
                for clients in CLIENTS:
                    queries = max(N_TEXTS, 4 * clients)
                    answers = ask(netloc, process, texts, clients, queries, right[when] if when == "now" else {})
                    measured["server", clients, when].append(answers)
    table = []
    for (name, clients, when), several in measured.items():
        numbers = {key: median(one[key] for one in several) for key in several[0]}
        pairs = zip(several, measured["one read", 0, "now"], strict=True)
        reads = median(one["cpu_ms"] / read["cpu_ms"] for one, read in pairs)
        row: dict[str, object] = {"what": name, "when": when, "clients": clients, "images": n_images, "dim": DIM}
        row |= {key: round(numbers[key], 2) if key in numbers else "" for key in ("per_s", "median_ms", "p95_ms", "cpu_ms")}
        row["times_one_read"] = round(reads, 2)
        if name == "server":
            single = measured["server", 1, when]
            speed_up = median(one["per_s"] / other["per_s"] for one, other in zip(several, single, strict=True))
            row["times_one_client"] = round(speed_up, 2)
        else:
            row["times_one_client"] = ""
        table.append(row)
    return table


def measure_precision(folder: Path, run: Path, rounds: int, demo_images: int) -> list[dict[str, object]]:
    """Return the rows of the table ``clients_precision``."""
    data = vse.draw_demo(folder / "data", images=demo_images)
    features = vse.extract(
        data, "fc7", sets=DEMO_FEATURE, out=folder / "demo.h5", shards=1, options=vse.ExtractOptions(device="cpu")
    )
    sets = {"train.epochs": 5, "warmup.epochs": 1, "model.dim": DIM, "train.min_count": 1}
    model = vse.train(features, sets=sets, out=folder / "demo_run", options=vse.TrainOptions(device="cpu"))
    subprocess.run(
        [sys.executable, *command_line(f"embed {model.path} --split test --out {folder}/test.h5 --device cpu")], check=True
    )
    embeddings = read_embeddings(folder / "test.h5")
    rows_of = {int(image): row for row, image in enumerate(embeddings.image_ids)}
    image_of_caption = np.asarray([rows_of[int(image)] for image in embeddings.caption_image_ids])
    rng = np.random.default_rng(3)
    texts = [" ".join(rng.choice(WORDS, 8)) for _ in range(N_TEXTS)]
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serve(ROOT, run, name)) for name in INDEXES}
        for _ in range(rounds):
            for name, (netloc, process) in servers.items():
                for clients in (1, 32):
                    taken[name, clients].append(ask(netloc, process, texts, clients, 2 * N_TEXTS, {})["cpu_ms"])
    table = []
    for name, parameters in INDEXES.items():
        recalls = measure_index_recalls(
            np.asarray(embeddings.images), np.asarray(embeddings.captions), image_of_caption, "cosine", name, parameters
        )
        row: dict[str, object] = {"index": name, "parameters": parameters, "bytes": BYTES[name]}
        for direction in ("i2t", "t2i"):
            row[f"{direction}_r10"] = round(recalls[direction]["r10"], 2)
            row[f"{direction}_exact_top_10"] = round(recalls[direction]["recall_at_10"], 2)
        row |= {f"cpu_ms_{clients}": round(median(taken[name, clients]), 2) for clients in (1, 32)}
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--demo-images", type=int, default=2500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSVs")
    parser.add_argument("--before", type=Path, help="another checkout to measure too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trees = {"now": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    with tempfile.TemporaryDirectory() as name:
        run = make_run(Path(name), arguments.images)
        report("clients", measure_clients(run, trees, arguments.images, arguments.rounds), arguments.out)
        precision = measure_precision(Path(name) / "demo", run, arguments.rounds, arguments.demo_images)
        report("clients_precision", precision, arguments.out)


if __name__ == "__main__":
    main()
