"""Headers of the pages of parquet files, which say how much memory a reader allocates.

The footer of a file says how large its columns are, but no reader relies on that; all obey the headers of the pages. These are
structs of Thrift's compact protocol (https://parquet.apache.org/docs/file-format/).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

_MOST_FIELDS = 1000  # of one header, nested ones counted
_INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (4, 5, 6), 7, 8, (9, 10), 12
_SIZE, _COMPRESSED, _DATA, _DICTIONARY, _DATA_V2 = 2, 3, 5, 7, 8  # fields of a page header
_KINDS = (_DATA, _DICTIONARY, _DATA_V2)


class Page(NamedTuple):
    """A page: the bytes that it decompresses to, and the number of its values."""

    n_bytes: int
    n_values: int


def pages(stream: BinaryIO, start: int, n_bytes: int) -> Iterator[Page]:
    """Yield the pages of a column chunk that begins at ``start``. Raises ValueError if a header is malformed."""
    place, end = start, start + n_bytes
    while place < end:
        stream.seek(place)
        header = _Reader(stream).struct()
        kind = next((kind for kind in _KINDS if kind in header), None)
        inner = {} if kind is None else header[kind]
        size, compressed = header.get(_SIZE, -1), header.get(_COMPRESSED, -1)
        n_values = inner.get(1, 0)
        if min(size, compressed, n_values) < 0:
            raise ValueError("a page of a negative size")
        yield Page(size, n_values)
        place = stream.tell() + compressed


class _Reader:
    """Reads a struct of integers and structs; other values are skipped."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._n_fields = 0

    def struct(self) -> dict[int, Any]:
        """Return the fields of the struct that begins here, by number."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            fields[number] = self._value(head & 15)
        return fields

    def _value(self, kind: int) -> Any:
        self._n_fields += 1
        if self._n_fields > _MOST_FIELDS:
            raise ValueError("a page header of too many fields")
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in _INTEGERS:
            return self._integer()
        if kind in (_DOUBLE, _BINARY):
            return self._stream.seek(8 if kind == _DOUBLE else self._varint(), 1)
        if kind in _LISTS:
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15) for _ in range(min(count, _MOST_FIELDS + 1))]
        if kind == _STRUCT:
            return self.struct()
        raise ValueError(f"a page header with a field of the kind {kind}")

    def _byte(self) -> int:
        byte = self._stream.read(1)
        if not byte:
            raise ValueError("a page header that is cut off")
        return byte[0]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
