from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vse.eval.ranking.ranks import column_counts, row_counts


@given(st.integers(0, 9), st.integers(0, 70), st.integers(0, 2**16), st.booleans())
def test_counts_by_bytes_are_sums(n_rows: int, n_columns: int, seed: int, transposed: bool) -> None:
    mask = torch.rand(n_rows, n_columns, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask = mask.T if transposed else mask
    assert torch.equal(row_counts(mask), mask.sum(1))
    assert torch.equal(column_counts(mask), mask.sum(0))


@pytest.mark.parametrize("n", [255, 256, 2040, 2041, 5000])
def test_no_byte_overflows(n: int) -> None:
    assert row_counts(torch.ones(3, n, dtype=torch.bool)).tolist() == [n] * 3
    assert column_counts(torch.ones(n, 3, dtype=torch.bool)).tolist() == [n] * 3
