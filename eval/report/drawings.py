"""What a model looked at, as drawings over a photo: for each word the regions, shaded by their weights.

What the models of a report looked at in the pairs that it shows, as a function of its caller says.

Phrases on a photo: each in a colour, with the boxes where a model and the annotators see it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings
from vse.eval.search.top_k import Attention
from vse.pipeline.errors import UserError

if TYPE_CHECKING:
    from vse.eval.report.report_inputs import ReportedResult


log = logging.getLogger(__name__)
_TOLERANCE = 0.01  # of a score; embeddings may be of another device

Pair = tuple[int, int]
"""The ids of an image and of a caption."""


@dataclass(frozen=True)
class AttendingRun:
    """A run whose model attends: ``of_pairs`` gives the attention in each of some pairs, None where it cannot be drawn.

    ``inputs`` are the files and folders that it is read from.
    """

    of_pairs: Callable[[Sequence[Pair]], Sequence[Attention | None]]
    inputs: Sequence[Path]


AttentionOfRun = Callable[[Path, Embeddings], AttendingRun | None]
"""Of the run in a folder, for its embeddings; None if its model does not attend, :class:`UserError` if nobody can tell how."""


class Attended:
    """The attention of the model of one result; nothing if it does not attend or its run is not at hand.

    ``missing`` gets a sentence on why it is not shown; others will read it, so that it names no folders.
    """

    def __init__(self, reported: ReportedResult, of_run: AttentionOfRun | None, missing: list[str]) -> None:
        self._missing, self._name = missing, reported.result.experiment
        self._run: AttendingRun | None = None
        if of_run is None or reported.folder is None or reported.run is None:
            return
        try:
            self._run = of_run(reported.folder, reported.run)
        except UserError as error:
            log.warning("%s", error)
            self._lacks("its run, its features or their places on the photos are not at hand")

    @property
    def inputs(self) -> Sequence[Path]:
        """What it is read from."""
        return self._run.inputs if self._run else ()

    def of(self, scores: Mapping[Pair, float]) -> dict[Pair, Attention]:
        """The attention in pairs of these scores; in none if the run has other scores than the embeddings."""
        if self._run is None or not scores:
            return {}
        found = zip(scores, self._run.of_pairs(list(scores)), strict=True)
        seen = {pair: attention for pair, attention in found if attention is not None}
        for pair, attention in seen.items():
            if not math.isclose(attention.score, scores[pair], rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                log.warning("image %d, caption %d: score %g, by the run %g", *pair, scores[pair], attention.score)
                self._lacks("the run was trained again since it was embedded")
                self._run = None
                return {}
        return seen

    def _lacks(self, why: str) -> None:
        self._missing.append(f"where the words of {self._name} look: {why}")


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
