"""The inputs and results of extractors, and the identity of a cache: the names, settings and hashes that determine it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset.columns import caption_ids, count_captions_per_image, image_ids
from vse.pipeline.dataset.dataset import Caption, Dataset, Image, list_phrase_texts
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import read_image_bytes
from vse.pipeline.files.writing import sha256_json

if TYPE_CHECKING:
    import h5py


CACHE_FORMAT, CACHE_VERSION = "vse-features", 1
Ids = NDArray[np.int64]
FeatureKind = Literal["image", "text"]
TextUnit = Literal["captions", "phrases"]  # whether a text feature has one row per caption or one per phrase


@dataclass(frozen=True)
class ExtractorInput:
    """The input of one row: an image file (``path``), or a text, as words (``tokens``) or as raw text (``raw``)."""

    id: int
    path: Path | None = None
    tokens: tuple[str, ...] = ()
    raw: str = ""

    def hash_input(self) -> NDArray[np.uint8]:
        """Return the SHA-256 of the image file, of the raw text, or of the words joined by spaces, as (32,) uint8."""
        return sha256_bytes(
            read_image_bytes(self.path) if self.path is not None else (self.raw or " ".join(self.tokens)).encode()
        )


def list_extractor_inputs(
    dataset: Dataset, kind: FeatureKind, raw: bool = False, text_unit: TextUnit = "captions", rows: slice = slice(None)
) -> list[ExtractorInput]:
    """Return the inputs of a feature in the order of ``dataset.json``: images, captions or phrases.

    ``rows`` selects some of the inputs by index. Captions are given as words or, with ``raw``, as raw text. Phrases are the
    distinct texts of the annotated phrases, in order of first appearance; the id of a phrase is its index in this order.
    Raises UserError if phrases are requested and the data set has none.
    """
    if kind == "image":
        return [ExtractorInput(image.imgid, dataset.image_path(image)) for image in dataset.images[rows]]
    if text_unit == "phrases":
        texts = list(enumerate(_require_phrase_texts(dataset)))
        return [ExtractorInput(index, tokens=tuple(text.split(" "))) for index, text in texts[rows]]
    captions = _select_captions(dataset.images, rows)
    return [ExtractorInput(c.sentid, raw=c.raw) if raw else ExtractorInput(c.sentid, tokens=c.tokens) for c in captions]


def list_row_ids(dataset: Dataset, kind: FeatureKind, text_unit: TextUnit = "captions") -> Ids:
    """Return the ids of all rows of a feature, in order: ids of images or captions, or the indices of distinct phrases."""
    if kind == "image":
        return image_ids(dataset.images)
    return np.arange(len(_require_phrase_texts(dataset))) if text_unit == "phrases" else caption_ids(dataset.images)


def _require_phrase_texts(dataset: Dataset) -> Sequence[str]:
    texts = list_phrase_texts(dataset)
    if not texts:
        raise UserError(f"{dataset.path}: no caption has marked phrases, so a feature of phrases has no rows")
    return texts


def _select_captions(images: Sequence[Image], rows: slice) -> list[Caption]:
    """Return the captions with the indices ``rows`` among all captions. Only the images with these captions are read."""
    ends = np.concatenate([[0], np.cumsum(count_captions_per_image(images))])
    start, stop, _ = rows.indices(int(ends[-1]))
    first, last = np.searchsorted(ends, start, side="right") - 1, np.searchsorted(ends, stop)
    captions = [caption for image in images[int(first) : int(last)] for caption in image.captions]
    return captions[start - int(ends[first]) : stop - int(ends[first])]


def find_text_unit(config: Mapping[str, Any]) -> TextUnit:
    """Return whether the extractor settings ``config`` of a cache select captions or phrases; captions by default."""
    return "phrases" if config.get("of") == "phrases" else "captions"


def list_input_ids(inputs: Sequence[ExtractorInput]) -> Ids:
    """Return the ids of the inputs, in order."""
    return np.asarray([row_input.id for row_input in inputs], np.int64)


def sha256_bytes(content: bytes) -> NDArray[np.uint8]:
    """Return the SHA-256 of ``content`` as (32,) uint8."""
    return np.frombuffer(hashlib.sha256(content).digest(), np.uint8)


@dataclass(frozen=True)
class CacheIdentity:
    """The names of a cache's data set and feature, and the settings and hashes that determine its vectors (``content``)."""

    dataset: str
    feature: str
    kind: FeatureKind
    content: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """The SHA-256 of the identity."""
        return sha256_json([CACHE_FORMAT, CACHE_VERSION, self.dataset, self.feature, self.kind, self.content])


@dataclass(frozen=True)
class RowBlocks:
    """Feature rows that are computed while they are written, so that only one block of rows is in memory.

    ``np.asarray`` computes all rows. ``blocks`` can be iterated over only once.

    shape, dtype : shape and type of the array of all rows
    blocks : iterator over blocks of consecutive rows
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Iterator[NDArray[Any]]

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.concatenate(list(self.blocks)).astype(dtype or self.dtype, copy=False)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class FeatureRows:
    """Feature rows in order, as an extractor computes them.

    ids : (n,) ids of images or captions
    features : (n, dim), (n, n_crops, dim) or, with ``offsets``, (n_regions, dim)
    input_hashes : (n, 32) uint8, the SHA-256 of the input of each row (:meth:`ExtractorInput.hash_input`)
    offsets : (n + 1,), row k has the regions (or tokens) ``offsets[k]:offsets[k + 1]``; None if each row has the same shape
    boxes : (n_regions, 4), x1, y1, x2, y2 in pixels of the original image; None if the rows have no boxes
    scores : (n_regions,), the score of each region
    image_size : (n, 2), width and height of images with regions
    skipped : id, path and reason of each image or text that was left out
    counts : numbers of unusual rows for the log, such as images without a box; final when all ``features`` are computed
    """

    ids: Ids
    features: NDArray[Any] | RowBlocks
    input_hashes: NDArray[np.uint8]
    offsets: NDArray[np.int64] | None = None
    boxes: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    image_size: NDArray[np.int32] | None = None
    skipped: Sequence[Mapping[str, Any]] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


_BLOCK_BYTES = 2**24  # size of a block of features that is checked and written at once


def write_features(path: Path, file: h5py.File, rows: FeatureRows) -> None:
    """Write the features of a shard into its open file, block by block. Raises UserError if a feature is not finite."""
    features = rows.features
    stored = file.create_dataset("features", shape=features.shape, dtype=features.dtype)
    start = 0
    for block in features.blocks if isinstance(features, RowBlocks) else _split_into_blocks(features):
        bad = np.flatnonzero(~np.isfinite(block).all(axis=tuple(range(1, block.ndim))))
        if len(bad):
            vector = start + bad[0]
            row = vector if rows.offsets is None else np.searchsorted(rows.offsets, vector, side="right") - 1
            raise UserError(
                f"{path}: {len(bad)} vectors are NaN or infinite in {features.dtype}, the first has id {rows.ids[row]}; "
                "if they are only too large for float16, store them with --set dtype=float32"
            )
        stored[start : start + len(block)] = block
        start += len(block)
    if start != len(features):
        raise ValueError(f"{start} rows of features, {len(features)} expected")


def _split_into_blocks(features: NDArray[Any]) -> Iterator[NDArray[Any]]:
    size = max(1, _BLOCK_BYTES // max(1, features[:1].nbytes))
    return (features[start : start + size] for start in range(0, len(features), size))
