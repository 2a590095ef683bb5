"""A data set: images, their captions and splits, in the layout of the Karpathy splits or as columns of a parquet file.

``data/<name>/dataset.json`` or ``dataset.parquet`` lies next to the folder ``images``. The file of an image is
``images/<filepath>/<filename>``; ``filepath`` may be missing. The first reader of a large ``dataset.json`` checks the content
and writes ``dataset.json.columns.parquet``, a copy with the columns of ``dataset.parquet``. Later readers read the copy.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset import SPLITS
from vse.pipeline.dataset.captions import DEFAULT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.columns import (
    IdIndex,
    Ids,
    ImageColumns,
    build_tables,
    caption_ids,
    count_captions_per_image,
    count_languages,
    image_ids,
    select_images,
)
from vse.pipeline.dataset.images import Caption, Image, Phrase, parse_images, pause_garbage_collection
from vse.pipeline.dataset.parquet_checks import check_parquet_columns
from vse.pipeline.dataset.parquet_io import ParquetColumns, ParquetColumnsWriter
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import (
    MAX_NAME_BYTES,
    FileState,
    InputFile,
    changed_file_error,
    is_valid_name,
)
from vse.pipeline.files.known_hashes import remember_sha256, set_remembered_sha256
from vse.pipeline.files.writing import open_atomic, parse_json, read_json

__all__ = [
    "SPLITS",
    "Caption",
    "Dataset",
    "Image",
    "describe_splits",
    "load_dataset_file",
]
ALL_SPLITS = "all"  # the value of an option that stands for all splits
MIN_LARGE_JSON_BYTES = 2**23  # a dataset.json of this size or more gets a parquet copy, and its SHA-256 is remembered
_CHECK_VERSION = 3  # to be increased if the checks of data sets, the columns or the tokenisers change
_LOADED_DATASETS: WeakValueDictionary[tuple[Path, FileState], Dataset] = WeakValueDictionary()
log = logging.getLogger(__name__)


class Fold(NamedTuple):
    """The number of a fold of a cross-validation, counted from 0, and the number of folds."""

    number: int
    n_folds: int


def parse_fold(text: str) -> Fold | None:
    """Return the fold that a text such as ``0 of 5`` describes; None for any other text."""
    found = re.fullmatch(r"(\d{1,9}) of (\d{1,9})", text)
    fold = Fold(*map(int, found.groups())) if found else None
    return fold if fold is not None and fold.number < fold.n_folds else None


@dataclass(frozen=True)
class Dataset:
    """A data set, read from the file ``path``: a ``dataset.json`` or ``dataset.parquet``. ``images`` are in file order.

    ``has_image_files`` is false if only image features were imported. ``sha256`` is the SHA-256 of the file, or empty if the
    data set was not read from a file. ``tokeniser`` names the tokeniser for captions without tokens and for queries.

    ``parent`` is the name of a data set that has all images of this data set; this data set reads the caches of image features
    of its parent. A data set without a parent has an empty text. A fold of a cross-validation
    (:mod:`vse.pipeline.dataset.splits_and_noise`) has a parent with other splits, and a ``fold``, such as ``0 of 5``. A data
    set with added captions (:mod:`vse.pipeline.imports.added_captions`) has a parent with fewer captions.
    """

    name: str
    path: Path
    images: Sequence[Image]
    has_image_files: bool = True
    sha256: str = ""
    tokeniser: str = DEFAULT_TOKENISER
    fold: str = ""
    parent: str = ""

    def image_path(self, image: Image) -> Path:
        return self.path.parent / "images" / image.file

    @property
    def input_paths(self) -> list[Path]:
        """The files and folders of the data set. No output may replace them."""
        return [self.path, self.path.parent / "images"]

    @property
    def content_paths(self) -> list[Path]:
        """The files besides ``path`` that determine the content. The list is empty, except for a folder of photos."""
        return []

    @cached_property
    def splits(self) -> dict[str, Sequence[Image]]:
        """The images of each split in file order; splits without images are left out."""
        if isinstance(self.images, ImageColumns):
            return self.images.group_by_split()
        by_split: dict[str, list[Image]] = {}
        for image in self.images:
            by_split.setdefault(image.split, []).append(image)
        return {split: tuple(by_split[split]) for split in SPLITS if split in by_split}

    def keep_splits(self, splits: Sequence[str]) -> Dataset:
        """Return a copy of this data set with only the images of ``splits``. Raises UserError if a split has no images."""
        if missing := [split for split in splits if split not in self.splits]:
            raise UserError(f"{self.path}: has no images in split {missing[0]!r}; it has {', '.join(self.splits)}")
        kept = np.concatenate([image_ids(self.splits[split]) for split in splits])
        return replace(self, images=select_images(self.images, np.isin(image_ids(self.images), kept)))

    def find_image(self, imgid: int) -> Image | None:
        """Return the image with this id; None without such an image."""
        row = int(self.find_image_rows(np.asarray([imgid]))[0])
        return None if row < 0 else self.images[row]

    def find_image_rows(self, imgids: Ids) -> NDArray[np.int64]:
        """Return the index in ``images`` of each image id, (n,); -1 for an unknown id."""
        return self._image_index.find_rows(imgids)

    def find_caption_rows(self, sentids: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return two arrays (n,) for n caption ids: the index of the image, and the index of the caption in this image.

        Both are -1 for an unknown id.
        """
        rows = self._caption_index.find_rows(sentids)
        images = np.searchsorted(self._caption_ends, rows, side="right")
        captions = rows - np.concatenate([[0], self._caption_ends])[images]
        return np.where(rows < 0, -1, images), captions

    @cached_property
    def _image_index(self) -> IdIndex:
        return IdIndex(image_ids(self.images))

    @cached_property
    def _caption_index(self) -> IdIndex:
        return IdIndex(caption_ids(self.images))

    @cached_property
    def _caption_ends(self) -> NDArray[np.int64]:
        return np.cumsum(count_captions_per_image(self.images))

    def split(self, name: str) -> Sequence[Image]:
        """Return the images of a split. Raises UserError if the split has no images."""
        if name not in self.splits:
            hint = f'; give some of its images "split": "{name}"' if name in SPLITS else ""
            raise UserError(f"{self.path}: no images in split {name!r}{did_you_mean(name, self.splits)}{hint}")
        return self.splits[name]

    def parse_splits(self, names: str) -> list[str]:
        """Return the splits in a text: one (``test``), several (``train,val``), or ``all`` for every split that has images.

        Raises UserError if a named split has no images.
        """
        if names == ALL_SPLITS:
            return list(self.splits)
        found = list(dict.fromkeys(name.strip() for name in names.split(",")))
        for name in found:
            self.split(name)
        return found


