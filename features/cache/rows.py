"""What extractors are asked for and what they make: items, rows, and the identity of a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset.columns import caption_counts, caption_ids, image_ids
from vse.pipeline.dataset.dataset import Caption, Dataset, Image, phrase_texts
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import read_image_bytes
from vse.pipeline.files.writing import sha256_json

FORMAT, VERSION = "vse-features", 1
Ids = NDArray[np.int64]
Kind = Literal["image", "text"]
TextRows = Literal["captions", "phrases"]  # what a feature of texts has a row of


@dataclass(frozen=True)
class Item:
    """One row to be made: an image (``path``), or a text as its words (``tokens``) or as it was written (``raw``)."""

    id: int
    path: Path | None = None
    tokens: tuple[str, ...] = ()
    raw: str = ""

    def source(self) -> NDArray[np.uint8]:
        """SHA-256 of what the row is made from: the image file's bytes, the text, or the words with blanks between them."""
        return sha256_bytes(
            read_image_bytes(self.path) if self.path is not None else (self.raw or " ".join(self.tokens)).encode()
        )


def items_of(
    dataset: Dataset, kind: Kind, raw: bool = False, of: TextRows = "captions", rows: slice = slice(None)
) -> list[Item]:
    """Some ``rows`` of a feature of ``dataset``, by default all: images, or captions as words or ``raw``, in file order.

    Of ``phrases`` they are the different texts, in the order in which these first appear, which is that of their ids;
    :class:`UserError` if there are none.
    """
    if kind == "image":
        return [Item(image.imgid, dataset.image_path(image)) for image in dataset.images[rows]]
    if of == "phrases":
        texts = list(enumerate(_phrase_texts(dataset)))
        return [Item(number, tokens=tuple(text.split(" "))) for number, text in texts[rows]]
    captions = _captions(dataset.images, rows)
    return [Item(c.sentid, raw=c.raw) if raw else Item(c.sentid, tokens=c.tokens) for c in captions]


def row_ids(dataset: Dataset, kind: Kind, of: TextRows = "captions") -> Ids:
    """The ids of all rows of a feature of ``dataset``, in the order of :func:`items_of`."""
    if kind == "image":
        return image_ids(dataset.images)
    return np.arange(len(_phrase_texts(dataset))) if of == "phrases" else caption_ids(dataset.images)


def _phrase_texts(dataset: Dataset) -> Sequence[str]:
    texts = phrase_texts(dataset)
    if not texts:
        raise UserError(f"{dataset.path}: no caption marks phrases, so a feature of phrases has no rows")
    return texts


def _captions(images: Sequence[Image], rows: slice) -> list[Caption]:
    """Some captions of images, by their rows among all captions; of no other image are they made."""
    ends = np.concatenate([[0], np.cumsum(caption_counts(images))])
    start, stop, _ = rows.indices(int(ends[-1]))
    first, last = np.searchsorted(ends, start, side="right") - 1, np.searchsorted(ends, stop)
    captions = [caption for image in images[int(first) : int(last)] for caption in image.captions]
    return captions[start - int(ends[first]) : stop - int(ends[first])]


def text_rows_of(config: Mapping[str, Any]) -> TextRows:
    """What a cache of texts has rows of, by the settings that it records; captions where these do not say it."""
    return "phrases" if config.get("of") == "phrases" else "captions"


def ids_of(items: Sequence[Item]) -> Ids:
    """Ids of rows, in order."""
    return np.asarray([item.id for item in items], np.int64)


def sha256_bytes(content: bytes) -> NDArray[np.uint8]:
    """SHA-256 of ``content`` as 32 numbers, the form in which a cache keeps it for each row."""
    return np.frombuffer(hashlib.sha256(content).digest(), np.uint8)


@dataclass(frozen=True)
class Identity:
    """What a cache is asked to hold: ``content`` is all that determines the vectors, beside the sources themselves."""

    dataset: str
    feature: str
    kind: Kind
    content: Mapping[str, Any]

    @property
    def key(self) -> str:
        """SHA-256 of the identity."""
        return sha256_json([FORMAT, VERSION, self.dataset, self.feature, self.kind, self.content])


@dataclass(frozen=True)
class Rows:
    """What an extractor made, in order.

    ids : (n,) image or sentence ids
    features : (n, dim), (n, n_crops, dim) or, with ``offsets``, (n_regions, dim): row k has regions
        ``offsets[k]:offsets[k + 1]``
    sources : (n, 32) uint8, the SHA-256 of the bytes that each row was made from (an image file, a caption's words)
    boxes, scores : (n_regions, 4) xyxy in pixels of the original image, and (n_regions,), of regions
    image_size : (n, 2) width and height, of images with regions
    skipped : what was left out: id, path and reason
    counts : what else is worth reporting, by name
    """

    ids: Ids
    features: NDArray[Any]
    sources: NDArray[np.uint8]
    offsets: Ids | None = None
    boxes: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    image_size: NDArray[np.int32] | None = None
    skipped: Sequence[Mapping[str, Any]] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
