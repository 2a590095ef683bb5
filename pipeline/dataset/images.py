"""An image of a data set, with its captions."""

from __future__ import annotations

from dataclasses import dataclass

from vse.pipeline.dataset.phrases import Phrase


@dataclass(frozen=True, slots=True)
class Caption:
    """A caption of an image: its id, the id of the image, the text, the tokens, and the phrases that the data set marks.

    ``language`` is the tag of its language, such as ``en``, or blank if the data set names none.
    """

    sentid: int
    imgid: int
    raw: str
    tokens: tuple[str, ...]
    phrases: tuple[Phrase, ...] = ()
    language: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a data set with all captions. ``file`` is relative to the folder ``images``."""

    imgid: int
    file: str
    split: str
    captions: tuple[Caption, ...]
    cocoid: int | None = None
