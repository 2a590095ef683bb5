from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.dataset.entities import MAX_BYTES, MAX_DEPTH, Element, read_xml
from vse.pipeline.errors import UserError

LAUGHS = '<!DOCTYPE a [<!ENTITY l0 "ha">{}]><a>&l9;</a>'.format(
    "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
)
HOSTILE = {
    "billion laughs": (LAUGHS, ":1: not well-formed XML (Maximum entity amplification factor exceeded"),
    "quadratic blow-up": (
        f'<!DOCTYPE a [<!ENTITY x "{"x" * 50_000}">]><a>{"&x;" * 50_000}</a>',
        ":1: not well-formed XML (Maximum entity amplification factor exceeded",
    ),
    "a file": (
        '<?xml version="1.0"?>\n<!DOCTYPE a [\n<!ENTITY x SYSTEM "file:///etc/passwd">]>\n<a>&x;</a>',
        ": has a document type declaration",
    ),
    "an address": (
        '<!DOCTYPE a [<!ENTITY x SYSTEM "http://127.0.0.1:9/x">]><a>&x;</a>',
        ": has a document type declaration",
    ),
    "an external DTD": ('<!DOCTYPE a SYSTEM "http://127.0.0.1:9/a.dtd"><a/>', ": has a document type declaration"),
    "a parameter entity": (
        '<!DOCTYPE a [<!ENTITY % x SYSTEM "file:///etc/passwd">%x;]><a/>',
        ": has a document type declaration",
    ),
    "a default attribute": ('<!DOCTYPE a [<!ATTLIST a b CDATA "c">]><a/>', ": has a document type declaration"),
    "an entity of nobody": ("<a>\n&x;</a>", ":2: not well-formed XML (Entity 'x' not defined"),
    "levels": ("<a>" * 100_000, ":1: not well-formed XML (Excessive depth in document"),
    "a few levels too many": (
        "<a>" * (MAX_DEPTH + 1) + "</a>" * (MAX_DEPTH + 1),
        f":1: elements more than {MAX_DEPTH} levels deep",
    ),
    "closed levels": ("<a>" * 10_000 + "</a>" * 10_000, ":1: not well-formed XML (Excessive depth in document"),
    "too much": (f"<a>{' ' * MAX_BYTES}</a>", f"(the limit is {MAX_BYTES})"),
    "nothing": ("", ":1: not well-formed XML (Document is empty"),
    "half": ("<a>\n<b>", ":2: not well-formed XML (Premature end of data"),
    "crossed": ("<a>\n<b>\n</a></b>", ":3: not well-formed XML (Opening and ending tag mismatch"),
    "two at the top": ("<a/><b/>", ":1: not well-formed XML (Extra content at the end"),
    "a zero byte": ("<a>\0</a>", "not well-formed XML"),
    "no encoding": ('<?xml version="1.0" encoding="nonsense"?><a/>', ":1: not well-formed XML (Unsupported encoding"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_xml_is_refused_in_a_line_that_names_the_file(kind: str, tmp_path: Path) -> None:
    text, message = HOSTILE[kind]
    path = tmp_path / "x.xml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_xml(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_elements_have_their_text_and_line(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_text("<?xml version='1.0'?>\n<a>\n <b c='d'> 1 &amp; 2 </b>\n <!-- e --><b>é<![CDATA[<]]></b>\n <f/></a>")
    first, second = Element("b", 3, "1 & 2"), Element("b", 4, "é<")
    top = read_xml(path)
    assert (top.tag, top.line, top.children) == ("a", 2, [first, second, Element("f", 5)])
    assert top.find_all("b") == [first, second]
    assert top.find_all("g") == []


def test_a_folder_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        read_xml(tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read_xml(tmp_path / "x.xml")


@given(content=st.binary(max_size=200))
def test_any_bytes_give_a_tree_or_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.xml"
    path.write_bytes(content)
    error = ""
    try:
        read_xml(path)
    except UserError as refusal:
        error = str(refusal)
    assert not error or error.startswith(str(path))
