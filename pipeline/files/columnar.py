"""Read untrusted parquet files, and check that parquet, Arrow and other compressed files do not decode to too many bytes.

Readers of parquet allocate as much memory as the headers of the pages state, even if the footer of the file states less. The
headers of all pages of a row group are therefore checked before the row group is read. A header is a struct of Thrift's
compact protocol (https://parquet.apache.org/docs/file-format/).
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from vse.pipeline.files.inputs import (
    check_decoded_gzip_xz_bz2_size,
    check_decoded_size,
    check_decoded_zip_size,
    check_input,
    wrap_read_errors,
)

_MAX_FIELDS = 1000  # the most fields of a page header, nested fields included
_INTEGER_TYPES, _DOUBLE_TYPE, _BINARY_TYPE, _LIST_TYPES, _STRUCT_TYPE = (
    (4, 5, 6),
    7,
    8,
    (9, 10),
    12,
)  # codes of types in Thrift's protocol
_SIZE_FIELD, _COMPRESSED_SIZE_FIELD, _DATA_PAGE_FIELD, _DICTIONARY_PAGE_FIELD, _DATA_PAGE_V2_FIELD = (
    2,
    3,
    5,
    7,
    8,
)  # fields of a page header
_INNER_HEADER_FIELDS = (_DATA_PAGE_FIELD, _DICTIONARY_PAGE_FIELD, _DATA_PAGE_V2_FIELD)  # a page header has one of these fields
_BATCH_ROWS, _SMALL_BATCH_ROWS = 1024, 16
_MAX_VALUE_BYTES = 8  # bytes of a number, or of the index of a text in a dictionary
_TEXT_TYPES = {("BYTE_ARRAY", kind) for kind in ("NONE", "UTF8", "ENUM", "JSON", "BSON")}  # BYTE_ARRAY can also hold numbers
_MESSAGE_TYPE_FIELD, _MESSAGE_HEADER_FIELD = 1, 2  # fields of a message, as in Arrow's Message.fbs
_DICTIONARY_MESSAGE_TYPE, _RECORD_MESSAGE_TYPE = 2, 3  # types of messages that hold data
_DICTIONARY_DATA_FIELD = 1  # field of a dictionary batch that holds a record batch
_BUFFERS_FIELD, _COMPRESSION_FIELD = 2, 3  # fields of a record batch


class _PageSize(NamedTuple):
    """The decompressed size in bytes and the number of values of a page of a parquet file."""

    n_bytes: int
    n_values: int


def _read_page_sizes(stream: BinaryIO, start: int, n_bytes: int) -> Iterator[_PageSize]:
    position, end = start, start + n_bytes
    while position < end:
        stream.seek(position)
        header = _ThriftReader(stream).read_struct()
        kind = next((kind for kind in _INNER_HEADER_FIELDS if kind in header), None)
        inner = {} if kind is None else header[kind]
        size, compressed = header.get(_SIZE_FIELD, -1), header.get(_COMPRESSED_SIZE_FIELD, -1)
        n_values = inner.get(1, 0)
        if min(size, compressed, n_values) < 0:
            raise ValueError("a page with a negative size")
        yield _PageSize(size, n_values)
        position = stream.tell() + compressed


class _ThriftReader:
    """A reader of structs in Thrift's compact protocol. It skips the values of texts and floating-point numbers.

    Raises ValueError for a damaged struct.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._n_fields = 0

    def read_struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        field_id = 0
        while head := self._read_byte():
            field_id = field_id + (head >> 4) if head >> 4 else self._read_integer()
            fields[field_id] = self._read_value(head & 15)
        return fields

    def _read_value(self, kind: int) -> Any:
        self._n_fields += 1
        if self._n_fields > _MAX_FIELDS:
            raise ValueError("a page header with too many fields")
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._read_byte()
        if kind in _INTEGER_TYPES:
            return self._read_integer()
        if kind in (_DOUBLE_TYPE, _BINARY_TYPE):
            return self._stream.seek(8 if kind == _DOUBLE_TYPE else self._read_varint(), 1)
        if kind in _LIST_TYPES:
            head = self._read_byte()
            count = head >> 4 if head >> 4 < 15 else self._read_varint()
            return [self._read_value(head & 15) for _ in range(min(count, _MAX_FIELDS + 1))]
        if kind == _STRUCT_TYPE:
            return self.read_struct()
        raise ValueError(f"a page header with a field of the unknown type {kind}")

    def _read_byte(self) -> int:
        byte = self._stream.read(1)
        if not byte:
            raise ValueError("a page header that is incomplete")
        return byte[0]

    def _read_varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._read_byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("an integer of more than 64 bits")

    def _read_integer(self) -> int:
        value = self._read_varint()
        return (value >> 1) ^ -(value & 1)


