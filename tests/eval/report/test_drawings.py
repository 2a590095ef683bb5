"""Drawings of attention: opacities in proportion to weights, and regions as their boxes."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from tests.drawn import shares
from vse.eval.report.drawings import draw_attention
from vse.eval.search.top_k import Attention

BOXES = np.asarray([[0, 0, 10, 20], [5.04, 5, 30, 20], [0, 10, 30, 20]], float)


def attention(side: Literal["t2i", "i2t"], *words: str, seed: int = 0) -> Attention:
    weights = np.random.default_rng(seed).random((3, len(words))) ** 3
    weights /= weights.sum(0 if side == "t2i" else 1, keepdims=True)
    return Attention(side, words, (30, 20), BOXES, weights, 0.5)


@pytest.mark.parametrize("side", ["t2i", "i2t"])
def test_opacities_are_in_proportion_to_weights_and_the_highest_comes_last(side: Literal["t2i", "i2t"]) -> None:
    seen = attention(side, "<start>", "a", "dog", "<end>")
    drawing = draw_attention("one", [seen])
    expected = shares(seen.weights, side)
    for column, word in enumerate(drawing.words):
        opacities = {region: float(opacity) for region, opacity in word.shades}
        for region in range(3):
            share = expected[region, column]
            assert opacities.get(region, 0) / 0.65 == pytest.approx(share if share >= 0.02 else 0, abs=1e-3)
        assert list(opacities.values()) == sorted(opacities.values())
        assert word.highest == f"{100 * seen.weights[:, column].max():.0f}%"
    assert [word.quiet for word in drawing.words] == [True, False, False, True]
    assert drawing.regions == [(0, 0, 10, 20), (5, 5, 25, 15), (0, 10, 30, 10)]
    more = attention(side, "two", "dogs", seed=1)
    both = draw_attention("both", [seen, more])
    assert [[word.number for word in words] for words in both.captions] == [[0, 1, 2, 3], [4, 5]]
    assert [word.shades for word in both.captions[1]] == [word.shades for word in draw_attention("it", [more]).words]


def test_a_word_that_no_region_attends_to_has_no_shades() -> None:
    seen = Attention("i2t", ("a", "dog"), (30, 20), BOXES, np.asarray([[1.0, 0], [1, 0], [1, 0]]), 0.5)
    assert [len(word.shades) for word in draw_attention("one", [seen]).words] == [3, 0]
    nothing = Attention("t2i", ("a",), (30, 20), BOXES, np.zeros((3, 1)), 0.5)
    assert not draw_attention("one", [nothing]).words[0].shades
