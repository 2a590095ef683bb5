"""Thumbnails, drawings of attention, and the pages of a search and of phrases in a photo."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

import jinja2
import numpy as np
import pytest
from PIL import Image

from tests.drawn import drawings
from vse.eval.report.drawings import PHRASE_COLOURS, draw_attention
from vse.eval.report.pages import thumbnail_data_uri, write_page, write_phrase_page, write_search_page
from vse.eval.search.top_k import Attention, PhraseCandidates, SearchHit
from vse.pipeline.files.images import BadImage

HATS = PhraseCandidates("a red hat", np.array([[1, 2, 11, 22], *[[0, 0, 5, 5.0]] * 8]), np.linspace(0.9, 0.1, 9))


@pytest.mark.parametrize(("size", "expected"), [((400, 200), (100, 50)), ((20, 300), (7, 100)), ((30, 20), (30, 20))])
def test_a_thumbnail_keeps_its_shape_and_colour_and_is_never_enlarged(
    tmp_path: Path, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    Image.new("RGB", size, (200, 40, 90)).save(tmp_path / "a.png")
    kind, _, content = thumbnail_data_uri(tmp_path / "a.png", 100).partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(BytesIO(base64.b64decode(content))) as image:
        assert image.size == expected
        np.testing.assert_allclose(image.convert("RGB").getpixel((3, 3)), (200, 40, 90), atol=3)


def test_what_is_no_picture_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("<svg/>")
    with pytest.raises(BadImage, match=r"a.png: not a readable image"):
        thumbnail_data_uri(tmp_path / "a.png")
    with pytest.raises(BadImage, match="no such image file"):
        write_phrase_page(tmp_path / "p.html", tmp_path / "it.png", [HATS], "")


def test_a_page_forbids_what_it_does_not_need_and_lacks_no_value_in_silence(tmp_path: Path) -> None:
    page = write_page(tmp_path / "x.html", "base.html").read_text()
    policy = page.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0]
    assert {part.strip() for part in policy.split(";")} >= {"default-src 'none'", "img-src data:", "style-src 'unsafe-inline'"}
    with pytest.raises(jinja2.UndefinedError):
        write_page(tmp_path / "y.html", "report.html")
    assert not (tmp_path / "y.html").exists()


def test_each_phrase_has_its_best_box_in_its_colour(tmp_path: Path) -> None:
    Image.new("RGB", (80, 40)).save(tmp_path / "it.png")
    none = PhraseCandidates("a dog", np.zeros((0, 4)), np.zeros(0))
    page = write_phrase_page(tmp_path / "p.html", tmp_path / "it.png", [HATS, none], "runs/a").read_text()
    assert 'viewBox="0 0 80 40"' in page
    assert page.count(f'x="1.0" y="2.0" width="10.0" height="20.0" stroke="{PHRASE_COLOURS[0]}"') == 1
    assert "The best 5 of 9 boxes." in page
    listed = re.findall(r'<td>([\d, ]+)</td><td class="n">([\d.]+)</td>', page)
    assert listed[:2] == [("1, 2, 11, 22", "0.9000"), ("0, 0, 5, 5", "0.8000")]
    assert len(listed) == 5
    assert page.count("no candidate box") == 1


def test_pages_escape_all_and_show_a_blank_for_what_is_no_photo(tmp_path: Path) -> None:
    evil, photo = "<script>alert(1)</script>", tmp_path / "<b>.jpg"
    Image.new("RGB", (80, 40)).save(photo)
    phrases = write_phrase_page(
        tmp_path / "p.html", photo, [PhraseCandidates(evil, HATS.boxes, HATS.scores)], '"><i>'
    ).read_text()
    photo.write_text("no photo")
    hits = [SearchHit(0.5, 1, photo, (evil,)), SearchHit(0.4, 7, None, ()), SearchHit(0.3, 8, None, (), 9)]
    page = write_search_page(tmp_path / "page.html", '"><script>', hits, "<i>").read_text()
    assert page.count("no photo</div>") == 3
    for text in ("&lt;script&gt;alert(1)", "image 7", "image 8", "caption 9", "0.4000"):
        assert text in page
    for escaped in (page, phrases):
        assert not re.search(r"<(script|b|i)>", escaped)


def test_words_that_are_drawn_are_escaped_as_well_and_a_blank_has_no_drawing(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20)).save(tmp_path / "it.png")
    words, boxes = ("<start>", "<script>alert(1)</script>", '"><i>'), np.asarray([[0, 0, 40, 20.0]])
    seen = Attention("t2i", words, (40, 20), boxes, np.ones((1, 3)), 0.5)
    hits = [SearchHit(0.5, k, tmp_path / file, ("a",), k, attention=seen) for k, file in enumerate(["it.png", "none.png"])]
    for query, n_drawn in (("q", 1), (tmp_path / "it.png", 2), (tmp_path / "none.png", 0)):
        page = write_search_page(tmp_path / "page.html", query, hits, "all").read_text()
        assert len(drawings(page)) == n_drawn
        assert not re.search(r"<(script|i)>", page)
        assert ("&lt;script&gt;alert(1)&lt;/script&gt;</span>" in page) == (n_drawn > 0)


# Drawings of attention.

BOXES = np.asarray([[0, 0, 10, 20], [5.04, 5, 30, 20], [0, 10, 30, 20]], float)


def test_the_highest_opacity_comes_last_and_a_word_that_no_region_attends_to_has_no_shades() -> None:
    one = Attention("t2i", ("a",), (30, 20), BOXES, np.asarray([[0.2], [0.5], [0.3]]), 0.5)
    assert [region for region, _ in draw_attention("one", [one]).words[0].region_opacities] == [0, 2, 1]
    seen = Attention("i2t", ("a", "dog"), (30, 20), BOXES, np.asarray([[1.0, 0], [1, 0], [1, 0]]), 0.5)
    assert [len(word.region_opacities) for word in draw_attention("one", [seen]).words] == [3, 0]
    nothing = Attention("t2i", ("a",), (30, 20), BOXES, np.zeros((3, 1)), 0.5)
    assert not draw_attention("one", [nothing]).words[0].region_opacities
