"""Phrases of a caption: which of its tokens name what, and where that is in the image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vse.pipeline.errors import UserError

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Phrase:
    """Tokens ``start`` to ``stop`` (exclusive) of a caption, and what they name.

    Phrases of one image that name the same thing share a ``chain``, the id of their coreference chain; it is empty if the
    phrase belongs to none. ``types`` are categories such as ``people`` or ``scene``. ``boxes`` are (x1, y1, x2, y2) in pixels
    of the original image, with x2 and y2 exclusive; a phrase such as a background may have none.
    """

    start: int
    stop: int
    chain: str = ""
    types: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()

    @property
    def truth(self) -> Box | None:
        """The smallest box around all of the phrase's boxes, by which a localisation is judged; None if it has none.

        A plural such as *two dogs* has several boxes, and the published evaluation of Flickr30K Entities takes their union.
        """
        if not self.boxes:
            return None
        left, top, right, bottom = zip(*self.boxes, strict=True)
        return min(left), min(top), max(right), max(bottom)


def read_phrases(entries: Any, n_tokens: int, where: str) -> tuple[Phrase, ...]:
    """The field ``phrases`` of a sentence of ``dataset.json``, checked; empty if ``entries`` is None.

    ``where`` names the file and the caption for the :class:`UserError`, which adds the number of the phrase, from 1.
    """
    if entries is None:
        return ()
    if not isinstance(entries, list):
        raise UserError(f"{where}: 'phrases' must be a list")
    return tuple(_phrase(entry, n_tokens, f"{where}: phrase {number}") for number, entry in enumerate(entries, 1))


def _phrase(entry: Any, n_tokens: int, where: str) -> Phrase:
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be an object with 'first_token' and 'n_tokens'")
    start, length = _integer(entry, "first_token", where), _integer(entry, "n_tokens", where)
    if start < 0 or length < 1 or start + length > n_tokens:
        raise UserError(f"{where}: {length} tokens from token {start} are not a span of the caption's {n_tokens} tokens")
    boxes = entry.get("boxes", [])
    if not isinstance(boxes, list):
        raise UserError(f"{where}: 'boxes' must be a list of [x1, y1, x2, y2]")
    return Phrase(start, start + length, _chain(entry, where), _types(entry, where), tuple(_box(box, where) for box in boxes))


def _integer(entry: dict[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if type(value) is not int:
        raise UserError(f"{where}: {key!r} must be an integer, not {value!r}")
    return value


def _chain(entry: dict[str, Any], where: str) -> str:
    """The chain's id; where there is none, the phrases that name the same ``objects`` are one chain."""
    objects = entry.get("objects", [])
    if not isinstance(objects, list):
        raise UserError(f"{where}: 'objects' must be a list")
    chain = entry.get("chain", "+".join(map(str, objects)))
    if not isinstance(chain, str):
        raise UserError(f"{where}: 'chain' must be a string, not {chain!r}")
    return chain


def _types(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    types = entry.get("types", [entry["kind"]] if "kind" in entry else [])
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise UserError(f"{where}: 'types' must be a list of strings, and 'kind' a string")
    return tuple(types)


def _box(box: Any, where: str) -> Box:
    if not isinstance(box, list) or len(box) != 4 or not all(type(x) in (int, float) and math.isfinite(x) for x in box):
        raise UserError(f"{where}: the box {box!r} must be four numbers, x1, y1, x2, y2")
    x1, y1, x2, y2 = map(float, box)
    if x2 <= x1 or y2 <= y1:
        raise UserError(f"{where}: the box {box!r} is empty: x2 must be greater than x1, and y2 than y1")
    return x1, y1, x2, y2
