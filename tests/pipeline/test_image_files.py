"""Images of every mode are decoded; files that are damaged, cut and closed, or too large by their header are refused."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from tests.conftest import TINY_FEATURE
from tests.hostile import refused
from tests.pipeline.conftest import succeed
from vse.features.cli import extract_main
from vse.pipeline.files.images import BadImage, decode_image, read_image_size


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


COLOUR = (204, 102, 51)


def saved(mode: str, path: Path) -> Path:
    """Save an image of one colour in a mode, with the nearest colour that the mode has."""
    if mode == "16-bit grey":
        Image.fromarray(np.full((6, 8), 40_000, np.uint16)).save(path)
    elif mode == "1":
        Image.new("1", (8, 6), 1).save(path)
    elif mode in ("PA", "transparent palette"):
        image = Image.new("P", (8, 6), 0)
        image.putpalette([*COLOUR, 0, 0, 0])
        image.save(path, transparency=0)
    elif mode in ("RGBA", "LA"):
        colour = (*COLOUR, 128) if mode == "RGBA" else (90, 0)
        Image.new(mode, (8, 6), colour).save(path)
    elif path.suffix == ".jpg":
        Image.new("RGB", (8, 6), COLOUR).convert(mode).save(path, quality=100)
    else:
        Image.new("RGB", (8, 6), COLOUR).convert(mode).save(path)
    return path


GREY = 127  # of COLOUR, by the weights of ITU-R 601-2


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        *(("x.jpg", "RGB", COLOUR), ("x.jpg", "L", (GREY,) * 3), ("x.jpg", "CMYK", COLOUR)),
        *(("x.png", "RGB", COLOUR), ("x.png", "P", COLOUR), ("x.png", "1", (255,) * 3), ("x.png", "RGBA", (229, 178, 153))),
        *(("x.png", "16-bit grey", (156,) * 3), ("x.png", "LA", (255,) * 3), ("x.png", "transparent palette", (255,) * 3)),
        *(("x.webp", "RGB", COLOUR), ("x.webp", "RGBA", (229, 178, 153))),
    ],
)
def test_any_colour_mode_becomes_8_bit_rgb(name: str, mode: str, expected: tuple[int, ...], tmp_path: Path) -> None:
    """Transparent pixels are blended with white; 16-bit values are scaled, not clipped."""
    found = decode_image(saved(mode, tmp_path / name))
    assert (found.mode, found.size) == ("RGB", (8, 6))
    tolerance = 1 if name == "x.png" else 6
    assert np.abs(np.asarray(found, int) - np.asarray(expected)).max() <= tolerance


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_set_upright(orientation: int, tmp_path: Path) -> None:
    """An image that is stored with orientation k is decoded upright."""
    upright = noise(12, 8)
    how = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transpose that undoes what a viewer does
    stored = upright.transpose(Image.Transpose(how[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.asarray(decode_image(tmp_path / "x.png")), np.asarray(upright))


@pytest.mark.parametrize("read", [decode_image, read_image_size])
def test_what_is_no_image_is_named(read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_text("no image")
    for path, message in (("gone.jpg", "no such image file"), (".", "no such image file"), ("x.jpg", "not a readable image")):
        with pytest.raises(BadImage, match=message) as error:
            read(tmp_path / path)
        assert str(error.value).startswith(str(tmp_path / path))


@pytest.mark.parametrize("suffix", ["gif", "bmp", "tiff", "ico"])
def test_other_kinds_of_files_are_refused(suffix: str, tmp_path: Path) -> None:
    noise(16, 16).save(tmp_path / f"x.{suffix}")
    path = (tmp_path / f"x.{suffix}").rename(tmp_path / "x.jpg")
    with pytest.raises(BadImage, match="not a readable image"):
        decode_image(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_the_size_of_an_image_is_that_of_the_upright_one(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    for orientation in range(9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        noise(24, 16).save(path, exif=exif)
        assert read_image_size(path) == decode_image(path).size


def png(width: int, height: int, data: bytes, interlaced: int = 0) -> bytes:
    """Return a PNG of 8-bit RGB with these bytes of rows."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, interlaced)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_000, 60_000])
def test_a_decompression_bomb_is_refused_from_its_header(side: int) -> None:
    with pytest.raises(BadImage, match=r"bomb\.png: .*(are too many|exceeds limit)"):
        decode_image(Path("bomb.png"), png(side, side, bytes(3 * side + 1) * 50))


