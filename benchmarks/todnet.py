"""TOD-Net: scores of all images with all captions in both directions, and a training step, compared with a loop over targets.

Claims: 1,000 images x 5,000 captions of 1,024 numbers, with networks of width 1,024, take minutes on two cores, less than
half of that in bf16, and under 2 GB. Scores take at most 0.75 of the time of the loop. They reach more than 0.9 of the
speed of matrix products of the same shapes; with networks of width 256 more than 0.3, because other operations take more
of the time there.
Limits: the authors published no code, so the loop follows their equations. For each target it runs every vector of the
other side, and the target itself, through each network, together with the target. Both times are extrapolated from the
first blocks; the column ``extrapolated`` has the shares. Each program has a process of its own. Vectors are random unit
vectors, and the networks do not start at the identity. The limit is the time of the matrix products that every pair
needs, at the speed of a block of such products alone; ``of_limit`` is its share of our time. ``ranks_changed`` compares
the ranks in bf16 with those in fp32 among 50 images and 250 captions: the share that differs, and the mean difference.

    python benchmarks/todnet.py
    python benchmarks/todnet.py --width 256
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch
from common import report, seconds
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from vse.training.kinds import InputKind, PackedEmbeddings
from vse.training.losses.base import Batch
from vse.training.losses.hinges import MaxOfHinges
from vse.training.models.build import InputSpec, Model, ModelConfig, build_model
from vse.training.models.deformations import ConditionalFlow
from vse.training.models.similarities.todnet import TodNetSettings, TodNetSimilarity
from vse.training.solvers.encode import MAX_TILE_CAPTIONS, MAX_TILE_IMAGES, PairScores, compute_ranks

DIM, EACH, LAYERS = 1024, 5, 3


def made(n_images: int, near: float = 0.0) -> tuple[PackedEmbeddings, PackedEmbeddings]:
    """Return images and captions; a caption is noise plus ``near`` times its image."""
    generator = torch.Generator().manual_seed(0)
    images, noise = (normalize(torch.randn(n, DIM, generator=generator), dim=1) for n in (n_images, EACH * n_images))
    captions = normalize(near * images.repeat_interleave(EACH, 0) + noise, dim=1)
    return PackedEmbeddings(images), PackedEmbeddings(captions)


def model_of(width: int) -> Model:
    config = ModelConfig.model_validate(
        {
            "image_encoder": "identity",
            "caption_encoder": "identity",
            "similarity": TodNetSettings(width=width, identity=False),
        }
    )
    torch.manual_seed(0)
    return build_model(config, InputSpec(InputKind.VECTORS, DIM, "images"), InputSpec(InputKind.VECTORS, DIM, "captions"))


def flow_of(model: Model) -> ConditionalFlow:
    assert isinstance(model.similarity, TodNetSimilarity)
    (flow,) = model.similarity.maps
    assert isinstance(flow, ConditionalFlow)
    return flow


def loop(flow: ConditionalFlow, targets: Tensor, others: Tensor) -> Tensor:
    """Return the scores of targets (rows) with the other side, target by target, through complete networks."""
    rows = []
    for target in targets:
        both = torch.cat([others, target[None]])
        halves, given = list(both.chunk(2, 1)), target.expand(len(both), -1)
        for number, network in enumerate(flow.networks):
            kept = number % 2
            hidden = torch.cat([halves[kept], given], 1)
            for layer in network.linears[:-1]:
                hidden = layer(hidden).relu()
            s, t = network.linears[-1](hidden).float().chunk(2, 1)
            halves[1 - kept] = halves[1 - kept] * s.exp() + t
        mapped = torch.cat(halves, 1)
        rows.append(cosine_similarity(mapped[:-1], mapped[-1:]))
    return torch.stack(rows)


def evaluation(n_images: int, blocks: int, who: str, width: int, precision: str) -> dict[str, float]:
    """Return the seconds per million pairs in both directions, and the share of the pairs that was scored."""
    images, captions = made(n_images)
    n_rows, n_columns = min(n_images, MAX_TILE_IMAGES), min(len(captions), MAX_TILE_CAPTIONS * blocks)
    model, rows, columns = model_of(width), slice(0, n_rows), torch.arange(n_columns)

    def work() -> None:
        if who == "loop":  # a few targets of each direction, each with all vectors of the other side
            flow = flow_of(model)
            loop(flow, captions.vectors[: 4 * blocks], images.vectors)
            loop(flow, images.vectors[:blocks], captions.vectors)
        else:
            PairScores(model, images, captions, precision)(rows, columns)

    taken = timed(work, precision)
    scored = (4 * blocks * n_images + blocks * len(captions)) / 2 if who == "loop" else n_rows * n_columns
    return {"s_per_million": 1e6 * taken / scored, "share": scored / (n_images * len(captions))}


def products(width: int) -> list[tuple[int, int, int]]:
    """Return the matrix products that every pair needs in a direction: input size, output size, number of products."""
    return [(width, width, LAYERS), (width, DIM, LAYERS), (DIM // 2, width, LAYERS - 1)]


def limit(width: int, precision: str) -> dict[str, float]:
    """Return the seconds of the products of a million pairs in both directions: hidden layers, last layers, kept halves."""
    n, total = 2**11, 0.0
    for n_in, n_out, times in products(width):
        rows, weights = torch.randn(n, n_in), torch.randn(n_in, n_out)
        if precision == "bf16":
            rows, weights = rows.bfloat16(), weights.bfloat16()

        def work(rows: Tensor = rows, weights: Tensor = weights) -> None:
            rows @ weights

        work()
        total += times * min(timed(work, precision) for _ in range(5))
    return {"s_per_million": 2e6 * total / n, "share": 0.0}


def training_step(width: int, batch: int, precision: str) -> dict[str, float]:
    """Return the seconds of a step: scores in both directions, max of hinges, gradients and Adam."""
    model = model_of(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, fused=True)
    objective = MaxOfHinges().build_objective(model.similarity)
    sides = [(normalize(torch.randn(batch, DIM), dim=1),) for _ in range(2)]
    numbers = np.arange(batch)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            cost = objective(Batch(*sides, numbers, numbers), 0)
        optimizer.zero_grad(set_to_none=True)
        cost.value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    return {"s": min(seconds(step) for _ in range(2))}


def changed_ranks(width: int, n_images: int = 50) -> dict[str, float]:
    """Return the share of the ranks that differ between bf16 and fp32, and the mean difference."""
    images, captions = made(n_images, near=0.08)
    image_indices, model = torch.arange(n_images).repeat_interleave(EACH), model_of(width)
    exact, rough = (compute_ranks(model, images, captions, image_indices, precision) for precision in ("fp32", "bf16"))
    differences = np.concatenate([np.abs(exact.i2t - rough.i2t), np.abs(exact.t2i - rough.t2i)])
    return {"share": float((differences > 0).mean()), "mean": float(differences.mean())}


def timed(work: Callable[[], None], precision: str) -> float:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return seconds(work)


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure one program in this process."""
    width, precision = arguments.width, arguments.precision
    if arguments.work == "step":
        found = training_step(width, arguments.batch, precision)
    elif arguments.work == "ranks":
        found = changed_ranks(width)
    elif arguments.who == "limit":
        found = limit(width, precision)
    else:
        found = evaluation(arguments.images, arguments.blocks, arguments.who, width, precision)
    return {**found, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128, help="pairs of a training step")
    parser.add_argument("--blocks", type=int, default=4, help="tiles of 64 x 256 pairs to score")
    parser.add_argument("--work", choices=["scores", "step", "ranks"])
    parser.add_argument("--who", choices=["ours", "loop", "limit"], default="ours")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    if arguments.work:
        print(json.dumps(measure(arguments)))
        return
    size = {name: getattr(arguments, name) for name in ("images", "width", "batch", "blocks")}

    def alone(**options: object) -> dict[str, float]:
        command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in {**size, **options}.items())]
        result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return result

    rows = []
    n_pairs = EACH * arguments.images**2
    for precision in ("fp32", "bf16"):
        best, theirs, ours = (alone(work="scores", who=who, precision=precision) for who in ("limit", "loop", "ours"))
        rows.append(
            {
                "work": f"scores of {arguments.images} x {EACH * arguments.images}",
                "width": arguments.width,
                "precision": precision,
                "ours_s_per_million": f"{ours['s_per_million']:.1f}",
                "loop_s_per_million": f"{theirs['s_per_million']:.1f}",
                "ratio": f"{theirs['s_per_million'] / ours['s_per_million']:.2f}",
                "of_limit": f"{best['s_per_million'] / ours['s_per_million']:.2f}",
                "ours_minutes": f"{ours['s_per_million'] * n_pairs / 6e7:.1f}",
                "ours_gb": f"{ours['peak_gb']:.2f}",
                "loop_gb": f"{theirs['peak_gb']:.2f}",
                "ranks_changed": "",
                "extrapolated": f"ours from {ours['share']:.2%} of the pairs, the loop from {theirs['share']:.2%}",
            }
        )
    found = alone(work="ranks")
    rows[-1]["ranks_changed"] = f"{found['share']:.1%}, by {found['mean']:.3f} on average"
    for precision in ("fp32", "bf16"):
        step = alone(work="step", precision=precision)
        what = f"training step of {arguments.batch} pairs, s"
        own = {"ours_s_per_million": f"{step['s']:.2f}", "ours_gb": f"{step['peak_gb']:.2f}"}
        rows.append({**dict.fromkeys(rows[0], ""), "work": what, "width": arguments.width, "precision": precision, **own})
    report("todnet" if arguments.width == DIM else f"todnet_{arguments.width}", rows)


if __name__ == "__main__":
    main()
