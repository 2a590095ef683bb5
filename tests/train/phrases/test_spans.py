"""Flat lists against loops over their rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vse.train.phrases.pairs import KeyedSets, flat_spans, padded_lists, sample_one_per_row, sample_per_row

ROWS = st.lists(st.integers(0, 6), max_size=30)
SEEDS = st.integers(0, 99)


def integers(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int64)


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=8))
def test_flat_spans_count_from_start_to_end(spans: list[tuple[int, int]]) -> None:
    starts, counts = (integers([span[k] for span in spans]) for k in (0, 1))
    expected = [(row, start + k) for row, (start, count) in enumerate(spans) for k in range(count)]
    assert list(zip(*(part.tolist() for part in flat_spans(starts, counts)), strict=True)) == expected


@given(rows=ROWS, seed=SEEDS)
def test_one_of_each_row_is_one_of_its_places(rows: list[int], seed: int) -> None:
    places = sample_one_per_row(integers(rows), 8, np.random.default_rng(seed)).tolist()
    assert len(places) == 8
    for row, place in enumerate(places):
        assert (rows[place] == row) if row in rows else place == -1


def test_each_place_of_a_row_is_as_likely() -> None:
    rng, rows = np.random.default_rng(0), integers([0, 1, 0, 1, 0])
    drawn = Counter(int(sample_one_per_row(rows, 2, rng)[0]) for _ in range(3000))
    assert set(drawn) == {0, 2, 4}
    assert min(drawn.values()) > 900


@given(rows=ROWS, most=st.integers(1, 5), seed=SEEDS)
def test_some_of_each_row_are_no_more_than_asked(rows: list[int], most: int, seed: int) -> None:
    drawn = sample_per_row(integers(rows), most, np.random.default_rng(seed))
    kept = Counter(row for row, keeps in zip(rows, drawn.tolist(), strict=True) if keeps)
    assert kept == {row: min(most, count) for row, count in Counter(rows).items()}
    assert sample_per_row(integers(rows), None, np.random.default_rng(seed)).all()


@given(rows=ROWS)
def test_padded_lists_hold_the_values_of_each_row(rows: list[int]) -> None:
    rows = sorted(rows)
    values = integers(list(range(100, 100 + len(rows))))
    padded, mask = padded_lists(integers(rows), values, 8)
    for row in range(8):
        assert padded[row][mask[row]].tolist() == [v for v, own in zip(values.tolist(), rows, strict=True) if own == row]
    assert (padded[~mask] == 0).all()


@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=30), seed=SEEDS)
def test_sets_know_what_belongs_to_a_key(pairs: list[tuple[int, int]], seed: int) -> None:
    keys, values = (integers([pair[k] for pair in pairs]) for k in (0, 1))
    sets = KeyedSets(keys, values)
    wanted = np.arange(8)
    assert sets.have(keys[:, None], wanted[None]).tolist() == [[(key, v) in pairs for v in range(8)] for key, _ in pairs]
    for (key, value), other in zip(
        pairs, sets.sample_another(keys, values, np.random.default_rng(seed)).tolist(), strict=True
    ):
        others = {v for k, v in pairs if k == key} - {value}
        assert other in others if others else other == -1


def test_another_value_of_a_key_is_any_as_likely() -> None:
    sets, rng = KeyedSets(integers([2, 2, 2, 5]), integers([1, 4, 6, 4])), np.random.default_rng(0)
    drawn = Counter(int(sets.sample_another(integers([2]), integers([4]), rng)[0]) for _ in range(2000))
    assert set(drawn) == {1, 6}
    assert min(drawn.values()) > 900
