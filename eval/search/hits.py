"""A result of a search, as people read it, and what the model looked at in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class Attention:
    """How much the words of a caption attend to the regions of a photo, or these to the words.

    Attributes
    ----------
    side : which attends to the other: with ``t2i`` each word divides its attention among the regions, so that a column of
        ``weights`` adds up to 1; with ``i2t`` each region does among the words, so that a row does
    words : what the model reads of the caption; in angle brackets what is no word of it
    size : width and height of the photo
    boxes : x1, y1, x2, y2 of the regions in its pixels
    score : of the pair, by the model that attends
    """

    side: Literal["t2i", "i2t"]
    words: tuple[str, ...]
    size: tuple[int, int]
    boxes: Float[np.ndarray, "n_regions 4"]
    weights: Float[np.ndarray, "n_regions n_words"]
    score: float


@dataclass(frozen=True, eq=False)
class PhraseHit:
    """The candidate boxes of a photo for a phrase, the best first.

    Attributes
    ----------
    text : the phrase
    boxes : x1, y1, x2, y2 in pixels of the photo, x2 and y2 exclusive
    scores : of the boxes, falling
    """

    text: str
    boxes: Float[np.ndarray, "n_boxes 4"]
    scores: Float[np.ndarray, " n_boxes"]

    def best(self, k: int) -> PhraseHit:
        """Its ``k`` best boxes."""
        return PhraseHit(self.text, self.boxes[:k], self.scores[:k])


@dataclass(frozen=True)
class SearchHit:
    """An image, or a caption of one, that a search returned, with its score.

    ``photo`` is None and ``captions`` is empty if ``dataset.json`` does not know the image. Otherwise ``captions`` is the one
    of the id ``caption_id`` or, if images were searched, all of the image. ``attention`` is that of the query and this hit,
    if the model attends.
    """

    score: float
    image_id: int
    photo: Path | None
    captions: tuple[str, ...]
    caption_id: int | None = None
    attention: Attention | None = None

    @property
    def caption(self) -> str | None:
        """The caption that was returned, or its id if that is all there is; None if images were searched."""
        return None if self.caption_id is None else self.captions[0] if self.captions else str(self.caption_id)
