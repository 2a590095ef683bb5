"""Drawings over a photo: regions shaded by the attention of words, and the boxes of phrases."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings
from vse.eval.search.top_k import Attention
from vse.pipeline.errors import UserError

log = logging.getLogger(__name__)
_SCORE_TOLERANCE = 0.01  # accepted difference between two computations of a score, which may use different devices
_MAX_OPACITY = 0.65  # opacity of the region with the highest weight
_MIN_VISIBLE_SHARE = 0.02  # regions below this share of the highest weight are not shaded

PairIds = tuple[int, int]
"""The ids of an image and of a caption."""


@dataclass(frozen=True)
class AttendingRun:
    """A run whose model computes attention between words and regions.

    ``read_attention`` takes pairs of an image id and a caption id, and returns the attention of each pair; None for a pair
    whose attention cannot be drawn. ``input_paths`` are the files and folders that ``read_attention`` reads.
    """

    read_attention: Callable[[Sequence[PairIds]], Sequence[Attention | None]]
    input_paths: Sequence[Path]


AttentionOpener = Callable[[Path, Embeddings], AttendingRun | None]
"""A function that opens the run in a folder, so that the attention of its model can be drawn.

The embeddings must come from this run. The function returns None if the model computes no attention. It raises UserError if
the attention cannot be drawn.
"""


class AttentionReader:
    """A reader of the attention between words and regions that the model of a result computes.

    The reader returns no attention if the model computes none, or if its run is missing. If the run cannot be opened or was
    trained again, a sentence about this is appended to ``missing``, the notes of the report.
    """

    def __init__(
        self,
        experiment: str,
        folder: Path | None,
        embeddings: Embeddings | None,
        open_run: AttentionOpener | None,
        missing: list[str],
    ) -> None:
        self._experiment, self._missing = experiment, missing
        self._run: AttendingRun | None = None
        if open_run is None or folder is None or embeddings is None:
            return
        try:
            self._run = open_run(folder, embeddings)
        except UserError as error:
            log.warning("%s", error)
            self._add_missing_sentence("its run, its features or their places on the photos are not at hand")

    @property
    def input_paths(self) -> Sequence[Path]:
        return self._run.input_paths if self._run else ()

    def read_attention_by_pair(self, scores: Mapping[PairIds, float]) -> dict[PairIds, Attention]:
        """Return the attention of the pairs in ``scores``, by pair; pairs whose attention cannot be drawn are left out.

        ``scores`` maps an image id and a caption id to their score in the embeddings file. If the run now computes another
        score for a pair, because it was trained again, the returned dict is empty.
        """
        if self._run is None or not scores:
            return {}
        results = zip(scores, self._run.read_attention(list(scores)), strict=True)
        attentions = {pair: attention for pair, attention in results if attention is not None}
        for pair, attention in attentions.items():
            if not math.isclose(attention.score, scores[pair], rel_tol=_SCORE_TOLERANCE, abs_tol=_SCORE_TOLERANCE):
                log.warning("image %d, caption %d: score %g, by the run %g", *pair, scores[pair], attention.score)
                self._add_missing_sentence("the run was trained again since it was embedded")
                self._run = None
                return {}
        return attentions

    def _add_missing_sentence(self, reason: str) -> None:
        self._missing.append(f"where the words of {self._experiment} look: {reason}")


ATTENTION_EXPLANATIONS = {
    "t2i": "Each word divides its attention among the regions of the photo. Point at a word, or click on it, to see how: the "
    "fuller the colour, the larger the share of a region. The number is the largest share.",
    "i2t": "Each region of the photo divides its attention among the words. Point at a word, or click on it, to see which "
    "regions attend to it: the fuller the colour, the larger the share that a region gives. The number is the largest share.",
}
"""The explanation of a drawing by :attr:`vse.eval.search.top_k.Attention.direction`."""

BRACKET_NOTE = "In angle brackets: the start and the end of a caption, and words that the model does not know."


@dataclass(frozen=True)
class DrawnWord:
    """A word of a caption, with the regions to shade for this word.

    Attributes
    ----------
    index_on_photo : index of the word among all words that are drawn on the photo
    text : the word
    highest_weight : highest weight of the word in percent
    region_opacities : index and opacity of each shaded region, in ascending order of opacity
    """

    index_on_photo: int
    text: str
    highest_weight: str
    region_opacities: Sequence[tuple[int, str]]

    @property
    def is_special_token(self) -> bool:
        """True for a token in angle brackets: the start or the end of a caption, or a word that the model does not know."""
        return self.text.startswith("<")


@dataclass(frozen=True)
class AttentionDrawing:
    """A drawing of the attention between a photo and one or more captions.

    ``element_id`` is an identifier that is unique in the report. ``size`` is width and height of the photo in pixels.
    ``regions`` are x, y, width and height in pixels of the photo. ``captions`` has the words of each caption.
    """

    element_id: str
    size: tuple[int, int]
    regions: Sequence[tuple[float, float, float, float]]
    captions: Sequence[Sequence[DrawnWord]]

    @property
    def words(self) -> Sequence[DrawnWord]:
        return [word for words in self.captions for word in words]

    def compute_font_size(self, text: str, lines: int) -> float:
        """Return the largest font size, in pixels of the photo, for lines that have a word and its weight.

        At this size, the line of the word ``text`` fits across the photo, and ``lines`` lines fit along its longer side.
        """
        return round(min(max(self.size) / lines, 1.5 * self.size[0] / (len(text) + 5)), 1)


def draw_attention(name: str, attentions: Sequence[Attention], first: int = 0) -> AttentionDrawing:
    """Return the drawing of the attention between a photo and one or more captions.

    ``name`` is the ``element_id`` of the drawing. ``first`` is the index of the first word among all words on the photo.
    """
    photo = attentions[0]
    x1, y1, x2, y2 = photo.boxes.T.round(1).tolist()
    corners = zip(x1, y1, x2, y2, strict=True)
    regions = [(left, top, round(right - left, 1), round(bottom - top, 1)) for left, top, right, bottom in corners]
    captions: list[list[DrawnWord]] = []
    for attention in attentions:
        captions.append(_draw_words(attention, first + sum(map(len, captions))))
    return AttentionDrawing(name, photo.size, regions, captions)


def _draw_words(attention: Attention, first: int) -> list[DrawnWord]:
    """Return the words of a caption, numbered from ``first``, with the opacities of regions for each word.

    The opacity of a region is proportional to its attention weight.
    If each word divides its attention among the regions (``t2i``), each word has a region with the largest opacity. If each
    region divides its attention among the words (``i2t``), only the highest weight of all words has the largest opacity.
    """
    weights = attention.weights
    highest = weights.max(0) if attention.direction == "t2i" else np.full(weights.shape[1], weights.max())
    words = []
    for column, text in enumerate(attention.words):
        shares = weights[:, column] / max(highest[column], 1e-12)
        order = shares.argsort(kind="stable")
        shades = [(int(k), f"{_MAX_OPACITY * shares[k]:.3f}") for k in order if shares[k] >= _MIN_VISIBLE_SHARE]
        words.append(DrawnWord(first + column, text, f"{100 * weights[:, column].max():.0f}%", shades))
    return words


PHRASE_COLOURS = ("#d81b60", "#1e88e5", "#2e9e44", "#e67e00", "#8e44ad", "#009aa6", "#b08900", "#6d4c41")
"""The colours of phrases by number, repeated after the last; each is visible on a light and on a dark background."""

_Rectangle = tuple[float, float, float, float]


class PhraseBox(NamedTuple):
    """A box to draw on a photo: ``rectangle`` is x, y, width and height in pixels of the photo.

    ``number`` is the number of the phrase in its caption, from 1. ``is_truth`` marks a ground-truth box, which has a dashed
    line.
    """

    rectangle: _Rectangle
    number: int
    colour: str
    is_truth: bool = False


class PhrasePhoto(NamedTuple):
    """A photo with the boxes of phrases. ``element_id`` is an identifier that is unique in the report; ``size`` is in pixels.

    ``source`` is the photo as a data URI. If the photo cannot be read, ``source`` is None, and the boxes are drawn on an
    empty area. ``earlier_element_id`` is the identifier of an earlier drawing of the photo in the report, whose image is
    reused; blank for the first drawing.
    """

    element_id: str
    source: str | None
    file: str
    size: tuple[float, float]
    boxes: Sequence[PhraseBox]
    earlier_element_id: str = ""

    @property
    def number_height(self) -> float:
        """The height of the phrase numbers, in pixels of the photo."""
        return round(max(self.size) / 20, 1)


def phrase_colour(number: int) -> str:
    """Return the colour of a phrase, given its number in the caption, from 1."""
    return PHRASE_COLOURS[(number - 1) % len(PHRASE_COLOURS)]


def build_phrase_box(box: NDArray[np.floating], number: int, truth: bool = False) -> PhraseBox:
    """Return the box to draw for ``box`` (4,), which has x1, y1, x2, y2.

    ``number`` is the number of the phrase in its caption, from 1. ``truth`` marks a ground-truth box.
    """
    x1, y1, x2, y2 = (round(float(value), 1) for value in box)
    return PhraseBox((x1, y1, round(x2 - x1, 1), round(y2 - y1, 1)), number, phrase_colour(number), truth)


def compute_bounding_size(boxes: Sequence[PhraseBox]) -> tuple[int, int]:
    """Return the width and height of an area that contains all boxes, to draw them without the photo; (4, 3) without boxes."""
    ends = [(x + width, y + height) for x, y, width, height in (box.rectangle for box in boxes)]
    return (math.ceil(max(x for x, _ in ends)), math.ceil(max(y for _, y in ends))) if ends else (4, 3)
