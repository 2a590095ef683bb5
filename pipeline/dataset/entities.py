"""Read the files of Flickr30K Entities: captions with marked phrases, and the boxes of the things that the phrases name.

``Sentences/<number>.txt`` has a caption per line; ``[/EN#<chain>/<type>[/<type>...] word ...]`` marks a phrase.
``Annotations/<number>.xml`` has the boxes of the coreference chains. The number is the id of the photo on Flickr. A
coreference chain is the set of phrases for the same thing. (Plummer et al., Flickr30k Entities, ICCV 2015 and IJCV 2017.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lxml import etree

from vse.pipeline.dataset.images import (
    Box,
)
from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.files.inputs import InputFile, wrap_read_errors

MAX_XML_BYTES = 4_000_000  # the largest XML file; an annotation of Flickr30K Entities has a few thousand bytes
MAX_XML_DEPTH = 32  # the most levels of elements; an annotation of Flickr30K Entities has four


@dataclass(slots=True)
class XmlElement:
    """An XML element: the name, the line of the start tag, the text and the child elements, without attributes."""

    tag: str
    line: int
    text: str = ""
    children: list[XmlElement] = field(default_factory=list)

    def find_all(self, tag: str) -> list[XmlElement]:
        """Return the child elements named ``tag``, in the order of the file."""
        return [child for child in self.children if child.tag == tag]


def read_xml(path: Path) -> XmlElement:
    """Return the root element of a small XML file from an untrusted source.

    Raises UserError with the file and usually the line if the file is not well-formed, has more bytes than ``MAX_XML_BYTES``
    or more levels of elements than ``MAX_XML_DEPTH``, or has a document type declaration. Such a declaration could define
    entities that expand without end (`billion laughs`) or load files or addresses.
    """
    file = InputFile(path)
    size = file.stream.seek(0, 2)
    if size > MAX_XML_BYTES:
        raise UserError(f"{path}: {size} bytes of XML are too many (the limit is {MAX_XML_BYTES})")
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
            raise UserError(f"{path}:{error.lineno}: not well-formed XML ({to_printable_line(error.msg)})") from None
    if top.getroottree().docinfo.doctype:
        raise UserError(
            f"{path}: has a document type declaration; only XML without one is read, because it may declare entities"
        )
    return _convert_element(top, path)


def _convert_element(node: etree._Element, path: Path, level: int = 1) -> XmlElement:
    if level > MAX_XML_DEPTH:
        raise UserError(f"{path}:{node.sourceline}: elements more than {MAX_XML_DEPTH} levels deep")
    children = [_convert_element(child, path, level + 1) for child in node]
    return XmlElement(str(node.tag), node.sourceline or 0, (node.text or "").strip(), children)


NOT_VISUAL_CHAIN = "0"  # the id of the chain in phrases that name nothing visible
_PHRASE_MARK_PATTERN = re.compile(r"\[/EN#([0-9]{1,18})((?:/[^/\[\]]+)+)")
_CORNER_TAGS = ("xmin", "ymin", "xmax", "ymax")


class MarkedPhrase(NamedTuple):
    """A phrase: words ``start`` to ``stop`` (exclusive) of a caption. ``chain`` is the id of the thing that the words name."""

    start: int
    stop: int
    chain: str
    types: tuple[str, ...]


class MarkedCaption(NamedTuple):
    """A caption of Flickr30K Entities: the words, including punctuation marks, and the phrases."""

    words: tuple[str, ...]
    phrases: tuple[MarkedPhrase, ...]


@dataclass(frozen=True, slots=True)
class ImageBoxAnnotations:
    """The content of ``Annotations/<number>.xml``: the size of the image in pixels, and the boxes of each coreference chain.

    Boxes are (x1, y1, x2, y2) with x2 and y2 exclusive, inside the image. The file counts pixels from 1 and includes xmax and
    ymax, so (xmin, ymin, xmax, ymax) becomes (xmin - 1, ymin - 1, xmax, ymax). If an object in the file has several
    chains, its boxes belong to each chain. ``chains_without_box`` are the chains without boxes, for example for the scene.
    ``n_boxes`` counts each box once. ``n_clipped`` is the number of boxes that extended beyond the image.
    """

    width: int
    height: int
    boxes_by_chain: dict[str, tuple[Box, ...]]
    chains_without_box: frozenset[str]
    n_boxes: int
    n_clipped: int


def read_marked_captions(path: Path) -> tuple[MarkedCaption, ...]:
    """Read the captions of a file in ``Sentences``, one per line.

    Raises UserError, which names the file and line, if a phrase has no words or no closing bracket, or if a closing bracket
    has no phrase or is followed by text (``guys],``).
    """
    with wrap_read_errors(path, "UTF-8 text"):
        lines = InputFile(path).read().decode().rstrip().split("\n")
    return tuple(_parse_caption(line, f"{path}:{line_number}") for line_number, line in enumerate(lines, 1))


def _parse_caption(line: str, where: str) -> MarkedCaption:
    words: list[str] = []
    phrases: list[MarkedPhrase] = []
    mark: tuple[str, tuple[str, ...]] | None = None
    start = brackets = 0
    for token in line.split():
        if token.startswith("[/EN#"):
            if mark is not None:
                raise UserError(f"{where}: the phrase {token!r} begins inside another phrase")
            mark, start = _parse_mark(token, where), len(words)
        elif mark is None:
            brackets += token.count("[") - token.count("]")  # brackets that mark no phrase, as in: a sign [ in German ]
            if "[/EN#" in token or brackets < 0:
                raise UserError(f"{where}: {token!r} does not mark a phrase; put blanks around marks and closing brackets")
            words.append(token)
        else:
            word, bracket, rest = token.partition("]")
            if rest or "[" in token:
                raise UserError(f"{where}: {token!r} does not end a phrase; put a blank after the closing bracket")
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


def _parse_mark(token: str, where: str) -> tuple[str, tuple[str, ...]]:
    if token.endswith("]"):
        raise UserError(f"{where}: the phrase {token!r} has no words")
    match = _PHRASE_MARK_PATTERN.fullmatch(token)
    if match is None:
        raise UserError(f"{where}: {token!r} does not mark a phrase; a mark is [/EN#<chain>/<type>")
    return match[1], tuple(match[2][1:].split("/"))


def read_box_annotations(path: Path) -> ImageBoxAnnotations:
    """Read the size of the image and the boxes, clipped to the image, from a file in ``Annotations``.

    Raises UserError, which names the file and line, if an element is missing or has an impossible value.
    """
    top = read_xml(path)
    size = _find_only_child(top, "size", path)
    width, height = (_parse_integer(_find_only_child(size, side, path), path) for side in ("width", "height"))
    if min(width, height) < 1:
        raise UserError(f"{path}:{size.line}: an image of {width} x {height} pixels")
    boxes: dict[str, list[Box]] = {}
    chains_without_box: set[str] = set()
    n_boxes = n_clipped = 0
    for thing in top.find_all("object"):
        chains = list(dict.fromkeys(_read_chains(thing, path)))
        rectangles = thing.find_all("bndbox")
        if not rectangles and not any(
            _parse_integer(flag, path) for name in ("scene", "nobndbox") for flag in thing.find_all(name)
        ):
            raise UserError(f"{path}:{thing.line}: the object has neither bndbox nor a flag scene or nobndbox")
        for element in rectangles:
            box, clipped = _read_box(element, width, height, path)
            n_boxes, n_clipped = n_boxes + 1, n_clipped + clipped
            for chain in chains:
                boxes.setdefault(chain, []).append(box)
        if not rectangles:
            chains_without_box.update(chains)
    return ImageBoxAnnotations(
        width, height, {chain: tuple(some) for chain, some in boxes.items()}, frozenset(chains_without_box), n_boxes, n_clipped
    )


def _read_chains(thing: XmlElement, path: Path) -> Iterator[str]:
    names = thing.find_all("name")
    if not names:
        raise UserError(f"{path}:{thing.line}: the object has no name; it must be the id of a chain")
    for name in names:
        if not re.fullmatch(r"[0-9]{1,18}", name.text):
            raise UserError(f"{path}:{name.line}: {name.text[:50]!r} is not the id of a chain")
        yield name.text


def _read_box(element: XmlElement, width: int, height: int, path: Path) -> tuple[Box, bool]:
    """Return a box, clipped to an image of this width and height in pixels, and whether clipping changed the box."""
    left, top, right, bottom = (_parse_integer(_find_only_child(element, corner, path), path) for corner in _CORNER_TAGS)
    box = max(left - 1, 0), max(top - 1, 0), min(right, width), min(bottom, height)
    if left > right or top > bottom or box[0] >= box[2] or box[1] >= box[3]:
        corners = f"{left}, {top}, {right}, {bottom}"
        raise UserError(f"{path}:{element.line}: the box {corners} is empty or outside the image of {width} x {height}")
    x1, y1, x2, y2 = map(float, box)
    return (x1, y1, x2, y2), box != (left - 1, top - 1, right, bottom)


def _find_only_child(element: XmlElement, tag: str, path: Path) -> XmlElement:
    children = element.find_all(tag)
    if len(children) != 1:
        raise UserError(f"{path}:{element.line}: <{element.tag}> must have one <{tag}>, not {len(children)}")
    return children[0]


def _parse_integer(element: XmlElement, path: Path) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", element.text):
        raise UserError(f"{path}:{element.line}: <{element.tag}> must be an integer, not {element.text[:50]!r}")
    return int(element.text)


def read_photo_numbers(path: Path) -> tuple[str, ...]:
    """Read the numbers of the photos in ``train.txt``, ``val.txt`` or ``test.txt``, one per line.

    Raises UserError, which names the file and line, if a line is not a number or repeats an earlier one.
    """
    with wrap_read_errors(path, "a list of numbers"):
        lines = InputFile(path).read().decode("ascii").split("\n")
    numbers: dict[str, int] = {}
    for line, text in enumerate((text.strip() for text in lines), 1):
        if text and not re.fullmatch(r"[0-9]{1,18}", text):
            raise UserError(f"{path}:{line}: {text[:50]!r} is not the number of a photo")
        if text in numbers:
            raise UserError(f"{path}:{line}: photo {text} is already in line {numbers[text]}")
        if text:
            numbers[text] = line
    return tuple(numbers)


def read_unrelated_captions(path: Path) -> frozenset[tuple[str, int]]:
    """Read ``UNRELATED_CAPTIONS``, the list of captions that do not describe their photo.

    Returns pairs: the number of a photo, and the 0-based index of one of its captions. Raises UserError, which names the file
    and line, if a line is not such a pair.
    """
    with wrap_read_errors(path, "a list of captions"):
        lines = InputFile(path).read().decode("ascii").split("\n")
    listed = set()
    for line_number, line in enumerate(lines, 1):
        match = re.fullmatch(r"\s*([0-9]{1,18})\s+([1-9][0-9]{0,2})\s*", line)
        if match:
            listed.add((match[1], int(match[2]) - 1))
        elif line.strip() and not line.startswith("#"):
            raise UserError(f"{path}:{line_number}: {line[:50]!r} is not the number of a photo and of one of its captions")
    return frozenset(listed)
