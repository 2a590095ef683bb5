"""Time of GPU programs compared with their limit: ranks, search, training, SCAN and TOD-Net scores, extraction, NCCL.

The limit is the least time on the device: the program's matrix products at the speed of one large product, or its bytes
at the speed of a copy, whichever takes longer. For an extraction it is the bare network on photos in memory. ``busy`` is
the share of the time in which the GPU computes, as nvidia-smi samples it (on a processor, the share of all cores). For a
training, ``busy`` includes loading and validation, and ``s`` does not. ``gpu_gb`` is the peak of the memory that torch
allocates.
Limits: weights are random, and data are made up. NCCL runs with one process: it gathers the embeddings of a batch and
sums the gradients of VSE++, as a training by several processes does, but sends nothing.

    python benchmarks/gpu.py  # needs a GPU
    python benchmarks/gpu.py --device cpu --tiny --out /tmp  # what the tests run
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import scan
import todnet
import torch
import torchvision
from common import RESULTS, report
from extraction import pictures
from torch import Tensor, distributed

from training import make_up
from vse.eval.ranking.ranks import ScoreBlocks, ranks_from_blocks
from vse.eval.search.gpu import choose_faiss_device
from vse.eval.search.top_k import search_exactly
from vse.features.backbones.device import describe_device, pick_device
from vse.features.backbones.networks import autocast
from vse.features.cache.rows import ExtractorInput
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings.images import CnnConfig
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.options import TrainOptions
from vse.training.solvers.encode import MAX_TILE_IMAGES, PairScores
from vse.training.training import train

WORDS, WORD_DIM, BATCH = 13, 300, 128  # words of a made-up caption with <start> and <end>; settings of VSE++


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured programs."""

    images: int = 5000
    dim: int = 1024
    pairs: int = 50_000
    photos: int = 512
    model: str = "resnet152"
    scored: int = 1000  # images for models that score pairs
    width: int = 1024  # of TOD-Net's networks
    side: int = 8192  # side of the matrices that give the speed of products
    rounds: int = 3


TINY = Sizes(images=30, dim=16, pairs=60, photos=8, model="resnet18", scored=2, width=16, side=64, rounds=1)


@dataclass(frozen=True)
class Work:
    """A measured program; if ``call`` returns a float, that is its time in seconds."""

    name: str
    precision: str
    call: Callable[[], object]
    limit_s: float


class Limits:
    """Least times on a device."""

    def __init__(self, device: torch.device, side: int) -> None:
        self.device, self.side, self.speeds = device, side, dict[str, float]()

    def seconds(self, precision: str, flops: float, n_bytes: float = 0) -> float:
        """Return the time of ``flops`` in matrix products or of copying ``n_bytes``, whichever is longer."""
        return max(flops / self._speed(precision), n_bytes / self._speed("copy"))

    def _speed(self, what: str) -> float:
        if what not in self.speeds:
            dtype = torch.bfloat16 if what == "bf16" else torch.float32
            one, other = (torch.ones(self.side, self.side, device=self.device, dtype=dtype) for _ in range(2))
            work, amount = (one.clone, 2 * one.nbytes) if what == "copy" else (lambda: one @ other, 2 * self.side**3)
            self.speeds[what] = amount / timed(work, self.device, 5)
        return self.speeds[what]


