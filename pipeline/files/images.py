"""Read and decode untrusted image files to upright RGB, and reject files that lack a part of their pixels.

All commands read photographs with :func:`read_image_bytes`, which also finds photographs in tar archives
(:mod:`vse.pipeline.files.photo_archives`).

Pillow decodes incomplete files without an error. Missing rows of a PNG file stay black, and Pillow does not check the
checksums of the pixels (:func:`_is_png_incomplete` does). Missing blocks of a JPEG file become grey if an end marker
follows the cut, or if the header states a larger image. To find missing blocks, the file is decoded a second time with added
noise (:func:`_insert_noise`).
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vse.pipeline.errors import UserError
from vse.pipeline.files.photo_archives import ArchivedPhoto, find_archived_photo

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
QUERY_IMAGE_FORMATS = (*IMAGE_FORMATS, "GIF", "BMP")  # formats of an image that is only a query
MAX_PIXELS = 80_000_000  # a larger image is rejected as a decompression bomb
_SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)  # orientations in EXIF data that exchange width and height
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_N_CHANNELS_BY_COLOUR_TYPE = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # colour types of PNG
_INTERLACE_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)  # x, y, steps
_INFLATE_CHUNK_BYTES = 1 << 20
_JPEG_START = b"\xff\xd8\xff"
_MARKER_PATTERN = re.compile(rb"\xff+([^\x00\xff])")
_SCAN_END_PATTERN = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
_RESTART_MARKER_PATTERN = re.compile(rb"\xff[\xd0-\xd7]")
_EOI, _SOS, _DRI = 0xD9, 0xDA, 0xDD
_MARKERS_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))  # markers that no length follows
_HUFFMAN_FRAME_MARKERS = (0xC0, 0xC1, 0xC2)  # sequential, extended sequential and progressive frames
_PROGRESSIVE_FRAME_MARKER = 0xC2
_N_COEFFICIENTS = 64
_NOISE_BYTES = bytes(random.Random(0).randrange(255) for _ in range(1024))  # without 0xff, which would begin a marker


def _is_png_incomplete(content: bytes) -> bool:
    """Return whether a PNG file lacks rows, or has a wrong checksum in its pixel data. Pillow finds neither fault."""
    stream, size, missing, position = zlib.decompressobj(), 0, 0, len(_PNG_SIGNATURE)
    while position + 8 <= len(content):
        length, kind = int.from_bytes(content[position : position + 4]), content[position + 4 : position + 8]
        data = content[position + 8 : position + 8 + length]
        checksum = content[position + 8 + length : position + 12 + length]
        position += length + 12
        if kind == b"IHDR":
            missing = _count_uncompressed_bytes(data)
        elif kind == b"IDAT":
            if zlib.crc32(kind + data) != int.from_bytes(checksum):
                return True
            while data and size < missing:
                size += len(stream.decompress(data, _INFLATE_CHUNK_BYTES))
                data = stream.unconsumed_tail
            if size >= missing:
                break
    return size < missing


def _count_uncompressed_bytes(header: bytes) -> int:
    """Return the number of bytes of all rows of a PNG image before compression.

    ``header`` is the content of the chunk IHDR. The byte at the start of each row, which names the row's filter, is counted.
    """
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    depth, colour, interlaced = header[8], header[9], header[12]
    bits, size = depth * _N_CHANNELS_BY_COLOUR_TYPE[colour], 0
    for x, y, across, down in _INTERLACE_PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - x) // across), -(-(height - y) // down)
        if columns > 0 and rows > 0:
            size += rows * (1 + -(-columns * bits // 8))
    return size


@dataclass
class _JpegFrame:
    """The frame header of a JPEG file, and a record of the DCT coefficients that its scans contain.

    ``sampling_factors`` maps the id of each colour component to its sampling factors (across, down). ``lowest_bit_positions``
    maps the same ids to 64 entries, one for each DCT coefficient. An entry is the position of the lowest bit of the
    coefficient that the scans contain, counted from 0; None if no scan contains the coefficient.
    """

    frame_marker: int
    height: int
    width: int
    sampling_factors: dict[int, tuple[int, int]]
    lowest_bit_positions: dict[int, list[int | None]] = field(default_factory=dict)

    @classmethod
    def read(cls, frame_marker: int, segment: bytes) -> _JpegFrame:
        height, width = int.from_bytes(segment[1:3]), int.from_bytes(segment[3:5])
        components = [segment[6 + 3 * k : 9 + 3 * k] for k in range(segment[5])]
        sampling = {c[0]: (c[1] >> 4 or 1, c[1] & 15 or 1) for c in components}
        return cls(frame_marker, height, width, sampling, {name: [None] * _N_COEFFICIENTS for name in sampling})

    def add_scan(self, segment: bytes) -> list[int]:
        """Record the DCT coefficients of the scan with the header ``segment``; return the ids of its colour components."""
        component_ids = [segment[1 + 2 * k] for k in range(segment[0])]
        first, last, bits = segment[-3:]
        if self.frame_marker != _PROGRESSIVE_FRAME_MARKER:
            first, last, bits = 0, _N_COEFFICIENTS - 1, 0
        for name in component_ids:
            known = self.lowest_bit_positions[name]
            known[first : last + 1] = [bits & 15] * len(known[first : last + 1])
        return component_ids

    def count_expected_restarts(self, component_ids: list[int], interval: int) -> int:
        """Return the number of restart markers (RST0 to RST7) in a complete scan of these colour components.

        ``interval`` is the restart interval of the file: the number of blocks of pixels from one marker to the next.
        """
        across, down = (max(factors[axis] for factors in self.sampling_factors.values()) for axis in (0, 1))
        width, height = 8 * across, 8 * down
        if len(component_ids) == 1:  # a scan of one component has no more blocks than that component
            factors = self.sampling_factors[component_ids[0]]
            width, height = width // factors[0], height // factors[1]
        return (-(-self.width // width) * -(-self.height // height) - 1) // interval

    @property
    def is_complete(self) -> bool:
        """True if the recorded scans contain every bit of every DCT coefficient of all colour components."""
        return not any(bit for known in self.lowest_bit_positions.values() for bit in (1 if b is None else b for b in known))


def _insert_noise(content: bytes) -> bytes | None:
    """Return the bytes of a JPEG file with noise after each scan; None if the file is incomplete.

    A decoder ignores noise after a complete scan. It reads noise after an incomplete scan as the missing data, so that the
    decoded image changes. A file without Huffman coding is returned unchanged.
    """
    frame, interval, position, parts = None, 0, 0, []
    copied = 0
    while marker := _MARKER_PATTERN.search(content, position):
        kind, position = marker[1][0], marker.end()
        if kind == _EOI:
            break
        if kind in _MARKERS_WITHOUT_LENGTH:
            continue
        length = int.from_bytes(content[position : position + 2])
        segment, position = content[position + 2 : position + length], position + length
        if kind == _DRI:
            interval = int.from_bytes(segment[:2])
        elif 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            if kind not in _HUFFMAN_FRAME_MARKERS:
                return content
            frame = _JpegFrame.read(kind, segment)
        elif kind == _SOS and frame is not None:
            found = _SCAN_END_PATTERN.search(content, position)
            if found is None and content.endswith(bytes(2)):
                return None  # zeros instead of the end marker: the end of the file was never written
            end = found.start() if found else len(content)
            component_ids = frame.add_scan(segment)
            if interval and len(_RESTART_MARKER_PATTERN.findall(content, position, end)) < frame.count_expected_restarts(
                component_ids, interval
            ):
                return None
            parts += [content[copied:end], _NOISE_BYTES]
            copied = position = end
    if frame is None or not frame.is_complete:
        return None
    return b"".join([*parts, content[copied:]])


class BadImage(UserError):
    """Raised for an image file that is missing or cannot be decoded."""


class UnreadableArchive(BadImage):
    """Raised if an archive of images is missing, unreachable or changed, so that none of its images can be read."""


def read_image_bytes(path: Path) -> bytes:
    """Return the bytes of an image: a plain file, or a member of a tar archive (:mod:`vse.pipeline.files.photo_archives`).

    Raises BadImage if no file and no archive has this image, and UnreadableArchive if the archive cannot be read.
    """
    try:
        if path.is_file():
            return path.read_bytes()
    except OSError as error:
        raise BadImage(f"{path}: {error.strerror}") from None
    with _wrap_archive_errors(path):
        return _require_archived_photo(path).read()


def image_file_size(path: Path) -> int:
    """Return the number of bytes of an image, in a plain file or a tar archive. Raises BadImage if the image is missing."""
    if path.is_file():
        return path.stat().st_size
    with _wrap_archive_errors(path):
        return _require_archived_photo(path).size


def image_exists(path: Path) -> bool:
    """Return whether an image exists: as a plain file, or in a tar archive that is unchanged since the import."""
    try:
        check_image_exists(path)
    except BadImage:
        return False
    return True


def check_image_exists(path: Path) -> None:
    """Raise BadImage if an image is neither a plain file nor in a tar archive that is unchanged since the import."""
    if not path.is_file():
        with _wrap_archive_errors(path):
            _require_archived_photo(path).archive.require_unchanged()


def _require_archived_photo(path: Path) -> ArchivedPhoto:
    photo = find_archived_photo(path)
    if photo is None:
        raise BadImage(f"{path}: no such image file")
    return photo


@contextmanager
def _wrap_archive_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except BadImage:
        raise
    except UserError as error:
        raise UnreadableArchive(f"{path}: {error}") from None


def decode_image(
    path: Path, content: bytes | None = None, max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = IMAGE_FORMATS
) -> Image.Image:
    """Decode an image file to 8-bit RGB, upright according to its EXIF data, with transparent pixels blended with white.

    If ``content`` has the bytes of the file, ``path`` only names the file in messages; otherwise ``path`` is read. A JPEG file
    is decoded twice to find missing data. This takes 2 ms more for an image of 500 x 375 pixels. An animation is decoded to
    its first image. Raises BadImage if the file is in none of the ``formats``, is damaged or incomplete, or has a header that
    states more pixels than ``max_pixels``.
    """
    content = read_image_bytes(path) if content is None else content
    with _wrap_decode_errors(path, formats), Image.open(BytesIO(content), formats=formats) as image:
        if image.width * image.height > max_pixels:
            raise BadImage(f"{path}: {image.width} x {image.height} pixels are too many (at most {max_pixels:,})")
        image.load()
        if _lacks_data(image, content):
            reason = "it lacks data: cut off, damaged, or of another size than its header states"
            raise BadImage(f"{path}: not a readable image ({reason})")
        return convert_to_rgb(ImageOps.exif_transpose(image))


def count_pixels(path: Path, content: bytes, formats: tuple[str, ...] = IMAGE_FORMATS) -> int:
    """Return the number of pixels that an image header states. Raises BadImage if the image is in none of the ``formats``."""
    with _wrap_decode_errors(path, formats), Image.open(BytesIO(content), formats=formats) as image:
        return image.width * image.height


def read_image_size(path: Path, content: bytes | None = None) -> tuple[int, int]:
    """Return the width and height of the upright image in pixels, as its header states. ``content`` has the bytes, if known.

    Raises BadImage if the file is missing, is not a JPEG, PNG or WebP file, or has more than ``MAX_PIXELS``.
    """
    if content is None and not path.is_file():
        content = read_image_bytes(path)
    source = path if content is None else BytesIO(content)
    with _wrap_decode_errors(path), Image.open(source, formats=IMAGE_FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise BadImage(f"{path}: {width} x {height} pixels are too many (at most {MAX_PIXELS:,})")
        return (
            (height, width) if image.getexif().get(ExifTags.Base.Orientation, 1) in _SIDEWAYS_ORIENTATIONS else (width, height)
        )


@contextmanager
def _wrap_decode_errors(path: Path, formats: tuple[str, ...] = IMAGE_FORMATS) -> Iterator[None]:
    """Turn any error in the ``with`` block, except MemoryError, into BadImage. ``formats`` are named in the message."""
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:  # the original message names an object in memory, not the file
        raise BadImage(f"{path}: not a readable image (not {' or '.join(formats)})") from None
    except Exception as error:  # a broken file can raise anything: struct.error from its EXIF, SyntaxError from its header
        raise BadImage(f"{path}: not a readable image ({error})") from None


def _lacks_data(image: Image.Image, content: bytes) -> bool:
    """Return whether the file ``content`` is incomplete, so that the decoder has made up a part of ``image``."""
    if content.startswith(_PNG_SIGNATURE):
        return _is_png_incomplete(content)
    if not content.startswith(_JPEG_START):
        return False
    noisy = _insert_noise(content)
    if noisy is None or noisy is content:
        return noisy is None
    with Image.open(BytesIO(noisy), formats=IMAGE_FORMATS) as again:
        return again.tobytes() != image.tobytes()


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode as 8-bit RGB. 16-bit values are scaled, transparent pixels are blended with white."""
    if image.mode.startswith(("I", "F")):  # 16-bit grey; Pillow's own conversion would clip the values at 255
        deep = np.asarray(image).astype(np.float64)
        return Image.fromarray((deep / 257).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
