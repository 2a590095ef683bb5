"""Images and captions of a data set as columns, which lie beside a large ``dataset.json`` so that it is parsed once.

``dataset.json.columns.h5`` is made from ``dataset.json`` after that was checked, and has its SHA-256: of another one it is
not read, but written again. Deleting it does no harm. HDF5 checks the sums of what it reads from it.

Where ids stand: rows by id, by binary search, so that nothing is made for ids that nobody asks for.

An image of a data set with its captions.

Ids and counts of images and of their captions as arrays; of columns they are read without making an image.
"""

from __future__ import annotations

import logging
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


class IdRows:
    """Rows of ``ids`` (n,), none of which comes twice."""

    def __init__(self, ids: Ids) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]

    def of(self, wanted: Ids) -> NDArray[np.int64]:
        """The row of each id that is wanted, (n_wanted,); -1 for one that is not there."""
        if not len(self._sorted):
            return np.full(len(wanted), -1, np.int64)
        places = np.searchsorted(self._sorted, wanted).clip(max=len(self._sorted) - 1)
        rows: NDArray[np.int64] = np.where(self._sorted[places] == wanted, self._order[places], -1)
        return rows


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


log = logging.getLogger(__name__)
FORMAT = "vse-dataset-columns"
VERSION = 1  # of the columns, and of all that reading dataset.json checks and makes of it: its tokenisers, too
_NO_NUMBER = np.iinfo(np.int64).min  # JSON of ours has no such integer
_ATTRIBUTES = {"name": str, "pictures": np.bool_, "tokeniser": str}
# Texts are one array of bytes and the ends of each, lists one array of items and the ends of each.
_COLUMNS = ("imgids", "splits", "cocoids", "captions", "sentids", "tokens", "token_ends")
_TEXTS = ("files", "raws", "words")


class Texts:
    """Texts, made where they are asked for from their bytes in UTF-8 and where each ends."""

    def __init__(self, content: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.content, self.ends = content, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        start = self.ends[number - 1] if number else 0
        return str(self.content.data[start : self.ends[number]], "utf-8")


class ImageColumns(Sequence[Image]):
    """The images of a data set, or some of them, made where they are asked for; equal to any sequence of equal images."""

    def __init__(self, columns: Mapping[str, Any], rows: NDArray[np.int64]) -> None:
        self._columns, self._rows = columns, rows

    @property
    def imgids(self) -> NDArray[np.int64]:
        """Their ids."""
        return self._of_rows("imgids")

    @property
    def cocoids(self) -> NDArray[np.int64] | None:
        """Their numbers in MS-COCO, if all have one."""
        numbers = self._of_rows("cocoids")
        return None if np.any(numbers == _NO_NUMBER) else numbers

    @property
    def caption_counts(self) -> NDArray[np.int64]:
        """How many captions each has."""
        counts: NDArray[np.int64] = np.diff(self._columns["captions"], prepend=0)[self._rows]
        return counts

    @property
    def sentids(self) -> NDArray[np.int64]:
        """The ids of their captions."""
        counts = self.caption_counts
        before = np.cumsum(counts) - counts
        numbers = np.repeat(self._of_rows("captions") - counts - before, counts) + np.arange(counts.sum())
        ids: NDArray[np.int64] = self._columns["sentids"][numbers]
        return ids

    def where(self, keep: NDArray[np.bool_]) -> ImageColumns:
        """Those of them that are to be kept."""
        return ImageColumns(self._columns, self._rows[keep])

    def _of_rows(self, name: str) -> NDArray[np.int64]:
        values: NDArray[np.int64] = self._columns[name][self._rows]
        return values

    def by_split(self) -> dict[str, Sequence[Image]]:
        """Those of each split that has any, in their order."""
        splits = self._columns["splits"][self._rows]
        rows = {name: self._rows[splits == number] for number, name in enumerate(SPLITS)}
        return {name: ImageColumns(self._columns, some) for name, some in rows.items() if len(some)}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, number: int) -> Image: ...
    @overload
    def __getitem__(self, number: slice) -> ImageColumns: ...
    def __getitem__(self, number: int | slice) -> Image | ImageColumns:
        if isinstance(number, slice):
            return ImageColumns(self._columns, self._rows[number])
        return self._image(int(self._rows[number]))

    def __iter__(self) -> Iterator[Image]:
        return map(self._image, self._rows.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def _image(self, row: int) -> Image:
        columns = self._columns
        imgid, cocoid = int(columns["imgids"][row]), int(columns["cocoids"][row])
        first, last = int(columns["captions"][row - 1]) if row else 0, int(columns["captions"][row])
        captions = tuple(self._caption(number, imgid) for number in range(first, last))
        file, split = columns["files"][row], SPLITS[columns["splits"][row]]
        return Image(imgid, file, split, captions, None if cocoid == _NO_NUMBER else cocoid)

    def _caption(self, number: int, imgid: int) -> Caption:
        columns, words = self._columns, self._columns["words"]
        first, last = columns["token_ends"][number - 1] if number else 0, columns["token_ends"][number]
        tokens = tuple(words[word] for word in columns["tokens"][first:last].tolist())
        return Caption(int(columns["sentids"][number]), imgid, columns["raws"][number], tokens)


def columns_file(dataset: Path) -> Path:
    """Where the columns of a ``dataset.json`` lie."""
    return dataset.with_name(f"{dataset.name}.columns.h5")


def write_columns(path: Path, sha256: str, images: Sequence[Image], attributes: Mapping[str, Any]) -> Path | None:
    """Write the columns of the ``dataset.json`` of this SHA-256 at ``path``; returns the file.

    None if there is none: because the folder cannot be written to, or because captions have phrases, which are no columns.
    """
    captions = [caption for image in images for caption in image.captions]
    if any(caption.phrases for caption in captions):
        return None
    numbers = {word: number for number, word in enumerate(dict.fromkeys(chain.from_iterable(c.tokens for c in captions)))}
    tokens = (numbers[token] for caption in captions for token in caption.tokens)
    columns = {
        "imgids": _array(image.imgid for image in images),
        "splits": _array((SPLITS.index(image.split) for image in images), np.uint8),
        "cocoids": _array(_NO_NUMBER if image.cocoid is None else image.cocoid for image in images),
        "captions": _array(accumulate(len(image.captions) for image in images)),
        "sentids": _array(caption.sentid for caption in captions),
        "tokens": _array(tokens, np.int32),
        "token_ends": _array(accumulate(len(caption.tokens) for caption in captions)),
        **_text_columns("files", [image.file for image in images]),
        **_text_columns("raws", [caption.raw for caption in captions]),
        **_text_columns("words", list(numbers)),
    }
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, fletcher32=bool(values.size))
        file.attrs.update({"format": FORMAT, "version": VERSION, "sha256": sha256, **attributes})
    with suppress(UserError):
        return write_bytes(columns_file(path), buffer.getbuffer())
    return None


