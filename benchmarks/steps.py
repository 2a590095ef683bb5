"""Training steps of presets in fp32, compared with their matrix products: InfoNCE, two-branch networks, and SCAN.

Claims: a step of two linear heads with InfoNCE takes at most 1.4 times its matrix products, and a step of SCAN at most 1.3
times. A step is the encoders, the loss, its gradients, and Adam. Models, losses and batch sizes are those of the presets in
:data:`MEASURED`.
Limits: inputs are random, and one thread computes. SCAN has 36 regions of 2,048 numbers for an image, and captions of 8 to 19
words from a vocabulary of 2,500. The products are as few and as large as possible, as if a recurrent network had no steps.
Steps and products take turns, and numbers are medians of processor time. ``products`` is the share of the products in the
step by torch's profiler. The environment variables of ``common.AVX2`` show a processor without AVX-512.

    python benchmarks/steps.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import numpy as np
import torch
from common import report
from torch import Tensor

from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.kinds import InputKind
from vse.training.losses.base import Batch
from vse.training.models.build import InputSpec, build_model

MEASURED = {
    name: load_experiment(name) for name in ("infonce_minilm_effnet", "twobranch_effnet", "scan_t2i_avg", "scan_i2t_avg")
}
LENGTHS = {"effnet": 1280, "effnet_10c": 1280, "minilm": 384, "hglmm": 6000}  # of the vectors of a feature
N_REGIONS, REGION_DIM, N_WORDS = 36, 2048, 2500
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
Product = tuple[Tensor, Tensor]
Shape = tuple[int, int, int, int]


def list_factors(shapes: Sequence[Shape]) -> list[Product]:
    """Return the factors of the matrix products of a training step, forward and backward.

    A shape has rows, input size, output size, and the number of passes: forward, and one or two backward.
    """
    products: list[Product] = []
    for rows, read, made, passes in shapes:
        left, weight, gradient = torch.randn(rows, read), torch.randn(read, made), torch.randn(rows, made)
        products += [(left, weight), (gradient.t(), left), (gradient, weight.t())][:passes]
    return products


def build_heads(experiment: ExperimentConfig) -> tuple[Callable[[], None], list[Product]]:
    """Return a function that trains two heads for a step, and the factors of its products."""
    batch, model, shapes = experiment.train.batch_size, experiment.model, []
    lengths = [LENGTHS[str(feature)] for feature in (experiment.feature, experiment.caption_feature)]
    for length, encoder in zip(lengths, (model.image_encoder, model.caption_encoder), strict=True):
        widths = [length, *getattr(encoder, "widths", [model.dim])]
        shapes += [(batch, read, made, 2 if k == 0 else 3) for k, (read, made) in enumerate(pairwise(widths))]
    specs = [InputSpec(InputKind.VECTORS, length, "vectors") for length in lengths]
    step = build_step(experiment, specs, [(torch.randn(batch, length),) for length in lengths])
    return step, list_factors([*shapes, (batch, widths[-1], batch, 3)])


def build_scan(experiment: ExperimentConfig) -> tuple[Callable[[], None], list[Product]]:
    """Return a function that trains SCAN for a step, and the factors of its products."""
    batch, model = experiment.train.batch_size, experiment.model
    lengths = torch.randint(8, 20, (batch,))
    words = torch.randint(1, N_WORDS, (batch, int(lengths.max())))
    spoken = words[torch.arange(words.shape[1]) < lengths[:, None]]
    specs = [InputSpec(InputKind.SETS, REGION_DIM, "regions"), InputSpec(InputKind.WORDS, N_WORDS, "captions")]
    regions = torch.rand(batch, N_REGIONS, REGION_DIM), torch.ones(batch, N_REGIONS, dtype=torch.bool)
    step = build_step(experiment, specs, [regions, (words, lengths)])
    of_one_direction = [
        (len(spoken.unique()), model.word_dim, 3 * model.dim, 3),
        (len(spoken), model.dim, 3 * model.dim, 3),
    ]
    n_regions = batch * N_REGIONS
    shapes = [(n_regions, REGION_DIM, model.dim, 2), *2 * of_one_direction, (n_regions, model.dim, len(spoken), 3)]
    return step, list_factors(shapes)


def build_step(
    experiment: ExperimentConfig, specs: Sequence[InputSpec], inputs: Sequence[tuple[Tensor, ...]]
) -> Callable[[], None]:
    model = build_model(experiment.model, *specs)
    scale = experiment.loss.build_scale()
    parameters = [*model.parameters(), *(scale.parameters() if scale is not None else ())]
    optimizer = torch.optim.Adam(parameters, lr=experiment.train.learning_rate, fused=True)
    objective = experiment.loss.build_objective(model.similarity, scale=scale)
    numbers = np.arange(experiment.train.batch_size)

    def step() -> None:
        embeddings = model.embed_images(*inputs[0]), model.embed_captions(*inputs[1])
        cost = objective(Batch(*embeddings, numbers, numbers), 0)
        optimizer.zero_grad(set_to_none=True)
        cost.value.backward()  # type: ignore[no-untyped-call]
        if experiment.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, experiment.train.clip, foreach=True)
        optimizer.step()

    return step


def measure(name: str, rounds: int) -> dict[str, object]:
    experiment = MEASURED[name]
    step, factors = (build_scan if name.startswith("scan") else build_heads)(experiment)

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
        "preset": name,
        "batch": experiment.train.batch_size,
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
    report("steps", [measure(name, rounds) for name in MEASURED])


if __name__ == "__main__":
    main()
