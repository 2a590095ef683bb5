"""From an image file to upright RGB.

Check that a PNG file holds all the rows that its header promises, undamaged.

A decoder leaves missing rows black, and Pillow does not compare the checksums of the pixels.

Whether a JPEG file holds all the data that its header promises.

libjpeg fills what is missing with grey and says so in a warning alone, which Pillow does not pass on: a file that was cut and
closed with an end marker, or whose header is of a larger image, is decoded as if it were whole.
"""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vse.pipeline.errors import UserError

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # x, y, steps
_BLOCK = 1 << 20


def is_png_incomplete(content: bytes) -> bool:
    """Return whether the rows of a PNG file that Pillow decoded are incomplete, or do not have their checksum."""
    stream, size, missing, place = zlib.decompressobj(), 0, 0, len(PNG_SIGNATURE)
    while place + 8 <= len(content):
        length, kind = int.from_bytes(content[place : place + 4]), content[place + 4 : place + 8]
        data = content[place + 8 : place + 8 + length]
        checksum = content[place + 8 + length : place + 12 + length]
        place += length + 12
        if kind == b"IHDR":
            missing = _raw_bytes(data)
        elif kind == b"IDAT":
            if zlib.crc32(kind + data) != int.from_bytes(checksum):
                return True
            while data and size < missing:
                size += len(stream.decompress(data, _BLOCK))
                data = stream.unconsumed_tail
            if size >= missing:
                break
    return size < missing


