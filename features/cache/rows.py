"""The inputs and results of extractors (:class:`Item`, :class:`Rows`), and the identity of a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset.columns import caption_counts, caption_ids, image_ids
from vse.pipeline.dataset.dataset import Caption, Dataset, Image, list_phrase_texts
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import read_image_bytes
from vse.pipeline.files.writing import sha256_json

FORMAT, VERSION = "vse-features", 1
Ids = NDArray[np.int64]
Kind = Literal["image", "text"]
TextRows = Literal["captions", "phrases"]  # whether a text feature has one row per caption or one per phrase


@dataclass(frozen=True)
class Item:
    """The input of one row: an image file (``path``), or a text, either as words (``tokens``) or unchanged (``raw``)."""

    id: int
    path: Path | None = None
    tokens: tuple[str, ...] = ()
    raw: str = ""

    def hash_input(self) -> NDArray[np.uint8]:
        """Return the SHA-256 of the image file, of the raw text, or of the words joined by spaces, as (32,) uint8."""
        return sha256_bytes(
            read_image_bytes(self.path) if self.path is not None else (self.raw or " ".join(self.tokens)).encode()
        )


def dataset_items(
    dataset: Dataset, kind: Kind, raw: bool = False, text_rows: TextRows = "captions", rows: slice = slice(None)
) -> list[Item]:
    """Return the inputs of a feature in the order of ``dataset.json``: images, captions or phrases.

    ``rows`` selects some of the inputs. A caption is given as words or, with ``raw``, as raw text. Phrases are the distinct
    texts of the annotated phrases, in order of first appearance. The id of a phrase is its index. Raises UserError if the data
    set has no annotated phrases.
    """
    if kind == "image":
        return [Item(image.imgid, dataset.image_path(image)) for image in dataset.images[rows]]
    if text_rows == "phrases":
        texts = list(enumerate(_phrase_texts(dataset)))
        return [Item(index, tokens=tuple(text.split(" "))) for index, text in texts[rows]]
    captions = _select_captions(dataset.images, rows)
    return [Item(c.sentid, raw=c.raw) if raw else Item(c.sentid, tokens=c.tokens) for c in captions]


def row_ids(dataset: Dataset, kind: Kind, text_rows: TextRows = "captions") -> Ids:
    """Return the ids of all rows of a feature of ``dataset``, in the order of :func:`dataset_items`."""
    if kind == "image":
        return image_ids(dataset.images)
    return np.arange(len(_phrase_texts(dataset))) if text_rows == "phrases" else caption_ids(dataset.images)


def _phrase_texts(dataset: Dataset) -> Sequence[str]:
    texts = list_phrase_texts(dataset)
    if not texts:
        raise UserError(f"{dataset.path}: no caption has marked phrases, so a feature of phrases has no rows")
    return texts


def _select_captions(images: Sequence[Image], rows: slice) -> list[Caption]:
    """Return the captions with the indices ``rows`` among all captions. Only the images with these captions are read."""
    ends = np.concatenate([[0], np.cumsum(caption_counts(images))])
    start, stop, _ = rows.indices(int(ends[-1]))
    first, last = np.searchsorted(ends, start, side="right") - 1, np.searchsorted(ends, stop)
    captions = [caption for image in images[int(first) : int(last)] for caption in image.captions]
    return captions[start - int(ends[first]) : stop - int(ends[first])]


def find_text_rows(config: Mapping[str, Any]) -> TextRows:
    """Return whether a cache with the extractor settings ``config`` holds captions or phrases; captions by default."""
    return "phrases" if config.get("of") == "phrases" else "captions"


def item_ids(items: Sequence[Item]) -> Ids:
    """Return the ids of items, in order."""
    return np.asarray([item.id for item in items], np.int64)


def sha256_bytes(content: bytes) -> NDArray[np.uint8]:
    """Return the SHA-256 of ``content`` as (32,) uint8."""
    return np.frombuffer(hashlib.sha256(content).digest(), np.uint8)


@dataclass(frozen=True)
class Identity:
    """The identity of a cache. ``content`` holds the settings and hashes that determine the vectors."""

    dataset: str
    feature: str
    kind: Kind
    content: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """The SHA-256 of the identity."""
        return sha256_json([FORMAT, VERSION, self.dataset, self.feature, self.kind, self.content])


@dataclass(frozen=True)
class Rows:
    """Feature rows in order, as an extractor computes them.

    ids : (n,) ids of images or captions
    features : (n, dim), (n, n_crops, dim) or, with ``offsets``, (n_regions, dim)
    input_hashes : (n, 32) uint8, the SHA-256 of the input of each row (:meth:`Item.hash_input`)
    offsets : (n + 1,), row k has the regions (or tokens) ``offsets[k]:offsets[k + 1]``; None if each row has the same shape
    boxes : (n_regions, 4), x1, y1, x2, y2 in pixels of the original image; None if the rows have no boxes
    scores : (n_regions,), the score of each region
    image_size : (n, 2), width and height of images with regions
    skipped : id, path and reason of each skipped input
    counts : further counts for the report, by name
    """

    ids: Ids
    features: NDArray[Any]
    input_hashes: NDArray[np.uint8]
    offsets: Ids | None = None
    boxes: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    image_size: NDArray[np.int32] | None = None
    skipped: Sequence[Mapping[str, Any]] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
