"""The images and captions of a data set, as Python objects or as arrays with one entry per image or caption (columns).

The first reader of a large ``dataset.json`` checks the content and writes ``dataset.json.columns.h5``, with the SHA-256 of
``dataset.json``. Later readers load these columns and create an ``Image`` only on request. The user may delete
``dataset.json.columns.h5`` at any time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate, chain, compress
from pathlib import Path
from typing import Any, overload

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset.phrases import Phrase
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import open_hdf5, require_hdf5_dataset
from vse.pipeline.files.writing import write_bytes

Ids = NDArray[np.int64]


class IdIndex:
    """An index of unique ``ids`` (n,) that finds the row of an id by binary search."""

    def __init__(self, ids: Ids) -> None:
        self._row_order = np.argsort(ids, kind="stable")
        self._sorted_ids = ids[self._row_order]

    def find_rows(self, wanted: Ids) -> NDArray[np.int64]:
        """Return the row of each wanted id, (n_wanted,); -1 for an unknown id."""
        if not len(self._sorted_ids):
            return np.full(len(wanted), -1, np.int64)
        places = np.searchsorted(self._sorted_ids, wanted).clip(max=len(self._sorted_ids) - 1)
        rows: NDArray[np.int64] = np.where(self._sorted_ids[places] == wanted, self._row_order[places], -1)
        return rows


SPLITS = ("train", "val", "test", "restval")


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


log = logging.getLogger(__name__)
COLUMNS_FORMAT = "vse-dataset-columns"
COLUMNS_VERSION = 3  # changes with the columns, the checks of dataset.json and the tokenisers
_NO_COCOID = np.iinfo(np.int64).min  # marks an image without an id in MS-COCO
# Fields of Dataset that the file of arrays has as attributes
ATTRIBUTE_TYPES = {"name": str, "has_image_files": np.bool_, "tokeniser": str, "fold": str, "parent": str}
# A column of texts is stored as one array of bytes and the end of each text, a column of lists as one array of items and the
# end of each list.
_INTEGER_COLUMNS = ("imgids", "splits", "cocoids", "captions", "sentids", "tokens", "token_ends", "caption_languages")
_TEXT_COLUMNS = ("files", "raws", "words", "languages")


class TextColumn:
    """A sequence of texts, stored as one array of UTF-8 bytes and the index of the end of each text."""

    def __init__(self, text_bytes: NDArray[np.uint8], text_ends: NDArray[np.int64]) -> None:
        self.text_bytes, self.text_ends = text_bytes, text_ends

    def __len__(self) -> int:
        return len(self.text_ends)

    def __getitem__(self, index: int) -> str:
        start = self.text_ends[index - 1] if index else 0
        return str(self.text_bytes.data[start : self.text_ends[index]], "utf-8")


class ImageColumns(Sequence[Image]):
    """A sequence of images that creates an :class:`Image` from arrays on access. Equal to any sequence of equal images.

    columns : the arrays by name
    rows : the indices of the images in the arrays
    """

    def __init__(self, columns: Mapping[str, Any], rows: NDArray[np.int64]) -> None:
        self._array_by_column, self._row_indices = columns, rows

    @property
    def imgids(self) -> NDArray[np.int64]:
        return self._selected_values("imgids")

    @property
    def files(self) -> list[str]:
        """The file of each image, relative to the folder of images."""
        return [self._array_by_column["files"][row] for row in self._row_indices.tolist()]

    @property
    def cocoids(self) -> NDArray[np.int64] | None:
        """The ids of the images in MS-COCO, (n_images,); None if an image has no such id."""
        cocoids = self._selected_values("cocoids")
        return None if np.any(cocoids == _NO_COCOID) else cocoids

    @property
    def caption_counts(self) -> NDArray[np.int64]:
        """The number of captions of each image, (n_images,)."""
        counts: NDArray[np.int64] = np.diff(self._array_by_column["captions"], prepend=0)[self._row_indices]
        return counts

    @property
    def sentids(self) -> NDArray[np.int64]:
        """The ids of the captions of the images, (n_captions,)."""
        ids: NDArray[np.int64] = self._array_by_column["sentids"][self._caption_rows]
        return ids

    @property
    def raws(self) -> list[str]:
        """The text of each caption of the images."""
        texts = self._array_by_column["raws"]
        return [texts[row] for row in self._caption_rows.tolist()]

    def count_words(self) -> dict[str, int]:
        """Return the number of occurrences of each word in the captions of the images."""
        columns, rows = self._array_by_column, self._caption_rows
        ends = columns["token_ends"]
        is_chosen = np.zeros(len(ends), bool)
        is_chosen[rows] = True
        counts = np.bincount(columns["tokens"][np.repeat(is_chosen, np.diff(ends, prepend=0))])
        return {columns["words"][word]: int(counts[word]) for word in np.flatnonzero(counts).tolist()}

    @property
    def caption_languages(self) -> list[str]:
        """The language of each caption of the images, or blank."""
        names: list[str] = self._array_by_column["languages"]
        return [names[index] for index in self._array_by_column["caption_languages"][self._caption_rows].tolist()]

    @property
    def _caption_rows(self) -> NDArray[np.int64]:
        """The indices of the captions of the images in the arrays, (n_captions,)."""
        counts = self.caption_counts
        before = np.cumsum(counts) - counts
        rows: NDArray[np.int64] = np.repeat(self._selected_values("captions") - counts - before, counts)
        return rows + np.arange(counts.sum())

    def select(self, keep: NDArray[np.bool_]) -> ImageColumns:
        return ImageColumns(self._array_by_column, self._row_indices[keep])

    def _selected_values(self, name: str) -> NDArray[np.int64]:
        values: NDArray[np.int64] = self._array_by_column[name][self._row_indices]
        return values

    def group_by_split(self) -> dict[str, Sequence[Image]]:
        """Return the images of each split by the name of the split; splits without images are left out."""
        splits = self._array_by_column["splits"][self._row_indices]
        rows = {name: self._row_indices[splits == index] for index, name in enumerate(SPLITS)}
        return {name: ImageColumns(self._array_by_column, some) for name, some in rows.items() if len(some)}

    def __len__(self) -> int:
        return len(self._row_indices)

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> ImageColumns: ...
    def __getitem__(self, index: int | slice) -> Image | ImageColumns:
        if isinstance(index, slice):
            return ImageColumns(self._array_by_column, self._row_indices[index])
        return self._build_image(int(self._row_indices[index]))

    def __iter__(self) -> Iterator[Image]:
        return map(self._build_image, self._row_indices.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def _build_image(self, row: int) -> Image:
        columns = self._array_by_column
        imgid, cocoid = int(columns["imgids"][row]), int(columns["cocoids"][row])
        first, last = int(columns["captions"][row - 1]) if row else 0, int(columns["captions"][row])
        captions = tuple(self._build_caption(caption_row, imgid) for caption_row in range(first, last))
        file, split = columns["files"][row], SPLITS[columns["splits"][row]]
        return Image(imgid, file, split, captions, None if cocoid == _NO_COCOID else cocoid)

    def _build_caption(self, row: int, imgid: int) -> Caption:
        columns, words = self._array_by_column, self._array_by_column["words"]
        first, last = columns["token_ends"][row - 1] if row else 0, columns["token_ends"][row]
        tokens = tuple(words[word] for word in columns["tokens"][first:last].tolist())
        language = columns["languages"][columns["caption_languages"][row]]
        return Caption(int(columns["sentids"][row]), imgid, columns["raws"][row], tokens, language=language)


def columns_file(dataset: Path) -> Path:
    """Return the path of the HDF5 file that stores the content of a ``dataset.json`` as arrays."""
    return dataset.with_name(f"{dataset.name}.columns.h5")


def write_columns(path: Path, sha256: str, images: Sequence[Image], attributes: Mapping[str, Any]) -> Path | None:
    """Write the content of the ``dataset.json`` at ``path``, whose SHA-256 is ``sha256``, as arrays to :func:`columns_file`.

    Returns the path of the arrays. Returns None and writes nothing if the folder is not writable, or if a caption has phrases,
    because arrays cannot store phrases.
    """
    captions = [caption for image in images for caption in image.captions]
    if any(caption.phrases for caption in captions):
        return None
    word_ids = {word: index for index, word in enumerate(dict.fromkeys(chain.from_iterable(c.tokens for c in captions)))}
    languages = list(dict.fromkeys(caption.language for caption in captions))
    tokens = (word_ids[token] for caption in captions for token in caption.tokens)
    columns = {
        "imgids": _build_array(image.imgid for image in images),
        "splits": _build_array((SPLITS.index(image.split) for image in images), np.uint8),
        "cocoids": _build_array(_NO_COCOID if image.cocoid is None else image.cocoid for image in images),
        "captions": _build_array(accumulate(len(image.captions) for image in images)),
        "sentids": _build_array(caption.sentid for caption in captions),
        "tokens": _build_array(tokens, np.int32),
        "token_ends": _build_array(accumulate(len(caption.tokens) for caption in captions)),
        "caption_languages": _build_array((languages.index(caption.language) for caption in captions), np.uint8),
        **_encode_text_column("languages", languages),
        **_encode_text_column("files", [image.file for image in images]),
        **_encode_text_column("raws", [caption.raw for caption in captions]),
        **_encode_text_column("words", list(word_ids)),
    }
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, fletcher32=bool(values.size))
        file.attrs.update({"format": COLUMNS_FORMAT, "version": COLUMNS_VERSION, "sha256": sha256, **attributes})
    with suppress(UserError):
        return write_bytes(columns_file(path), buffer.getbuffer())
    return None


def read_columns(path: Path, sha256: str) -> tuple[ImageColumns, dict[str, Any]] | None:
    """Read the images and the attributes (:data:`ATTRIBUTE_TYPES`) that :func:`write_columns` wrote.

    ``path`` is the ``dataset.json``. Returns None if the file of arrays is missing, is invalid, or does not record ``sha256``.
    """
    file = columns_file(path)
    if not file.is_file():
        return None
    try:
        with open_hdf5(file, "columns of a data set") as stored:
            wanted = {"format": COLUMNS_FORMAT, "version": COLUMNS_VERSION, "sha256": sha256}
            if any(stored.attrs.get(name) != value for name, value in wanted.items()):
                return None
            attributes = {name: stored.attrs[name] for name in ATTRIBUTE_TYPES}
            if any(not isinstance(attributes[name], kind) for name, kind in ATTRIBUTE_TYPES.items()):
                return None
            names = [*_INTEGER_COLUMNS, *(name for text in _TEXT_COLUMNS for name in (text, f"{text}_ends"))]
            arrays = {name: require_hdf5_dataset(stored, name)[()] for name in names}
    except UserError as error:
        log.warning("%s; dataset.json is parsed instead", error)
        return None
    if not _are_consistent(arrays):
        log.warning("%s: the columns contradict each other; dataset.json is parsed instead", file)
        return None
    texts: dict[str, Any] = {name: TextColumn(arrays[name], arrays[f"{name}_ends"]) for name in _TEXT_COLUMNS}
    lists = {
        name: list(map(texts.pop(name).__getitem__, range(len(arrays[f"{name}_ends"])))) for name in ("words", "languages")
    }
    columns = {**arrays, **texts, **lists}
    return ImageColumns(columns, np.arange(len(arrays["imgids"]))), attributes | {
        "has_image_files": bool(attributes["has_image_files"])
    }


def _build_array(values: Iterable[int], dtype: type[np.integer[Any]] = np.int64) -> NDArray[Any]:
    return np.fromiter(values, dtype)


def _encode_text_column(name: str, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
    encoded = [text.encode() for text in texts]
    ends = _build_array(accumulate(len(text) for text in encoded))
    return {name: np.frombuffer(b"".join(encoded), np.uint8), f"{name}_ends": ends}


def _are_consistent(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether the lengths of the arrays match and all indices and ends lie inside their arrays."""
    n_images, n_captions = len(arrays["imgids"]), len(arrays["sentids"])
    if any(values.ndim != 1 or values.dtype.kind not in "iu" for values in arrays.values()):
        return False
    lengths = {"splits": n_images, "cocoids": n_images, "captions": n_images, "files_ends": n_images}
    lengths |= {"token_ends": n_captions, "raws_ends": n_captions, "caption_languages": n_captions}
    if not n_images or any(len(arrays[name]) != length for name, length in lengths.items()):
        return False
    ends = {"captions": n_captions, "token_ends": len(arrays["tokens"])}
    ends |= {f"{name}_ends": len(arrays[name]) for name in _TEXT_COLUMNS}
    if any(not _are_ends(arrays[name], total) for name, total in ends.items()):
        return False
    most = {"splits": len(SPLITS), "tokens": len(arrays["words_ends"]), "caption_languages": len(arrays["languages_ends"])}
    return all(not len(arrays[name]) or 0 <= arrays[name].min() <= arrays[name].max() < n for name, n in most.items())


