"""Training steps of presets in fp32, compared with their matrix products: InfoNCE, two-branch networks, SCAN, and phrases.

Claims: a step of two linear heads with InfoNCE takes at most 1.4 times its matrix products, and a step of SCAN at most
1.4 times. A step is the encoders, the loss, its gradients, and Adam. A step for phrases also samples the regions and
phrases that are compared. Models, losses and batch sizes are those of the presets in :data:`MEASURED`.
Limits: inputs are random, and one thread computes. SCAN has 36 regions of 2,048 numbers for an image, and captions of 8
to 19 words from a vocabulary of 2,500. For phrases, an image has 36 random boxes and 10 phrases. The matrix products of
the limit are as few and as large as possible: a recurrent network has one product for all words. Steps and products
take turns, and numbers are medians of processor time. ``products`` is the share of the products in the step by torch's
profiler. The environment variables of ``common.AVX2`` show a processor without AVX-512.

    python benchmarks/steps.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import cast

import numpy as np
import torch
from common import report
from numpy.typing import NDArray
from torch import Tensor

from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.kinds import InputKind
from vse.training.losses.base import Batch, PairLoss
from vse.training.losses.ranking import RankingLoss
from vse.training.models.build import InputSpec, build_model
from vse.training.phrases.arrays import PhraseArrays, RegionFeatures
from vse.training.phrases.batches import (
    PairSampler,
    TripletBatch,
    TripletSampler,
    compute_pair_cost,
    compute_triplet_cost,
)
from vse.training.phrases.solvers import PhraseGradientSettings

PRESETS = ("infonce_minilm_effnet", "twobranch_effnet", "scan_t2i_avg", "scan_i2t_avg", "phrase_embedding_effnet")
MEASURED = {name: load_experiment(name) for name in (*PRESETS, "phrase_network_effnet")}
LENGTHS = {  # of the vectors of a feature
    "effnet": 1280,
    "effnet_10c": 1280,
    "boxes_effnet_levels": 432,
    "minilm": 384,
    "minilm_phrases": 384,
    "hglmm": 6000,
}
N_REGIONS, REGION_DIM, N_WORDS = 36, 2048, 2500
N_IMAGES, N_PHRASES = 500, 10  # images with phrases, and phrases of an image
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
Product = tuple[Tensor, Tensor]
Shape = tuple[int, int, int, int]


class MadeUpRegions:
    """Boxes of images that all have the same number of boxes, with the attributes that samplers read."""

    def __init__(self, boxes: NDArray[np.float32], n_images: int) -> None:
        each = len(boxes) // n_images
        self.boxes, self.region_starts, self.region_counts = boxes, np.arange(n_images) * each, np.full(n_images, each)


def list_factors(shapes: Sequence[Shape]) -> list[Product]:
    """Return the factors of the matrix products of a training step, forward and backward.

    A shape has rows, input size, output size, and the number of passes: forward, and one or two backward.
    """
    products: list[Product] = []
    for rows, read, made, passes in shapes:
        left, weight, gradient = torch.randn(rows, read), torch.randn(read, made), torch.randn(rows, made)
        products += [(left, weight), (gradient.t(), left), (gradient, weight.t())][:passes]
    return products


def list_layers(rows: int, widths: Sequence[int]) -> list[Shape]:
    """Return the shapes of the products of linear layers; the input of the first layer needs no gradient."""
    return [(rows, read, made, 2 if k == 0 else 3) for k, (read, made) in enumerate(pairwise(widths))]


def build_heads(experiment: ExperimentConfig) -> tuple[Callable[[], None], list[Product]]:
    """Return a function that trains two heads for a step, and the factors of its products."""
    batch, model, shapes = experiment.train.batch_size, experiment.model, []
    lengths = [LENGTHS[str(feature)] for feature in (experiment.feature, experiment.caption_feature)]
    for length, encoder in zip(lengths, (model.image_encoder, model.caption_encoder), strict=True):
        widths = [length, *getattr(encoder, "widths", [model.dim])]
        shapes += list_layers(batch, widths)
    specs = [InputSpec(InputKind.VECTORS, length, "vectors") for length in lengths]
    step = build_pairs(experiment, specs, [(torch.randn(batch, length),) for length in lengths])
    return step, list_factors([*shapes, (batch, widths[-1], batch, 3)])


def build_pairs(
    experiment: ExperimentConfig, specs: Sequence[InputSpec], inputs: Sequence[tuple[Tensor, ...]]
) -> Callable[[], None]:
    """Return a function that trains a model of images and captions for a step."""
    model = build_model(experiment.model, *specs)
    scale = experiment.loss.build_scale()
    objective = experiment.loss.build_objective(model.similarity, scale=scale)
    numbers = np.arange(experiment.train.batch_size)

    def compute_cost() -> Tensor:
        embeddings = model.embed_images(*inputs[0]), model.embed_captions(*inputs[1])
        return objective(Batch(*embeddings, numbers, numbers), 0).value

    return build_step(experiment, [*model.parameters(), *(scale.parameters() if scale is not None else ())], compute_cost)


def build_scan(experiment: ExperimentConfig) -> tuple[Callable[[], None], list[Product]]:
    """Return a function that trains SCAN for a step, and the factors of its products."""
    batch, model = experiment.train.batch_size, experiment.model
    lengths = torch.randint(8, 20, (batch,))
    words = torch.randint(1, N_WORDS, (batch, int(lengths.max())))
    spoken = words[torch.arange(words.shape[1]) < lengths[:, None]]
    specs = [InputSpec(InputKind.SETS, REGION_DIM, "regions"), InputSpec(InputKind.WORDS, N_WORDS, "captions")]
    regions = torch.rand(batch, N_REGIONS, REGION_DIM), torch.ones(batch, N_REGIONS, dtype=torch.bool)
    step = build_pairs(experiment, specs, [regions, (words, lengths)])
    of_one_direction = [
        (len(spoken.unique()), model.word_dim, 3 * model.dim, 3),
        (len(spoken), model.dim, 3 * model.dim, 3),
    ]
    n_regions = batch * N_REGIONS
    shapes = [(n_regions, REGION_DIM, model.dim, 2), *2 * of_one_direction, (n_regions, model.dim, len(spoken), 3)]
    return step, list_factors(shapes)


def make_up_phrases() -> tuple[PhraseArrays, NDArray[np.float32]]:
    """Return the phrases of some images, and the candidate boxes of these images.

    The boxes of an image's phrases are its first candidate boxes, moved by 5 pixels.
    """
    rng = np.random.default_rng(0)
    corners, sizes = rng.uniform(0, 300, (N_IMAGES, N_REGIONS, 2)), rng.uniform(50, 200, (N_IMAGES, N_REGIONS, 2))
    boxes = np.concatenate([corners, corners + sizes], 2).astype(np.float32)
    numbers = np.arange(N_IMAGES * N_PHRASES)
    phrases = PhraseArrays(
        image_ids=np.arange(N_IMAGES),
        phrase_ids=numbers,
        caption_ids=numbers,
        image_indices=numbers // N_PHRASES,
        text_indices=numbers,
        chain_indices=numbers,
        truth_boxes=boxes[:, :N_PHRASES].reshape(-1, 4) + np.float32(5),
        phrase_types=["other"] * len(numbers),
        n_phrase_texts=len(numbers),
    )
    return phrases, boxes.reshape(-1, 4)


def build_phrases(experiment: ExperimentConfig) -> tuple[Callable[[], None], list[Product]]:
    """Return a function that trains a model of phrases for a step, and the factors of its products."""
    settings, config, loss = experiment.solver, experiment.model, experiment.loss
    assert isinstance(settings, PhraseGradientSettings)
    lengths = [LENGTHS[str(feature)] for feature in (experiment.feature, experiment.caption_feature)]
    phrases, boxes = make_up_phrases()
    regions = torch.rand(len(boxes) + len(phrases), lengths[0])  # candidates, and the ground truth of each phrase
    texts = torch.rand(len(phrases), lengths[1])
    candidates = cast(RegionFeatures, MadeUpRegions(boxes, N_IMAGES))
    truths = len(boxes) + np.arange(len(phrases))
    sampler = (TripletSampler if loss.is_ranking else PairSampler)(phrases, candidates, truths, settings)
    batch = np.random.default_rng(1).choice(len(phrases), experiment.train.batch_size, replace=False)
    model = build_model(config, *(InputSpec(InputKind.VECTORS, length, "vectors") for length in lengths))

    def compute_cost() -> Tensor:
        samples = sampler.sample(batch, np.random.default_rng(2))
        embedded = model.embed_images(regions[samples.region_indices])[0], model.embed_captions(texts[samples.text_indices])[0]
        if isinstance(samples, TripletBatch):
            return compute_triplet_cost(samples, *embedded, model.similarity, cast(RankingLoss, loss)).value
        return compute_pair_cost(samples, *embedded, model.similarity, cast(PairLoss, loss)).value

    samples, shapes = sampler.sample(batch, np.random.default_rng(2)), []
    rows = len(samples.region_indices), len(samples.text_indices)
    for n, length, encoder in zip(rows, lengths, (config.image_encoder, config.caption_encoder), strict=True):
        widths = [length, *getattr(encoder, "widths", ())]
        shapes += list_layers(n, widths)
    if isinstance(samples, TripletBatch):
        shapes.append((rows[0], widths[-1], rows[1], 3))
    else:
        shapes += [
            (len(samples.labels), *layer, 3) for layer in pairwise([widths[-1], *getattr(config.similarity, "widths", ()), 1])
        ]
    return build_step(experiment, model.parameters(), compute_cost), list_factors(shapes)


def build_step(
    experiment: ExperimentConfig, parameters: Iterable[Tensor], compute_cost: Callable[[], Tensor]
) -> Callable[[], None]:
    """Return a function that computes the loss and its gradients, and updates the parameters by Adam."""
    parameters = list(parameters)
    optimizer = torch.optim.Adam(parameters, lr=experiment.train.learning_rate, fused=True)

    def step() -> None:
        cost = compute_cost()
        optimizer.zero_grad(set_to_none=True)
        cost.backward()  # type: ignore[no-untyped-call]
        if experiment.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, experiment.train.clip, foreach=True)
        optimizer.step()

    return step


def measure(name: str, rounds: int) -> dict[str, object]:
    experiment = MEASURED[name]
    build = {"scan": build_scan, "phrase": build_phrases}.get(name.partition("_")[0], build_heads)
    step, factors = build(experiment)

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
