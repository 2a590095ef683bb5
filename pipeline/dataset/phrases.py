"""Phrases of captions, and the boxes of the things in the image that phrases name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Num
from numpy.typing import NDArray

from vse.pipeline.errors import UserError

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Phrase:
    """Tokens ``start`` to ``stop`` (exclusive) of a caption that name something in the image.

    ``chain`` is the id of the coreference chain: all phrases of an image for the same thing have the same id. It is an empty
    text if the chain is unknown. ``types`` are categories such as ``people`` or ``scene``. ``boxes`` are (x1, y1, x2, y2) in
    pixels of the original image, with x2 and y2 exclusive; a phrase for the background has no boxes.
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
    """Check and convert the field ``phrases`` of a sentence of ``dataset.json``; None stands for no phrases.

    Raises UserError if an entry is invalid. The message begins with ``where``, the file and the caption.
    """
    if entries is None:
        return ()
    if not isinstance(entries, list):
        raise UserError(f"{where}: 'phrases' must be a list")
    return tuple(_parse_phrase(entry, n_tokens, f"{where}: phrase {position}") for position, entry in enumerate(entries, 1))


def _parse_phrase(entry: Any, n_tokens: int, where: str) -> Phrase:
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be an object with 'first_token' and 'n_tokens'")
    start, length = _read_integer(entry, "first_token", where), _read_integer(entry, "n_tokens", where)
    if start < 0 or length < 1 or start + length > n_tokens:
        raise UserError(f"{where}: {length} tokens from token {start} are not a span of the caption's {n_tokens} tokens")
    boxes = entry.get("boxes", [])
    if not isinstance(boxes, list):
        raise UserError(f"{where}: 'boxes' must be a list of [x1, y1, x2, y2]")
    return Phrase(
        start,
        start + length,
        _read_chain(entry, where),
        _read_types(entry, where),
        tuple(_parse_box(box, where) for box in boxes),
    )


def _read_integer(entry: dict[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if type(value) is not int:
        raise UserError(f"{where}: {key!r} must be an integer, not {value!r}")
    return value


def _read_chain(entry: dict[str, Any], where: str) -> str:
    """Return the id of the coreference chain: the field ``chain`` of a phrase, or else the joined ids in ``objects``.

    All phrases of an image with the same id name the same thing.
    """
    objects = entry.get("objects", [])
    if not isinstance(objects, list):
        raise UserError(f"{where}: 'objects' must be a list")
    chain = entry.get("chain", "+".join(map(str, objects)))
    if not isinstance(chain, str):
        raise UserError(f"{where}: 'chain' must be a string, not {chain!r}")
    return chain


def _read_types(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    types = entry.get("types", [entry["kind"]] if "kind" in entry else [])
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise UserError(f"{where}: 'types' must be a list of strings, and 'kind' a string")
    return tuple(types)


def _parse_box(box: Any, where: str) -> Box:
    if not isinstance(box, list) or len(box) != 4 or not all(type(x) in (int, float) and math.isfinite(x) for x in box):
        raise UserError(f"{where}: the box {box!r} must be four numbers, x1, y1, x2, y2")
    x1, y1, x2, y2 = map(float, box)
    if x2 <= x1 or y2 <= y1:
        raise UserError(f"{where}: the box {box!r} is empty: x2 must be greater than x1, and y2 than y1")
    return x1, y1, x2, y2


def iou(a: Num[np.ndarray, "n_boxes 4"], b: Num[np.ndarray, "n_others 4"]) -> Float[np.ndarray, "n_boxes n_others"]:
    """Return the intersection over union of every box of ``a`` with every box of ``b``, in float64.

    Boxes are (x1, y1, x2, y2) with x2 and y2 exclusive. For boxes of integers the result equals the IoU of the published
    evaluations, which take x2 and y2 as inclusive and add 1 to each side. A box without area has an IoU of 0 with every box.
    """
    first, second = (np.asarray(boxes, np.float64) for boxes in (a, b))
    near = np.maximum(first[:, None, :2], second[None, :, :2])
    far = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.clip(far - near, 0, None).prod(axis=2)
    union = _compute_areas(first)[:, None] + _compute_areas(second) - shared
    overlap: Float[np.ndarray, "n_boxes n_others"] = np.zeros_like(shared)
    np.divide(shared, union, out=overlap, where=(shared > 0) & (union > 0))
    return overlap


def _compute_areas(boxes: Float[np.ndarray, "n_boxes 4"]) -> Float[np.ndarray, " n_boxes"]:
    areas: Float[np.ndarray, " n_boxes"] = np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(axis=1)
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
