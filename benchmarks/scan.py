"""SCAN: scores of all images with all captions, and a training step, compared with the published loop over captions.

Claims: exact ranks of 5,000 images x 25,000 captions with 36 regions take under 3 GB on a processor. Scores take at most
1/3.5 of the time of the loop, and a training step of batch 128 at most 1/2.
Limits: the published loop is reimplemented here, in tiles of 128 x 128 pairs and in float32; the published evaluation
uses float64, in 17 GB. Its time is extrapolated from the first blocks, and so is ours for 25,000 captions; the column
``extrapolated`` has the shares. Vectors are random unit vectors of 1,024 dimensions, and captions are as long as those of
COCO (8 to 52 words, 13.3 on average). The limit is one product of all regions with all words, without padding;
``of_limit`` is its share of our time. Memory is the peak of a process of its own, with embeddings and libraries.

    python benchmarks/scan.py
    python benchmarks/scan.py --images 5000 --blocks 8
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
from common import precisions, report, seconds
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, relu

from vse.training.experiment import load_experiment
from vse.training.kinds import BatchVectors, InputKind, PackedEmbeddings
from vse.training.losses.base import Batch
from vse.training.losses.hinges import MaxOfHinges
from vse.training.models.build import InputSpec, Model, build_model
from vse.training.models.similarities.base import Similarity
from vse.training.models.similarities.scan import ScanSettings
from vse.training.solvers.encode import MAX_TILE_IMAGES, PairScores

EACH, REGIONS, DIM, TILE, BATCH, N_WORDS = 5, 36, 1024, 128, 128, 8000
MEASURED = {attention: load_experiment(f"scan_{attention}_avg") for attention in ("t2i", "i2t")}
FORMS = {attention: ScanSettings.model_validate(one.model.similarity) for attention, one in MEASURED.items()}


def lengths_like_coco(n: int) -> Tensor:
    """Return the numbers of words of n captions, including <start> and <end>."""
    generator = torch.Generator().manual_seed(1)
    more = torch.distributions.Gamma(torch.tensor(1.3), torch.tensor(0.245))
    torch.manual_seed(int(generator.initial_seed()))
    return (8 + more.sample((n,)).floor().long()).clamp(max=52)


def made(n_images: int) -> tuple[PackedEmbeddings, PackedEmbeddings]:
    """Return images and captions in the form that an evaluation reads."""
    generator = torch.Generator().manual_seed(0)
    lengths = lengths_like_coco(EACH * n_images)
    sides = []
    for counts in (torch.full((n_images,), REGIONS), lengths):
        vectors = torch.empty(int(counts.sum()), DIM)
        for part in vectors.split(2**11):  # avoids a second copy of all vectors
            part.copy_(normalize(torch.randn(part.shape, generator=generator), dim=1))
        sides.append(PackedEmbeddings(vectors, counts))
    return sides[0], sides[1]


def loop(images: BatchVectors, captions: BatchVectors, form: ScanSettings) -> Tensor:
    """Return scores as the published code computes them: caption by caption, with attended vectors."""
    regions, columns = images[0], []
    for words, spoken in zip(*captions, strict=True):
        repeated = words[spoken][None].expand(len(regions), -1, -1)
        queries, context = (repeated, regions) if form.attention == "t2i" else (regions, repeated)
        cosines = relu(torch.bmm(context, queries.transpose(1, 2)))
        cosines = cosines / (cosines.pow(2).sum(2, keepdim=True).sqrt() + 1e-8)
        weights = torch.softmax(cosines.transpose(1, 2).contiguous() * form.sharpness, -1)
        attended = torch.bmm(weights, context)
        columns.append(cosine_similarity(queries, attended, dim=2, eps=1e-8).mean(1))
    return torch.stack(columns, 1)


class Loop(Similarity):
    """The published loop as a similarity."""

    def __init__(self, form: ScanSettings) -> None:
        super().__init__()
        self.form = form

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Tensor:
        return loop(images, captions, self.form)


def model_of(form: ScanSettings) -> Model:
    torch.manual_seed(0)
    return build_model(
        MEASURED[form.attention].model,
        InputSpec(InputKind.SETS, 2048, "regions"),
        InputSpec(InputKind.WORDS, N_WORDS, "captions"),
    )


def evaluation(n_images: int, n_blocks: int | None, who: str, form: ScanSettings, precision: str) -> dict[str, float]:
    """Return the seconds per million pairs, and the share of the pairs that was scored."""
    images, captions = made(n_images)
    n_pairs = n_images * len(captions)
    if who == "published":
        columns = torch.arange(0, min(len(captions), TILE * (n_blocks or 4)))
        rows = images.unpack(torch.arange(min(n_images, TILE)))

        def work() -> None:
            for start in range(0, len(columns), TILE):
                loop(rows, captions.unpack(columns[start : start + TILE]), form)

        scored = len(rows[0]) * len(columns)
    elif who == "limit":
        regions = images.unpack(torch.arange(min(n_images, MAX_TILE_IMAGES)))[0].flatten(0, 1).contiguous()
        words = captions.vectors[:8192].T.contiguous()

        def work() -> None:
            regions @ words

        work()
        taken = min(timed(work, precision) for _ in range(5))
        n_words = captions.vectors.shape[0] / len(captions)
        return {"s_per_million": 1e6 * taken / (len(regions) / REGIONS * 8192 / n_words), "share": 0.0}
    else:
        scores = PairScores(model_of(form), images, captions, precision)
        starts = range(0, n_images, MAX_TILE_IMAGES)[:n_blocks]

        def work() -> None:
            for start in starts:
                scores(slice(start, min(start + MAX_TILE_IMAGES, n_images)), None)

        scored = min(n_images, MAX_TILE_IMAGES * len(starts)) * len(captions)
        return {"s_per_million": 1e6 * seconds(work) / scored, "share": scored / n_pairs}
    return {"s_per_million": 1e6 * timed(work, precision) / scored, "share": scored / n_pairs}


def timed(work: Callable[[], None], precision: str) -> float:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return seconds(work)


def training_step(who: str, form: ScanSettings, precision: str) -> dict[str, float]:
    """Return the seconds of a step: both encoders, scores, max of hinges, gradients and Adam."""
    model = model_of(form)
    if who == "published":
        model.similarity = Loop(form)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, fused=True)
    objective = MaxOfHinges().build_objective(model.similarity)
    lengths = lengths_like_coco(BATCH)
    regions, mask = torch.rand(BATCH, REGIONS, 2048), torch.ones(BATCH, REGIONS, dtype=torch.bool)
    words = torch.randint(N_WORDS, (BATCH, int(lengths.max())))
    numbers = torch.arange(BATCH).numpy()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            images, captions = model.embed_images(regions, mask), model.embed_captions(words, lengths)
            cost = objective(Batch(images, captions, numbers, numbers), 0)
        optimizer.zero_grad(set_to_none=True)
        cost.value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    return {"s": min(seconds(step) for _ in range(3))}


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure one program in this process."""
    form = FORMS[arguments.attention]
    if arguments.work == "step":
        found = training_step(arguments.who, form, arguments.precision)
    else:
        found = evaluation(arguments.images, arguments.blocks, arguments.who, form, arguments.precision)
    return {**found, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--blocks", type=int, help="blocks to score; by default all for ours, four for the loop")
    parser.add_argument("--work", choices=["scores", "step"])
    parser.add_argument("--who", choices=["ours", "published", "limit"])
    parser.add_argument("--attention", choices=list(FORMS))
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    arguments = parser.parse_args()
    if arguments.who:
        print(json.dumps(measure(arguments)))
        return

    def alone(**options: object) -> dict[str, float]:
        command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in options.items() if value is not None)]
        result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return result

    size = {"images": arguments.images, "blocks": arguments.blocks}
    rows = []
    for attention in FORMS:
        for precision in precisions():
            how = {"attention": attention, "precision": precision}
            limit, theirs, ours = (alone(work="scores", who=who, **how, **size) for who in ("limit", "published", "ours"))
            rows.append(
                {
                    "work": f"scores of {arguments.images} x {EACH * arguments.images}",
                    **how,
                    "ours_s": f"{ours['s_per_million']:.2f}",
                    "published_s": f"{theirs['s_per_million']:.2f}",
                    "ratio": f"{theirs['s_per_million'] / ours['s_per_million']:.1f}",
                    "of_limit": f"{limit['s_per_million'] / ours['s_per_million']:.2f}",
                    "ours_gb": f"{ours['peak_gb']:.2f}",
                    "published_gb": f"{theirs['peak_gb']:.2f}",
                    "extrapolated": f"ours from {ours['share']:.1%} of the pairs, published from {theirs['share']:.1%}",
                }
            )
    if arguments.images == 1000:
        for attention in FORMS:
            for precision in precisions():
                how = {"attention": attention, "precision": precision}
                theirs, ours = (alone(work="step", who=who, **how) for who in ("published", "ours"))
                rows.append(
                    {
                        **dict.fromkeys(rows[0], ""),
                        "work": "training step of 128 pairs",
                        **how,
                        "ours_s": f"{ours['s']:.2f}",
                        "published_s": f"{theirs['s']:.2f}",
                        "ratio": f"{theirs['s'] / ours['s']:.1f}",
                        "ours_gb": f"{ours['peak_gb']:.2f}",
                        "published_gb": f"{theirs['peak_gb']:.2f}",
                    }
                )
    report("scan" if arguments.images == 1000 else f"scan_{arguments.images}", rows)


if __name__ == "__main__":
    main()
