"""What a model looked at, as drawings over a photo: for each word the regions, shaded by their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vse.eval.search.hits import Attention

_DARKEST = 0.65  # how much of the photo the region with the highest weight hides
_LEAST = 0.02  # of the highest weight; below it a shade cannot be seen

SAID = {
    "t2i": "Each word divides its attention among the regions of the photo. Point at a word, or click on it, to see how: the "
    "fuller the colour, the more of it a region has; the number is the largest share.",
    "i2t": "Each region of the photo divides its attention among the words. Point at a word, or click on it, to see which "
    "regions attend to it: the fuller the colour, the more of its attention a region gives; the number is the largest share.",
}
"""What a figure shows, by which side attends to the other."""

BRACKETS = "In angle brackets: the start and the end of a caption, and words that the model does not know."


@dataclass(frozen=True)
class DrawnWord:
    """A word and its shades: numbers of regions, those that it has least of first, each with its opacity.

    ``number`` tells it from the other words of its photo, ``highest`` is its highest weight in percent; ``quiet`` is what is
    no word that the model knows, such as the end of a caption.
    """

    number: int
    text: str
    highest: str
    shades: Sequence[tuple[int, str]]

    @property
    def quiet(self) -> bool:
        """Whether it is no word that the model knows."""
        return self.text.startswith("<")


@dataclass(frozen=True)
class Drawing:
    """The regions of a photo, x, y, width and height in its pixels, and the words of each caption to shade them by.

    ``name`` is the drawing's own in its report.
    """

    name: str
    size: tuple[int, int]
    regions: Sequence[tuple[float, float, float, float]]
    captions: Sequence[Sequence[DrawnWord]]

    @property
    def words(self) -> Sequence[DrawnWord]:
        """Those of all captions."""
        return [word for words in self.captions for word in words]

    def text_height(self, text: str, lines: int) -> float:
        """In pixels of the photo: so that it has room for so many lines, and its width for this text and a number."""
        return round(min(max(self.size) / lines, 1.5 * self.size[0] / (len(text) + 5)), 1)


def drawn(name: str, attentions: Sequence[Attention], first: int = 0) -> Drawing:
    """A drawing of a photo with one caption or more, whose words have the numbers from ``first`` on."""
    photo = attentions[0]
    x1, y1, x2, y2 = photo.boxes.T.round(1).tolist()
    corners = zip(x1, y1, x2, y2, strict=True)
    regions = [(left, top, round(right - left, 1), round(bottom - top, 1)) for left, top, right, bottom in corners]
    captions: list[list[DrawnWord]] = []
    for one in attentions:
        captions.append(_words(one, first + sum(map(len, captions))))
    return Drawing(name, photo.size, regions, captions)


def _words(attention: Attention, first: int) -> list[DrawnWord]:
    """The words of a caption, whose numbers begin with ``first``; the opacity of a region is proportional to its weight.

    Where words divide their attention, the highest weight of each word is drawn alike; where regions do, the highest of the
    pair, since a word may have hardly any.
    """
    weights = attention.weights
    highest = weights.max(0) if attention.side == "t2i" else np.full(weights.shape[1], weights.max())
    words = []
    for column, text in enumerate(attention.words):
        shares = weights[:, column] / max(highest[column], 1e-12)
        shades = [(int(k), f"{_DARKEST * shares[k]:.3f}") for k in shares.argsort(kind="stable") if shares[k] >= _LEAST]
        words.append(DrawnWord(first + column, text, f"{100 * weights[:, column].max():.0f}%", shades))
    return words
