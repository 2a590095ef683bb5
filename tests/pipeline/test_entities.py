"""Files of Flickr30K Entities are read by its README; an invalid or hostile one is an error with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.entities_files import annotation, thing
from vse.pipeline.dataset.entities import (
    MAX_XML_BYTES,
    MAX_XML_DEPTH,
    ImageBoxAnnotations,
    MarkedCaption,
    MarkedPhrase,
    XmlElement,
    read_box_annotations,
    read_marked_captions,
    read_photo_numbers,
    read_unrelated_captions,
    read_xml,
)
from vse.pipeline.errors import UserError


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def annotated(folder: Path, *things: str) -> ImageBoxAnnotations:
    return read_box_annotations(written(folder / "1.xml", annotation(things)))


def captions(folder: Path, text: str) -> tuple[MarkedCaption, ...]:
    return read_marked_captions(written(folder / "1.txt", text))


def test_a_phrase_is_a_span_of_words_with_a_chain_and_types(tmp_path: Path) -> None:
    (caption,) = captions(tmp_path, "In [/EN#12/people/scene a large crowd] , [/EN#0/notvisual it] ends .\n")
    assert caption.words == ("In", "a", "large", "crowd", ",", "it", "ends", ".")
    assert caption.phrases == (MarkedPhrase(1, 4, "12", ("people", "scene")), MarkedPhrase(5, 6, "0", ("notvisual",)))


def test_each_line_is_a_caption(tmp_path: Path) -> None:
    one, two = captions(tmp_path, "[/EN#1/people Guys]\r\ntwo\u2028words \x0b here\r\n\r\n")
    assert one == MarkedCaption(("Guys",), (MarkedPhrase(0, 1, "1", ("people",)),))
    assert two == MarkedCaption(("two", "words", "here"), ())


def test_brackets_of_a_caption_are_words_and_a_closing_bracket_may_stand_alone(tmp_path: Path) -> None:
    (caption,) = captions(tmp_path, "A sign [ in German ] by [/EN#1/other a road ] ends")
    assert caption.words == ("A", "sign", "[", "in", "German", "]", "by", "a", "road", "ends")
    assert caption.phrases == (MarkedPhrase(7, 9, "1", ("other",)),)


BAD_LINES = {
    "punctuation behind the bracket": ("[/EN#1/people two guys], ok .", "'guys],'"),
    "a bracket in a word": ("[/EN#1/people two g]uys] .", "'g]uys]'"),
    "no words": ("[/EN#1/people] x", "the phrase '[/EN#1/people]' has no words"),
    "no words before the bracket": ("[/EN#1/people ] x", "a phrase of chain 1 has no words"),
    "never closed": ("[/EN#1/people two guys .", "a phrase of chain 1 is not closed"),
    "one in another": ("[/EN#1/people two [/EN#2/people guys] .", "'[/EN#2/people'"),
    "one right behind another": ("[/EN#1/people guys][/EN#2/other x]", "'guys][/EN#2/other'"),
    "no blank before a mark": ("The[/EN#1/people guys] .", "'The[/EN#1/people'"),
    "nothing to close": ("two guys] .", "'guys]'"),
    "no chain": ("[/EN#/people guys] .", "'[/EN#/people'"),
    "a chain that is no number": ("[/EN#x/people guys] .", "'[/EN#x/people'"),
    "no type": ("[/EN#1 guys] .", "'[/EN#1'"),
    "an empty type": ("[/EN#1/people/ guys] .", "'[/EN#1/people/'"),
    "an empty line": ("", "the caption is empty"),
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_a_bad_line_is_an_error_with_its_number(fault: str, tmp_path: Path) -> None:
    text, message = BAD_LINES[fault]
    with pytest.raises(UserError) as error:
        captions(tmp_path, f"[/EN#1/people Guys]\n{text}\nlast\n")
    assert str(error.value).startswith(f"{tmp_path / '1.txt'}:2: ")
    assert message in str(error.value)


def test_captions_are_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "1.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"1\.txt: not UTF-8 text"):
        read_marked_captions(path)


def test_corners_are_counted_from_0_and_the_last_ones_are_exclusive(tmp_path: Path) -> None:
    read = annotated(tmp_path, thing("7", (1, 1, 1, 1)), thing("8", (3, 4, 100, 80)))
    assert (read.width, read.height) == (100, 80)
    assert read.boxes_by_chain == {"7": ((0.0, 0.0, 1.0, 1.0),), "8": ((2.0, 3.0, 100.0, 80.0),)}
    assert (read.n_boxes, read.n_clipped, read.chains_without_box) == (2, 0, frozenset())


def test_an_object_with_several_names_belongs_to_each_chain(tmp_path: Path) -> None:
    read = annotated(tmp_path, thing("7 8", (1, 1, 10, 10)), thing("8", (5, 5, 20, 20)), thing("8 8", (2, 2, 3, 3)))
    assert read.boxes_by_chain == {"7": ((0, 0, 10, 10),), "8": ((0, 0, 10, 10), (4, 4, 20, 20), (1, 1, 3, 3))}
    assert read.n_boxes == 3


def test_a_scene_and_an_object_without_box_have_no_box(tmp_path: Path) -> None:
    scene, nothing = "<scene>1</scene><nobndbox>0</nobndbox>", "<nobndbox>1</nobndbox>"
    read = annotated(tmp_path, thing("7", None, scene), thing("8 9", None, nothing), thing("9", (1, 1, 2, 2)))
    assert read.chains_without_box == {"7", "8", "9"}
    assert read.boxes_by_chain == {"9": ((0.0, 0.0, 2.0, 2.0),)}


def test_a_box_that_extends_beyond_the_image_is_clipped(tmp_path: Path) -> None:
    read = annotated(tmp_path, thing("7", (0, -3, 101, 80)), thing("7", (1, 1, 100, 80)))
    assert read.boxes_by_chain == {"7": ((0, 0, 100, 80), (0, 0, 100, 80))}
    assert (read.n_boxes, read.n_clipped) == (2, 1)


BAD_OBJECTS = {
    "upside down": ([thing("7", (5, 9, 6, 8))], ":3: the box 5, 9, 6, 8 is empty or outside the image of 100 x 80"),
    "outside": ([thing("7", (101, 1, 120, 8))], ":3: the box 101, 1, 120, 8 is empty or outside"),
    "a fraction": ([thing("1", (1, 1, 2, 2)).replace("<xmax>2<", "<xmax>2.5<")], ":3: <xmax> must be an integer, not '2.5'"),
    "no corner": ([thing("1", (1, 1, 2, 2)).replace("<xmax>2</xmax>", "")], ":3: <bndbox> must have one <xmax>, not 0"),
    "no name": ([thing("1", (1, 1, 2, 2)), thing("", (1, 1, 2, 2))], ":4: the object has no name"),
    "no number": ([thing("7a", (1, 1, 2, 2))], ":3: '7a'"),
    "neither a box nor a flag": ([thing("7", None, "")], ":3: "),
    "no box and flags of 0": ([thing("7", None, "<scene>0</scene><nobndbox>0</nobndbox>")], ":3: "),
}


@pytest.mark.parametrize("fault", BAD_OBJECTS)
def test_a_bad_object_is_an_error_with_its_line(fault: str, tmp_path: Path) -> None:
    things, message = BAD_OBJECTS[fault]
    path = written(tmp_path / "1.xml", annotation(things))
    with pytest.raises(UserError) as error:
        read_box_annotations(path)
    assert str(error.value).startswith(f"{path}{message}")


def test_the_size_of_the_image_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1\.xml:1: <annotation> must have one <size>, not 0"):
        read_box_annotations(written(tmp_path / "1.xml", "<annotation/>"))
    with pytest.raises(UserError, match=r"1\.xml:2: an image of 0 x 80 pixels"):
        read_box_annotations(written(tmp_path / "1.xml", annotation([], (0, 80))))


def test_a_split_lists_each_photo_once(tmp_path: Path) -> None:
    assert read_photo_numbers(written(tmp_path / "a.txt", "12\r\n7\n\n")) == ("12", "7")
    with pytest.raises(UserError, match=r"b\.txt:3: photo 12 .*line 1"):
        read_photo_numbers(written(tmp_path / "b.txt", "12\n7\n12"))
    with pytest.raises(UserError, match=r"c\.txt:2: '7\.jpg'"):
        read_photo_numbers(written(tmp_path / "c.txt", "12\n7.jpg\n"))


def test_unrelated_captions_are_counted_from_0(tmp_path: Path) -> None:
    text = "# format: <imageID> <sentence number>\n129602216 5\n153299765 2"
    assert read_unrelated_captions(written(tmp_path / "a", text)) == {("129602216", 4), ("153299765", 1)}
    with pytest.raises(UserError, match=r"b:2: '153299765 0'"):
        read_unrelated_captions(written(tmp_path / "b", "129602216 5\n153299765 0"))


LAUGHS = '<!DOCTYPE a [<!ENTITY l0 "ha">{}]><a>&l9;</a>'.format(
    "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
)
DECLARED, MALFORMED = ": has a document type declaration", "not well-formed XML"
AMPLIFIED = f":1: {MALFORMED} (Maximum entity amplification factor exceeded"
HOSTILE = {
    "billion laughs": (LAUGHS, AMPLIFIED),
    "quadratic blow-up": (f'<!DOCTYPE a [<!ENTITY x "{"x" * 50_000}">]><a>{"&x;" * 50_000}</a>', AMPLIFIED),
    "a file": ('<?xml version="1.0"?>\n<!DOCTYPE a [\n<!ENTITY x SYSTEM "file:///etc/passwd">]>\n<a>&x;</a>', DECLARED),
    "an address": ('<!DOCTYPE a [<!ENTITY x SYSTEM "http://127.0.0.1:9/x">]><a>&x;</a>', DECLARED),
    "an external DTD": ('<!DOCTYPE a SYSTEM "http://127.0.0.1:9/a.dtd"><a/>', DECLARED),
    "a parameter entity": ('<!DOCTYPE a [<!ENTITY % x SYSTEM "file:///etc/passwd">%x;]><a/>', DECLARED),
    "a default attribute": ('<!DOCTYPE a [<!ATTLIST a b CDATA "c">]><a/>', DECLARED),
    "an entity of nobody": ("<a>\n&x;</a>", f":2: {MALFORMED} (Entity 'x' not defined"),
    "levels": ("<a>" * 100_000, f":1: {MALFORMED} (Excessive depth in document"),
    "a level too many": (
        "<a>" * (MAX_XML_DEPTH + 1) + "</a>" * (MAX_XML_DEPTH + 1),
        f":1: elements more than {MAX_XML_DEPTH} levels",
    ),
    "closed levels": ("<a>" * 10_000 + "</a>" * 10_000, f":1: {MALFORMED} (Excessive depth in document"),
    "too much": (f"<a>{' ' * MAX_XML_BYTES}</a>", f"(the limit is {MAX_XML_BYTES})"),
    "nothing": ("", f":1: {MALFORMED} (Document is empty"),
    "half": ("<a>\n<b>", f":2: {MALFORMED} (Premature end of data"),
    "crossed": ("<a>\n<b>\n</a></b>", f":3: {MALFORMED} (Opening and ending tag mismatch"),
    "two at the top": ("<a/><b/>", f":1: {MALFORMED} (Extra content at the end"),
    "a zero byte": ("<a>\0</a>", MALFORMED),
    "no encoding": ('<?xml version="1.0" encoding="nonsense"?><a/>', f":1: {MALFORMED} (Unsupported encoding"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_xml_is_refused_in_a_line_that_names_the_file(kind: str, tmp_path: Path) -> None:
    text, message = HOSTILE[kind]
    path = written(tmp_path / "x.xml", text)
    with pytest.raises(UserError) as error:
        read_xml(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_elements_have_their_text_and_line(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_text("<?xml version='1.0'?>\n<a>\n <b c='d'> 1 &amp; 2 </b>\n <!-- e --><b>é<![CDATA[<]]></b>\n <f/></a>")
    first, second = XmlElement("b", 3, "1 & 2"), XmlElement("b", 4, "é<")
    top = read_xml(path)
    assert (top.tag, top.line, top.children) == ("a", 2, [first, second, XmlElement("f", 5)])
    assert top.find_all("b") == [first, second]
    assert top.find_all("g") == []


def test_a_folder_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        read_xml(tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read_xml(tmp_path / "x.xml")


@given(content=st.binary(max_size=200))
def test_any_bytes_give_a_tree_or_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.xml"
    path.write_bytes(content)
    error = str(path)
    try:
        read_xml(path)
    except UserError as refusal:
        error = str(refusal)
    assert error.startswith(str(path))
