"""A data set: images, their captions and splits, in the layout of the Karpathy splits.

``data/<name>/dataset.json`` lies next to the folder ``images``. The file of an image is ``images/<filepath>/<filename>``;
``filepath`` may be missing.
"""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset.captions import DEFAULT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.columns import (
    ATTRIBUTE_TYPES,
    SPLITS,
    Caption,
    IdIndex,
    Ids,
    Image,
    ImageColumns,
    caption_counts,
    caption_ids,
    count_languages,
    image_ids,
    read_columns,
    select_images,
    write_columns,
)
from vse.pipeline.dataset.languages import is_language_tag
from vse.pipeline.dataset.phrases import Phrase, read_phrases
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import MAX_NAME_BYTES, FileState, InputFile, error_reason, is_path_text, is_valid_name
from vse.pipeline.files.writing import parse_json

__all__ = [
    "SPLITS",
    "Caption",
    "Dataset",
    "Image",
    "describe_splits",
    "load_dataset_file",
]
ALL_SPLITS = "all"  # stands for all splits where a command takes several
_MIN_JSON_BYTES_FOR_COLUMNS = 2**23  # the size from which a dataset.json gets a file of columns
_LOADED_DATASETS: WeakValueDictionary[tuple[Path, FileState], Dataset] = WeakValueDictionary()
_Tokeniser = Callable[[str], list[str]]


class Fold(NamedTuple):
    """The number of a fold of a cross-validation, counted from 0, and the number of folds."""

    number: int
    n_folds: int


def parse_fold(text: str) -> Fold | None:
    """Return the fold that a text such as ``0 of 5`` describes; None if it describes none."""
    found = re.fullmatch(r"(\d{1,9}) of (\d{1,9})", text)
    fold = Fold(*map(int, found.groups())) if found else None
    return fold if fold is not None and fold.number < fold.n_folds else None


@dataclass(frozen=True)
class Dataset:
    """A data set. ``path`` is the file ``dataset.json``; ``images`` are all images in the order of the file.

    ``has_image_files`` is false for a data set of imported features. ``sha256`` is the SHA-256 of the file, or empty if the
    data set was not read from a file. ``tokeniser`` names the tokeniser for captions without tokens and for new text.

    ``parent`` is the name of a data set with the same images, whose caches of image features this data set reads. It is empty
    for most data sets. A fold of a cross-validation (:mod:`vse.pipeline.dataset.folds`) has a parent with other splits, and a
    ``fold``, such as ``0 of 5``. A data set with further captions (:mod:`vse.pipeline.imports.added_captions`) has a parent
    with fewer captions.
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
    def listed_files(self) -> list[Path]:
        """The files and folders, besides ``path``, whose change makes this a different data set."""
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
        """Return this data set with the images of ``splits`` alone. Raises UserError if a split has no images."""
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
        """Return, for each caption id, the index of the image in ``images`` (n,) and of the caption in the image (n,).

        The index of the image is -1 for an unknown id.
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
        return np.cumsum(caption_counts(self.images))

    def split(self, name: str) -> Sequence[Image]:
        """Return the images of a split. Raises UserError if the split has no images."""
        if name not in self.splits:
            hint = f'; give some of its images "split": "{name}"' if name in SPLITS else ""
            raise UserError(f"{self.path}: no images in split {name!r}{did_you_mean(name, self.splits)}{hint}")
        return self.splits[name]

    def parse_splits(self, names: str) -> list[str]:
        """Return the splits that a text names: one (``test``), several (``train,val``) or ``all`` that have images.

        Raises UserError if a split has no images.
        """
        if names == ALL_SPLITS:
            return list(self.splits)
        found = list(dict.fromkeys(name.strip() for name in names.split(",")))
        for name in found:
            self.split(name)
        return found


def load_dataset_file(path: Path) -> Dataset:
    """Read and check a ``dataset.json``. The second read of a large file loads a copy in arrays instead.

    Further calls return the same object while the object is in use and the file has not changed. Raises UserError, which
    names the image or caption, if the content is invalid: duplicate ids or files, captions with the id of another image,
    empty captions, unknown splits or tokenisers, image files outside the folder ``images``, phrases beyond the caption.
    """
    file, now = InputFile(path), time.time_ns()
    loaded = _LOADED_DATASETS.get((path, file.state))
    if loaded is not None:
        return loaded
    dataset = _read_dataset(path, file)
    if file.state.detects_writes_after(now) and not file.has_changed:
        _LOADED_DATASETS[path, file.state] = dataset
    return dataset


def _read_dataset(path: Path, file: InputFile) -> Dataset:
    large = file.size >= _MIN_JSON_BYTES_FOR_COLUMNS
    if large and (columns := read_columns(path, file.sha256)):
        images, attributes = columns
        return Dataset(path=path, images=images, sha256=file.sha256, **attributes)
    with _pause_garbage_collection():
        dataset = _parse_dataset(path, file)
    if large:
        attributes = {name: getattr(dataset, name) for name in ATTRIBUTE_TYPES}
        write_columns(path, dataset.sha256, dataset.images, attributes)
    return dataset


