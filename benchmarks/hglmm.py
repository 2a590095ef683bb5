"""HGLMM Fisher vectors: speed compared with a loop and with scikit-learn, and memory for COCO's training captions.

Claims: ten steps of EM of a Gaussian mixture take no more processor time than scikit-learn's GaussianMixture from the
same start, both on one thread. Ten steps for the other mixtures, which scikit-learn does not have, take at most twelve
times as much. EM and Fisher vectors are more than 50 times as fast as a loop over single numbers, the reference of the
tests. Encoding captions includes the projection of their Fisher vectors on the principal components, and takes at most
twice the processor time of this projection alone. Fitting 6,000 principal components of 18,000-d Fisher vectors takes
less than 8 GB. Word vectors and captions are made up, in COCO's numbers: 566,435 captions of 10 words, from 30,000
words. Limit: the covariance is a sum over only ``--captions`` captions, because its memory does not depend on their
number and its time is proportional to it.

    python benchmarks/hglmm.py --captions 20000
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from common import report, seconds
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.features.slow_mixture import as_lists, slow_fisher_vector, slow_step
from vse.features.extractors.hglmm import HglmmEncoder, ProjectedMixture
from vse.features.extractors.mixture import compute_fisher_vectors, draw_initial_mixture, fit_mixture
from vse.features.extractors.words import WordVectors
from vse.features.settings import load_feature_preset
from vse.features.settings.captions import HglmmConfig, MixtureKind

MEASURED = {"hglmm": HglmmConfig.model_validate(load_feature_preset("hglmm").model_dump())}
CONFIG = MEASURED["hglmm"]


def speed(centres: int = CONFIG.centres, dim: int = CONFIG.trained_dim, n: int = 1000) -> list[dict[str, object]]:
    data = torch.randn(n, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = draw_initial_mixture(data, centres, 0)
    lists, mixture = data.tolist(), as_lists(start)
    sizes, words = torch.full((n // 10,), 10), torch.arange(n)
    groups = [lists[k : k + 10] for k in range(0, n, 10)]
    single, small = data.float(), start.to(data.float())
    loops = {
        "EM": seconds(lambda: slow_step(lists, mixture)),
        "FV": seconds(lambda: [slow_fisher_vector(g, mixture) for g in groups]),
    }
    works = {
        "EM, one step, double precision": ("EM", lambda: fit_mixture(data, start, 1)),
        "Fisher vectors, double precision": ("FV", lambda: compute_fisher_vectors(data, words, sizes, start)),
        "Fisher vectors, single precision, as the encoder": (
            "FV",
            lambda: compute_fisher_vectors(single, words, sizes, small),
        ),
    }
    rows: list[dict[str, object]] = []
    for what, (loop, work) in works.items():
        work()
        ours = min(seconds(work) for _ in range(5))
        row = {"what": what, "size": f"{n} words, {centres} centres, {dim} numbers", "threads": torch.get_num_threads()}
        rows.append({**row, "loop_s": round(loops[loop], 2), "ours_s": round(ours, 4), "ratio": round(loops[loop] / ours)})
    return rows


def em(n: int = 5000, rounds: int = 5) -> list[dict[str, object]]:
    """Return the processor seconds of complete fits, which take turns; medians of the rounds."""
    centres, dim, steps = CONFIG.centres, CONFIG.trained_dim, CONFIG.iterations
    data = torch.from_numpy(np.random.default_rng(0).laplace(size=(n, dim)))
    start = draw_initial_mixture(data, centres, 0)
    scikit_learn = GaussianMixture(
        n_components=centres,
        covariance_type="diag",
        reg_covar=0,
        tol=0,
        max_iter=steps,
        weights_init=start.priors.numpy(),
        means_init=start.mean.numpy(),
        precisions_init=1 / start.variance.numpy(),
    )
    works: dict[str, Callable[[], object]] = {"scikit-learn, gaussian": lambda: scikit_learn.fit(data.numpy())}
    for kind in get_args(MixtureKind):
        works[f"ours, {kind}"] = partial(fit_mixture, data, start, steps, kind)
    times: dict[str, list[float]] = {what: [] for what in works}
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)
        for _ in range(1 + rounds):
            for what, work in works.items():
                started = time.process_time()
                work()
                times[what].append(time.process_time() - started)
    medians = {what: statistics.median(of_rounds[1:]) for what, of_rounds in times.items()}
    size = f"{n} words, {centres} centres, {dim} numbers, {steps} steps"
    return [
        {"what": what, "size": size, "cpu_s": round(m, 3), "ratio": round(m / medians["scikit-learn, gaussian"], 2)}
        for what, m in medians.items()
    ]


def make_up_captions(n: int) -> tuple[WordVectors, list[list[str]]]:
    """Return vectors of 30,000 words, and captions of ten words. Most words of a caption are frequent ones."""
    rng = np.random.default_rng(0)
    names = [f"word{k}" for k in range(30_000)]
    words = WordVectors(tuple(names), rng.laplace(size=(30_000, CONFIG.trained_dim)).astype(np.float32))
    frequent = np.minimum(rng.zipf(1.3, size=(n, 10)), 30_000) - 1
    return words, [[names[k] for k in row] for row in frequent]


def encoding(chunks: int = 2, rounds: int = 3) -> list[dict[str, object]]:
    """Return the rate at which captions are encoded, and the rate of the projection on the principal components alone.

    The two programs run in turns, and the first round does not count. The mixture and the principal components are random;
    their values do not change the time.
    """
    words, captions = make_up_captions(chunks * CONFIG.chunk)
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(5000, CONFIG.trained_dim, generator=generator)
    mixture = draw_initial_mixture(samples, CONFIG.centres, 0)
    length = 2 * mixture.mean.numel()
    axes = torch.randn(CONFIG.pca or length, length, generator=generator)
    projected = ProjectedMixture(mixture, torch.zeros(length), axes)
    unmixing = torch.randn(CONFIG.trained_dim, CONFIG.trained_dim, generator=generator)
    encoder = HglmmEncoder(words, unmixing, CONFIG.scale, [projected], CONFIG.normalize, torch.device("cpu"))
    vectors = torch.randn(CONFIG.chunk, length, generator=generator)
    times: dict[str, list[float]] = {"captions": [], "projection": []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(1 + rounds):
        for k in range(0, len(captions), CONFIG.chunk):
            for what, work in (
                ("captions", partial(encoder.encode, captions[k : k + CONFIG.chunk])),
                ("projection", lambda: vectors @ axes.T),
            ):
                started = time.process_time()
                work()
                times[what].append(time.process_time() - started)
    torch.set_num_threads(threads)
    rates = {what: CONFIG.chunk / statistics.median(spent[chunks:]) for what, spent in times.items()}
    size = f"{len(captions):,} captions of 10 words, {length:,} numbers, {len(axes):,} components"
    row = {"preset": CONFIG.name, "size": size, "threads": 1}
    row |= {f"{what}_per_cpu_s": round(rate, 1) for what, rate in rates.items()}
    return [row | {"times_projection": round(rates["projection"] / rates["captions"], 2)}]


def memory(n_captions: int) -> dict[str, object]:
    words, captions = make_up_captions(566_435)
    config = CONFIG.model_copy(update={"ica_iterations": 5, "iterations": 1, "pca_captions": n_captions})
    started = time.perf_counter()
    encoder = HglmmEncoder.fit(words, captions, config, torch.device("cpu"), words.select_words((), 5_000))
    fitted = time.perf_counter() - started
    assert encoder.dim == 6000
    encoding = seconds(lambda: encoder.encode(captions[:2048]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    size = f"566,435 captions, covariance of {n_captions:,}"
    rate = round(2048 / encoding)
    return {"size": size, "fit_s": round(fitted), "peak_gb": round(peak, 2), "encoded_captions_per_s": rate}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=20_000, help="captions of the covariance; 0: measure only the speed")
    arguments = parser.parse_args()
    report("hglmm_em", em())
    report("hglmm_speed", speed())
    report("hglmm_encoding", encoding())
    if arguments.captions:
        report("hglmm_memory", [memory(arguments.captions)])


if __name__ == "__main__":
    main()
