"""Decode photos of clients and of the data set within limits of memory, and keep the last photos of clients."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import nullcontext
from pathlib import Path
from threading import BoundedSemaphore, Lock

from PIL import Image

from vse.pipeline.errors import UserError
from vse.pipeline.files.images import (
    MAX_PIXELS,
    QUERY_IMAGE_FORMATS,
    count_pixels,
    decode_image,
    read_image_bytes,
)

SMALL_PHOTO_SIDE = 480  # longer side of a photo among the results, in pixels
LARGE_PHOTO_PIXELS = 10_000_000  # photos with more pixels are decoded one at a time
LARGE_PHOTO_LOCK = Lock()
PHOTO_SLOTS = BoundedSemaphore(4)  # photos in memory at once, because a decoded photo takes up to 75 MB by default
_large_photo_slots = BoundedSemaphore(2)  # one large upload is decoded and one waits; others are refused to keep threads free
_UPLOAD_NAME = Path("the photograph")  # the name of an upload in messages
_MAX_KEPT_BYTES = 64 * 2**20


class TooManyLargePhotos(UserError):
    """A large photo cannot be read now, because one is being decoded and another one already waits."""


class UploadedPhotos:
    """The files of the last uploaded photos, in memory: at most 64 MiB in total, or a single larger file.

    The key of a file is a hash with a secret, so that only the client that sent a photo knows the link to its results.
    """

    def __init__(self) -> None:
        self._secret, self._lock = secrets.token_bytes(16), Lock()
        self._content_by_key: dict[str, bytes] = {}

    def keep(self, content: bytes) -> str:
        """Keep a file, and return its key."""
        key = hashlib.blake2b(content, key=self._secret, digest_size=16).hexdigest()
        with self._lock:
            self._content_by_key.pop(key, None)
            self._content_by_key[key] = content
            while len(self._content_by_key) > 1 and sum(map(len, self._content_by_key.values())) > _MAX_KEPT_BYTES:
                del self._content_by_key[next(iter(self._content_by_key))]
        return key

    def find(self, key: str) -> bytes:
        """Return the file with a key. Raises UserError if the file is no longer in memory."""
        content = self._content_by_key.get(key)
        if content is None:
            raise UserError("The photograph is no longer in the memory of the server; choose it again.")
        return content


def read_photo(path: Path) -> Image.Image:
    """Return the decoded photo of a file. Large photos are decoded one at a time. Raises BadImage if the file is invalid."""
    with PHOTO_SLOTS:
        content = read_image_bytes(path)
        with LARGE_PHOTO_LOCK if LARGE_PHOTO_PIXELS < count_pixels(path, content) <= MAX_PIXELS else nullcontext():
            return decode_image(path, content)


def read_upload(content: bytes, max_pixels: int) -> Image.Image:
    """Decode a photo that a client sent. Raises BadImage if it is invalid, or TooManyLargePhotos if others wait already."""
    is_large = LARGE_PHOTO_PIXELS < count_pixels(_UPLOAD_NAME, content, QUERY_IMAGE_FORMATS) <= max_pixels
    if not is_large:
        return decode_image(_UPLOAD_NAME, content, max_pixels, QUERY_IMAGE_FORMATS)
    if not _large_photo_slots.acquire(blocking=False):
        raise TooManyLargePhotos("The server reads other large photographs; try again in a moment.")
    try:
        with LARGE_PHOTO_LOCK:
            return decode_image(_UPLOAD_NAME, content, max_pixels, QUERY_IMAGE_FORMATS)
    finally:
        _large_photo_slots.release()
