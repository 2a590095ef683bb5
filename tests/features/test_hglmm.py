"""The mixture and the Fisher vectors against loops over single numbers, in double precision."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vse.features.hglmm import (
    FLOOR,
    Mixture,
    contributions,
    first_mixture,
    fisher_vectors,
    fit_mixture,
    posteriors,
    power_normalized,
)


def samples(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Two clouds, one of them with heavy tails."""
    chance = np.random.default_rng(seed)
    gauss, laplace = chance.normal(1, 1, (n // 2, dim)), chance.laplace(-1, 2, (n - n // 2, dim))
    return torch.from_numpy(np.concatenate([gauss, laplace]))


def slow_posterior(x: list[float], m: dict) -> list[float]:
    logs = []
    for k in range(len(m["priors"])):
        total = math.log(m["priors"][k])
        for d, value in enumerate(x):
            if m["laplacian"][k][d]:
                total += -math.log(2 * m["deviation"][k][d]) - abs(value - m["median"][k][d]) / m["deviation"][k][d]
            else:
                variance = m["variance"][k][d]
                total += -0.5 * math.log(2 * math.pi * variance) - (value - m["mean"][k][d]) ** 2 / (2 * variance)
        logs.append(total)
    top = max(logs)
    parts = [math.exp(value - top) for value in logs]
    return [part / sum(parts) for part in parts]


def slow_step(data: list[list[float]], m: dict) -> dict:
    n, dim, n_clusters = len(data), len(data[0]), len(m["priors"])
    gamma = [slow_posterior(x, m) for x in data]
    new = {key: [[0.0] * dim for _ in range(n_clusters)] for key in ("median", "deviation", "mean", "variance", "laplacian")}
    new["priors"] = [0.0] * n_clusters
    for k in range(n_clusters):
        weight = sum(gamma[i][k] for i in range(n))
        new["priors"][k] = weight / n
        for d in range(dim):
            order = sorted(range(n), key=lambda i: data[i][d])
            reached = 0.0
            for i in order:
                reached += gamma[i][k]
                if reached >= weight / 2:
                    break
            median = data[i][d]
            absolute = sum(gamma[i][k] * abs(data[i][d] - median) for i in range(n)) / weight
            mean = sum(gamma[i][k] * data[i][d] for i in range(n)) / weight
            squared = sum(gamma[i][k] * (data[i][d] - mean) ** 2 for i in range(n)) / weight
            s, v = max(absolute, FLOOR), max(squared, FLOOR)
            laplace = sum(gamma[i][k] * (-math.log(2 * s) - abs(data[i][d] - median) / s) for i in range(n))
            gauss = sum(
                gamma[i][k] * (-0.5 * math.log(2 * math.pi * v) - (data[i][d] - mean) ** 2 / (2 * v)) for i in range(n)
            )
            new["median"][k][d], new["deviation"][k][d] = median, s
            new["mean"][k][d], new["variance"][k][d] = mean, v
            new["laplacian"][k][d] = laplace > gauss
    return new


def slow_fisher_vector(words: list[list[float]], m: dict) -> list[float]:
    """First all derivatives by the places, cluster by cluster, then all by the deviations."""
    n_clusters, dim = len(m["priors"]), len(m["median"][0])
    place = [[0.0] * dim for _ in range(n_clusters)]
    spread = [[0.0] * dim for _ in range(n_clusters)]
    for x in words:
        gamma = slow_posterior(x, m)
        for k in range(n_clusters):
            for d in range(dim):
                root = math.sqrt(len(words) * m["priors"][k])
                if m["laplacian"][k][d]:
                    off = x[d] - m["median"][k][d]
                    place[k][d] += gamma[k] * (1 if off >= 0 else -1) / root
                    spread[k][d] += gamma[k] * (abs(off) / m["deviation"][k][d] - 1) / root
                else:
                    off = (x[d] - m["mean"][k][d]) / math.sqrt(m["variance"][k][d])
                    place[k][d] += gamma[k] * off / root
                    spread[k][d] += gamma[k] * (off**2 - 1) / (root * math.sqrt(2))
    return [value for part in (place, spread) for row in part for value in row]


def as_lists(mixture: Mixture) -> dict:
    names = ("priors", "median", "deviation", "mean", "variance", "laplacian")
    return {name: getattr(mixture, name).tolist() for name in names}


def assert_same(found: Mixture, expected: dict) -> None:
    for name, value in as_lists(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(("n", "dim", "centres", "steps"), [(40, 3, 1, 3), (60, 4, 3, 5), (90, 2, 5, 10)])
def test_em_equals_a_loop(n: int, dim: int, centres: int, steps: int) -> None:
    data = samples(n, dim)
    start = first_mixture(data, centres, seed=1)
    slow = as_lists(start)
    for _ in range(steps):
        slow = slow_step(data.tolist(), slow)
    found = fit_mixture(data, start, steps)
    assert_same(found, slow)
    if steps == 10:
        assert found.laplacian.any()
        assert not found.laplacian.all(), "both kinds of dimension occur in what is compared"


@pytest.mark.parametrize("sizes", [[1], [3, 1, 7], [0, 2, 0]])
def test_fisher_vectors_equal_a_loop(sizes: list[int]) -> None:
    table = samples(30, 5)
    mixture = fit_mixture(table, first_mixture(table, 4, seed=0), 5)
    chance = random.Random(0)
    words = [chance.randrange(30) for _ in range(sum(sizes))]
    found = fisher_vectors(table, torch.tensor(words, dtype=torch.int64), torch.tensor(sizes), mixture)
    start = 0
    for size, row in zip(sizes, found, strict=True):
        mine = [table[word].tolist() for word in words[start : start + size]]
        expected = slow_fisher_vector(mine, as_lists(mixture)) if size else [0.0] * 40
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-10)
        start += size


def test_thirty_centres_over_300_numbers_give_18000_places_first() -> None:
    table = samples(64, 300)
    mixture = first_mixture(table, 30, seed=0)
    found = fisher_vectors(table, torch.arange(8), torch.tensor([8]), mixture)
    assert found.shape == (1, 2 * 30 * 300)
    expected = slow_fisher_vector(table[:8].tolist(), as_lists(mixture))
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-10)


def test_posteriors_sum_to_one_and_a_far_sample_still_has_them() -> None:
    data = torch.cat([samples(20, 4), torch.full((1, 4), 1e6, dtype=torch.float64)])
    found = posteriors(data, first_mixture(data[:20], 3, seed=0))
    torch.testing.assert_close(found.sum(1), torch.ones(21, dtype=torch.float64))


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = samples(50, 3)
    start = first_mixture(data, 3, seed=0)
    whole = fit_mixture(data, start, 4)
    monkeypatch.setattr("vse.features.hglmm._BLOCK", 7)
    assert_same(fit_mixture(data, start, 4), as_lists(whole))


def test_more_centres_than_words_stay_finite() -> None:
    data = samples(4, 3)
    mixture = fit_mixture(data, first_mixture(data, 6, seed=0), 10)
    assert contributions(data, mixture).isfinite().all()


@settings(max_examples=30)
@given(st.integers(0, 1000))
def test_single_precision_stays_close_to_double(seed: int) -> None:
    table = samples(40, 6, seed)
    mixture = fit_mixture(table, first_mixture(table, 3, seed), 3)
    words, lengths = torch.arange(12), torch.tensor([5, 7])
    double = power_normalized(fisher_vectors(table, words, lengths, mixture))
    single = power_normalized(fisher_vectors(table.float(), words, lengths, mixture.to(torch.zeros(0))))
    assert ((double - single).abs() < 1e-3).all()


def test_power_and_length() -> None:
    found = power_normalized(torch.tensor([[4.0, -9.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[2.0, -3.0, 0.0], [0.0, 0.0, 0.0]]) / 13**0.5)
