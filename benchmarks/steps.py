"""Training steps in fp32, compared with their matrix products alone: heads with InfoNCE, and SCAN.

Claims: a step of two linear heads with InfoNCE takes at most 1.4 times its matrix products. SCAN takes about twice the
products of all regions with all words; a third to a half of its step are operations on single attention weights.
Limits: inputs are random, and one thread computes. The heads have 1,024 dimensions and a batch of 1,024, SCAN has 64 images
of 36 regions, and captions of 8 to 19 words. Steps and products take turns, and numbers are medians of processor time.
``products`` is the share of the products in the step by torch's profiler. The environment variables of ``avx2.py`` show a
processor without AVX-512.

    python benchmarks/steps.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from common import report
from torch import Tensor, nn
from torch.nn.functional import normalize

from vse.training.losses.base import Batch
from vse.training.losses.contrastive import InfoNceLoss
from vse.training.losses.hinges import MaxOfHinges
from vse.training.models.similarities.scan import ScanSettings
from vse.training.models.similarities.vectors import CosineSettings

DIM, IMAGE_DIM, CAPTION_DIM = 1024, 1280, 384
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
Product = tuple[Tensor, Tensor]


def products(rows: int, read: int, made: int, passes: int) -> list[Product]:
    """Return the factors of a product and its gradients: forward, and one or two backward passes."""
    left, weight, gradient = torch.randn(rows, read), torch.randn(read, made), torch.randn(rows, made)
    return [(left, weight), (gradient.t(), left), (gradient, weight.t())][:passes]


def infonce(batch: int = 1024) -> tuple[Callable[[], None], list[Product]]:
    heads = nn.ModuleList([nn.Linear(IMAGE_DIM, DIM), nn.Linear(CAPTION_DIM, DIM)])
    optimizer = torch.optim.Adam(heads.parameters(), fused=True)
    objective, numbers = InfoNceLoss().build_objective(CosineSettings().build(DIM)), np.arange(batch)
    inputs = torch.randn(batch, IMAGE_DIM), torch.randn(batch, CAPTION_DIM)

    def step() -> None:
        sides = [(normalize(head(one), dim=1),) for head, one in zip(heads, inputs, strict=True)]
        optimizer.zero_grad()
        objective(Batch(*sides, numbers, numbers), 0).value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    shapes = [(batch, IMAGE_DIM, DIM, 2), (batch, CAPTION_DIM, DIM, 2), (batch, DIM, batch, 3)]
    return step, [one for shape in shapes for one in products(*shape)]


def scan(attention: str, batch: int = 64, n_regions: int = 36) -> tuple[Callable[[], None], list[Product]]:
    similarity = ScanSettings.model_validate({"attention": attention}).build(DIM)
    objective, numbers = MaxOfHinges().build_objective(similarity), np.arange(batch)
    lengths = torch.randint(8, 20, (batch,))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    regions, words = (normalize(torch.randn(batch, n, DIM), dim=2).requires_grad_() for n in (n_regions, mask.shape[1]))

    def step() -> None:
        regions.grad = words.grad = None
        batch_of_sets = Batch((regions, torch.ones(batch, n_regions, dtype=torch.bool)), (words, mask), numbers, numbers)
        objective(batch_of_sets, 0).value.backward()  # type: ignore[no-untyped-call]

    return step, products(batch * n_regions, DIM, int(lengths.sum()), 3)


def measure(name: str, step: Callable[[], None], factors: list[Product], rounds: int) -> dict[str, object]:
    def multiply() -> None:
        for left, right in factors:
            left @ right

    times = []
    for _ in range(1 + rounds):
        clock = [time.process_time()]
        for work in (step, multiply):
            work()
            clock.append(time.process_time())
        times.append(np.diff(clock))
    with torch.profiler.profile() as profile:
        step()
    spent = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    return {
        "step": name,
        "step_cpu_s": round(median(one[0] for one in times[1:]), 3),
        "products_cpu_s": round(median(one[1] for one in times[1:]), 3),
        "ratio": round(median(one[0] / one[1] for one in times[1:]), 2),
        "products": f"{sum(spent.get(key, 0) for key in PRODUCTS) / sum(spent.values()):.0%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    works = {"InfoNCE, batch 1024": infonce(), "SCAN t2i, batch 64": scan("t2i"), "SCAN i2t, batch 64": scan("i2t")}
    report("steps", [measure(name, *work, rounds) for name, work in works.items()])


if __name__ == "__main__":
    main()