def read_parquet_batches(path: Path, stream: BinaryIO, choose_columns: Callable[[list[str]], Sequence[str]]) -> Iterator[Any]:
    """Yield record batches (pyarrow) of a parquet file, row group by row group; one empty batch if the file has no rows.

    Texts are read as dictionary arrays of pyarrow, so that a repeated text is in memory once. Raises UserError if the file is
    damaged. Raises UserError if a row group, or all values of the file together, expand to over 1 GB and over 100 times the
    size of the file (:func:`~vse.pipeline.files.inputs.max_decoded_bytes`). Here a repeated text counts each time.

    path : the name of the file in messages
    stream : the open file
    choose_columns : a function from the names of all columns to the names of the columns to read
    """
    arrow, library = import_module("pyarrow"), import_module("pyarrow.parquet")
    with wrap_read_errors(path, "a parquet file"):
        n_stored = stream.seek(0, 2)
        parquet = library.ParquetFile(stream)
        columns = list(choose_columns(parquet.schema_arrow.names))
        leaves = _select_leaf_columns(parquet.schema, columns)
        texts = _select_dictionary_columns(parquet.metadata, leaves)
        parquet = library.ParquetFile(stream, read_dictionary=texts)
        n_expanded, n_batches = 0, 0
        for group in range(parquet.num_row_groups):
            n_decoded, n_rows = _count_decoded_bytes_and_rows(parquet.metadata.row_group(group), leaves, texts, stream)
            check_decoded_size(path, n_decoded, n_stored)
            for batch in parquet.iter_batches(n_rows, [group], columns, use_threads=False):
                n_expanded += sum(map(_count_expanded_bytes, batch.columns))
                check_decoded_size(path, n_expanded, n_stored)
                n_batches += 1
                yield batch
        if not n_batches:
            yield arrow.RecordBatch.from_pylist([], arrow.schema([parquet.schema_arrow.field(name) for name in columns]))


def list_values(column: Any) -> list[Any]:
    """Return the values of a column of :func:`read_parquet_batches`; None stands for a null value.

    pyarrow lists the values of a dictionary array twenty times as slowly as those of the decoded array.
    """
    is_dictionary = import_module("pyarrow.types").is_dictionary(column.type)
    values: list[Any] = (column.dictionary_decode() if is_dictionary else column).to_pylist()
    return values


def check_decoded_parquet_size(path: Path) -> None:
    """Raise UserError if a parquet file expands to over 1 GB and over 100 times its size (:func:`max_decoded_bytes`)."""
    with path.open("rb") as stream:
        for _ in read_parquet_batches(path, stream, lambda names: names):
            pass


def _select_leaf_columns(schema: Any, columns: Sequence[str]) -> dict[int, Any]:
    starts = tuple(f"{name}." for name in columns)
    leaves = map(schema.column, range(len(schema)))
    return {index: leaf for index, leaf in enumerate(leaves) if f"{leaf.path}.".startswith(starts)}


def _select_dictionary_columns(metadata: Any, leaves: Mapping[int, Any]) -> list[str]:
    """Return the paths of the columns that pyarrow can read as dictionary arrays: columns of texts without delta encoding.

    ``metadata`` is the metadata of the file (pyarrow). ``leaves`` maps indices of columns to their schemas.
    """
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    return [
        leaf.path
        for index, leaf in leaves.items()
        if (leaf.physical_type, leaf.converted_type) in _TEXT_TYPES
        and not any(encoding.startswith("DELTA") for group in groups for encoding in group.column(index).encodings)
    ]


def _count_decoded_bytes_and_rows(
    group: Any, leaves: Mapping[int, Any], texts: Sequence[str], stream: BinaryIO
) -> tuple[int, int]:
    """Return an upper bound on the memory in bytes for reading a row group, and the number of rows to read in one batch.

    ``group`` is the metadata of the row group (pyarrow). ``leaves`` maps indices of columns to their schemas. ``texts`` are
    the paths of the columns that are read as dictionary arrays. ``stream`` is the open file.
    """
    n_decoded, n_rows = 0, _BATCH_ROWS
    for index, leaf in leaves.items():
        chunk = group.column(index)
        starts = [position for position in (chunk.dictionary_page_offset, chunk.data_page_offset) if position]
        width = max(_MAX_VALUE_BYTES, leaf.length or 0)
        is_copied = leaf.physical_type == "BYTE_ARRAY" and leaf.path not in texts
        n_rows = _SMALL_BATCH_ROWS if is_copied else n_rows
        for page in _read_page_sizes(stream, min(starts), chunk.total_compressed_size):
            n_decoded += page.n_bytes + width * page.n_values
            if is_copied:  # each value may be as long as the page
                n_decoded += page.n_bytes * (page.n_values if leaf.max_repetition_level else _SMALL_BATCH_ROWS)
    return n_decoded, n_rows


