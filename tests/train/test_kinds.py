from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vse.train.kinds import Encoded, Kind, joined, kind_of_rows, padded, select

DIM = 3


def sets(counts: list[int], seed: int = 0, n_padding: int = 0) -> Encoded:
    """Sets of so many vectors each, with zeros as padding."""
    longest = max(counts) + n_padding
    mask = torch.arange(longest) < torch.tensor(counts)[:, None]
    vectors = torch.randn(*mask.shape, DIM, generator=torch.Generator().manual_seed(seed))
    return vectors * mask[:, :, None], mask


def members(encoded: Encoded) -> list[list[list[float]]]:
    """The vectors of each set, without the padding."""
    vectors, mask = encoded
    return [one[inside].tolist() for one, inside in zip(vectors, mask, strict=True)]


@pytest.mark.parametrize(("row_kind", "kind"), [("sets", Kind.SETS), ("crops", Kind.VECTORS), ("vectors", Kind.VECTORS)])
def test_rows_of_a_cache_are_read_as_sets_or_as_vectors(row_kind: str, kind: Kind) -> None:
    assert kind_of_rows(row_kind) == kind


def test_a_kind_reads_as_its_name() -> None:
    assert [f"{kind}" for kind in Kind] == ["vectors", "sets", "words", "tokens"]


def test_rows_of_every_tensor_are_selected() -> None:
    vectors, mask = sets([2, 1, 3])
    for rows in (torch.tensor([2, 0, 2]), slice(1, 3), torch.tensor([], dtype=torch.int64)):
        some_vectors, some_mask = select((vectors, mask), rows)
        assert torch.equal(some_vectors, vectors[rows])
        assert torch.equal(some_mask, mask[rows])
    (alone,) = select((vectors,), slice(0, 1))
    assert torch.equal(alone, vectors[:1])


def test_vectors_are_joined_one_after_the_other() -> None:
    parts = [torch.randn(n, DIM) for n in (2, 0, 3)]
    (whole,) = joined([(part,) for part in parts])
    assert torch.equal(whole, torch.cat(parts))


@given(counts=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_joined_sets_keep_their_vectors_and_are_padded_to_the_longest(counts: list[list[int]]) -> None:
    parts = [sets(part, seed) for seed, part in enumerate(counts)]
    vectors, mask = joined(parts)
    assert members((vectors, mask)) == [one for part in parts for one in members(part)]
    assert mask.shape[1] == vectors.shape[1] == max(map(max, counts))
    assert not vectors[~mask].any()


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=4), n_more=st.integers(0, 3))
def test_padding_adds_zeros_that_do_not_count(counts: list[int], n_more: int) -> None:
    before = sets(counts)
    vectors, mask = padded(before, max(counts) + n_more)
    assert members((vectors, mask)) == members(before)
    assert mask.shape == (len(counts), max(counts) + n_more)
    assert mask.dtype == torch.bool
    assert not vectors[~mask].any()


def test_padding_may_be_cut_off() -> None:
    longer = sets([2, 1], n_padding=3)
    vectors, mask = padded(longer, 2)
    assert vectors.shape == (2, 2, DIM)
    assert members((vectors, mask)) == members(longer)


def test_single_vectors_have_no_padding() -> None:
    vectors = torch.randn(2, DIM)
    (same,) = padded((vectors,), 9)
    assert same is vectors
