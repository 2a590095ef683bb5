"""The picture of a ladder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from tests.eval.tables.test_ladder import edited, embeddings, ladder_of_three, result
from vse.eval.cli import table_main
from vse.eval.options import TableRequest
from vse.eval.tables.ladder import LadderTable, build_ladder


def test_the_picture_names_the_best_and_all_that_was_read(tmp_path: Path) -> None:
    drawn = LadderTable("ladder").write(build_ladder(ladder_of_three(tmp_path)), tmp_path / "x.svg").read_text()
    ElementTree.fromstring(drawn)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert {"fc7", "tfidf", "rsum", "extraction, training and evaluation, seconds"} <= set(texts)
    assert texts.count("VSE++") == 3, "a name at each point"
    assert all("$" not in text for text in texts), "numbers at the axes are plain"
    assert any(text.startswith("demo test: ") for text in texts)


def test_the_same_rows_make_the_same_bytes(tmp_path: Path) -> None:
    table = build_ladder(ladder_of_three(tmp_path))
    one, two = (
        LadderTable("ladder").write(table, tmp_path / name, TableRequest(cost="train_s")).read_bytes()
        for name in ("a.svg", "b.svg")
    )
    assert one == two


def test_a_png_is_an_image_of_some_width(tmp_path: Path) -> None:
    with Image.open(LadderTable("ladder").write(build_ladder(ladder_of_three(tmp_path)), tmp_path / "x.png")) as image:
        assert image.width > 800
        assert len(np.unique(np.asarray(image.convert("L")))) > 10


def test_names_from_data_are_drawn_as_they_are(tmp_path: Path) -> None:
    named = result(tmp_path, "odd", embeddings("odd", 0, 1.0, train_s=0.0, embed_s=0.0))
    hostile = "$x_{1}$ <b>&\x07\n" + 60 * "y"

    def rename(content: dict[str, dict[str, dict[str, str]]]) -> None:
        content["provenance"]["config"] |= {"title": hostile, "feature": "$", "caption_feature": "a$b$"}

    drawn = LadderTable("ladder").write(build_ladder([edited(named, rename)]), tmp_path / "x.svg").read_text()
    ElementTree.fromstring(drawn)
    assert "$x_{1}$ &lt;b&gt;&amp;" in drawn
    assert "y" * 41 not in drawn


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, fails: Callable[..., str]) -> None:
    unknown = result(tmp_path, "unknown", embeddings("unknown", 0, 0.5))
    out = tmp_path / "x.svg"
    assert "x.svg: no result has the cost total_s" in fails(table_main, "ladder", unknown, "--out", out)
    cheap, better, _ = ladder_of_three(tmp_path)
    other = edited(better, lambda content: content.update(dataset="other"))
    assert "several datasets" in fails(table_main, "ladder", cheap, other, "--out", out)
    assert not out.exists()
