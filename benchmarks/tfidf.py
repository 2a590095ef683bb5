"""TF-IDF vectors of captions: processor time compared with scikit-learn's own transformation.

Claim: for as many captions as Flickr8k has for training, dense float32 vectors take at most 1.5 times the processor time
of ``TfidfVectorizer.transform``, which returns sparse vectors; this is the limit. Rounded to float16, as a cache stores
them, they take at most twice that time. ``dense in double precision`` is an earlier version of the encoder: it computed
dense float64 vectors first, and NumPy rounded them. Captions are made up, of 11 +- 4 words. All variants take turns; the
numbers are medians of the rounds.

    python benchmarks/tfidf.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from common import report

from vse.features.extractors.words import TfidfEncoder
from vse.features.settings import load_feature_preset
from vse.features.settings.captions import TfidfConfig

MEASURED = {"tfidf": TfidfConfig.model_validate(load_feature_preset("tfidf").model_dump())}
CONFIG = MEASURED["tfidf"]
CHUNK = CONFIG.chunk


def make_up(n_captions: int, n_words: int) -> list[list[str]]:
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, n_words + 1) ** 1.1
    lengths = np.clip(rng.gamma(8, 1.4, n_captions).round().astype(int), 3, 40)
    words = iter(rng.choice(n_words, lengths.sum(), p=frequency / frequency.sum()))
    return [[f"word{next(words)}" for _ in range(length)] for length in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=30_000)
    parser.add_argument("--words", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    captions = make_up(arguments.captions, arguments.words)
    encoder = TfidfEncoder.fit(captions, CONFIG)
    sparse = encoder._vectorizer.transform

    def in_double(part: list[list[str]]) -> torch.Tensor:
        return torch.from_numpy(sparse(part).toarray()).float()

    works: dict[str, Callable[[list[list[str]]], object]] = {
        "scikit-learn, sparse (limit)": sparse,
        "dense in double precision, float32": in_double,
        "ours, float32": encoder.encode,
        "dense in double precision, float16 by NumPy": lambda part: in_double(part).numpy().astype(np.float16),
        "ours, float16": lambda part: encoder.encode(part).half(),
    }
    times: dict[str, list[float]] = {what: [] for what in works}
    for _ in range(1 + arguments.rounds):
        for what, work in works.items():
            started = time.process_time()
            for k in range(0, len(captions), CHUNK):
                work(captions[k : k + CHUNK])
            times[what].append(time.process_time() - started)
    medians = {what: statistics.median(of_rounds[1:]) for what, of_rounds in times.items()}
    limit = next(iter(medians.values()))
    size = f"{len(captions):,} captions, {encoder.dim:,} words"
    report(
        "tfidf",
        [
            {
                "preset": CONFIG.name,
                "what": what,
                "size": size,
                "cpu_s": round(median, 3),
                "ratio_to_limit": round(median / limit, 2),
            }
            for what, median in medians.items()
        ],
    )


if __name__ == "__main__":
    main()
