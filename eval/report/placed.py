"""Phrases on a photo: each in a colour, with the boxes where a model and the annotators see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PHRASE_COLOURS = ("#d81b60", "#1e88e5", "#2e9e44", "#e67e00", "#8e44ad", "#009aa6", "#b08900", "#6d4c41")
"""Of phrases by their numbers, the first again after the last; each differs from a light and from a dark background."""

_Rectangle = tuple[float, float, float, float]


class PlacedBox(NamedTuple):
    """A box to draw: x, y, width and height in pixels of the photo, the number of its phrase from 1, and its colour.

    ``truth`` is what annotators drew, which has a dashed line.
    """

    rectangle: _Rectangle
    number: int
    colour: str
    truth: bool = False


class PlacedPhoto(NamedTuple):
    """A photo with boxes; ``source`` is None if it cannot be read, and then the boxes stand on a blank.

    ``name`` is its own in its report, ``again`` that of the drawing whose photo it repeats; blank: none.
    """

    name: str
    source: str | None
    file: str
    size: tuple[float, float]
    boxes: Sequence[PlacedBox]
    again: str = ""

    @property
    def font(self) -> float:
        """The height of numbers, in pixels of the photo."""
        return round(max(self.size) / 20, 1)


def colour_of(number: int) -> str:
    """The colour of the phrase with a number, from 1."""
    return PHRASE_COLOURS[(number - 1) % len(PHRASE_COLOURS)]


def placed_box(box: NDArray[np.floating], number: int, truth: bool = False) -> PlacedBox:
    """The drawing of a box (4,), x1, y1, x2, y2."""
    x1, y1, x2, y2 = (round(float(value), 1) for value in box)
    return PlacedBox((x1, y1, round(x2 - x1, 1), round(y2 - y1, 1)), number, colour_of(number), truth)


def size_around(boxes: Sequence[PlacedBox]) -> tuple[int, int]:
    """Width and height of a blank that holds all boxes, for a photo that is not there."""
    ends = [(x + width, y + height) for x, y, width, height in (box.rectangle for box in boxes)]
    return (math.ceil(max(x for x, _ in ends)), math.ceil(max(y for _, y in ends))) if ends else (4, 3)