def _are_ends(ends: NDArray[Any], total: int) -> bool:
    """Return whether ``ends`` are the ends of consecutive parts of an array of ``total`` items."""
    return bool(np.all(np.diff(ends, prepend=0) >= 0)) and (int(ends[-1]) if len(ends) else 0) == total


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


def caption_counts(images: Sequence[Image]) -> NDArray[np.int64]:
    """Return the number of captions of each image, (n_images,)."""
    if isinstance(images, ImageColumns):
        return images.caption_counts
    return np.asarray([len(image.captions) for image in images], np.int64)


def coco_ids(images: Sequence[Image]) -> Ids | None:
    """Return the ids of the images in MS-COCO, (n_images,); None if an image has no such id."""
    if isinstance(images, ImageColumns):
        return images.cocoids
    cocoids = [image.cocoid for image in images if image.cocoid is not None]
    return np.asarray(cocoids, np.int64) if len(cocoids) == len(images) else None


def select_images(images: Sequence[Image], keep: NDArray[np.bool_]) -> Sequence[Image]:
    """Return the images for which ``keep`` (n_images,) is true."""
    return images.select(keep) if isinstance(images, ImageColumns) else list(compress(images, keep))


def caption_texts(images: Sequence[Image]) -> list[str]:
    """Return the text of each caption, in the order of the images."""
    if isinstance(images, ImageColumns):
        return images.raws
    return [caption.raw for image in images for caption in image.captions]


def count_words(images: Sequence[Image]) -> dict[str, int]:
    """Return the number of occurrences of each word in the captions of the images."""
    if isinstance(images, ImageColumns):
        return images.count_words()
    return dict(Counter(word for image in images for caption in image.captions for word in caption.tokens))


def caption_languages(images: Sequence[Image]) -> list[str]:
    """Return the language of each caption, in the order of the images; blank for a caption without a language."""
    if isinstance(images, ImageColumns):
        return images.caption_languages
    return [caption.language for image in images for caption in image.captions]


def count_languages(images: Sequence[Image]) -> dict[str, int]:
    """Return the number of captions of each language. Captions without a language count under ``""``."""
    return dict(Counter(caption_languages(images)))
