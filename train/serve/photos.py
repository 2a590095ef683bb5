"""Decode photographs, and large ones one at a time."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from threading import BoundedSemaphore, Lock

from PIL import Image

from vse.pipeline.errors import UserError
from vse.pipeline.image_files import MAX_PIXELS, decode, pixel_count, read_bytes

LARGE = 10_000_000  # pixels
DECODING = Lock()  # held while a large photograph is decoded
_places = BoundedSemaphore(2)  # one photograph is decoded and one waits: other threads answer other queries


class TooManyLargePhotos(UserError):
    """A large photograph is decoded already, and another one waits."""


def read_photo(path: Path, content: bytes | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return a photograph as :func:`vse.pipeline.image_files.decode` does, and only one large photograph at a time.

    Raises :class:`BadImage` if it is not a readable image, or if its header promises more than ``max_pixels``: then nothing
    is decoded.
    """
    content = read_bytes(path) if content is None else content
    with DECODING if LARGE < pixel_count(path, content) <= max_pixels else nullcontext():
        return decode(path, content, max_pixels)


def read_upload(content: bytes, max_pixels: int) -> Image.Image:
    """Return a photograph that a client sent, as :func:`read_photo` does.

    Raises :class:`TooManyLargePhotos` if it is large, one large photograph is decoded already and another one waits.
    """
    path = Path("the photograph")
    if not LARGE < pixel_count(path, content) <= max_pixels:
        return decode(path, content, max_pixels)
    if not _places.acquire(blocking=False):
        raise TooManyLargePhotos("The server reads other large photographs; try again in a moment.")
    try:
        return read_photo(path, content, max_pixels)
    finally:
        _places.release()
