"""The page of phrases in one photo."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vse.eval.report.drawings import PHRASE_COLOURS
from vse.eval.report.pages import write_phrase_page
from vse.eval.search.top_k import PhraseHit
from vse.pipeline.files.images import BadImage

HATS = PhraseHit("a red hat", np.array([[1, 2, 11, 22], *[[0, 0, 5, 5.0]] * 8]), np.linspace(0.9, 0.1, 9))


def test_each_phrase_has_its_best_box_in_its_colour(tmp_path: Path) -> None:
    Image.new("RGB", (80, 40)).save(tmp_path / "it.png")
    none = PhraseHit("a dog", np.zeros((0, 4)), np.zeros(0))
    page = write_phrase_page(tmp_path / "p.html", tmp_path / "it.png", [HATS, none], "runs/a").read_text()
    assert 'viewBox="0 0 80 40"' in page
    rectangle = f'x="1.0" y="2.0" width="10.0" height="20.0" stroke="{PHRASE_COLOURS[0]}"'
    assert page.count(rectangle) == 1
    assert "The best 5 of 9 boxes." in page
    listed = re.findall(r'<td>([\d, ]+)</td><td class="n">([\d.]+)</td>', page)
    assert listed[:2] == [("1, 2, 11, 22", "0.9000"), ("0, 0, 5, 5", "0.8000")]
    assert len(listed) == 5
    assert page.count("no candidate box") == 1
    assert "“a red hat”, “a dog” in it.png" in page


def test_what_is_shown_is_escaped(tmp_path: Path) -> None:
    Image.new("RGB", (80, 40)).save(tmp_path / "<b>.png")
    hit = PhraseHit("<script>alert(1)</script>", HATS.boxes, HATS.scores)
    page = write_phrase_page(tmp_path / "p.html", tmp_path / "<b>.png", [hit], '"><i>').read_text()
    assert not re.search(r"<(script|b|i)>", page)
    assert "&lt;script&gt;" in page


def test_a_photo_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="no such image file"):
        write_phrase_page(tmp_path / "p.html", tmp_path / "it.png", [HATS], "")
