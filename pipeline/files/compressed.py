"""Check compressed files against the limit on decoded bytes, before a library opens them itself.

:func:`check_compressed_file` recognises the format of a file. :func:`check_arrow` reads the headers of an Arrow stream; the
checks of the other formats are in :mod:`~vse.pipeline.files.decoded_limit` and :mod:`~vse.pipeline.files.parquet`.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vse.pipeline.errors import import_extra
from vse.pipeline.files.decoded_limit import check_decoded, check_stream, check_zip
from vse.pipeline.files.inputs import check_input, wrap_read_errors
from vse.pipeline.files.parquet import check_parquet

_HEADER_TYPE, _HEADER = 1, 2  # fields of a message, as in Arrow's Message.fbs
_DICTIONARY, _RECORDS = 2, 3  # types of messages that hold data
_BUFFERS, _COMPRESSION = 2, 3  # fields of a record batch
_BATCH_OF_DICTIONARY = 1


def check_arrow(path: Path) -> None:
    """Raise UserError if the buffers of an Arrow stream decode to more bytes than the limit."""
    library = import_extra("pyarrow", str(path), "datasets")
    with wrap_read_errors(path, "an Arrow stream"), library.memory_map(str(check_input(path))) as stream:
        stream.seek(8 if stream.read(6) == b"ARROW1" else 0)
        n_decoded = sum(map(_decoded_size, library.ipc.MessageReader.open_stream(stream)))
    check_decoded(path, n_decoded, path.stat().st_size)


def _decoded_size(message: Any) -> int:
    """Return the number of bytes of a message's decompressed buffers. A compressed one begins with its decompressed size."""
    head, body = memoryview(message.metadata), memoryview(message.body or b"")
    root = _Table(head, 0)
    (kind,) = struct.unpack_from("B", head, root.field(_HEADER_TYPE) or len(head))
    batch = _Table(head, root.field(_HEADER))
    if kind == _DICTIONARY:
        batch = _Table(head, batch.field(_BATCH_OF_DICTIONARY))
    if kind not in (_DICTIONARY, _RECORDS) or not batch.field(_COMPRESSION):
        return len(body)
    total = 0
    place = batch.field(_BUFFERS)
    place += struct.unpack_from("<I", head, place)[0]
    for offset, length in struct.iter_unpack(
        "<qq", head[place + 4 : place + 4 + 16 * struct.unpack_from("<I", head, place)[0]]
    ):
        total += max(struct.unpack_from("<q", body, offset)[0], length) if length else 0
    return total


class _Table:
    """A table of a flatbuffer. Its offset is stored at ``place``."""

    def __init__(self, content: memoryview, place: int) -> None:
        self._content = content
        self._start = place + struct.unpack_from("<I", content, place)[0]
        self._vtable = self._start - struct.unpack_from("<i", content, self._start)[0]

    def field(self, index: int) -> int:
        """Return the position of a field in the content; 0 if the table lacks the field."""
        (size,) = struct.unpack_from("<H", self._content, self._vtable)
        if 4 + 2 * index >= size:
            return 0
        (offset,) = struct.unpack_from("<H", self._content, self._vtable + 4 + 2 * index)
        return self._start + offset if offset else 0


_CHECKS: dict[bytes, Callable[[Path], None]] = {
    b"PAR1": check_parquet,
    b"ARROW1": check_arrow,
    b"\xff\xff\xff\xff": check_arrow,
    b"PK": check_zip,
    b"\x1f\x8b": check_stream,
    b"\xfd7zXZ": check_stream,
    b"BZh": check_stream,
}


def check_compressed_file(path: Path) -> None:
    """Raise UserError if a file decodes to more bytes than the limit. The first bytes tell how it is compressed."""
    with path.open("rb") as stream:
        start = stream.read(6)
    check = next((check for magic, check in _CHECKS.items() if start.startswith(magic)), None)
    if check is not None and (check is not check_zip or zipfile.is_zipfile(path)):
        with wrap_read_errors(path, "a file that can be decoded"):
            check(path)