JPEG: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("RGB", {}), "optimised": ("RGB", {"optimize": True}), "fine": ("RGB", {"quality": 95, "subsampling": 0}),
    "coarse": ("RGB", {"quality": 10, "subsampling": 2}), "progressive": ("RGB", {"progressive": True}),
    "coarse and progressive": ("RGB", {"progressive": True, "quality": 30}),
    "restarted in each row": ("RGB", {"restart_marker_rows": 1}),
    "restarted in each block": ("RGB", {"restart_marker_blocks": 1}),
    "progressive and restarted": ("RGB", {"progressive": True, "restart_marker_rows": 2}), "grey": ("L", {}),
    "grey and progressive": ("L", {"progressive": True}), "CMYK": ("CMYK", {}),
}  # fmt: skip


def photo(width: int = 150, height: int = 111) -> Image.Image:
    """Return an image with surfaces and edges everywhere, as photographs have them."""
    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2))


@cache
def jpeg(kind: str, **size: int) -> bytes:
    mode, options = JPEG[kind]
    stream = BytesIO()
    photo(**size).convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


def cut_and_closed(content: bytes, part: float) -> bytes:
    """Return the first ``part`` of a JPEG's data, with all headers before the first scan, and an end marker."""
    start = content.index(b"\xff\xda") + 16
    return content[: start + int(part * (len(content) - 2 - start))] + b"\xff\xd9"


def larger(content: bytes, width: int, height: int) -> bytes:
    """Return the same data with a header of another size."""
    start = max(content.find(b"\xff\xc0"), content.find(b"\xff\xc2")) + 5
    return content[:start] + struct.pack(">HH", height, width) + content[start + 4 :]


@pytest.mark.parametrize("kind", JPEG)
@given(part=st.floats(0.02, 0.995))
@example(part=0.99)
def test_a_jpeg_that_was_cut_and_closed_is_refused(kind: str, part: float) -> None:
    with pytest.raises(BadImage, match=r"x\.jpg: not a readable image"):
        decode_image(Path("x.jpg"), cut_and_closed(jpeg(kind), part))


@pytest.mark.parametrize("kind", JPEG)
@pytest.mark.parametrize("size", [(150, 222), (300, 111), (1200, 1200)])
def test_a_jpeg_that_says_it_is_larger_than_its_data_is_refused(kind: str, size: tuple[int, int]) -> None:
    with pytest.raises(BadImage, match=r"x\.jpg: not a readable image .*lacks data"):
        decode_image(Path("x.jpg"), larger(jpeg(kind), *size))


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


@pytest.mark.parametrize("rows", [0, 30, 63])
def test_a_png_that_lacks_rows_is_refused(rows: int) -> None:
    assert decode_image(Path("x.png"), png(16, 64, bytes(64 * 49))).size == (16, 64)
    with pytest.raises(BadImage, match=r"x\.png: not a readable image"):
        decode_image(Path("x.png"), png(16, 64, bytes(rows * 49)))


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 5), (8, 8), (9, 17)])
def test_an_interlaced_png_is_read_if_it_is_whole(size: tuple[int, int]) -> None:
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    columns = [(len(range(x, size[0], across)), len(range(y, size[1], down))) for x, y, across, down in passes]
    n_bytes = sum(rows * (1 + 3 * across) for across, rows in columns if across)
    assert decode_image(Path("x.png"), png(*size, bytes(n_bytes), interlaced=1)).size == size
    with pytest.raises(BadImage):
        decode_image(Path("x.png"), png(*size, bytes(n_bytes - 1), interlaced=1))


def test_the_command_names_the_file_or_lists_it(few: Path, tmp_path: Path) -> None:
    shutil.copytree(few.parent, tmp_path / "data")
    preset, first = tmp_path / "tiny.yaml", sorted((tmp_path / "data" / "images").iterdir())[0]
    settings = TINY_FEATURE.model_dump(mode="json", exclude={"name"})
    preset.write_text("\n".join(f"{key}: {value}" for key, value in settings.items() if value is not None))
    first.write_bytes(cut_and_closed(first.read_bytes(), 0.6))
    dataset, out = tmp_path / "data" / "dataset.json", tmp_path / "f.h5"
    arguments = ["cnn", "--dataset", dataset, "--feature", preset, "--shards", 1, "--out", out]
    error = refused(extract_main, *arguments)
    assert f"{first}: not a readable image (it lacks data" in error
    assert "--skip-bad" in error
    succeed(extract_main, *arguments, "--skip-bad")
    assert first.name in (tmp_path / "f.h5.failures.jsonl").read_text()