def load_dataset_file(path: Path) -> Dataset:
    """Read and check a data set, ``dataset.json`` or ``dataset.parquet``. The texts of a large data set are read on access.

    Further calls return the same object while the object is in use and the file has not changed. Raises UserError, which
    names the image or caption, if the content is invalid: duplicate ids or files, captions with the id of another image,
    empty captions, unknown splits or tokenisers, image files outside the folder ``images``, phrases beyond the caption. The
    existence of image files is not checked.
    """
    file, now = InputFile(path), time.time_ns()
    loaded = _LOADED_DATASETS.get((path, file.state))
    if loaded is not None:
        return loaded
    dataset = _read_parquet(path, file) if path.suffix == ".parquet" else _read_json(path, file)
    if file.state.detects_writes_after(now) and not file.has_changed:
        _LOADED_DATASETS[path, file.state] = dataset
    return dataset


def find_dataset_file(folder: Path) -> Path:
    """Return the path of the data set in a folder: ``dataset.parquet`` if only this file exists, else ``dataset.json``."""
    parquet, usual = folder / "dataset.parquet", folder / "dataset.json"
    return parquet if parquet.is_file() and not usual.exists() else usual


def read_dataset_head(dataset_file: Path) -> dict[str, Any]:
    """Return the head of a data set: all keys of ``dataset.json`` besides ``images``, such as ``dataset`` and ``tokeniser``.

    The metadata of a ``dataset.parquet`` have the same keys.
    """
    if dataset_file.suffix == ".parquet":
        return ParquetColumns(InputFile(dataset_file)).head
    dataset = load_dataset_file(dataset_file)
    if isinstance(dataset.images, ImageColumns):  # the parquet copy has the same keys as the large file
        return ParquetColumns(dataset.images.input_file).head
    return {key: value for key, value in read_json(dataset_file).items() if key != "images"}


