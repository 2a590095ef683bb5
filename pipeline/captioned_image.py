"""An image of a data set with its captions."""

from __future__ import annotations

from dataclasses import dataclass

from vse.pipeline.phrases import Phrase

SPLITS = ("train", "val", "test", "restval")


@dataclass(frozen=True, slots=True)
class Caption:
    """One sentence of an image, with the phrases that the data set marks in it."""

    sentid: int
    imgid: int
    raw: str
    tokens: tuple[str, ...]
    phrases: tuple[Phrase, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    """One image of a data set, its file relative to the ``images`` folder, and its captions."""

    imgid: int
    file: str
    split: str
    captions: tuple[Caption, ...]
    cocoid: int | None = None
