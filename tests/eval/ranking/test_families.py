"""All pairs of systems: corrected p-values, letters, and a simulation of their errors."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control

from tests.eval.ranking.simulated_tables import measure, simulate
from vse.eval.ranking.statistics import assign_letters, compare_all_pairs, correct_p_values

P_VALUES = st.lists(st.floats(0.0001, 1), min_size=1, max_size=8).map(np.array)


@given(P_VALUES)
def test_holm_multiplies_by_the_number_of_tests_that_are_left(p_values: np.ndarray) -> None:
    """One test after the other, from the smallest p-value on."""
    corrected, largest = {}, 0.0
    for place, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, float(p_values[index]) * (len(p_values) - place))
        corrected[index] = min(1.0, largest)
    assert correct_p_values(p_values, "holm").tolist() == pytest.approx([corrected[k] for k in range(len(p_values))])


@given(P_VALUES)
def test_bonferroni_is_the_largest_and_fdr_is_that_of_scipy(p_values: np.ndarray) -> None:
    bonferroni = correct_p_values(p_values, "bonferroni")
    assert bonferroni.tolist() == pytest.approx(np.minimum(1, len(p_values) * p_values).tolist())
    assert (correct_p_values(p_values, "holm") <= bonferroni + 1e-12).all()
    assert correct_p_values(p_values, "fdr").tolist() == pytest.approx(false_discovery_control(p_values).tolist())


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.sampled_from(list(combinations(range(n), 2)))))))
def test_two_systems_share_a_letter_exactly_if_they_cannot_be_told_apart(case: tuple[int, set[tuple[int, int]]]) -> None:
    n, different = case
    differs = np.zeros((n, n), bool)
    for a, b in different:
        differs[a, b] = differs[b, a] = True
    letters = assign_letters(np.arange(n, 0, -1.0), differs)
    for a, b in combinations(range(n), 2):
        assert bool(set(letters[a]) & set(letters[b])) != differs[a, b]
    assert "a" in letters[0], "the best system has the first letter"


def test_letters_of_a_chain() -> None:
    """The first and the third system differ; the second differs from neither."""
    differs = np.zeros((3, 3), bool)
    differs[0, 2] = differs[2, 0] = True
    assert assign_letters(np.array([3.0, 2.0, 1.0]), differs) == ["a", "ab", "b"]
    assert assign_letters(np.array([1.0, 2.0, 3.0]), differs) == ["b", "ab", "a"]


@pytest.mark.nightly
@pytest.mark.parametrize(("n_seeds", "noise_of_seeds"), [(1, 0.0), (3, 0.0), (3, 0.05), (5, 0.1)])
def test_intervals_cover_the_truth_and_false_differences_are_rare(n_seeds: int, noise_of_seeds: float) -> None:
    """Four equal systems: 95% intervals contain 0 in 93 to 97% of all pairs, and Holm errs in about 5% of the tables."""
    n_tables = 800
    coverage, errors = measure(n_seeds, noise_of_seeds, n_tables, samples=150)
    assert 0.93 <= coverage <= 0.975
    assert errors <= 0.05 + 2 * (0.05 * 0.95 / n_tables) ** 0.5, "5%, and what chance adds"


def test_a_large_difference_is_found_and_a_small_one_is_not() -> None:
    systems = simulate(np.random.default_rng(0), [1.0, 0.02, 0.0], 3, 0.02)
    family = compare_all_pairs(systems, ["rsum"])
    assert [pair.is_significant for pair in family.pairs] == [True, True, False]
    first = family.pairs[0]
    assert first.difference > family.smallest_significant_difference > abs(family.pairs[2].difference)
    assert first.interval[0] < first.difference < first.interval[1]
    assert all(pair.p_corrected >= pair.p for pair in family.pairs)
    assert family.values.argmax() == 0


def test_two_equal_systems_have_no_difference() -> None:
    (one,) = simulate(np.random.default_rng(0), [0.0], 1, 0.0)
    (pair,) = compare_all_pairs([one, one], ["i2t", "r1"]).pairs
    assert (pair.difference, pair.p, pair.interval) == (0.0, 1.0, (0.0, 0.0))