def parquet_copy_path(path: Path) -> Path:
    """Return the path of the parquet copy of a large ``dataset.json``."""
    return path.with_name(f"{path.name}.columns.parquet")


def _read_parquet(path: Path, file: InputFile) -> Dataset:
    columns = _open_and_check_columns(file)
    return Dataset(path=path, images=ImageColumns(columns), sha256=file.sha256, **_parse_head(path, columns.head))


def _open_and_check_columns(file: InputFile) -> ParquetColumns:
    """Open a parquet file of a data set. Check all values, unless the file has not changed since its last check."""
    if not set_remembered_sha256(file, _CHECK_VERSION):
        check_parquet_columns(file)
        if file.has_changed:
            raise changed_file_error(file.path)
        remember_sha256(file, _CHECK_VERSION)
    return ParquetColumns(file)


def remember_checks(dataset: Dataset) -> None:
    """Remember that a loaded data set is valid, so that the next command need not check its file again.

    Call this function for a file that this program has just written. :func:`load_dataset_file` does not remember a new file,
    because another program might still write to it.
    """
    if isinstance(dataset.images, ImageColumns):
        remember_sha256(dataset.images.input_file, _CHECK_VERSION)
        if dataset.images.input_file.path != dataset.path:
            remember_sha256(InputFile(dataset.path))


def _read_json(path: Path, file: InputFile) -> Dataset:
    if file.size < MIN_LARGE_JSON_BYTES:
        return _parse_dataset(path, file)[0]
    if not set_remembered_sha256(file):
        remember_sha256(file)
    if (dataset := _read_parquet_copy(path, file.sha256)) is not None:
        return dataset
    with pause_garbage_collection():
        dataset, head = _parse_dataset(path, file)
    write_parquet_copy(path, dataset.sha256, head, build_tables(dataset.images))
    return dataset


def _read_parquet_copy(path: Path, sha256: str) -> Dataset | None:
    """Return the data set from the parquet copy of the file ``path``, whose SHA-256 is ``sha256``.

    Returns None if the copy is missing or invalid, or if it was made from a file with another SHA-256.
    """
    copy = parquet_copy_path(path)
    if not copy.is_file():
        return None
    try:
        columns = _open_and_check_columns(InputFile(copy))
        if columns.source_version != f"{sha256} {_CHECK_VERSION}":
            return None
        return Dataset(path=path, images=ImageColumns(columns), sha256=sha256, **_parse_head(copy, columns.head))
    except UserError as error:
        log.warning("%s; %s is parsed instead", error, path.name)
        return None


def write_parquet_copy(path: Path, sha256: str, head: dict[str, Any], tables: Iterable[Any]) -> None:
    """Write a parquet copy of the ``dataset.json`` at ``path``. If the copy cannot be written, no error is raised.

    ``sha256`` is the hash of the ``dataset.json``, ``head`` has its keys besides ``images``, and ``tables`` yields its images
    as tables (pyarrow).
    """
    with suppress(UserError), open_atomic(parquet_copy_path(path)) as stream:
        writer = ParquetColumnsWriter(stream)
        for table in tables:
            writer.write(table)
        writer.close(head, f"{sha256} {_CHECK_VERSION}")


def _parse_dataset(path: Path, file: InputFile) -> tuple[Dataset, dict[str, Any]]:
    """Parse a ``dataset.json``; return the data set, and the keys besides ``images``."""
    try:
        content = parse_json(path, file.read())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise UserError(f"{path}: not a data set; it needs {{'dataset': ..., 'images': [...]}}")
    head = _parse_head(path, content)
    images = parse_images(path, content.pop("images"), find_tokeniser(head["tokeniser"], path))
    return Dataset(path=path, images=images, sha256=file.sha256, **head), content


