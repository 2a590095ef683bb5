"""Small XML files that others made, read without a document type: no entity, no DTD, nothing from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from vse.pipeline.errors import UserError
from vse.pipeline.input_files import reading
from vse.pipeline.read_once import ReadOnce

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
    expand without end (`billion laughs`), or that stand for files or addresses, can be declared nowhere else. Nor does a file
    of more than ``LARGEST`` bytes or ``DEEPEST`` levels become a tree.
    """
    file = ReadOnce(path)
    size = file.stream.seek(0, 2)
    if size > LARGEST:
        raise UserError(f"{path}: {size} bytes of XML are too many (at most {LARGEST})")
    builder = _Builder(path)
    with reading(path, "well-formed XML"):
        builder.parser.Parse(file.read(), True)
    return builder.top


class _Builder:
    """Makes elements of what the parser meets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.top = Element("", 0)
        self._open: list[Element] = []
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text

    def _doctype(self, *_: object) -> None:
        raise UserError(
            f"{self.path}:{self.parser.CurrentLineNumber}: has a document type declaration, which may declare entities; "
            "only plain XML is read"
        )

    def _start(self, tag: str, _: object) -> None:
        element = Element(tag, self.parser.CurrentLineNumber)
        if len(self._open) >= DEEPEST:
            raise UserError(f"{self.path}:{element.line}: elements more than {DEEPEST} levels deep")
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.top = element
        self._open.append(element)

    def _end(self, _: str) -> None:
        element = self._open.pop()
        element.text = element.text.strip()

    def _text(self, text: str) -> None:
        self._open[-1].text += text
