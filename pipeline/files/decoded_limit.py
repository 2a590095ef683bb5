"""The limit on the size of a decoded file, and checks of zip files and of gzip, xz and bzip2 streams against it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import check_input

LIMIT_VARIABLE = "VSE_MAX_DECODED_GB"
_DEFAULT_GB = 1.0
_RATIO = 100  # real data hardly compress better
_CHUNK = 1 << 20
_OPENERS: dict[bytes, Callable[[BinaryIO], Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open}


def decoded_limit(n_stored: int) -> int:
    """Return the limit on decoded bytes for ``n_stored`` compressed bytes: 100 times as many, but at least 1 GB.

    The environment variable VSE_MAX_DECODED_GB replaces the 1 GB. Raises UserError if it is not a positive number.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        n_gb = float(text) if text else _DEFAULT_GB
        if not 0 < n_gb < 1e9:
            raise ValueError
    except ValueError:
        raise UserError(f"{LIMIT_VARIABLE}={text[:50]}: not a positive number of gigabytes") from None
    return max(int(n_gb * 1e9), _RATIO * n_stored)


def check_decoded(path: Path | str, n_decoded: int, n_stored: int) -> None:
    """Raise UserError if ``n_decoded`` exceeds the limit on decoded bytes for ``n_stored`` bytes of the file ``path``."""
    limit = decoded_limit(n_stored)
    if n_decoded > limit:
        raise UserError(
            f"{path}: {n_stored:,} bytes decode to {n_decoded:,} or more, and the limit is {limit:,}; if you trust the file, "
            f"set {LIMIT_VARIABLE} to a larger number of gigabytes"
        )


@contextmanager
def open_decoded(path: Path) -> Iterator[io.BufferedReader]:
    """Open and decode a plain, gzip, xz or bzip2 file, by its first bytes. Reading beyond the limit raises UserError."""
    with ExitStack() as stack:
        stream = stack.enter_context(check_input(path).open("rb"))
        start = stream.read(6)
        stream.seek(0)
        opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
        if opener is not None:
            decoder = stack.enter_context(opener(stream))
            stream = stack.enter_context(io.BufferedReader(_LimitedStream(path, decoder), _CHUNK))
        yield stream


def check_stream(path: Path) -> None:
    """Raise UserError if a gzip, xz or bzip2 file decodes to more bytes than the limit, before a library opens it."""
    with open_decoded(path) as stream:
        if isinstance(stream.raw, _LimitedStream):
            while stream.read(_CHUNK):
                pass


def check_zip(path: Path) -> None:
    """Raise UserError if a zip file states more bytes than the limit; readers return no more than the stated sizes."""
    with zipfile.ZipFile(check_input(path)) as archive:
        check_decoded(path, sum(member.file_size for member in archive.infolist()), path.stat().st_size)


class _LimitedStream(io.RawIOBase):
    def __init__(self, path: Path, stream: io.BufferedIOBase) -> None:
        self._path, self._stream = path, stream
        self._n_stored = path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = self._stream.seek(offset, whence)
        check_decoded(self._path, position, self._n_stored)
        return position

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(min(len(buffer), _CHUNK))
        check_decoded(self._path, self._stream.tell(), self._n_stored)
        buffer[: len(content)] = content
        return len(content)
