"""Parquet files that others wrote, read a batch of rows at a time within the limit on decoded bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from vse.pipeline.decoded_limit import check_decoded
from vse.pipeline.extra_packages import extra_package
from vse.pipeline.input_files import reading
from vse.pipeline.parquet_pages import pages

_BATCH, _SMALL_BATCH = 1024, 16  # rows
_VALUE_BYTES = 8  # of a number, or of the index of a text, at most
_TEXTS = {("BYTE_ARRAY", kind) for kind in ("NONE", "UTF8", "ENUM", "JSON", "BSON")}  # without decimal numbers


def parquet_batches(path: Path, stream: BinaryIO, choose: Callable[[list[str]], Sequence[str]]) -> Iterator[Any]:
    """Yield record batches (pyarrow) of a parquet file, row group by row group.

    Texts come as dictionaries, so that a long text in many rows is in memory once. A file without rows yields an empty batch.

    Parameters
    ----------
    choose : returns the columns to read, of the names that the file has

    Raises UserError if the file is damaged, or if a row group or all texts together decode to more bytes than they may.
    """
    library = extra_package("pyarrow.parquet", str(path), "parquet")
    arrow = extra_package("pyarrow", str(path), "parquet")
    with reading(path, "a parquet file"):
        n_stored = stream.seek(0, 2)
        parquet = library.ParquetFile(stream)
        columns = list(choose(parquet.schema_arrow.names))
        leaves = _leaves(parquet.schema, columns)
        texts = _dictionaries(parquet.metadata, leaves)
        parquet = library.ParquetFile(stream, read_dictionary=texts)
        n_expanded, n_batches = 0, 0
        for group in range(parquet.num_row_groups):
            n_decoded, n_rows = _decoded(parquet.metadata.row_group(group), leaves, texts, stream)
            check_decoded(path, n_decoded, n_stored)
            for batch in parquet.iter_batches(n_rows, [group], columns, use_threads=False):
                n_expanded += sum(map(_expanded, batch.columns))
                check_decoded(path, n_expanded, n_stored)
                n_batches += 1
                yield batch
        if not n_batches:
            yield arrow.RecordBatch.from_pylist([], arrow.schema([parquet.schema_arrow.field(name) for name in columns]))


def check_parquet(path: Path) -> None:
    """Raise UserError if a row group decodes to more bytes than it may; for libraries that open the file themselves.

    Texts count once for each row, because such a library copies them.
    """
    with path.open("rb") as stream:
        for _ in parquet_batches(path, stream, lambda names: names):
            pass


def _leaves(schema: Any, columns: Sequence[str]) -> dict[int, Any]:
    """Return the columns of a parquet schema that make up columns of the table, by their index."""
    starts = tuple(f"{name}." for name in columns)
    leaves = map(schema.column, range(len(schema)))
    return {index: leaf for index, leaf in enumerate(leaves) if f"{leaf.path}.".startswith(starts)}


def _dictionaries(metadata: Any, leaves: Mapping[int, Any]) -> list[str]:
    """Return the paths of the texts that pyarrow reads as dictionaries, which it does not in the delta encodings."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [
        leaf.path
        for index, leaf in leaves.items()
        if (leaf.physical_type, leaf.converted_type) in _TEXTS
        and not any(encoding.startswith("DELTA") for group in groups for encoding in group.column(index).encodings)
    ]


def _decoded(group: Any, leaves: Mapping[int, Any], texts: Sequence[str], stream: BinaryIO) -> tuple[int, int]:
    """Return the most bytes that a reader allocates for a row group, and the number of rows to read at a time."""
    n_decoded, n_rows = 0, _BATCH
    for index, leaf in leaves.items():
        chunk = group.column(index)
        starts = [place for place in (chunk.dictionary_page_offset, chunk.data_page_offset) if place]
        width = max(_VALUE_BYTES, leaf.length or 0)
        is_copied = leaf.physical_type == "BYTE_ARRAY" and leaf.path not in texts
        n_rows = _SMALL_BATCH if is_copied else n_rows
        for page in pages(stream, min(starts), chunk.total_compressed_size):
            n_decoded += page.n_bytes + width * page.n_values
            if is_copied:  # a value may be as long as the page
                n_decoded += page.n_bytes * (page.n_values if leaf.max_repetition_level else _SMALL_BATCH)
    return n_decoded, n_rows


def _expanded(array: Any) -> int:
    """Return the bytes of an array's texts once each row has its own copy."""
    kind, compute = import_module("pyarrow.types"), import_module("pyarrow.compute")
    if kind.is_dictionary(array.type):
        lengths = compute.binary_length(array.dictionary).cast("int64")
        return int(compute.sum(lengths.take(array.indices)).as_py() or 0)
    if kind.is_struct(array.type):
        return sum(map(_expanded, array.flatten()))
    if kind.is_list(array.type) or kind.is_large_list(array.type) or kind.is_fixed_size_list(array.type):
        return _expanded(array.flatten())
    if kind.is_map(array.type):
        return _expanded(array.keys) + _expanded(array.items)
    return int(array.nbytes)
