"""Several queries at once find exactly what each of them finds alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.eval.search.matrix import VectorMatrix
from vse.eval.search.top_k import search_single_query
from vse.pipeline.errors import UserError


def make_vectors(rng: np.random.Generator, form: str, n: int, dim: int) -> np.ndarray:
    """Vectors of some form; all forms but the first have many equal or almost equal scores."""
    normal = rng.standard_normal((n, dim))
    vectors = {
        "directions": lambda: normal / np.linalg.norm(normal, axis=1, keepdims=True),
        "few integers": lambda: rng.integers(-1, 2, (n, dim)),
        "almost equal": lambda: 1 + 1e-7 * normal,
        "equal": lambda: np.ones((n, dim)),
        "large and small": lambda: normal * 10.0 ** rng.integers(-12, 12, (n, 1)),
        "zeros": lambda: np.zeros((n, dim)),
    }
    return vectors[form]().astype(np.float32)


FORMS = st.sampled_from(["directions", "few integers", "almost equal", "equal", "large and small", "zeros"])


@given(st.integers(0, 10_000), FORMS, st.integers(1, 400), st.integers(1, 40), st.integers(1, 140), st.integers(1, 33))
def test_queries_together_find_bit_for_bit_what_each_finds_alone(
    seed: int, form: str, n: int, n_queries: int, dim: int, largest_k: int
) -> None:
    rng = np.random.default_rng(seed)
    corpus, queries = make_vectors(rng, form, n, dim), make_vectors(rng, form, n_queries, dim)
    ks = rng.integers(1, largest_k + 1, n_queries).tolist()
    together = VectorMatrix(corpus).search(queries, ks)
    for query, k, found in zip(queries, ks, together, strict=True):
        scores, rows = search_single_query(corpus, query[None], k)
        np.testing.assert_array_equal(found.rows, rows)
        np.testing.assert_array_equal(found.scores.view(np.int32), scores.view(np.int32))
        exact = corpus.astype(np.float64) @ query.astype(np.float64)
        np.testing.assert_allclose(scores[0], -np.sort(-exact)[:k], rtol=1e-4, atol=1e-5 * np.abs(exact).max())


@given(st.integers(0, 10_000), st.integers(2, 20))
def test_many_rows_take_several_products(seed: int, n_queries: int) -> None:
    rng = np.random.default_rng(seed)
    corpus, queries = rng.integers(-3, 4, (20_000, 16)).astype(np.float32), make_vectors(rng, "directions", n_queries, 16)
    for query, found in zip(queries, VectorMatrix(corpus).search(queries, [7] * n_queries), strict=True):
        alone = search_single_query(corpus, query[None], 7)
        np.testing.assert_array_equal(found.rows, alone.rows)
        np.testing.assert_array_equal(found.scores, alone.scores)


def test_equal_scores_are_in_the_order_of_rows() -> None:
    corpus = np.ones((500, 16), np.float32)
    corpus[::2] = 2
    for (found,) in (VectorMatrix(corpus).search(np.ones((m, 16), np.float32), [3] * m)[-1:] for m in (1, 9)):
        assert found.rows.tolist() == [[0, 2, 4]]
        assert found.scores.tolist() == [[32, 32, 32]]


def test_a_row_that_is_not_finite_is_named() -> None:
    corpus = np.ones((30, 16), np.float32)
    corpus[21, 3] = np.inf
    with pytest.raises(UserError, match="corpus row 21 is not finite"):
        VectorMatrix(corpus)