def _parse_head(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of :class:`Dataset`, such as the name, from ``content``, the keys of a ``dataset.json``.

    Raises UserError if a value in ``content`` is invalid. The message begins with ``path``, the file of the data set.
    """
    name = content.get("dataset")
    if not isinstance(name, str) or not is_valid_name(name):
        raise UserError(
            f"{path}: 'dataset' must name the data set; the name becomes a part of file names: at most {MAX_NAME_BYTES} bytes"
            ", without slashes, control characters or a dot in front"
        )
    tokeniser = content.get("tokeniser", DEFAULT_TOKENISER)
    find_tokeniser(tokeniser, path)
    fold, parent = content.get("fold", ""), content.get("parent", "")
    if not isinstance(parent, str) or (fold != "" and not (isinstance(fold, str) and parent and parse_fold(fold))):
        raise UserError(f"{path}: a fold needs the keys 'fold', such as \"0 of 5\", and 'parent', the name of a data set")
    has_image_files = bool(content.get("pictures", True))
    return {"name": name, "has_image_files": has_image_files, "tokeniser": tokeniser, "fold": fold, "parent": parent}


def select_languages(images: Sequence[Image], languages: Sequence[str], path: Path) -> Sequence[Image]:
    """Return the images with only their captions in ``languages``; an empty list of languages keeps all captions.

    Images that lose all captions are kept. Raises UserError if a language has no caption. The message begins with ``path``,
    the file of the data set.
    """
    if not languages:
        return images
    counts = count_languages(images)
    for language in languages:
        if language not in counts:
            known = [name for name in counts if name]
            reason = did_you_mean(language, known) if known else "; its captions name no language (vse-data add-captions)"
            raise UserError(f"{path}: no caption in the language {language!r}{reason}")
    wanted = set(languages)
    return [
        replace(image, captions=tuple(caption for caption in image.captions if caption.language in wanted)) for image in images
    ]


def describe_splits(dataset: Dataset) -> str:
    """Return a report with a line for each split: the numbers of images, captions, and captions per image."""
    lines = [f"{dataset.path}: data set {dataset.name!r}{'' if dataset.has_image_files else ', without image files'}"]
    for split, images in dataset.splits.items():
        counts = count_captions_per_image(images)
        n_captions, least, most = int(counts.sum()), counts.min(), counts.max()
        per_image = f"{least}" if least == most else f"{least}-{most}"
        lines.append(f"  {split:8s} {len(images):7d} images {n_captions:7d} captions ({per_image} per image)")
        languages = count_languages(images)
        if list(languages) not in ([], [""]):
            counted = ", ".join(f"{n} {language or 'without a language'}" for language, n in sorted(languages.items()))
            lines[-1] += f", {counted}"
    return "\n".join(lines)


class Mention(NamedTuple):
    """A phrase with the caption and the image to which it belongs.

    ``phrase_id`` is the index of the phrase among all phrases of the data set, in the order of ``dataset.json``. ``text`` is
    the tokens of the phrase in lower case, separated by blanks.
    """

    phrase_id: int
    image: Image
    caption: Caption
    phrase: Phrase
    text: str


def list_mentions(dataset: Dataset) -> list[Mention]:
    """Return all phrases of a data set, in the order of ``dataset.json``."""
    places = ((image, caption, phrase) for image in dataset.images for caption in image.captions for phrase in caption.phrases)
    return [
        Mention(phrase_id, image, caption, phrase, " ".join(caption.tokens[phrase.start : phrase.stop]).lower())
        for phrase_id, (image, caption, phrase) in enumerate(places)
    ]


def list_phrase_texts(dataset: Dataset) -> list[str]:
    """Return the distinct texts of phrases in order of appearance. The id of a text in feature caches is its index here."""
    return list(dict.fromkeys(mention.text for mention in list_mentions(dataset)))
