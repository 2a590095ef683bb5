"""Small XML files that others made, read without a document type: no entity, no DTD, nothing from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lxml import etree

from vse.pipeline.errors import UserError
from vse.pipeline.input_files import reading
from vse.pipeline.plain_text import printable
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
    expand without end (`billion laughs`), or that stand for files or addresses, can be declared nowhere else, and none is
    expanded here anyway. Nor does a file of more than ``LARGEST`` bytes or ``DEEPEST`` levels become a tree.
    """
    file = ReadOnce(path)
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
    with reading(path, "well-formed XML"):
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