def read_columns(path: Path, sha256: str) -> tuple[ImageColumns, dict[str, Any]] | None:
    """The images and attributes of the ``dataset.json`` of this SHA-256 at ``path``; None without columns that are good."""
    file = columns_file(path)
    if not file.is_file():
        return None
    try:
        with open_hdf5(file, "columns of a data set") as stored:
            wanted = {"format": FORMAT, "version": VERSION, "sha256": sha256}
            if any(stored.attrs.get(name) != value for name, value in wanted.items()):
                return None
            attributes = {name: stored.attrs[name] for name in _ATTRIBUTES}
            if any(not isinstance(attributes[name], kind) for name, kind in _ATTRIBUTES.items()):
                return None
            arrays = {name: require_hdf5_dataset(stored, name)[()] for name in (*_COLUMNS, *_names_of_texts())}
    except UserError as error:
        log.warning("%s; dataset.json is parsed instead", error)
        return None
    if not _fit_together(arrays):
        log.warning("%s: its columns do not fit together; dataset.json is parsed instead", file)
        return None
    texts = {name: Texts(arrays[name], arrays[f"{name}_ends"]) for name in _TEXTS}
    words = texts.pop("words")
    columns = {**arrays, **texts, "words": [words[number] for number in range(len(words))]}
    return ImageColumns(columns, np.arange(len(arrays["imgids"]))), attributes | {"pictures": bool(attributes["pictures"])}


def _names_of_texts() -> list[str]:
    return [name for text in _TEXTS for name in (text, f"{text}_ends")]


def _array(values: Iterable[int], dtype: type[np.integer[Any]] = np.int64) -> NDArray[Any]:
    return np.fromiter(values, dtype)


def _text_columns(name: str, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
    encoded = [text.encode() for text in texts]
    ends = _array(accumulate(len(text) for text in encoded))
    return {name: np.frombuffer(b"".join(encoded), np.uint8), f"{name}_ends": ends}


def _fit_together(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Whether the columns are as long as each other, and nothing in them points beyond another one."""
    n_images, n_captions = len(arrays["imgids"]), len(arrays["sentids"])
    if any(values.ndim != 1 or values.dtype.kind not in "iu" for values in arrays.values()):
        return False
    lengths = {"splits": n_images, "cocoids": n_images, "captions": n_images, "files_ends": n_images}
    lengths |= {"token_ends": n_captions, "raws_ends": n_captions}
    if not n_images or any(len(arrays[name]) != length for name, length in lengths.items()):
        return False
    ends = {"captions": n_captions, "token_ends": len(arrays["tokens"])}
    ends |= {f"{name}_ends": len(arrays[name]) for name in _TEXTS}
    if any(not _are_ends(arrays[name], total) for name, total in ends.items()):
        return False
    most = {"splits": len(SPLITS), "tokens": len(arrays["words_ends"])}
    return all(not len(arrays[name]) or 0 <= arrays[name].min() <= arrays[name].max() < n for name, n in most.items())


def _are_ends(ends: NDArray[Any], total: int) -> bool:
    """Whether these are where consecutive parts of so many items end."""
    return bool(np.all(np.diff(ends, prepend=0) >= 0)) and (int(ends[-1]) if len(ends) else 0) == total


Numbers = NDArray[np.int64]


def image_ids(images: Sequence[Image]) -> Numbers:
    """The ids of the images (n_images,)."""
    if isinstance(images, ImageColumns):
        return images.imgids
    return np.asarray([image.imgid for image in images], np.int64)


def caption_ids(images: Sequence[Image]) -> Numbers:
    """The ids of their captions (n_captions,), in their order."""
    if isinstance(images, ImageColumns):
        return images.sentids
    return np.asarray([caption.sentid for image in images for caption in image.captions], np.int64)


def caption_counts(images: Sequence[Image]) -> Numbers:
    """How many captions each image has (n_images,)."""
    if isinstance(images, ImageColumns):
        return images.caption_counts
    return np.asarray([len(image.captions) for image in images], np.int64)


def coco_ids(images: Sequence[Image]) -> Numbers | None:
    """The images' numbers in MS-COCO (n_images,), if all have one."""
    if isinstance(images, ImageColumns):
        return images.cocoids
    numbers = [image.cocoid for image in images if image.cocoid is not None]
    return np.asarray(numbers, np.int64) if len(numbers) == len(images) else None


def images_where(images: Sequence[Image], keep: NDArray[np.bool_]) -> Sequence[Image]:
    """The images that ``keep`` (n_images,) is true of."""
    return images.where(keep) if isinstance(images, ImageColumns) else list(compress(images, keep))
