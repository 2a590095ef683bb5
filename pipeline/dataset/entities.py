"""The files of Flickr30K Entities: captions with marked phrases, and the boxes of what the phrases name.

Plummer et al., Flickr30k Entities, ICCV 2015 and IJCV 2017. ``Sentences/<number>.txt`` has a caption per line, in which
``[/EN#<chain>/<type>[/<type>...] word ...]`` is a phrase; ``Annotations/<number>.xml`` has the boxes of the chains. The number
is that of the photo.

Small XML files that others made, read without a document type: no entity, no DTD, nothing from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lxml import etree

from vse.pipeline.dataset.phrases import Box
from vse.pipeline.errors import UserError, printable
from vse.pipeline.files.inputs import InputFile, wrap_read_errors

LARGEST = 4_000_000  # bytes of a file; an annotation of Flickr30K Entities has a few thousand
DEEPEST = 32  # levels of elements; such an annotation has four


@dataclass(slots=True)
class Element:
    """An element: its name, the line on which it begins, the text in it, and the elements in it. Attributes are not kept."""

    tag: str
    line: int
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        """The elements called ``tag`` that lie directly in this one, in their order."""
        return [child for child in self.children if child.tag == tag]


def read_xml(path: Path) -> Element:
    """The outermost element of an XML file.

    :class:`UserError` names file and line of what is not well-formed, and refuses any document type declaration: entities that
    expand without end (`billion laughs`), or that stand for files or addresses, can be declared nowhere else, and none is
    expanded here anyway. Nor does a file of more than ``LARGEST`` bytes or ``DEEPEST`` levels become a tree.
    """
    file = InputFile(path)
    size = file.stream.seek(0, 2)
    if size > LARGEST:
        raise UserError(f"{path}: {size} bytes of XML are too many (at most {LARGEST})")
    parser = etree.XMLParser(
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        dtd_validation=False,
        huge_tree=False,
        recover=False,
        remove_comments=True,
        remove_pis=True,
    )
    with wrap_read_errors(path, "well-formed XML"):
        try:
            top = etree.fromstring(file.read(), parser)
        except etree.XMLSyntaxError as error:
            raise UserError(f"{path}:{error.lineno}: not well-formed XML ({printable(error.msg)})") from None
    if top.getroottree().docinfo.doctype:
        raise UserError(f"{path}: has a document type declaration, which may declare entities; only plain XML is read")
    return _element(top, path)


def _element(node: etree._Element, path: Path, level: int = 1) -> Element:
    if level > DEEPEST:
        raise UserError(f"{path}:{node.sourceline}: elements more than {DEEPEST} levels deep")
    children = [_element(child, path, level + 1) for child in node]
    return Element(str(node.tag), node.sourceline or 0, (node.text or "").strip(), children)


NOT_VISUAL = "0"  # the chain of phrases that name nothing to be seen; they do not belong together
_MARK = re.compile(r"\[/EN#([0-9]{1,18})((?:/[^/\[\]]+)+)")
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class MarkedPhrase(NamedTuple):
    """Words ``start`` to ``stop`` (exclusive) of a caption, the id of their coreference chain and their types."""

    start: int
    stop: int
    chain: str
    types: tuple[str, ...]


class MarkedCaption(NamedTuple):
    """A caption of Flickr30K Entities as words, punctuation among them, and its phrases."""

    words: tuple[str, ...]
    phrases: tuple[MarkedPhrase, ...]


@dataclass(frozen=True, slots=True)
class Annotation:
    """What ``Annotations/<number>.xml`` says of an image: its size in pixels, and the boxes of each coreference chain.

    Boxes are (x1, y1, x2, y2) with x2 and y2 exclusive, inside the image. The file counts pixels from 1 and includes the last
    ones: its (xmin, ymin, xmax, ymax) is (xmin - 1, ymin - 1, xmax, ymax) here. A box with several names is one of each chain.
    ``unboxed`` are the chains that are a scene or have no box. ``n_boxes`` counts each box once, and ``n_cut`` those that
    reached out of the image.
    """

    width: int
    height: int
    boxes: dict[str, tuple[Box, ...]]
    unboxed: frozenset[str]
    n_boxes: int
    n_cut: int


def read_captions(path: Path) -> tuple[MarkedCaption, ...]:
    """The captions of a file of ``Sentences``, a line each, in its order.

    :class:`UserError` names file and line of a mark that cannot be meant: a phrase without words, one that is not closed, a
    closing bracket with something behind it (``guys],``), or one that closes nothing.
    """
    with wrap_read_errors(path, "UTF-8 text"):
        lines = InputFile(path).read().decode().rstrip().split("\n")
    return tuple(_caption(line, f"{path}:{number}") for number, line in enumerate(lines, 1))


def _caption(line: str, where: str) -> MarkedCaption:
    words: list[str] = []
    phrases: list[MarkedPhrase] = []
    mark: tuple[str, tuple[str, ...]] | None = None
    start = brackets = 0
    for token in line.split():
        if token.startswith("[/EN#"):
            if mark is not None:
                raise UserError(f"{where}: the phrase {token!r} begins in another one, which is not closed")
            mark, start = _mark(token, where), len(words)
        elif mark is None:
            brackets += token.count("[") - token.count("]")  # a caption's own, as in: a sign [ in German ]
            if "[/EN#" in token or brackets < 0:
                raise UserError(f"{where}: {token!r} is no mark of a phrase; blanks must stand around marks and their ends")
            words.append(token)
        else:
            word, bracket, rest = token.partition("]")
            if rest or "[" in token:
                raise UserError(f"{where}: {token!r} does not end a phrase; a blank must stand behind the closing bracket")
            words += [word] if word else []
            if bracket:
                if len(words) == start:
                    raise UserError(f"{where}: a phrase of chain {mark[0]} has no words")
                phrases.append(MarkedPhrase(start, len(words), *mark))
                mark = None
    if mark is not None:
        raise UserError(f"{where}: a phrase of chain {mark[0]} is not closed")
    if not words:
        raise UserError(f"{where}: the caption is empty")
    return MarkedCaption(tuple(words), tuple(phrases))


def _mark(token: str, where: str) -> tuple[str, tuple[str, ...]]:
    """The chain and the types of ``[/EN#12/people/other``."""
    if token.endswith("]"):
        raise UserError(f"{where}: the phrase {token!r} has no words")
    match = _MARK.fullmatch(token)
    if match is None:
        raise UserError(f"{where}: {token!r} is no mark of a phrase, which is [/EN#<chain>/<type>")
    return match[1], tuple(match[2][1:].split("/"))


def read_annotation(path: Path) -> Annotation:
    """The size and the boxes in a file of ``Annotations``.

    A box that reaches out of the image is cut there. :class:`UserError` names file and line of what is missing or impossible.
    """
    top = read_xml(path)
    size = _only(top, "size", path)
    width, height = (_integer(_only(size, side, path), path) for side in ("width", "height"))
    if min(width, height) < 1:
        raise UserError(f"{path}:{size.line}: an image of {width} x {height} pixels")
    boxes: dict[str, list[Box]] = {}
    unboxed: set[str] = set()
    n_boxes = n_cut = 0
    for thing in top.all("object"):
        chains = list(dict.fromkeys(_chains(thing, path)))
        rectangles = thing.all("bndbox")
        if not rectangles and not any(_integer(flag, path) for name in ("scene", "nobndbox") for flag in thing.all(name)):
            raise UserError(f"{path}:{thing.line}: the object has no bndbox, and is neither scene nor nobndbox")
        for element in rectangles:
            box, was_cut = _box(element, width, height, path)
            n_boxes, n_cut = n_boxes + 1, n_cut + was_cut
            for chain in chains:
                boxes.setdefault(chain, []).append(box)
        if not rectangles:
            unboxed.update(chains)
    return Annotation(width, height, {chain: tuple(some) for chain, some in boxes.items()}, frozenset(unboxed), n_boxes, n_cut)


def _chains(thing: Element, path: Path) -> Iterator[str]:
    names = thing.all("name")
    if not names:
        raise UserError(f"{path}:{thing.line}: the object has no name, the id of a chain")
    for name in names:
        if not re.fullmatch(r"[0-9]{1,18}", name.text):
            raise UserError(f"{path}:{name.line}: {name.text[:50]!r} is no id of a chain")
        yield name.text


def _box(element: Element, width: int, height: int, path: Path) -> tuple[Box, bool]:
    """The box, and whether it was cut at the border of the image."""
    left, top, right, bottom = (_integer(_only(element, corner, path), path) for corner in _CORNERS)
    box = max(left - 1, 0), max(top - 1, 0), min(right, width), min(bottom, height)
    if left > right or top > bottom or box[0] >= box[2] or box[1] >= box[3]:
        corners = f"{left}, {top}, {right}, {bottom}"
        raise UserError(f"{path}:{element.line}: the box {corners} is empty or outside the image of {width} x {height}")
    x1, y1, x2, y2 = map(float, box)
    return (x1, y1, x2, y2), box != (left - 1, top - 1, right, bottom)


def _only(element: Element, tag: str, path: Path) -> Element:
    inside = element.all(tag)
    if len(inside) != 1:
        raise UserError(f"{path}:{element.line}: <{element.tag}> must have one <{tag}>, not {len(inside)}")
    return inside[0]


def _integer(element: Element, path: Path) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", element.text):
        raise UserError(f"{path}:{element.line}: <{element.tag}> must be an integer, not {element.text[:50]!r}")
    return int(element.text)


def read_split(path: Path) -> tuple[str, ...]:
    """The numbers of the photos in ``train.txt``, ``val.txt`` or ``test.txt``, one per line; each must be there once."""
    with wrap_read_errors(path, "a list of numbers"):
        lines = InputFile(path).read().decode("ascii").split("\n")
    numbers: dict[str, int] = {}
    for line, text in enumerate((text.strip() for text in lines), 1):
        if text and not re.fullmatch(r"[0-9]{1,18}", text):
            raise UserError(f"{path}:{line}: {text[:50]!r} is no number of a photo")
        if text in numbers:
            raise UserError(f"{path}:{line}: photo {text} is in line {numbers[text]} already")
        if text:
            numbers[text] = line
    return tuple(numbers)


def read_unrelated(path: Path) -> frozenset[tuple[str, int]]:
    """The captions that say nothing of their photo, from ``UNRELATED_CAPTIONS``: number of the photo, place from 0."""
    with wrap_read_errors(path, "a list of captions"):
        lines = InputFile(path).read().decode("ascii").split("\n")
    listed = set()
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"\s*([0-9]{1,18})\s+([1-9][0-9]{0,2})\s*", line)
        if match:
            listed.add((match[1], int(match[2]) - 1))
        elif line.strip() and not line.startswith("#"):
            raise UserError(f"{path}:{number}: {line[:50]!r} is no number of a photo and of its caption")
    return frozenset(listed)
