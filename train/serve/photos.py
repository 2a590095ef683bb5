"""Decoding of photographs, of which one large one at a time takes memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from threading import BoundedSemaphore, Lock

from PIL import Image

from vse.pipeline.errors import UserError
from vse.pipeline.image_files import BadImage, decode, image_size, read_bytes

LARGE = 10_000_000  # pixels
_decoding = Lock()
_places = BoundedSemaphore(2)  # one photograph is decoded and one waits: other threads answer other queries


class TooManyLargePhotos(UserError):
    """A large photograph is decoded already, and another one waits."""


def read_photo(path: Path, content: bytes | None = None) -> Image.Image:
    """Return a photograph as :func:`vse.pipeline.image_files.decode` does, of more than ``LARGE`` pixels one at a time.

    Raises :class:`BadImage` if it is not a readable image.
    """
    content = read_bytes(path) if content is None else content
    with _decoding if _is_large(path, content) else nullcontext():
        return decode(path, content)


def read_upload(content: bytes, max_pixels: int) -> Image.Image:
    """Return a stranger's photograph, of which two large ones are in work at most.

    Raises :class:`BadImage` if it is not a readable image, or if its header promises more than ``max_pixels``: then nothing
    is decoded. Raises :class:`TooManyLargePhotos` if two large ones are in work already.
    """
    path = Path("the photograph")
    width, height = image_size(path, content)
    if width * height > max_pixels:
        raise BadImage(f"{path}: {width} x {height} pixels are too many, at most {max_pixels:,} are read")
    if not _is_large(path, content):
        return decode(path, content)
    if not _places.acquire(blocking=False):
        raise TooManyLargePhotos("The server reads other large photographs; try again in a moment.")
    try:
        return read_photo(path, content)
    finally:
        _places.release()


def _is_large(path: Path, content: bytes) -> bool:
    """Whether the header promises more than ``LARGE`` pixels."""
    width, height = image_size(path, content)
    return width * height > LARGE
