from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tests.drawn import drawings
from vse.eval.report.pages import write_search_page
from vse.eval.search.top_k import Attention, SearchHit


def test_a_report_escapes_all_and_shows_a_blank_for_what_is_no_photo(tmp_path: Path) -> None:
    (tmp_path / "<b>.jpg").write_text("no photo")
    hits = [
        SearchHit(0.5, 1, tmp_path / "<b>.jpg", ("<script>alert(1)</script>",)),
        SearchHit(0.4, 7, None, ()),
        SearchHit(0.3, 8, None, (), 9),
    ]
    page = write_search_page(tmp_path / "page.html", '"><script>', hits, "<i>").read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert page.count("no photo</div>") == 3
    for text in ("&lt;script&gt;alert(1)", "image 7", "image 8", "caption 9", "0.4000"):
        assert text in page


def test_words_that_are_drawn_are_escaped_as_well_and_a_blank_has_no_drawing(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20)).save(tmp_path / "it.png")
    words, boxes = ("<start>", "<script>alert(1)</script>", '"><i>'), np.asarray([[0, 0, 40, 20.0]])
    seen = Attention("t2i", words, (40, 20), boxes, np.ones((1, 3)), 0.5)
    hits = [SearchHit(0.5, k, tmp_path / file, ("a",), k, attention=seen) for k, file in enumerate(["it.png", "none.png"])]
    for query, n_drawn in (("q", 1), (tmp_path / "it.png", 2), (tmp_path / "none.png", 0)):
        page = write_search_page(tmp_path / "page.html", query, hits, "all").read_text()
        assert len(drawings(page)) == n_drawn
        assert "<script" not in page
        assert "<i>" not in page
        assert ("&lt;script&gt;alert(1)&lt;/script&gt;</span>" in page) == (n_drawn > 0)
        assert ("divides its attention" in page) == (n_drawn > 0)