def _count_expanded_bytes(array: Any) -> int:
    """Return the size of an Arrow array in bytes, as if each row had its own copy of its texts."""
    kind, compute = import_module("pyarrow.types"), import_module("pyarrow.compute")
    if kind.is_dictionary(array.type):
        lengths = compute.binary_length(array.dictionary).cast("int64")
        return int(compute.sum(lengths.take(array.indices)).as_py() or 0)
    if kind.is_struct(array.type):
        return sum(map(_count_expanded_bytes, array.flatten()))
    if kind.is_list(array.type) or kind.is_large_list(array.type) or kind.is_fixed_size_list(array.type):
        return _count_expanded_bytes(array.flatten())
    if kind.is_map(array.type):
        return _count_expanded_bytes(array.keys) + _count_expanded_bytes(array.items)
    return int(array.nbytes)


def check_decoded_arrow_size(path: Path) -> None:
    """Raise UserError if an Arrow stream expands to over 1 GB and over 100 times its size (:func:`max_decoded_bytes`)."""
    library = import_module("pyarrow")
    with wrap_read_errors(path, "an Arrow stream"), library.memory_map(str(check_input(path))) as stream:
        stream.seek(8 if stream.read(6) == b"ARROW1" else 0)
        n_decoded = sum(map(_count_message_bytes, library.ipc.MessageReader.open_stream(stream)))
    check_decoded_size(path, n_decoded, path.stat().st_size)


def _count_message_bytes(message: Any) -> int:
    """Return the number of bytes of the buffers of an Arrow message after decompression.

    A compressed buffer begins with its decompressed size.
    """
    head, body = memoryview(message.metadata), memoryview(message.body or b"")
    root = _FlatBuffersTable(head, 0)
    (kind,) = struct.unpack_from("B", head, root.field_position(_MESSAGE_TYPE_FIELD) or len(head))
    batch = _FlatBuffersTable(head, root.field_position(_MESSAGE_HEADER_FIELD))
    if kind == _DICTIONARY_MESSAGE_TYPE:
        batch = _FlatBuffersTable(head, batch.field_position(_DICTIONARY_DATA_FIELD))
    if kind not in (_DICTIONARY_MESSAGE_TYPE, _RECORD_MESSAGE_TYPE) or not batch.field_position(_COMPRESSION_FIELD):
        return len(body)
    total = 0
    position = batch.field_position(_BUFFERS_FIELD)
    position += struct.unpack_from("<I", head, position)[0]
    for offset, length in struct.iter_unpack(
        "<qq", head[position + 4 : position + 4 + 16 * struct.unpack_from("<I", head, position)[0]]
    ):
        total += max(struct.unpack_from("<q", body, offset)[0], length) if length else 0
    return total


class _FlatBuffersTable:
    """A table of a FlatBuffers message. It begins n bytes after ``position``; the four bytes at ``position`` hold n."""

    def __init__(self, content: memoryview, position: int) -> None:
        self._content = content
        self._start = position + struct.unpack_from("<I", content, position)[0]
        self._vtable = self._start - struct.unpack_from("<i", content, self._start)[0]

    def field_position(self, index: int) -> int:
        """Return the position of field ``index`` of the table in the message; 0 if the table lacks this field."""
        (size,) = struct.unpack_from("<H", self._content, self._vtable)
        if 4 + 2 * index >= size:
            return 0
        (offset,) = struct.unpack_from("<H", self._content, self._vtable + 4 + 2 * index)
        return self._start + offset if offset else 0


_CHECK_BY_MAGIC: dict[bytes, Callable[[Path], None]] = {
    b"PAR1": check_decoded_parquet_size,
    b"ARROW1": check_decoded_arrow_size,
    b"\xff\xff\xff\xff": check_decoded_arrow_size,
    b"PK": check_decoded_zip_size,
    b"\x1f\x8b": check_decoded_gzip_xz_bz2_size,
    b"\xfd7zXZ": check_decoded_gzip_xz_bz2_size,
    b"BZh": check_decoded_gzip_xz_bz2_size,
}


def check_decoded_file_size(path: Path) -> None:
    """Raise UserError if a compressed file expands to over 1 GB and over 100 times its size (:func:`max_decoded_bytes`).

    Parquet, Arrow, zip, gzip, xz and bzip2 files are checked; other files are not.
    """
    with path.open("rb") as stream:
        start = stream.read(6)
    check = next((check for magic, check in _CHECK_BY_MAGIC.items() if start.startswith(magic)), None)
    if check is not None and (check is not check_decoded_zip_size or zipfile.is_zipfile(path)):
        with wrap_read_errors(path, "a file that can be decoded"):
            check(path)
