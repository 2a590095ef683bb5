from __future__ import annotations

import pytest

from vse.features.extractors.images import read_ahead


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ahead", [1, 4, 100])
def test_read_ahead_keeps_the_order(workers: int, ahead: int) -> None:
    assert list(read_ahead(range(40), lambda k: k * k, workers, ahead)) == [k * k for k in range(40)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_an_item_is_raised_in_its_turn(workers: int) -> None:
    results = read_ahead([4, 2, 0, 1], lambda k: 8 // k, workers, ahead=3)
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(ZeroDivisionError):
        next(results)
