"""Hubs: their statistics, and corrections, against slow code and cases that are made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import skew

from vse.eval.ranking import hubness
from vse.eval.ranking.hubness import (
    InnerProducts,
    compute_biases,
    diagnose_hubs,
    mark_corrected_queries,
    mean_cosine,
    measure_hubs,
)
from vse.eval.ranking.ranks import blocks_from_embeddings


def vectors(seed: int, n: int, dim: int = 5) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@given(st.integers(0, 2**32 - 1), st.integers(12, 30), st.integers(12, 40))
def test_hubs_are_those_of_sorted_lists(seed: int, n_images: int, n_captions: int) -> None:
    images, captions = vectors(seed, n_images), vectors(seed + 1, n_captions)
    of = torch.arange(n_captions) % n_images
    found = measure_hubs(blocks_from_embeddings(torch.from_numpy(images), torch.from_numpy(captions), of), None)
    for direction, scores in (("i2t", images @ captions.T), ("t2i", captions @ images.T)):
        order = np.argsort(-scores, axis=1)
        occurrences = np.bincount(order[:, :10].ravel(), minlength=scores.shape[1])
        firsts = np.bincount(order[:, 0], minlength=scores.shape[1])
        assert found[direction]["skewness"] == pytest.approx(skew(occurrences) if occurrences.std() else 0.0, abs=1e-6)
        assert found[direction]["never"] == pytest.approx(100 * np.mean(occurrences == 0))
        assert found[direction]["largest"] == pytest.approx(100 * firsts.max() / len(scores))


@pytest.mark.parametrize("repeats", [1, 100_000], ids=["one block of rows", "many blocks of rows"])
def test_the_mean_cosine_is_that_of_all_pairs(repeats: int) -> None:
    rows = np.tile(vectors(0, 20) * np.arange(1, 21)[:, None].astype(np.float32), repeats)
    units = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    pairs = [units[a] @ units[b] for a in range(20) for b in range(20) if a != b]
    assert mean_cosine(rows) == pytest.approx(np.mean(pairs), abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 40))
def test_biases_are_those_of_their_definitions(seed: int, n: int, n_bank: int) -> None:
    candidates, bank = vectors(seed, n), vectors(seed + 1, n_bank)
    scores = candidates.astype(np.float64) @ bank.T
    nearest = np.sort(scores, axis=1)[:, ::-1][:, :3].mean(1)
    expected = {
        ("mean", ()): scores.mean(1),
        ("csls", (("k", 3.0),)): nearest / 2,
        ("nnn", (("k", 3.0), ("alpha", 0.75))): 0.75 * nearest,
        ("inverted-softmax", (("beta", 20.0),)): np.log(np.exp(20 * scores).sum(1)) / 20,
    }
    for (method, parameters), biases in expected.items():
        for of_bank in (InnerProducts(candidates, bank), candidates @ bank.T):
            assert compute_biases(of_bank, method, dict(parameters)) == pytest.approx(biases, abs=1e-5), method


def test_a_query_is_activated_by_a_candidate_that_is_first_for_the_bank() -> None:
    bank = np.array([[1.0, 0.9], [0.2, 0.1], [0.0, 0.3]], np.float32)  # a row for each candidate
    queries = np.array([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.5, 1.0]], np.float32)
    assert mark_corrected_queries(bank, queries).tolist() == [1, 0, 0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 9), st.integers(1, 30))
def test_activated_queries_are_those_of_a_loop(seed: int, n: int, n_bank: int, block: int) -> None:
    bank, queries = np.random.default_rng(seed).random((n, n_bank)), np.random.default_rng(seed + 1).random((n, 7))
    activated = {int(column.argmax()) for column in bank.T}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hubness, "_MAX_BLOCK_SCORES", block)
        found = mark_corrected_queries(bank.astype(np.float32), queries.astype(np.float32))
    assert found.tolist() == [int(column.argmax()) in activated for column in queries.astype(np.float32).T]


def test_a_hub_a_narrow_cone_and_chance_are_named() -> None:
    calm = {"largest": 2.0}
    recalls, chance = {"i2t": 50.0, "t2i": 40.0}, {"i2t": 1.0, "t2i": 1.0}
    spread = {"images": 0.1, "captions": 0.2}
    assert list(diagnose_hubs({"i2t": calm, "t2i": calm}, spread, recalls, chance)) == []
    (sentence,) = diagnose_hubs({"i2t": calm, "t2i": {"largest": 99.8}}, {"images": 0.1, "captions": 0.9987}, recalls, chance)
    assert "t2i: one candidate is the first one for 99.8% of the queries" in sentence
    assert "all captions point into nearly the same direction (mean cosine 0.9987)" in sentence
    assert "--correct mean" in sentence
    (sentence,) = diagnose_hubs({"i2t": calm, "t2i": calm}, spread, {**recalls, "t2i": 1.2}, chance)
    assert "t2i: R@10 1.2 is about chance, 1.0" in sentence
    assert "collapsed" in sentence
