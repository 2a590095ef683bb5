"""The mixture and the Fisher vectors against loops over single numbers, in double precision."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from tests.features.slow_mixture import as_lists, slow_fisher_vector, slow_step
from vse.features.extractors.mixture import (
    MIN_SPREAD,
    Mixture,
    compute_fisher_vectors,
    compute_posteriors,
    draw_initial_mixture,
    fit_mixture,
    power_normalize,
)
from vse.features.settings.captions import MixtureKind


def samples(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    gauss, laplace = rng.normal(1, 1, (n // 2, dim)), rng.laplace(-1, 2, (n - n // 2, dim))
    return torch.from_numpy(np.concatenate([gauss, laplace]))


def assert_same(found: Mixture, expected: dict) -> None:
    for name, value in as_lists(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "n", "dim", "centres", "steps"),
    [("hybrid", 40, 3, 1, 3), ("hybrid", 60, 4, 3, 5), ("hybrid", 90, 2, 5, 10), ("laplacian", 60, 4, 3, 5)],
)
def test_em_equals_a_loop(kind: MixtureKind, n: int, dim: int, centres: int, steps: int) -> None:
    data = samples(n, dim)
    start = draw_initial_mixture(data, centres, seed=1)
    fixed = {"laplacian": [[True] * dim] * centres} if kind == "laplacian" else {}
    slow = as_lists(start) | fixed
    for _ in range(steps):
        slow = slow_step(data.tolist(), slow) | fixed
    found = fit_mixture(data, start, steps, kind)
    assert_same(found, slow)
    assert steps != 10 or found.laplacian.unique().tolist() == [False, True], "both kinds are compared"


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_em_of_a_gaussian_mixture_is_scikit_learn_s(steps: int) -> None:
    data = samples(200, 4)
    start = draw_initial_mixture(data, 3, seed=1)
    found = fit_mixture(data, start, steps, "gaussian")
    priors, mean, precision = start.priors.numpy(), start.mean.numpy(), 1 / start.variance.numpy()
    initial = {"weights_init": priors, "means_init": mean, "precisions_init": precision}
    plain = GaussianMixture(3, covariance_type="diag", reg_covar=0, tol=0, max_iter=steps, **initial)
    with pytest.warns(ConvergenceWarning):
        plain.fit(data.numpy())
    assert found.variance.min() > MIN_SPREAD, "scikit-learn has no such floor"
    assert not found.laplacian.any()
    for ours, theirs in ((found.priors, plain.weights_), (found.mean, plain.means_), (found.variance, plain.covariances_)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)
    np.testing.assert_allclose(compute_posteriors(data, found), plain.predict_proba(data.numpy()), rtol=0, atol=1e-10)


@given(st.integers(1, 100), st.integers(0, 1000))
def test_the_median_of_equal_weights_is_the_lower_one(n: int, seed: int) -> None:
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 40, (n, 3))).double()  # some of them equal
    found = fit_mixture(data, draw_initial_mixture(data, 1, seed), 1, "laplacian")
    np.testing.assert_array_equal(found.median[0], np.sort(data, axis=0)[(n - 1) // 2])


@pytest.mark.parametrize("kind", ["hybrid", "gaussian", "laplacian"])
@pytest.mark.parametrize("sizes", [[1], [3, 1, 7], [0, 2, 0]])
def test_fisher_vectors_equal_a_loop(sizes: list[int], kind: MixtureKind) -> None:
    table = samples(30, 5)
    mixture = fit_mixture(table, draw_initial_mixture(table, 4, seed=0), 5, kind)
    rng = random.Random(0)
    words = [rng.randrange(30) for _ in range(sum(sizes))]
    found = compute_fisher_vectors(table, torch.tensor(words, dtype=torch.int64), torch.tensor(sizes), mixture)
    start = 0
    for size, row in zip(sizes, found, strict=True):
        mine = [table[word].tolist() for word in words[start : start + size]]
        expected = slow_fisher_vector(mine, as_lists(mixture)) if size else [0.0] * 40
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-10)
        start += size


def test_fisher_vectors_on_a_laplacian_mixture_are_gradients_over_the_root_of_the_fisher_information() -> None:
    data, table = samples(30, 5), samples(7, 5, seed=1)  # not the same: the likelihood has a kink at a median
    mixture = fit_mixture(data, draw_initial_mixture(data, 4, seed=0), 5, "laplacian")
    median, deviation = mixture.median.clone().requires_grad_(), mixture.deviation.clone().requires_grad_()
    likelihood = torch.distributions.Laplace(median, deviation).log_prob(table[:, None]).sum(2)
    (likelihood + mixture.priors.log()).logsumexp(1).sum().backward()
    information = 7 * mixture.priors[:, None] / mixture.deviation**2  # of medians and deviations alike
    by_place, by_deviation = compute_fisher_vectors(table, torch.arange(7), torch.tensor([7]), mixture).view(2, 4, 5)
    torch.testing.assert_close(by_place, median.grad / information.sqrt())
    torch.testing.assert_close(by_deviation, deviation.grad / information.sqrt())


def test_few_words_and_far_samples_stay_finite_and_lengths_are_one() -> None:
    few = samples(4, 3)
    mixture = fit_mixture(few, draw_initial_mixture(few, 6, seed=0), 10)
    assert compute_fisher_vectors(few, torch.arange(4), torch.tensor([1, 3]), mixture).isfinite().all()
    powers = power_normalize(torch.tensor([[4.0, -9.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(powers, torch.tensor([[2.0, -3.0, 0.0], [0.0, 0.0, 0.0]]) / 13**0.5)
    data = torch.cat([samples(20, 4), torch.full((1, 4), 1e6, dtype=torch.float64)])
    found = compute_posteriors(data, draw_initial_mixture(data[:20], 3, seed=0))
    torch.testing.assert_close(found.sum(1), torch.ones(21, dtype=torch.float64))


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = samples(50, 3)
    start = draw_initial_mixture(data, 3, seed=0)
    whole = fit_mixture(data, start, 4)
    for block in ("_BLOCK_SAMPLES", "_MAX_GATHERED_WEIGHTS", "_RUN_LENGTH"):
        monkeypatch.setattr(f"vse.features.extractors.mixture.{block}", 7)
    assert_same(fit_mixture(data, start, 4), as_lists(whole))


@given(st.integers(0, 1000))
def test_single_precision_stays_close_to_double(seed: int) -> None:
    table = samples(40, 6, seed)
    mixture = fit_mixture(table, draw_initial_mixture(table, 3, seed), 3)
    words, lengths = torch.arange(12), torch.tensor([5, 7])
    double = power_normalize(compute_fisher_vectors(table, words, lengths, mixture))
    single = power_normalize(compute_fisher_vectors(table.float(), words, lengths, mixture.to(torch.zeros(0))))
    assert ((double - single).abs() < 1e-3).all()
