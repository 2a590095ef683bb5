"""Tables of methods that are equally good: how often a comparison of all pairs errs.

``python -m tests.eval.ranking.simulated_tables`` prints ``docs/results/compare/simulation.csv``.
"""

from __future__ import annotations

import numpy as np

from vse.eval.ranking.metrics import MeasuredQueries
from vse.eval.ranking.statistics import SeedQueries, compare_all_pairs

N_METHODS, N_IMAGES, N_TABLES = 4, 200, 800
CASES = ((1, 0.0), (3, 0.0), (3, 0.05), (3, 0.1), (5, 0.1), (3, 0.2))  # number of seeds, and their noise


def simulate(rng: np.random.Generator, gains: list[float], n_seeds: int, noise_of_seeds: float) -> list[list[SeedQueries]]:
    """Return the queries of systems. A rank depends on the image, the system with it, the seed, and chance.

    ``gains`` makes a system better. With a ``noise_of_seeds`` of 0.05, R@1 has a standard deviation of 1.7 over seeds.
    """
    hard, systems = rng.standard_normal(N_IMAGES), []
    for gain in gains:
        own = 0.7 * rng.standard_normal(N_IMAGES)
        seeds = []
        for _ in range(n_seeds):
            quality = hard + own + gain + noise_of_seeds * rng.standard_normal() + 0.7 * rng.standard_normal(N_IMAGES)
            fold = {
                name: MeasuredQueries.from_ranks(np.floor(np.exp(height - quality)).astype(int), np.arange(N_IMAGES))
                for name, height in (("i2t", 1.5), ("t2i", 1.8))
            }
            seeds.append([fold])
        systems.append(seeds)
    return systems


def measure(n_seeds: int, noise_of_seeds: float, n_tables: int, samples: int) -> tuple[float, float]:
    """Return the share of intervals that contain the true difference, 0, and the share of tables with a false difference."""
    rng = np.random.default_rng(7)
    covered, n_errors = [], 0
    for seed in range(n_tables):
        family = compare_all_pairs(simulate(rng, [0.0] * N_METHODS, n_seeds, noise_of_seeds), ["rsum"], "holm", samples, seed)
        covered += [pair.interval[0] <= 0 <= pair.interval[1] for pair in family.pairs]
        n_errors += any(pair.is_significant for pair in family.pairs)
    return float(np.mean(covered)), n_errors / n_tables


def deviation_over_seeds(noise_of_seeds: float) -> float:
    """Return the standard deviation of R@1 over seeds."""
    systems = simulate(np.random.default_rng(8), [0.0] * 8, 30, noise_of_seeds)
    recalls = [[seed[0]["i2t"].values_by_metric["r1"].mean() for seed in seeds] for seeds in systems]
    return float(np.mean(np.std(recalls, axis=1, ddof=1)))


if __name__ == "__main__":
    print("seeds,r1_std,coverage,false_tables")
    for n_seeds, noise in CASES:
        coverage, errors = measure(n_seeds, noise, N_TABLES, samples=300)
        print(f"{n_seeds},{deviation_over_seeds(noise):.1f},{100 * coverage:.1f},{100 * errors:.1f}")