def _raw_bytes(header: bytes) -> int:
    """Size of all rows, each with the byte that names its filter."""
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    depth, colour, interlaced = header[8], header[9], header[12]
    bits, size = depth * _CHANNELS[colour], 0
    for x, y, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - x) // across), -(-(height - y) // down)
        if columns > 0 and rows > 0:
            size += rows * (1 + -(-columns * bits // 8))
    return size


JPEG_START = b"\xff\xd8\xff"
_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_END_OF_SCAN = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_EOI, _SOS, _DRI = 0xD9, 0xDA, 0xDD
_ALONE = (0x01, *range(0xD0, 0xD9))  # markers without a length
_HUFFMAN = (0xC0, 0xC1, 0xC2)  # sequential, extended sequential and progressive frames
_PROGRESSIVE = 0xC2
_N_COEFFICIENTS = 64
_NOISE = bytes(random.Random(0).randrange(255) for _ in range(1024))  # no 0xff: it is data, not a marker


@dataclass
class _Frame:
    """A frame header, and what its scans have refined so far: by component, the lowest bit known of each coefficient."""

    kind: int
    height: int
    width: int
    sampling: dict[int, tuple[int, int]]
    lowest_bits: dict[int, list[int | None]] = field(default_factory=dict)

    @classmethod
    def read(cls, kind: int, segment: bytes) -> _Frame:
        height, width = int.from_bytes(segment[1:3]), int.from_bytes(segment[3:5])
        components = [segment[6 + 3 * k : 9 + 3 * k] for k in range(segment[5])]
        sampling = {c[0]: (c[1] >> 4 or 1, c[1] & 15 or 1) for c in components}
        return cls(kind, height, width, sampling, {name: [None] * _N_COEFFICIENTS for name in sampling})

    def add_scan(self, segment: bytes) -> list[int]:
        """Note what a scan with this header refines; returns its components."""
        names = [segment[1 + 2 * k] for k in range(segment[0])]
        first, last, bits = segment[-3:]
        if self.kind != _PROGRESSIVE:
            first, last, bits = 0, _N_COEFFICIENTS - 1, 0
        for name in names:
            known = self.lowest_bits[name]
            known[first : last + 1] = [bits & 15] * len(known[first : last + 1])
        return names

    def restarts(self, names: list[int], interval: int) -> int:
        """How many restart markers a scan of these components has."""
        across, down = (max(factors[axis] for factors in self.sampling.values()) for axis in (0, 1))
        width, height = 8 * across, 8 * down
        if len(names) == 1:  # a scan of one component has no more blocks than that component
            factors = self.sampling[names[0]]
            width, height = width // factors[0], height // factors[1]
        return (-(-self.width // width) * -(-self.height // height) - 1) // interval

    @property
    def complete(self) -> bool:
        """Whether the scans bring every coefficient of every component to its last bit."""
        return not any(bit for known in self.lowest_bits.values() for bit in (1 if b is None else b for b in known))


def insert_noise(content: bytes) -> bytes | None:
    """The file with noise after the data of each scan, or None if data are missing, which shows without decoding.

    Of a whole file a decoder ignores the noise, because it has all blocks of the scan by then. A decoder that lacks data
    takes the noise for them, where it would have filled the image: the two images differ. Files that are not coded as
    Huffman's are returned as they are.
    """
    frame, interval, place, parts = None, 0, 0, []
    copied = 0
    while marker := _MARKER.search(content, place):
        kind, place = marker[1][0], marker.end()
        if kind == _EOI:
            break
        if kind in _ALONE:
            continue
        length = int.from_bytes(content[place : place + 2])
        segment, place = content[place + 2 : place + length], place + length
        if kind == _DRI:
            interval = int.from_bytes(segment[:2])
        elif 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            if kind not in _HUFFMAN:
                return content
            frame = _Frame.read(kind, segment)
        elif kind == _SOS and frame is not None:
            found = _END_OF_SCAN.search(content, place)
            if found is None and content.endswith(bytes(2)):
                return None  # the end was never written: zeros are where the end marker belongs
            end = found.start() if found else len(content)
            names = frame.add_scan(segment)
            if interval and len(_RESTART.findall(content, place, end)) < frame.restarts(names, interval):
                return None
            parts += [content[copied:end], _NOISE]
            copied = place = end
    if frame is None or not frame.complete:
        return None
    return b"".join([*parts, content[copied:]])


IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 80_000_000  # an image with more is taken for a decompression bomb
_LYING = (5, 6, 7, 8)  # orientations in EXIF data that exchange width and height


class BadImage(UserError):
    """An image file that is missing or cannot be decoded."""


def read_image_bytes(path: Path) -> bytes:
    """Bytes of an image file; :class:`BadImage` if it is not there, or is not a plain file."""
    try:
        if not path.is_file():
            raise BadImage(f"{path}: no such image file")
        return path.read_bytes()
    except OSError as error:
        raise BadImage(f"{path}: {error.strerror}") from None


def decode_image(path: Path, content: bytes | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An image file (or its bytes, read before) as RGB; :class:`BadImage` says why not.

    Only JPEG, PNG and WebP are opened, and nothing is decoded whose header promises more than ``max_pixels``. The
    image is turned upright as its EXIF data say, transparent pixels are laid on white, and grey, palette, CMYK and
    16-bit images become 8-bit RGB. A file that lacks data is refused, also one that was closed after a cut: a JPEG is decoded
    twice for that (see :mod:`vse.pipeline.files.images`), which takes 2 ms more for an image of 500 x 375 pixels.
    """
    try:
        content = read_image_bytes(path) if content is None else content
        with Image.open(BytesIO(content), formats=IMAGE_FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise BadImage(f"{path}: {image.width} x {image.height} pixels are too many, at most {max_pixels:,} are read")
            image.load()
            if _is_filled(image, content):
                raise BadImage(
                    f"{path}: not a readable image (it lacks data: cut off, damaged, or of another size than it says)"
                )
            return convert_to_rgb(ImageOps.exif_transpose(image))
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:  # whose own message names an object in memory
        raise BadImage(f"{path}: not a readable image (no {', '.join(IMAGE_FORMATS)})") from None
    except Exception as error:  # a broken file can raise anything: struct.error from its EXIF, SyntaxError from its header
        raise BadImage(f"{path}: not a readable image ({error})") from None


def count_pixels(path: Path, content: bytes) -> int:
    """Return how many pixels the header of an image file promises; nothing is decoded.

    Raises :class:`BadImage` if it is not the header of one.
    """
    try:
        with Image.open(BytesIO(content), formats=IMAGE_FORMATS) as image:
            return image.width * image.height
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise BadImage(f"{path}: not a readable image (no {', '.join(IMAGE_FORMATS)})") from None
    except Exception as error:  # as in decode
        raise BadImage(f"{path}: not a readable image ({error})") from None


def read_image_size(path: Path, content: bytes | None = None) -> tuple[int, int]:
    """Width and height of an image file (or its bytes), turned upright, from its header; :class:`BadImage` says why not.

    An image of more than ``MAX_PIXELS`` is refused as by :func:`decode_image`.
    """
    if content is None and not path.is_file():
        raise BadImage(f"{path}: no such image file")
    try:
        with Image.open(path if content is None else BytesIO(content), formats=IMAGE_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadImage(f"{path}: {width} x {height} pixels are too many")
            return (height, width) if image.getexif().get(ExifTags.Base.Orientation, 1) in _LYING else (width, height)
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:  # whose own message names an object in memory
        raise BadImage(f"{path}: not a readable image (no {', '.join(IMAGE_FORMATS)})") from None
    except Exception as error:  # as in decode
        raise BadImage(f"{path}: not a readable image ({error})") from None


def _is_filled(image: Image.Image, content: bytes) -> bool:
    """Whether the decoder made up a part of ``image``, because the file lacks its data; of WebP it never does."""
    if content.startswith(PNG_SIGNATURE):
        return is_png_incomplete(content)
    if not content.startswith(JPEG_START):
        return False
    noisy = insert_noise(content)
    if noisy is None or noisy is content:
        return noisy is None
    with Image.open(BytesIO(noisy), formats=IMAGE_FORMATS) as again:
        return again.tobytes() != image.tobytes()


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode as 8-bit RGB: 16 bits are scaled, and transparent pixels are laid on white."""
    if image.mode.startswith(("I", "F")):  # 16 bits of grey; Pillow's own conversion would clip them at 255
        deep = np.asarray(image).astype(np.float64)
        return Image.fromarray((deep / 257).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