def _parse_dataset(path: Path, file: InputFile) -> Dataset:
    try:
        content = parse_json(path, file.read(), _intern_tokens)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise UserError(f"{path}: not a data set; it needs {{'dataset': ..., 'images': [...]}}")
    name = content.get("dataset")
    if not isinstance(name, str) or not is_valid_name(name):
        raise UserError(
            f"{path}: 'dataset' must name the data set; the name becomes a part of file names: at most {MAX_NAME_BYTES} bytes"
            ", without slashes, control characters or a dot in front"
        )
    tokeniser = content.get("tokeniser", DEFAULT_TOKENISER)
    tokenise = find_tokeniser(tokeniser, path)
    try:
        entries = content.pop("images")[::-1]
        images = tuple(_parse_image(path, entries.pop(), tokenise) for _ in range(len(entries)))  # frees each entry after use
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: a field of an image or sentence is missing or invalid: {error_reason(error)}") from None
    if not images:
        raise UserError(f"{path}: no images")
    _check_unique(path, "imgid", (image.imgid for image in images))
    _check_unique(path, "image file", (image.file for image in images))
    _check_unique(path, "sentid", (caption.sentid for image in images for caption in image.captions))
    fold, parent = content.get("fold", ""), content.get("parent", "")
    if not isinstance(parent, str) or (fold != "" and not (isinstance(fold, str) and parent and parse_fold(fold))):
        raise UserError(f"{path}: a fold needs the keys 'fold', such as \"0 of 5\", and 'parent', the name of a data set")
    return Dataset(name, path, images, bool(content.get("pictures", True)), file.sha256, tokeniser, fold, parent)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Switch the garbage collector off in the block, because it would visit millions of new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def select_languages(images: Sequence[Image], languages: Sequence[str], path: Path) -> Sequence[Image]:
    """Return the images with the captions in ``languages`` only. Without ``languages``, the images are unchanged.

    Raises UserError, which begins with ``path``, if a language has no caption.
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
        counts = caption_counts(images)
        n_captions, least, most = int(counts.sum()), counts.min(), counts.max()
        per_image = f"{least}" if least == most else f"{least}-{most}"
        lines.append(f"  {split:8s} {len(images):7d} images {n_captions:7d} captions ({per_image} per image)")
        languages = count_languages(images)
        if list(languages) not in ([], [""]):
            counted = ", ".join(f"{n} {language or 'without a language'}" for language, n in sorted(languages.items()))
            lines[-1] += f", {counted}"
    return "\n".join(lines)


def _intern_tokens(content: dict[str, Any]) -> dict[str, Any]:
    """Store equal tokens only once in memory, because COCO has 6.5 million tokens but only 30,000 distinct words."""
    tokens = content.get("tokens")
    if isinstance(tokens, list) and all(type(token) is str for token in tokens):
        content["tokens"] = [sys.intern(token) for token in tokens]
    return content


def _parse_image(path: Path, entry: Any, tokenise: _Tokeniser) -> Image:
    imgid = _read_id(entry, "imgid")
    folder, name = entry.get("filepath") or "", entry["filename"]
    if not is_path_text(folder) or not is_path_text(name) or not name:
        raise UserError(f"{path}: image {imgid}: 'filename' and 'filepath' must name a file")
    file = Path(folder, name)
    if file.is_absolute() or ".." in file.parts:
        raise UserError(f"{path}: image {imgid}: the file {str(file)!r} is outside the images folder")
    if entry["split"] not in SPLITS:
        raise UserError(f"{path}: image {imgid}: unknown split{did_you_mean(str(entry['split']), SPLITS)}")
    captions = tuple(_parse_caption(path, imgid, sentence, tokenise) for sentence in entry.get("sentences", ()))
    if "sentids" in entry and list(entry["sentids"]) != [c.sentid for c in captions]:
        raise UserError(f"{path}: image {imgid}: 'sentids' {entry['sentids']} differ from the ids of its sentences")
    cocoid = _read_id(entry, "cocoid") if entry.get("cocoid") is not None else None
    return Image(imgid, file.as_posix(), entry["split"], captions, cocoid)


def _parse_caption(path: Path, imgid: int, sentence: Any, tokenise: _Tokeniser) -> Caption:
    sentid, raw = _read_id(sentence, "sentid"), sentence["raw"]
    if not isinstance(raw, str):
        raise UserError(f"{path}: caption {sentid}: 'raw' must be a text")
    if sentence.get("imgid", imgid) != imgid:
        raise UserError(f"{path}: caption {sentid} belongs to image {imgid} but has 'imgid' {sentence['imgid']}")
    tokens = sentence["tokens"] if "tokens" in sentence else tokenise(raw)
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UserError(f"{path}: caption {sentid}: 'tokens' must be a list of words")
    if not tokens or not raw.strip():
        raise UserError(f"{path}: caption {sentid} of image {imgid} is empty")
    phrases = read_phrases(sentence.get("phrases"), len(tokens), f"{path}: caption {sentid}")
    language = sentence.get("language", "")
    if language != "" and not is_language_tag(language):
        raise UserError(f"{path}: caption {sentid}: 'language' must be a tag such as en, de or pt-BR")
    return Caption(sentid, imgid, raw, tuple(tokens), phrases, language)


def _read_id(entry: Any, key: str) -> int:
    value = entry[key]
    if type(value) is not int:
        raise ValueError(f"{key} must be an integer")
    return value


def _check_unique(path: Path, what: str, values: Iterable[int | str]) -> None:
    seen: set[int | str] = set()
    for value in values:
        if value in seen:
            raise UserError(f"{path}: duplicate {what} {value}")
        seen.add(value)


class Mention(NamedTuple):
    """A phrase with its caption and image.

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
    """Return the distinct texts of phrases in order of appearance; indices in this list are ids in feature caches."""
    return list(dict.fromkeys(mention.text for mention in list_mentions(dataset)))
