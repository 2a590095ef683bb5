from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vse.train.kinds import Encoded, Kind, kind_of_rows, pack, pad_sets, select

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


def test_vectors_are_stored_one_after_the_other() -> None:
    parts = [torch.randn(n, DIM) for n in (2, 0, 3)]
    kept = pack([(part,) for part in parts])
    assert (len(kept), kept.lengths) == (5, None)
    (whole,) = kept.unpack_all()
    assert torch.equal(whole, torch.cat(parts))
    (some,) = kept.unpack(torch.tensor([4, 0]), longest=9)
    assert torch.equal(some, whole[[4, 0]])


@given(
    counts=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    n_more=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_stored_sets_keep_their_vectors_and_are_padded_with_zeros_that_do_not_count(
    counts: list[list[int]], n_more: int, seed: int
) -> None:
    parts = [sets(part, seed, n_padding=k % 3) for k, part in enumerate(counts)]
    kept = pack(parts)
    assert len(kept.vectors) == sum(map(sum, counts))
    expected = [one for part in parts for one in members(part)]
    vectors, mask = kept.unpack_all()
    assert members((vectors, mask)) == expected
    assert mask.shape[1] == vectors.shape[1] == max(map(max, counts))
    assert not vectors[~mask].any()
    rows = torch.randint(len(expected), (3,), generator=torch.Generator().manual_seed(seed))
    longest = max(len(expected[row]) for row in rows.tolist())
    vectors, mask = kept.unpack(rows, longest + n_more)
    assert members((vectors, mask)) == [expected[row] for row in rows.tolist()]
    assert mask.shape == vectors.shape[:2] == (3, longest + n_more)
    assert mask.dtype == torch.bool
    assert not vectors[~mask].any()


def test_members_need_not_come_first() -> None:
    vectors, mask = torch.arange(6.0).view(1, 3, 2), torch.tensor([[True, False, True]])
    assert members(pack([(vectors, mask)]).unpack_all()) == [[[0, 1], [4, 5]]]


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=4), n_more=st.integers(0, 3))
def test_padding_adds_zeros_that_do_not_count(counts: list[int], n_more: int) -> None:
    before = sets(counts)
    vectors, mask = pad_sets(before, max(counts) + n_more)
    assert members((vectors, mask)) == members(before)
    assert mask.shape == (len(counts), max(counts) + n_more)
    assert not vectors[~mask].any()


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=6), data=st.data())
def test_some_of_the_stored_rows_are_stored_as_they_would_be_alone(counts: list[int], data: st.DataObject) -> None:
    rng = torch.Generator().manual_seed(0)
    sets = [(torch.randn(1, count, 3, generator=rng), torch.ones(1, count, dtype=torch.bool)) for count in counts]
    rows = data.draw(st.lists(st.integers(0, len(counts) - 1), min_size=1))
    some = pack(sets).select(torch.tensor(rows))
    alone = pack([sets[row] for row in rows])
    assert torch.equal(some.vectors, alone.vectors)
    assert torch.equal(some.lengths, alone.lengths)
    vectors = pack([(part[0][:, 0],) for part in sets])
    assert torch.equal(vectors.select(torch.tensor(rows)).vectors, vectors.vectors[rows])
