"""An image of a data set with its captions, and the checks of the images in a ``dataset.json``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vse.pipeline.dataset import SPLITS
from vse.pipeline.dataset.languages import is_language_tag
from vse.pipeline.dataset.phrases import Phrase, read_phrases
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import error_reason, is_path_text


@dataclass(frozen=True, slots=True)
class Caption:
    """A caption of an image: its id, the id of the image, the text, the tokens, and the phrases that the data set marks.

    ``language`` is the tag of the language, such as ``en``, or an empty text if it is unknown.
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


Tokeniser = Callable[[str], list[str]]


def parse_images(path: Path, entries: list[Any], tokenise: Tokeniser) -> tuple[Image, ...]:
    """Return the images in ``entries``, the list ``images`` of the file ``path``. The list is emptied to save memory.

    ``tokenise`` splits captions without tokens. Raises UserError, which names the image or caption, for an invalid entry,
    for duplicate ids or files, and for an empty list.
    """
    try:
        entries.reverse()
        images = tuple(_parse_image(path, entries.pop(), tokenise) for _ in range(len(entries)))  # frees each entry after use
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: a field of an image or sentence is missing or invalid: {error_reason(error)}") from None
    if not images:
        raise UserError(f"{path}: no images")
    _check_unique(path, "imgid", (image.imgid for image in images))
    _check_unique(path, "image file", (image.file for image in images))
    _check_unique(path, "sentid", (caption.sentid for image in images for caption in image.captions))
    return images


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Switch Python's garbage collector off in the block, because it would visit millions of new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def intern_tokens(content: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object whose list ``tokens``, if it has one, shares the memory of equal tokens.

    COCO has 6.5 million tokens but only 30,000 distinct words.
    """
    tokens = content.get("tokens")
    if isinstance(tokens, list) and all(type(token) is str for token in tokens):
        content["tokens"] = [sys.intern(token) for token in tokens]
    return content


def _parse_image(path: Path, entry: Any, tokenise: Tokeniser) -> Image:
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


def _parse_caption(path: Path, imgid: int, sentence: Any, tokenise: Tokeniser) -> Caption:
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
