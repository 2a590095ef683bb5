from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path

import jinja2
import pytest
from PIL import Image

from vse.eval.report.pages import thumbnail, write_page
from vse.pipeline.files.images import BadImage


def opened(source: str) -> Image.Image:
    kind, _, content = source.partition(",")
    assert kind == "data:image/jpeg;base64"
    return Image.open(BytesIO(base64.b64decode(content)))


@pytest.mark.parametrize(("size", "expected"), [((400, 200), (100, 50)), ((20, 300), (7, 100)), ((30, 20), (30, 20))])
def test_a_thumbnail_keeps_its_shape_and_is_never_enlarged(
    tmp_path: Path, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    Image.new("RGB", size, "red").save(tmp_path / "a.png")
    assert opened(thumbnail(tmp_path / "a.png", 100)).size == expected


def test_a_thumbnail_is_as_light_as_the_picture(tmp_path: Path) -> None:
    Image.new("RGB", (300, 300), (200, 40, 90)).save(tmp_path / "a.png")
    found = opened(thumbnail(tmp_path / "a.png")).convert("RGB").getpixel((50, 50))
    assert isinstance(found, tuple)
    assert all(abs(a - b) <= 3 for a, b in zip(found, (200, 40, 90), strict=True))


def test_what_is_no_picture_has_no_thumbnail(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("<svg/>")
    with pytest.raises(BadImage, match=r"a.png: not a readable image"):
        thumbnail(tmp_path / "a.png")


def test_a_page_forbids_what_it_does_not_need(tmp_path: Path) -> None:
    page = write_page(tmp_path / "x.html", "base.html").read_text()
    policy = page.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0]
    assert {part.strip() for part in policy.split(";")} >= {"default-src 'none'", "img-src data:", "style-src 'unsafe-inline'"}


def test_a_page_lacks_no_value_in_silence(tmp_path: Path) -> None:
    with pytest.raises(jinja2.UndefinedError):
        write_page(tmp_path / "x.html", "report.html")
    assert not (tmp_path / "x.html").exists()
