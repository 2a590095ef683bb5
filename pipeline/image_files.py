"""From an image file to upright RGB."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vse.pipeline.errors import UserError
from vse.pipeline.jpeg_data import SOI, with_noise
from vse.pipeline.png_data import SIGNATURE, lacks_rows

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 80_000_000  # an image with more is taken for a decompression bomb
_LYING = (5, 6, 7, 8)  # orientations in EXIF data that exchange width and height


class BadImage(UserError):
    """An image file that is missing or cannot be decoded."""


def read_bytes(path: Path) -> bytes:
    """Bytes of an image file; :class:`BadImage` if it is not there, or is not a plain file."""
    try:
        if not path.is_file():
            raise BadImage(f"{path}: no such image file")
        return path.read_bytes()
    except OSError as error:
        raise BadImage(f"{path}: {error.strerror}") from None


def decode(path: Path, content: bytes | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An image file (or its bytes, read before) as RGB; :class:`BadImage` says why not.

    Only JPEG, PNG and WebP are opened, and nothing is decoded whose header promises more than ``max_pixels``. The
    image is turned upright as its EXIF data say, transparent pixels are laid on white, and grey, palette, CMYK and
    16-bit images become 8-bit RGB. A file that lacks data is refused, also one that was closed after a cut: a JPEG is decoded
    twice for that (see :mod:`vse.pipeline.jpeg_data`), which takes 2 ms more for an image of 500 x 375 pixels.
    """
    try:
        content = read_bytes(path) if content is None else content
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise BadImage(f"{path}: {image.width} x {image.height} pixels are too many, at most {max_pixels:,} are read")
            image.load()
            if _is_filled(image, content):
                raise BadImage(
                    f"{path}: not a readable image (it lacks data: cut off, damaged, or of another size than it says)"
                )
            return as_rgb(ImageOps.exif_transpose(image))
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:  # whose own message names an object in memory
        raise BadImage(f"{path}: not a readable image (no {', '.join(FORMATS)})") from None
    except Exception as error:  # a broken file can raise anything: struct.error from its EXIF, SyntaxError from its header
        raise BadImage(f"{path}: not a readable image ({error})") from None


def pixel_count(path: Path, content: bytes) -> int:
    """Return how many pixels the header of an image file promises; nothing is decoded.

    Raises :class:`BadImage` if it is not the header of one.
    """
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            return image.width * image.height
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise BadImage(f"{path}: not a readable image (no {', '.join(FORMATS)})") from None
    except Exception as error:  # as in decode
        raise BadImage(f"{path}: not a readable image ({error})") from None


def image_size(path: Path, content: bytes | None = None) -> tuple[int, int]:
    """Width and height of an image file (or its bytes), turned upright, from its header; :class:`BadImage` says why not.

    An image of more than ``MAX_PIXELS`` is refused as by :func:`decode`.
    """
    if content is None and not path.is_file():
        raise BadImage(f"{path}: no such image file")
    try:
        with Image.open(path if content is None else BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadImage(f"{path}: {width} x {height} pixels are too many")
            return (height, width) if image.getexif().get(ExifTags.Base.Orientation, 1) in _LYING else (width, height)
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:  # whose own message names an object in memory
        raise BadImage(f"{path}: not a readable image (no {', '.join(FORMATS)})") from None
    except Exception as error:  # as in decode
        raise BadImage(f"{path}: not a readable image ({error})") from None


def _is_filled(image: Image.Image, content: bytes) -> bool:
    """Whether the decoder made up a part of ``image``, because the file lacks its data; of WebP it never does."""
    if content.startswith(SIGNATURE):
        return lacks_rows(content)
    if not content.startswith(SOI):
        return False
    noisy = with_noise(content)
    if noisy is None or noisy is content:
        return noisy is None
    with Image.open(BytesIO(noisy), formats=FORMATS) as again:
        return again.tobytes() != image.tobytes()


def as_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode as 8-bit RGB: 16 bits are scaled, and transparent pixels are laid on white."""
    if image.mode.startswith(("I", "F")):  # 16 bits of grey; Pillow's own conversion would clip them at 255
        deep = np.asarray(image).astype(np.float64)
        return Image.fromarray((deep / 257).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
