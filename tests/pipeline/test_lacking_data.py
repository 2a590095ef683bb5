"""Test that images with missing data are rejected: files that were cut and closed, or whose header states a larger size."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from tests.conftest import TINY_FEATURE
from tests.hostile import refused
from vse.features.cli import main as extract_main
from vse.pipeline.files.images import BadImage, decode_image

JPEG: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("RGB", {}),
    "optimised": ("RGB", {"optimize": True}),
    "fine": ("RGB", {"quality": 95, "subsampling": 0}),
    "coarse": ("RGB", {"quality": 10, "subsampling": 2}),
    "progressive": ("RGB", {"progressive": True}),
    "coarse and progressive": ("RGB", {"progressive": True, "quality": 30}),
    "restarted in each row": ("RGB", {"restart_marker_rows": 1}),
    "restarted in each block": ("RGB", {"restart_marker_blocks": 1}),
    "progressive and restarted": ("RGB", {"progressive": True, "restart_marker_rows": 2}),
    "grey": ("L", {}),
    "grey and progressive": ("L", {"progressive": True}),
    "CMYK": ("CMYK", {}),
}
EOI = b"\xff\xd9"


def photo(width: int = 150, height: int = 111) -> Image.Image:
    """Return an image with surfaces and edges everywhere, as photographs have them."""
    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2))


def jpeg(kind: str, **size: int) -> bytes:
    mode, options = JPEG[kind]
    stream = BytesIO()
    photo(**size).convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


def cut_and_closed(content: bytes, part: float) -> bytes:
    """Return the first ``part`` of a JPEG's data, with all headers before the first scan, and an end marker."""
    start = content.index(b"\xff\xda") + 16
    return content[: start + int(part * (len(content) - 2 - start))] + EOI


def larger(content: bytes, width: int, height: int) -> bytes:
    """Return the same data with a header of another size."""
    start = max(content.find(b"\xff\xc0"), content.find(b"\xff\xc2")) + 5
    return content[:start] + struct.pack(">HH", height, width) + content[start + 4 :]


@pytest.mark.parametrize("kind", JPEG)
@pytest.mark.parametrize("part", [0.1, 0.3, 0.6, 0.9, 0.99])
def test_a_jpeg_that_was_cut_and_closed_is_refused(kind: str, part: float) -> None:
    with pytest.raises(BadImage, match=r"x\.jpg: not a readable image"):
        decode_image(Path("x.jpg"), cut_and_closed(jpeg(kind), part))


@pytest.mark.parametrize("kind", JPEG)
@given(part=st.floats(0.02, 0.995))
def test_no_cut_goes_unnoticed(kind: str, part: float) -> None:
    with pytest.raises(BadImage):
        decode_image(Path("x.jpg"), cut_and_closed(jpeg(kind), part))


@pytest.mark.parametrize("kind", JPEG)
@pytest.mark.parametrize("size", [(150, 222), (300, 111), (1600, 1600)])
def test_a_jpeg_that_says_it_is_larger_than_its_data_is_refused(kind: str, size: tuple[int, int]) -> None:
    with pytest.raises(BadImage, match=r"x\.jpg: not a readable image"):
        decode_image(Path("x.jpg"), larger(jpeg(kind), *size))


def test_a_header_of_8000_x_8000_over_64_x_64_of_data_is_refused() -> None:
    with pytest.raises(BadImage, match="lacks data"):
        decode_image(Path("x.jpg"), larger(jpeg("plain", width=64, height=64), 8000, 8000))


@pytest.mark.parametrize("kind", JPEG)
@given(width=st.integers(1, 70), height=st.integers(1, 70), tail=st.binary(max_size=40))
def test_a_whole_jpeg_is_read_whatever_follows_it(kind: str, width: int, height: int, tail: bytes) -> None:
    content = jpeg(kind, width=width, height=height)
    assert decode_image(Path("x.jpg"), content + tail).size == (width, height)


@pytest.mark.parametrize("kind", JPEG)
def test_a_thumbnail_in_the_header_is_no_end(kind: str) -> None:
    content = jpeg(kind)
    thumbnail = cut_and_closed(jpeg("plain"), 0.5)
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    assert decode_image(Path("x.jpg"), content[:2] + segment + content[2:]).size == (150, 111)


def png(width: int, height: int, rows: bytes, interlaced: int = 0) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, interlaced)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("rows", [0, 1, 30, 63])
def test_a_png_that_lacks_rows_is_refused(rows: int) -> None:
    assert decode_image(Path("x.png"), png(16, 64, bytes(64 * 49))).size == (16, 64)
    with pytest.raises(BadImage, match=r"x\.png: not a readable image"):
        decode_image(Path("x.png"), png(16, 64, bytes(rows * 49)))


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9])
def test_a_tail_of_zeros_is_refused(part: float) -> None:
    """After a power failure, unwritten parts of a file are zeros."""
    noise = np.random.default_rng(0).integers(0, 256, 64 * 49, np.uint8).reshape(64, 49)
    noise[:, 0] = 0  # the filter of a row
    for name, content in (("x.png", png(16, 64, noise.tobytes())), ("x.jpg", jpeg("plain"))):
        kept = int(part * len(content))
        with pytest.raises(BadImage, match=f"{name}: not a readable image"):
            decode_image(Path(name), content[:kept] + bytes(len(content) - kept))


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 5), (8, 8), (9, 17)])
def test_an_interlaced_png_is_read_if_it_is_whole(size: tuple[int, int]) -> None:
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    columns = [(len(range(x, size[0], across)), len(range(y, size[1], down))) for x, y, across, down in passes]
    n_bytes = sum(rows * (1 + 3 * across) for across, rows in columns if across)
    assert decode_image(Path("x.png"), png(*size, bytes(n_bytes), interlaced=1)).size == size
    with pytest.raises(BadImage):
        decode_image(Path("x.png"), png(*size, bytes(n_bytes - 1), interlaced=1))


def test_the_command_names_the_file_or_lists_it(own_demo: Path, tmp_path: Path) -> None:
    preset = tmp_path / "tiny.yaml"
    settings = TINY_FEATURE.model_dump(mode="json", exclude={"name"})
    preset.write_text("\n".join(f"{key}: {value}" for key, value in settings.items() if value is not None))
    first = sorted((own_demo.parent / "images").iterdir())[0]
    first.write_bytes(cut_and_closed(first.read_bytes(), 0.6))
    arguments = ["cnn", "--dataset", own_demo, "--feature", preset, "--shards", 1, "--out", tmp_path / "f.h5"]
    error = refused(extract_main, *arguments)
    assert f"{first}: not a readable image (it lacks data" in error
    assert "--skip-bad" in error
    with pytest.raises(SystemExit) as stop:
        extract_main([*map(str, arguments), "--skip-bad"])
    assert stop.value.code == 0
    assert first.name in (tmp_path / "f.h5.failures.jsonl").read_text()
