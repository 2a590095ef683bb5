"""An image of a data set with its captions and phrases, and the checks of the images in a ``dataset.json``."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset import SPLITS
from vse.pipeline.dataset.languages import is_language_tag
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import error_reason, is_path_text

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Phrase:
    """Tokens ``start`` to ``stop`` (exclusive) of a caption that name something in the image.

    ``chain`` is the id of the coreference chain: all phrases of an image for the same thing have the same id. The id is an
    empty text if the chain is unknown. ``types`` are categories such as ``people`` or ``scene``. ``boxes`` are (x1, y1, x2,
    y2) in pixels of the original image, with x2 and y2 exclusive; a phrase for the background has no boxes.
    """

    start: int
    stop: int
    chain: str = ""
    types: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()

    @property
    def truth_box(self) -> Box | None:
        """The correct box in an evaluation of localisation: the smallest box around all boxes. None without boxes.

        The published evaluation of Flickr30K Entities takes this union for plurals such as *two dogs*.
        """
        if not self.boxes:
            return None
        left, top, right, bottom = zip(*self.boxes, strict=True)
        return min(left), min(top), max(right), max(bottom)


def read_phrases(entries: Any, n_tokens: int, where: str) -> tuple[Phrase, ...]:
    """Check and convert ``entries``, the field ``phrases`` of a caption in ``dataset.json``. None stands for no phrases.

    ``n_tokens`` is the number of tokens of the caption. Raises UserError if a phrase is invalid. The message begins with
    ``where``, the file and the caption.
    """
    if entries is None:
        return ()
    if not isinstance(entries, list):
        raise UserError(f"{where}: 'phrases' must be a list")
    phrases = []
    for position, entry in enumerate(entries, 1):
        try:
            phrases.append(_parse_phrase(entry, n_tokens))
        except UserError as error:
            raise UserError(f"{where}: phrase {position}: {error}") from None
    return tuple(phrases)


def build_phrase_entry(phrase: Phrase) -> dict[str, Any]:
    """Return a phrase as a JSON object for ``dataset.json``, without the optional keys that have no value."""
    optional = {"chain": phrase.chain, "types": list(phrase.types), "boxes": list(map(list, phrase.boxes))}
    span = {"first_token": phrase.start, "n_tokens": phrase.stop - phrase.start}
    return {**span, **{key: value for key, value in optional.items() if value}}


def _parse_phrase(entry: Any, n_tokens: int) -> Phrase:
    if not isinstance(entry, dict):
        raise UserError("must be an object with 'first_token' and 'n_tokens'")
    start, length = _read_integer(entry, "first_token"), _read_integer(entry, "n_tokens")
    if start < 0 or length < 1 or start + length > n_tokens:
        raise UserError(f"{length} tokens from token {start} are not a span of the caption's {n_tokens} tokens")
    boxes = entry.get("boxes", [])
    if not isinstance(boxes, list):
        raise UserError("'boxes' must be a list of [x1, y1, x2, y2]")
    return Phrase(start, start + length, _read_chain(entry), _read_types(entry), tuple(map(_parse_box, boxes)))


def _read_integer(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int:
        raise UserError(f"{key!r} must be an integer, not {value!r}")
    return value


def _read_chain(entry: dict[str, Any]) -> str:
    """Return the id of the coreference chain: the field ``chain`` of a phrase, or else its field ``objects``, joined by ``+``.

    All phrases of an image with the same id name the same thing. The id is an empty text if the phrase has neither field.
    """
    objects = entry.get("objects", [])
    if not isinstance(objects, list):
        raise UserError("'objects' must be a list")
    chain = entry.get("chain", "+".join(map(str, objects)))
    if not isinstance(chain, str):
        raise UserError(f"'chain' must be a string, not {chain!r}")
    return chain


def _read_types(entry: dict[str, Any]) -> tuple[str, ...]:
    types = entry.get("types", [entry["kind"]] if "kind" in entry else [])
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise UserError("'types' must be a list of strings, and 'kind' a string")
    return tuple(types)


def _parse_box(box: Any) -> Box:
    if not isinstance(box, list) or len(box) != 4 or not all(type(x) in (int, float) and math.isfinite(x) for x in box):
        raise UserError(f"the box {box!r} must be four numbers, x1, y1, x2, y2")
    x1, y1, x2, y2 = map(float, box)
    if x2 <= x1 or y2 <= y1:
        raise UserError(f"the box {box!r} is empty: x2 must be greater than x1, and y2 than y1")
    return x1, y1, x2, y2


def iou(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Return the intersection over union of every box of ``a`` with every box of ``b``.

    The shapes are (n, 4) and (m, 4). The result has the shape (n, m) and the type float64.

    Boxes are (x1, y1, x2, y2) with x2 and y2 exclusive. For boxes of integers the result equals the IoU of the published
    evaluations, which take x2 and y2 as inclusive and add 1 to each side. A box without area has an IoU of 0 with every box.
    """
    first, second = (np.asarray(boxes, np.float64) for boxes in (a, b))
    near = np.maximum(first[:, None, :2], second[None, :, :2])
    far = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.clip(far - near, 0, None).prod(axis=2)
    union = _compute_areas(first)[:, None] + _compute_areas(second) - shared
    overlap: NDArray[np.float64] = np.zeros_like(shared)
    np.divide(shared, union, out=overlap, where=(shared > 0) & (union > 0))
    return overlap


