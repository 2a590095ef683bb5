from __future__ import annotations

from pathlib import Path

from vse.eval.report.search_page import write_search_page
from vse.eval.search.hits import SearchHit


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
