"""A data set: images, their captions and splits, in the layout of the Karpathy splits.

``data/<name>/dataset.json`` lies beside the folder ``images``; an image's file is
``images/<filepath>/<filename>``, where ``filepath`` may be missing.

All phrases of a data set in one list, and their different texts.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset.captions import UNNAMED, tokeniser_named
from vse.pipeline.dataset.columns import (
    SPLITS,
    Caption,
    IdRows,
    Ids,
    Image,
    ImageColumns,
    caption_counts,
    caption_ids,
    image_ids,
    read_columns,
    write_columns,
)
from vse.pipeline.dataset.phrases import Phrase, read_phrases
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import LONGEST_NAME, FileState, InputFile, error_reason, is_name, is_path
from vse.pipeline.files.writing import parse_json

__all__ = [
    "SPLITS",
    "Caption",
    "Dataset",
    "Image",
    "count_splits",
    "load_dataset_file",
    "missing_images",
]
_LARGE = 2**23  # bytes of a dataset.json, from which on its columns are kept beside it
_HELD: WeakValueDictionary[tuple[Path, FileState], Dataset] = WeakValueDictionary()
_Tokeniser = Callable[[str], list[str]]


@dataclass(frozen=True)
class Dataset:
    """All images of ``dataset.json`` in file order; ``path`` is that file.

    ``pictures`` is false if there are no image files, because the features were imported; ``sha256`` is that of the file's
    bytes, if it was read from a file. ``tokeniser`` cuts captions without tokens, and new text, into words.
    """

    name: str
    path: Path
    images: Sequence[Image]
    pictures: bool = True
    sha256: str = ""
    tokeniser: str = UNNAMED

    def image_path(self, image: Image) -> Path:
        """Path of the image's file."""
        return self.path.parent / "images" / image.file

    @cached_property
    def splits(self) -> dict[str, Sequence[Image]]:
        """Images by split, in file order; only splits that have images."""
        if isinstance(self.images, ImageColumns):
            return self.images.by_split()
        by_split: dict[str, list[Image]] = {}
        for image in self.images:
            by_split.setdefault(image.split, []).append(image)
        return {split: tuple(by_split[split]) for split in SPLITS if split in by_split}

    def with_id(self, imgid: int) -> Image | None:
        """The image of this id; None if there is none."""
        row = int(self.image_rows(np.asarray([imgid]))[0])
        return None if row < 0 else self.images[row]

    def image_rows(self, imgids: Ids) -> NDArray[np.int64]:
        """For each of some ids the row of its image (n,) among ``images``; -1 where there is none."""
        return self._image_rows.of(imgids)

    def caption_rows(self, sentids: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each of some caption ids the row of its image, -1 where there is no such caption, and its number there."""
        rows = self._caption_rows.of(sentids)
        images = np.searchsorted(self._caption_ends, rows, side="right")
        numbers = rows - np.concatenate([[0], self._caption_ends])[images]
        return np.where(rows < 0, -1, images), numbers

    @cached_property
    def _image_rows(self) -> IdRows:
        return IdRows(image_ids(self.images))

    @cached_property
    def _caption_rows(self) -> IdRows:
        return IdRows(caption_ids(self.images))

    @cached_property
    def _caption_ends(self) -> NDArray[np.int64]:
        return np.cumsum(caption_counts(self.images))

    def split(self, name: str) -> Sequence[Image]:
        """Images of one split; :class:`UserError` if there is none."""
        if name not in self.splits:
            hint = f'; give some of its images "split": "{name}"' if name in SPLITS else ""
            raise UserError(f"{self.path}: no images in split {name!r}{did_you_mean(name, self.splits)}{hint}")
        return self.splits[name]


def load_dataset_file(path: Path) -> Dataset:
    """Read and check ``dataset.json``; of a large one that was read before, the columns that lie beside it since then.

    As long as somebody holds what was read, and the file stays as it is, that is what is returned.

    Errors name the image or sentence: a duplicate id or file, a caption of another image or of none,
    an empty caption, an unknown split or tokeniser, an image file outside the ``images`` folder, a phrase outside its caption.
    """
    file, now = InputFile(path), time.time_ns()
    held = _HELD.get((path, file.state))
    if held is not None:
        return held
    dataset = _read(path, file)
    if file.state.is_settled(now) and not file.has_changed:
        _HELD[path, file.state] = dataset
    return dataset


def _read(path: Path, file: InputFile) -> Dataset:
    large = file.size >= _LARGE
    if large and (columns := read_columns(path, file.sha256)):
        images, attributes = columns
        return Dataset(path=path, images=images, sha256=file.sha256, **attributes)
    with _no_collection():
        dataset = _parsed(path, file)
    if large:
        attributes = {"name": dataset.name, "pictures": dataset.pictures, "tokeniser": dataset.tokeniser}
        write_columns(path, dataset.sha256, dataset.images, attributes)
    return dataset


def _parsed(path: Path, file: InputFile) -> Dataset:
    try:
        content = parse_json(path, file.read(), _share_words)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise UserError(f"{path}: not a data set; it needs {{'dataset': ..., 'images': [...]}}")
    name = content.get("dataset")
    if not isinstance(name, str) or not is_name(name):
        raise UserError(
            f"{path}: 'dataset' must name the data set; the name becomes a part of file names: at most {LONGEST_NAME} bytes, "
            "without slashes, control characters or a dot in front"
        )
    tokeniser = content.get("tokeniser", UNNAMED)
    cut = tokeniser_named(tokeniser, path)
    try:
        entries = content.pop("images")[::-1]
        images = tuple(_image(path, entries.pop(), cut) for _ in range(len(entries)))  # each entry is freed once it is read
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: an image or sentence lacks a field or has a wrong one: {error_reason(error)}") from None
    if not images:
        raise UserError(f"{path}: no images")
    _unique(path, "imgid", (image.imgid for image in images))
    _unique(path, "image file", (image.file for image in images))
    _unique(path, "sentid", (caption.sentid for image in images for caption in image.captions))
    return Dataset(name, path, images, bool(content.get("pictures", True)), file.sha256, tokeniser)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No search for garbage: millions of objects that stay are made, and it would look at them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def count_splits(dataset: Dataset) -> str:
    """A line per split: images, captions, captions per image."""
    lines = [f"{dataset.path}: data set {dataset.name!r}{'' if dataset.pictures else ', without image files'}"]
    for split, images in dataset.splits.items():
        counts = sorted({len(image.captions) for image in images})
        n_captions = sum(len(image.captions) for image in images)
        each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        lines.append(f"  {split:8s} {len(images):7d} images {n_captions:7d} captions ({each} per image)")
    return "\n".join(lines)


def missing_images(dataset: Dataset) -> list[Path]:
    """Paths of the image files that do not exist; none are missing of a data set without image files."""
    if not dataset.pictures:
        return []
    return [path for image in dataset.images if not (path := dataset.image_path(image)).is_file()]


def _share_words(content: dict[str, Any]) -> dict[str, Any]:
    """Keep each distinct token once in memory: COCO has 6.5 million tokens and 30,000 words."""
    tokens = content.get("tokens")
    if isinstance(tokens, list) and all(type(token) is str for token in tokens):
        content["tokens"] = [sys.intern(token) for token in tokens]
    return content


def _image(path: Path, entry: Any, cut: _Tokeniser) -> Image:
    imgid = _id(entry, "imgid")
    folder, name = entry.get("filepath") or "", entry["filename"]
    if not is_path(folder) or not is_path(name) or not name:
        raise UserError(f"{path}: image {imgid}: 'filename' and 'filepath' must name a file")
    file = Path(folder, name)
    if file.is_absolute() or ".." in file.parts:
        raise UserError(f"{path}: image {imgid}: the file {str(file)!r} is not inside the images folder")
    if entry["split"] not in SPLITS:
        raise UserError(f"{path}: image {imgid}: unknown split{did_you_mean(str(entry['split']), SPLITS)}")
    captions = tuple(_caption(path, imgid, sentence, cut) for sentence in entry.get("sentences", ()))
    if "sentids" in entry and list(entry["sentids"]) != [c.sentid for c in captions]:
        raise UserError(f"{path}: image {imgid}: 'sentids' {entry['sentids']} are not its sentences' ids")
    cocoid = _id(entry, "cocoid") if entry.get("cocoid") is not None else None
    return Image(imgid, file.as_posix(), entry["split"], captions, cocoid)


def _caption(path: Path, imgid: int, sentence: Any, cut: _Tokeniser) -> Caption:
    sentid, raw = _id(sentence, "sentid"), sentence["raw"]
    if not isinstance(raw, str):
        raise UserError(f"{path}: caption {sentid}: 'raw' must be a text")
    if sentence.get("imgid", imgid) != imgid:
        raise UserError(f"{path}: caption {sentid} lies under image {imgid} but says image {sentence['imgid']}")
    tokens = sentence["tokens"] if "tokens" in sentence else cut(raw)
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UserError(f"{path}: caption {sentid}: 'tokens' must be a list of words")
    if not tokens or not raw.strip():
        raise UserError(f"{path}: caption {sentid} of image {imgid} is empty")
    phrases = read_phrases(sentence.get("phrases"), len(tokens), f"{path}: caption {sentid}")
    return Caption(sentid, imgid, raw, tuple(tokens), phrases)


def _id(entry: Any, key: str) -> int:
    value = entry[key]
    if type(value) is not int:
        raise ValueError(f"{key} must be an integer")
    return value


def _unique(path: Path, what: str, values: Iterable[int | str]) -> None:
    seen: set[int | str] = set()
    for value in values:
        if value in seen:
            raise UserError(f"{path}: duplicate {what} {value}")
        seen.add(value)


class Mention(NamedTuple):
    """A phrase where it stands: in which caption of which image.

    ``number`` is its place among all phrases of the data set in file order, from 0, and its id in every file. ``text`` is its
    tokens in lower case with blanks between them.
    """

    number: int
    image: Image
    caption: Caption
    phrase: Phrase
    text: str


def mentions(dataset: Dataset) -> list[Mention]:
    """All phrases of a data set, in the order of ``dataset.json``."""
    places = ((image, caption, phrase) for image in dataset.images for caption in image.captions for phrase in caption.phrases)
    return [
        Mention(number, image, caption, phrase, " ".join(caption.tokens[phrase.start : phrase.stop]).lower())
        for number, (image, caption, phrase) in enumerate(places)
    ]


def phrase_texts(dataset: Dataset) -> list[str]:
    """The different texts of a data set's phrases, in the order of their first appearance.

    The place of a text in this list is its id in a cache of phrases.
    """
    return list(dict.fromkeys(mention.text for mention in mentions(dataset)))
