"""Functions that return a property of all images or captions, such as the ids, from Python objects or a parquet file.

The functions accept any sequence of images. From :class:`ImageColumns` (a parquet file) they read only the needed columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import compress, islice
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset import SPLITS
from vse.pipeline.dataset.images import Caption, Image, Phrase, build_phrase_entry
from vse.pipeline.dataset.parquet_io import (
    IMAGES_PER_GROUP,
    NO_COCOID,
    CaptionTexts,
    ParquetColumns,
    PhraseFields,
    column_schema,
    decode_phrases,
)
from vse.pipeline.files.inputs import InputFile

Ids = NDArray[np.int64]


class IdIndex:
    """An index of an array of unique ``ids`` (n,). It finds the position of an id in the array by binary search."""

    def __init__(self, ids: Ids) -> None:
        self._row_order = np.argsort(ids, kind="stable")
        self._sorted_ids = ids[self._row_order]

    def find_rows(self, wanted: Ids) -> NDArray[np.int64]:
        """Return the position in ``ids`` of each wanted id, (n_wanted,); -1 for an unknown id."""
        if not len(self._sorted_ids):
            return np.full(len(wanted), -1, np.int64)
        places = np.minimum(np.searchsorted(self._sorted_ids, wanted), len(self._sorted_ids) - 1)
        rows: NDArray[np.int64] = np.where(self._sorted_ids[places] == wanted, self._row_order[places], -1)
        return rows


class ImageColumns(Sequence[Image]):
    """A sequence of images that reads each :class:`Image` from a parquet file on access.

    columns : the columns of the file
    rows : the indices of the images in the file; None for all images
    """

    def __init__(self, columns: ParquetColumns, rows: NDArray[np.int64] | None = None) -> None:
        self._columns = columns
        self._row_indices = np.arange(columns.n_images) if rows is None else rows

    @property
    def input_file(self) -> InputFile:
        """The open parquet file."""
        return self._columns.input_file

    @property
    def imgids(self) -> NDArray[np.int64]:
        imgids: NDArray[np.int64] = self._columns.imgids[self._row_indices]
        return imgids

    @property
    def files(self) -> list[str]:
        """The file of each image, relative to the folder of images."""
        return [
            files[row]
            for group, rows in self._iterate_groups()
            for files in [self._columns.read_files(group)]
            for row in rows.tolist()
        ]

    @property
    def cocoids(self) -> NDArray[np.int64] | None:
        """The ids of the images in MS-COCO, (n_images,); None if an image has no such id."""
        cocoids: NDArray[np.int64] = self._columns.cocoids[self._row_indices]
        return None if np.any(cocoids == NO_COCOID) else cocoids

    @property
    def n_captions_per_image(self) -> NDArray[np.int64]:
        """The number of captions of each image, (n_images,)."""
        counts: NDArray[np.int64] = np.diff(self._columns.caption_ends, prepend=0)[self._row_indices]
        return counts

    @property
    def sentids(self) -> NDArray[np.int64]:
        """The ids of the captions of the images, (n_captions,)."""
        ids: NDArray[np.int64] = self._columns.sentids[_list_caption_rows(self._columns.caption_ends, self._row_indices)]
        return ids

    @property
    def caption_texts(self) -> list[str]:
        """The text of each caption, in the order of the images."""
        return [
            raws[row]
            for group, captions in self._iterate_caption_groups()
            for raws in [self._columns.read_raw_texts(group)]
            for row in captions.tolist()
        ]

    def count_words(self) -> dict[str, int]:
        """Return the number of occurrences of each word in the captions of the images."""
        total: Counter[str] = Counter()
        for group, captions in self._iterate_caption_groups():
            tokens, ends, words = self._columns.read_encoded_tokens(group)
            is_chosen = np.zeros(len(ends), bool)
            is_chosen[captions] = True
            counts = np.bincount(tokens[np.repeat(is_chosen, np.diff(ends, prepend=0))], minlength=len(words))
            total.update({words[word]: int(counts[word]) for word in np.flatnonzero(counts).tolist()})
        return dict(total)

    @property
    def caption_languages(self) -> list[str]:
        """The language of each caption, in the order of the images; an empty text for a caption without a language."""
        if not self._columns.has_languages:
            return [""] * int(self.n_captions_per_image.sum())
        return [
            languages[row] or ""
            for group, captions in self._iterate_caption_groups()
            for languages in [self._columns.read_languages(group)]
            for row in captions.tolist()
        ]

    def _iterate_groups(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield runs of consecutive images that lie in one row group of the file.

        A run is a pair: the index of the row group, and the indices of the images in this group.
        """
        ends = self._columns.group_ends
        groups = np.searchsorted(ends, self._row_indices, side="right")
        for rows in np.split(np.arange(len(groups)), np.flatnonzero(np.diff(groups)) + 1):
            if len(rows):
                group = int(groups[rows[0]])
                yield group, self._row_indices[rows] - (ends[group - 1] if group else 0)

    def _iterate_caption_groups(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the captions of these images as pairs: the index of a row group, and the indices of captions in this group.

        A row group occurs several times if the images are not in the order of the file.
        """
        for group, rows in self._iterate_groups():
            yield group, _list_caption_rows(self._find_caption_ends(group), rows)

    def _find_caption_ends(self, group: int) -> NDArray[np.int64]:
        """Return, for each image of a row group, the number of captions up to and including this image in the row group."""
        first, last = self._columns.group_ends[group - 1] if group else 0, self._columns.group_ends[group]
        ends = self._columns.caption_ends
        return ends[first:last] - (ends[first - 1] if first else 0)

    def select(self, keep: NDArray[np.bool_]) -> ImageColumns:
        return ImageColumns(self._columns, self._row_indices[keep])

    def group_by_split(self) -> dict[str, Sequence[Image]]:
        """Return the images of each split by the name of the split; splits without images are left out."""
        splits = self._columns.splits[self._row_indices]
        rows = {name: self._row_indices[splits == index] for index, name in enumerate(SPLITS)}
        return {name: ImageColumns(self._columns, some) for name, some in rows.items() if len(some)}

    def __len__(self) -> int:
        return len(self._row_indices)

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> ImageColumns: ...
    def __getitem__(self, index: int | slice) -> Image | ImageColumns:
        if isinstance(index, slice):
            return ImageColumns(self._columns, self._row_indices[index])
        columns, row = self._columns, int(self._row_indices[index])
        group = int(np.searchsorted(columns.group_ends, row, side="right"))
        first = int(columns.group_ends[group - 1]) if group else 0
        file, sentences = columns.read_file_and_captions(group, row - first)
        imgid, split, cocoid = (int(column[row]) for column in (columns.imgids, columns.splits, columns.cocoids))
        phrases = decode_phrases(sentences) or [()] * len(sentences)
        captions = tuple(
            [
                Caption(one["sentid"], imgid, one["raw"], tuple(one["tokens"]), build_phrases(some), one.get("language") or "")
                for one, some in zip(sentences.to_pylist(), phrases, strict=True)
            ]
        )
        return Image(imgid, file, SPLITS[split], captions, None if cocoid == NO_COCOID else cocoid)

    def __iter__(self) -> Iterator[Image]:
        for group, rows in self._iterate_groups():
            first = int(self._columns.group_ends[group - 1]) if group else 0
            facts = (self._columns.imgids, self._columns.splits, self._columns.cocoids)
            imgids, splits, cocoids = (column[first + rows].tolist() for column in facts)
            files, texts = self._columns.read_files(group), self._columns.read_captions(group)
            ends = self._find_caption_ends(group)
            starts = ends - np.diff(ends, prepend=0)
            sentids = self._columns.sentids[(self._columns.caption_ends[first - 1] if first else 0) :]
            for row, start, end, imgid, split, cocoid in zip(
                rows.tolist(), starts[rows].tolist(), ends[rows].tolist(), imgids, splits, cocoids, strict=True
            ):
                captions = _build_captions(imgid, sentids[start:end].tolist(), start, texts)
                yield Image(imgid, files[row], SPLITS[split], captions, None if cocoid == NO_COCOID else cocoid)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def build_phrases(fields: Iterable[PhraseFields]) -> tuple[Phrase, ...]:
    """Return phrases with these fields."""
    return tuple([Phrase(*some) for some in fields])


def _build_captions(imgid: int, sentids: Sequence[int], first: int, texts: CaptionTexts) -> tuple[Caption, ...]:
    raws, tokens, ends, languages, phrases = texts
    return tuple(
        [
            Caption(
                sentid,
                imgid,
                raws[row],
                tuple(tokens[ends[row] : ends[row + 1]]),
                build_phrases(phrases[row]) if phrases else (),
                (languages and languages[row]) or "",
            )
            for row, sentid in enumerate(sentids, first)
        ]
    )


def _list_caption_rows(ends: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of all captions of some images.

    ``rows`` are the indices of these images. ``ends`` has, for every image, the number of captions up to and including this
    image.
    """
    counts = np.diff(ends, prepend=0)[rows]
    before = np.cumsum(counts) - counts
    indices: NDArray[np.int64] = np.repeat(ends[rows] - counts - before, counts) + np.arange(counts.sum())
    return indices


def build_tables(images: Iterable[Image]) -> Iterator[Any]:
    """Yield the images as tables (pyarrow) with the columns of a ``dataset.parquet``.

    Each table has ``IMAGES_PER_GROUP`` images; the last table may have fewer.
    """
    arrow = import_module("pyarrow")
    iterator = iter(images)
    while part := list(islice(iterator, IMAGES_PER_GROUP)):
        captions = [caption for image in part for caption in image.captions]
        values = {
            "sentid": [caption.sentid for caption in captions],
            "raw": [caption.raw for caption in captions],
            "tokens": [caption.tokens for caption in captions],
            "language": [caption.language or None for caption in captions],
            "phrases": [list(map(build_phrase_entry, caption.phrases)) or None for caption in captions],
        }
        schema = column_schema()
        struct = schema.field("sentences").type.value_type
        fields = [arrow.array(values[field.name], field.type) for field in struct]
        ends = np.cumsum([0, *(len(image.captions) for image in part)], dtype=np.int32)
        sentences = arrow.ListArray.from_arrays(
            arrow.array(ends), arrow.StructArray.from_arrays(fields, fields=list(struct)), type=schema.field("sentences").type
        )
        columns = {
            "imgid": [image.imgid for image in part],
            "filename": [image.file for image in part],
            "split": [image.split for image in part],
            "cocoid": [image.cocoid for image in part],
        }
        yield arrow.table([*columns.values(), sentences], schema=schema)


def image_ids(images: Sequence[Image]) -> Ids:
    """Return the ids of the images, (n_images,)."""
    if isinstance(images, ImageColumns):
        return images.imgids
    return np.asarray([image.imgid for image in images], np.int64)


def image_files(images: Sequence[Image]) -> list[str]:
    """Return the file of each image, relative to the folder of images."""
    if isinstance(images, ImageColumns):
        return images.files
    return [image.file for image in images]


def caption_ids(images: Sequence[Image]) -> Ids:
    """Return the ids of all captions, (n_captions,), in the order of the images."""
    if isinstance(images, ImageColumns):
        return images.sentids
    return np.asarray([caption.sentid for image in images for caption in image.captions], np.int64)


def count_captions_per_image(images: Sequence[Image]) -> NDArray[np.int64]:
    """Return the number of captions of each image, (n_images,)."""
    if isinstance(images, ImageColumns):
        return images.n_captions_per_image
    return np.asarray([len(image.captions) for image in images], np.int64)


def coco_ids(images: Sequence[Image]) -> Ids | None:
    """Return the ids of the images in MS-COCO, (n_images,); None if an image has no such id."""
    if isinstance(images, ImageColumns):
        return images.cocoids
    cocoids = [image.cocoid for image in images if image.cocoid is not None]
    return np.asarray(cocoids, np.int64) if len(cocoids) == len(images) else None


def select_images(images: Sequence[Image], keep: NDArray[np.bool_]) -> Sequence[Image]:
    """Return the images for which the Boolean array ``keep`` (n_images,) is true."""
    return images.select(keep) if isinstance(images, ImageColumns) else list(compress(images, keep))


def caption_texts(images: Sequence[Image]) -> list[str]:
    """Return the text of each caption, in the order of the images."""
    if isinstance(images, ImageColumns):
        return images.caption_texts
    return [caption.raw for image in images for caption in image.captions]


def count_words(images: Sequence[Image]) -> dict[str, int]:
    """Return the number of occurrences of each word in the captions of the images."""
    if isinstance(images, ImageColumns):
        return images.count_words()
    return dict(Counter(word for image in images for caption in image.captions for word in caption.tokens))


def caption_languages(images: Sequence[Image]) -> list[str]:
    """Return the language of each caption, in the order of the images; an empty text for a caption without a language."""
    if isinstance(images, ImageColumns):
        return images.caption_languages
    return [caption.language for image in images for caption in image.captions]


def count_languages(images: Sequence[Image]) -> dict[str, int]:
    """Return the number of captions of each language. Captions without a language count under ``""``."""
    return dict(Counter(caption_languages(images)))