def _compute_areas(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(axis=1)
    return areas


def clip_boxes(boxes: NDArray[np.float32], size: tuple[int, int], where: str) -> NDArray[np.float32]:
    """Return boxes (n, 4), clipped to an image of the width and height ``size`` in pixels.

    Raises UserError if a box lies outside the image or has no area; the message begins with ``where``.
    """
    clipped = np.clip(boxes, 0, np.asarray(size * 2, np.float32))
    empty = ~(clipped[:, 2:] > clipped[:, :2]).all(axis=1)  # written so that NaN counts as empty
    if empty.any():
        bad = boxes[empty][0].tolist()
        raise UserError(f"{where}: the box {bad} (x1, y1, x2, y2) does not overlap the image, which is {size[0]} x {size[1]}")
    return clipped


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
    """Convert ``entries``, the list ``images`` of the ``dataset.json`` at ``path``, to images.

    The list is emptied during the conversion, to save memory. ``tokenise`` splits captions without tokens. Raises UserError,
    which names the image or caption, for an invalid entry, for duplicate ids or files, and for an empty list.
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
    """Switch Python's garbage collector off in the ``with`` block: it would visit millions of new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
    if not isinstance(tokens, list) or set(map(type, tokens)) - {str}:
        raise UserError(f"{path}: caption {sentid}: 'tokens' must be a list of words")
    if not tokens or not raw.strip():
        raise UserError(f"{path}: caption {sentid} of image {imgid} is empty")
    phrases = read_phrases(sentence.get("phrases"), len(tokens), f"{path}: caption {sentid}")
    language = sentence.get("language", "")
    if language != "" and not is_language_tag(language):
        raise UserError(f"{path}: caption {sentid}: 'language' must be a tag such as en, de or pt-BR")
    # Equal words become one object in memory: COCO has 6.5 million tokens, but only 30,000 different words.
    return Caption(sentid, imgid, raw, tuple(map(sys.intern, tokens)), phrases, language)


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


def convert_image_to_entry(image: Image) -> dict[str, Any]:
    """Return an image as a JSON object for ``dataset.json``."""
    sentences = [
        build_caption_entry(one.sentid, image.imgid, one.raw, list(one.tokens), one.language, one.phrases)
        for one in image.captions
    ]
    return build_image_entry(image.imgid, image.file, image.split, image.cocoid, sentences)


def build_image_entry(
    imgid: int, file: str, split: str, cocoid: int | None, sentences: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return an image as a JSON object for ``dataset.json``."""
    folder, _, name = file.rpartition("/")
    return {
        "imgid": imgid,
        **({"filepath": folder} if folder else {}),
        "filename": name,
        "split": split,
        **({} if cocoid is None else {"cocoid": cocoid}),
        "sentids": [sentence["sentid"] for sentence in sentences],
        "sentences": sentences,
    }


def build_caption_entry(
    sentid: int, imgid: int, raw: str, tokens: list[str], language: str | None = None, phrases: Sequence[Phrase] = ()
) -> dict[str, Any]:
    """Return a caption as a JSON object for ``dataset.json``."""
    return {
        "sentid": sentid,
        "imgid": imgid,
        "raw": raw,
        "tokens": tokens,
        **({"language": language} if language else {}),
        **({"phrases": list(map(build_phrase_entry, phrases))} if phrases else {}),
    }