def timed(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median seconds of a call, until the device has finished; the first call warms up."""
    taken = []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        own = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(own if isinstance(own, float) else time.perf_counter() - started)
    return statistics.median(taken[1:])


def ranking(device: torch.device, sizes: Sizes, limits: Limits) -> Iterator[Work]:
    """Yield exact ranks, and the ten best of both directions by FAISS."""
    n, m = sizes.images, 5 * sizes.images
    images, captions = torch.randn(n, sizes.dim), torch.randn(m, sizes.dim)
    right, image_of_caption = captions.to(device), torch.arange(m, device=device) // 5
    left = images.to(device)

    def ranks() -> None:
        blocks = ScoreBlocks(
            n, image_of_caption, 512, lambda rows, which: left[rows] @ (right if which is None else right[which]).T
        )
        ranks_from_blocks(blocks)

    def search() -> None:
        choose_faiss_device(device.type)
        search_exactly(images.numpy(), captions.numpy(), 10)
        search_exactly(captions.numpy(), images.numpy(), 10)

    limit = limits.seconds("fp32", 2 * n * m * sizes.dim, 2 * 4 * n * m)
    yield Work(f"exact ranks of {n} x {m}", "fp32", ranks, limit)
    yield Work(f"FAISS, top 10 of {n} x {m}, both directions", "fp32", search, 2 * limit)


def training(device: torch.device, sizes: Sizes, limits: Limits) -> Iterator[Work]:
    """Yield the second epoch of VSE++, and the exchange of several processes in a step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_up(folder, {"train": sizes.pairs // 5, "val": 20}, 4 * sizes.dim, 3000, 1)
        for precision in ("fp32", "bf16"):
            settings = [f"model.dim={sizes.dim}", f"train.precision={precision}", "train.epochs=2", "train.min_count=1"]
            experiment = load_experiment("vsepp", sets=[*settings, "train.on_collapse=warn"])

            def epoch(experiment: ExperimentConfig = experiment) -> float:
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    run = train(
                        folder / "made-up.h5", experiment, out=Path(out) / "run", options=TrainOptions(device=device.type)
                    )
                    return sizes.pairs / float(pd.read_csv(run / "metrics.csv")["pairs_per_s"].iloc[-1])

            word = 3 * (WORD_DIM + sizes.dim) * sizes.dim  # a GRU's products for a word, forward; backward takes twice as many
            flops = 2 * (3 * WORDS * word + 2 * 4 * sizes.dim**2 + 3 * BATCH * sizes.dim)
            yield Work(f"training, {sizes.pairs} pairs", precision, epoch, limits.seconds(precision, sizes.pairs * flops))
        gradients = torch.ones(word + 4 * sizes.dim**2 + 3000 * WORD_DIM, device=device)
        embeddings = torch.ones(2 * BATCH, sizes.dim, device=device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, init_method=f"file://{folder / 'processes'}", rank=0, world_size=1)

        def exchange() -> None:
            distributed.all_gather([torch.empty_like(embeddings)], embeddings)
            distributed.all_reduce(gradients)

        n_bytes = 2 * (embeddings.nbytes + gradients.nbytes)
        yield Work(f"{backend}, what a step exchanges", "fp32", exchange, limits.seconds("fp32", 0, n_bytes))
        distributed.destroy_process_group()


def scores(device: torch.device, sizes: Sizes, limits: Limits) -> Iterator[Work]:
    """Yield the scores of a tile of images with all captions, for models that score pairs."""
    rows = slice(0, min(MAX_TILE_IMAGES, sizes.scored))
    for precision in ("fp32", "bf16"):
        for attention, form in scan.FORMS.items():
            images, captions = scan.made(sizes.scored)
            flops = 2 * rows.stop * scan.REGIONS * captions.vectors.numel()
            call = partial(score, PairScores(scan.model_of(form).to(device), images, captions, precision), rows, len(captions))
            name = f"SCAN {attention}, {rows.stop} x {len(captions)}"
            yield Work(name, precision, call, limits.seconds(precision, flops))
        images, captions = todnet.made(sizes.scored)
        products = 2 * sum(2 * n_in * n_out * times for n_in, n_out, times in todnet.products(sizes.width))  # both directions
        flops = products * rows.stop * len(captions)
        call = partial(
            score, PairScores(todnet.model_of(sizes.width).to(device), images, captions, precision), rows, len(captions)
        )
        yield Work(f"TOD-Net, {rows.stop} x {len(captions)}", precision, call, limits.seconds(precision, flops))


def score(pairs: PairScores, rows: slice, n_captions: int) -> None:
    pairs(rows, torch.arange(n_captions))


def extraction(device: torch.device, sizes: Sizes, limits: Limits) -> Iterator[Work]:
    """Yield extractions of photos in files; the limit is the bare network on photos in the device's memory."""
    with tempfile.TemporaryDirectory() as folder:
        items = [ExtractorInput(k, path) for k, path in enumerate(pictures(Path(folder), sizes.photos))]
        network = torchvision.models.get_model(sizes.model).eval().to(device)
        for precision in ("fp32", "bf16"):
            config = CnnConfig(name="x", model=sizes.model, weights="random", precision=precision, batch_size=64, workers=8)
            batch = torch.rand(min(64, sizes.photos), 3, config.crop, config.crop, device=device)

            def bare(precision: str = precision, batch: Tensor = batch) -> None:
                with torch.inference_mode(), autocast(precision, device):
                    network(batch)

            limit_s = timed(bare, device, sizes.rounds) * len(items) / len(batch)
            extractor = CnnExtractor(config, device=str(device))
            yield Work(
                f"extraction, {sizes.model}, {len(items)} photos", precision, partial(extractor.extract, items), limit_s
            )


class Busy:
    """The share of the time in which a device computes, between entering and leaving the context."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.share = device, float("nan")

    def __enter__(self) -> Busy:
        self.started, self.started_cpu = time.perf_counter(), time.process_time()
        if self.device.type == "cuda":
            command = [
                "nvidia-smi",
                f"--id={self.device.index or 0}",
                "--query-gpu=utilization.gpu",
                "--format=csv,noheader,nounits",
            ]
            self.watching = subprocess.Popen([*command, "-lms", "100"], stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.watching.terminate()
            samples = [float(line) for line in self.watching.communicate()[0].split()]
            self.share = statistics.mean(samples) / 100 if samples else float("nan")
        else:
            wall = time.perf_counter() - self.started
            self.share = (time.process_time() - self.started_cpu) / wall / len(os.sched_getaffinity(0))


def measure(work: Work, device: torch.device, rounds: int) -> dict[str, object]:
    """Return a row of the CSV."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with Busy(device) as busy:
        taken = timed(work.call, device, rounds)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else float("nan")
    return {
        "work": work.name,
        "device": describe_device(device),
        "precision": work.precision,
        "s": f"{taken:.4g}",
        "limit_s": f"{work.limit_s:.4g}",
        "times_limit": f"{taken / work.limit_s:.3g}",
        "busy": f"{busy.share:.2f}",
        "gpu_gb": f"{peak / 1e9:.3g}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, whose times mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    arguments = parser.parse_args()
    device, sizes = pick_device(arguments.device), TINY if arguments.tiny else Sizes()
    limits, rows = Limits(device, sizes.side), []
    for works in (ranking, training, scores, extraction):
        for work in works(device, sizes, limits):
            rows.append(measure(work, device, sizes.rounds))
            print(rows[-1], flush=True)
    report("gpu", rows, arguments.out)


if __name__ == "__main__":
    main()
