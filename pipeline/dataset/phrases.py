"""Phrases of a caption: which of its tokens name what, and where that is in the image.

How much boxes overlap.

Noun phrases of captions that nobody annotated, by a spaCy pipeline; their boxes are not known.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Num

from vse.pipeline.dataset.captions import UNNAMED, tokeniser_named
from vse.pipeline.errors import UserError, import_extra
from vse.pipeline.progress import progress_bar

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


def iou(a: Num[np.ndarray, "n_boxes 4"], b: Num[np.ndarray, "n_others 4"]) -> Float[np.ndarray, "n_boxes n_others"]:
    """Intersection over union of every box of ``a`` with every box of ``b``, in float64.

    Boxes are (x1, y1, x2, y2) with x2 and y2 exclusive, so their area is (x2 - x1)(y2 - y1). Of boxes of whole pixels that is
    the IoU of the published evaluations, which count x2 and y2 in and add 1 to each side. A box without area has an IoU of 0
    with every box.
    """
    first, second = (np.asarray(boxes, np.float64) for boxes in (a, b))
    near = np.maximum(first[:, None, :2], second[None, :, :2])
    far = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.clip(far - near, 0, None).prod(axis=2)
    union = _areas(first)[:, None] + _areas(second) - shared
    overlap: Float[np.ndarray, "n_boxes n_others"] = np.zeros_like(shared)
    np.divide(shared, union, out=overlap, where=(shared > 0) & (union > 0))
    return overlap


def _areas(boxes: Float[np.ndarray, "n_boxes 4"]) -> Float[np.ndarray, " n_boxes"]:
    """Area of each box, 0 where it is empty or upside down."""
    areas: Float[np.ndarray, " n_boxes"] = np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(axis=1)
    return areas


_BATCH = 1000  # captions that are parsed at once
log = logging.getLogger(__name__)


def with_noun_phrases(content: dict[str, Any], pipeline: str) -> dict[str, Any]:
    """The content of a checked ``dataset.json`` whose captions mark their noun phrases, in place of the phrases they had.

    ``pipeline`` is an installed spaCy package, such as ``en_core_web_sm``, or a folder, with a tagger and a parser. Of what
    it calls noun chunks, *a black dog* and *the snow* in *a black dog in the snow*, pronouns are left out. The captions' own
    tokens are parsed. :class:`UserError` if spaCy or the pipeline is not there, or if it parses no sentences.
    """
    nlp = _loaded(pipeline)
    doc_of = import_extra("spacy.tokens", "--chunker", "chunker").Doc
    sentences = [dict(sentence) for entry in content["images"] for sentence in entry.get("sentences", ())]
    cut = tokeniser_named(content.get("tokeniser", UNNAMED), "dataset.json")
    texts = [sentence["tokens"] if "tokens" in sentence else cut(sentence["raw"]) for sentence in sentences]
    docs = nlp.pipe((doc_of(nlp.vocab, words=words) for words in texts), batch_size=_BATCH)
    n_phrases = n_without = 0
    parsed = progress_bar(docs, desc="noun phrases", total=len(texts), unit="caption")
    for sentence, doc in zip(sentences, parsed, strict=True):
        spans = [(chunk.start, chunk.end) for chunk in doc.noun_chunks if chunk.root.pos_ != "PRON"]
        sentence["phrases"] = [{"first_token": start, "n_tokens": stop - start} for start, stop in spans]
        n_phrases, n_without = n_phrases + len(spans), n_without + (not spans)
    log.info("%d noun phrases in %d captions by %s; %d captions have none", n_phrases, len(texts), pipeline, n_without)
    rest = iter(sentences)
    images = [{**entry, "sentences": [next(rest) for _ in entry.get("sentences", ())]} for entry in content["images"]]
    return {**content, "images": images}


def _loaded(pipeline: str) -> Any:
    spacy = import_extra("spacy", "--chunker", "chunker")
    try:
        nlp = spacy.load(pipeline)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{pipeline}: no spaCy pipeline that can be loaded ({reason}); python -m spacy download en_core_web_sm has one"
        ) from None
    parsed = next(iter(nlp.pipe(["a dog in the snow"])))
    if not parsed.has_annotation("DEP") or not parsed.has_annotation("POS") or parsed.vocab.get_noun_chunks is None:
        raise UserError(f"{pipeline}: marks no noun phrases, for which a spaCy pipeline needs a tagger and a parser")
    return nlp
