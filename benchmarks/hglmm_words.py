"""Memory to fit independent components and a mixture to 300,000 words of 300 numbers, as the published encoder does.

Claim: less than 8 GB, including the word vectors. The vectors are made up. The fit has 3 iterations of FastICA and one
step of EM, because more iterations take the same memory and more time.

    python benchmarks/hglmm_words.py
"""

from __future__ import annotations

import resource

import numpy as np
import torch
from common import report, seconds

from vse.features.extractors.hglmm import HglmmEncoder
from vse.features.extractors.words import WordVectors
from vse.features.settings.captions import HglmmConfig

WORDS, DIM = 300_000, 300


def main() -> None:
    words = WordVectors(
        tuple(f"word{k}" for k in range(WORDS)), np.random.default_rng(0).laplace(size=(WORDS, DIM)).astype(np.float32)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    config = HglmmConfig(name="hglmm", ica_iterations=3, iterations=1, pca=None)
    took = seconds(lambda: HglmmEncoder.fit(words, [], config, torch.device("cpu"), words))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    row = {"words": WORDS, "numbers": DIM, "ica_iterations": 3, "em_steps": 1, "seconds": round(took)}
    report("hglmm_words", [{**row, "before_gb": round(before, 2), "peak_gb": round(peak, 2)}])


if __name__ == "__main__":
    main()
