from __future__ import annotations

import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

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
        ("x.jpg", "RGB", COLOUR),
        ("x.jpg", "L", (GREY,) * 3),
        ("x.jpg", "CMYK", COLOUR),
        ("x.png", "RGB", COLOUR),
        ("x.png", "P", COLOUR),
        ("x.png", "1", (255,) * 3),
        ("x.png", "16-bit grey", (156,) * 3),
        ("x.png", "RGBA", (229, 178, 153)),
        ("x.png", "LA", (255,) * 3),
        ("x.png", "transparent palette", (255,) * 3),
        ("x.webp", "RGB", COLOUR),
        ("x.webp", "RGBA", (229, 178, 153)),
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


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"gone\.jpg: no such image file"):
        decode_image(tmp_path / "gone.jpg")
    with pytest.raises(BadImage, match="no such image file"):
        decode_image(tmp_path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@given(part=st.floats(0, 0.98))
def test_a_truncated_file_is_refused(suffix: str, tmp_path: Path, part: float) -> None:
    noise(40, 30).save(tmp_path / f"x.{suffix}")
    whole = (tmp_path / f"x.{suffix}").read_bytes()
    (tmp_path / f"cut.{suffix}").write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(BadImage, match=rf"cut\.{suffix}: not a readable image"):
        decode_image(tmp_path / f"cut.{suffix}")


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), suffix=st.sampled_from(["jpg", "png", "webp"]))
def test_a_flipped_bit_is_an_image_or_a_bad_image_never_another_error(
    place: float, bit: int, suffix: str, tmp_path: Path
) -> None:
    noise(20, 16).save(tmp_path / f"x.{suffix}")
    content = bytearray((tmp_path / f"x.{suffix}").read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    with suppress(BadImage):
        assert decode_image(tmp_path / "x", bytes(content)).mode == "RGB"


@pytest.mark.parametrize("suffix", ["txt", "gif", "bmp", "tiff", "ico"])
def test_other_kinds_of_files_are_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix == "txt":
        path.write_text("not a image")
    else:
        noise(16, 16).save(path)
    path = path.rename(tmp_path / "x.jpg")
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


def test_the_size_of_what_is_no_image_is_a_line_of_error(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_text("no image")
    with pytest.raises(BadImage, match=r"x\.jpg: not a readable image"):
        read_image_size(tmp_path / "x.jpg")
    with pytest.raises(BadImage, match="no such image file"):
        read_image_size(tmp_path)


def bomb(side: int) -> bytes:
    """Write a PNG of a few hundred kilobytes that holds side x side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(3 * side + 1) * 50)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_000, 20_000, 60_000])
def test_a_decompression_bomb_is_refused_from_its_header(side: int, tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(bomb(side))
    with pytest.raises(BadImage, match=r"bomb\.png: .*(are too many|exceeds limit)"):
        decode_image(tmp_path / "bomb.png")
