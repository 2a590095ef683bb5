"""Write a data set as ``dataset.json`` or ``dataset.parquet``, and convert one of these file formats to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from vse.pipeline.dataset.captions import find_tokeniser
from vse.pipeline.dataset.columns import build_phrases, build_tables
from vse.pipeline.dataset.dataset import MIN_LARGE_JSON_BYTES, load_dataset_file, read_dataset_head, write_parquet_copy
from vse.pipeline.dataset.images import build_caption_entry, build_image_entry, parse_images
from vse.pipeline.dataset.parquet_io import ParquetColumns, ParquetColumnsWriter, decode_captions
from vse.pipeline.dataset.preparation import (
    check_dataset_name,
    link_images,
    write_json_dataset,
)
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile
from vse.pipeline.files.outputs import OutputKind, check_output, may_replace_other_kinds
from vse.pipeline.files.writing import lock_for_writing, open_atomic, remove_temporary_files

DatasetFormat = Literal["json", "parquet"]
MAX_JSON_CAPTIONS = 1_000_000  # an import writes a larger data set as parquet
TableFactory = Callable[[], Iterator[Any]]  # each call yields tables (pyarrow) with all images


def choose_dataset_format(n_captions: int) -> DatasetFormat:
    """Return the file format of a new data set: parquet for more than ``MAX_JSON_CAPTIONS`` captions, else JSON."""
    return "parquet" if n_captions > MAX_JSON_CAPTIONS else "json"


def check_no_other_format(out: Path, file_format: DatasetFormat) -> None:
    """Raise UserError if the folder ``out`` has a data set in the other file format than ``file_format``."""
    other = out / ("dataset.json" if file_format == "parquet" else "dataset.parquet")
    if other.exists():
        raise UserError(f"{other} already exists, and a data set has one form; move it away, or give another --out")


def write_dataset_from_tables(
    head: dict[str, Any],
    tables: TableFactory,
    out: Path,
    images: Path | None,
    inputs: list[Path],
    file_format: DatasetFormat,
) -> Path:
    """Write a data set to the folder ``out``, link ``out/images`` to ``images``, and return the path of the file.

    A file that already has this content is left as it is. Raises UserError if the folder has a data set with other content, or
    in another format than ``file_format``.

    head : the keys of ``dataset.json`` besides ``images``
    tables : a function that yields the images as tables (pyarrow) with the columns of a ``dataset.parquet``. It may be called
        several times.
    images : the folder of the images; None if there is no link to create
    inputs : the files from which the data set was built; no input is replaced
    """
    check_no_other_format(out, file_format)
    if file_format == "parquet":
        return _write_parquet(head, tables, out, images, inputs)
    entries = _ImageEntries(tables)
    path = write_json_dataset({**head, "images": entries}, out, images, inputs, may_replace=may_replace_other_kinds())
    file = InputFile(path)
    if file.size >= MIN_LARGE_JSON_BYTES:
        write_parquet_copy(path, file.sha256, head, tables())
    return path


def write_dataset_content(
    content: dict[str, Any], out: Path, images: Path | None, inputs: list[Path], file_format: DatasetFormat
) -> Path:
    """Write a data set as ``dataset.json`` or ``dataset.parquet`` to the folder ``out``; return the path of the file.

    ``content`` is in the layout of ``dataset.json``. ``out/images`` becomes a link to the folder ``images``, unless ``images``
    is None. ``inputs`` are the files from which the data set was built; no input is replaced.
    """
    if file_format == "json":
        check_no_other_format(out, file_format)
        return write_json_dataset(content, out, images, inputs, may_replace=may_replace_other_kinds())
    parsed = parse_images(out, list(content["images"]), find_tokeniser(content["tokeniser"], out))
    head = {key: value for key, value in content.items() if key != "images"}
    return write_dataset_from_tables(head, lambda: build_tables(parsed), out, images, inputs, file_format)


def convert_dataset(dataset_file: Path, out: Path) -> Path:
    """Write a data set in the other file format to the folder ``out``, and return the path of the new file.

    ``dataset.parquet`` becomes a ``dataset.json`` with the layout of the Karpathy splits, and any other file becomes
    ``dataset.parquet``.
    """
    dataset = load_dataset_file(dataset_file)
    check_dataset_name(dataset.name)
    file_format: DatasetFormat = "json" if dataset_file.suffix == ".parquet" else "parquet"
    head = read_dataset_head(dataset_file)
    images = dataset_file.parent / "images" if dataset.has_image_files else None
    return write_dataset_from_tables(head, lambda: build_tables(dataset.images), out, images, [dataset_file], file_format)


class _ImageEntries(Iterable[dict[str, Any]]):
    """An iterable of the images in pyarrow tables, as JSON objects for ``dataset.json``. It can be iterated several times."""

    def __init__(self, tables: TableFactory) -> None:
        self._tables = tables

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for table in self._tables():
            sentences = table.column("sentences").combine_chunks()
            raws, tokens, token_ends, languages, phrases = decode_captions(sentences)
            sentids = sentences.flatten().field("sentid").to_pylist()
            ends = sentences.offsets.to_pylist()
            columns = (table.column(name).to_pylist() for name in ("imgid", "filename", "split", "cocoid"))
            for imgid, file, split, cocoid, start, end in zip(*columns, ends[:-1], ends[1:], strict=True):
                captions = [
                    build_caption_entry(
                        sentids[row],
                        imgid,
                        raws[row],
                        tokens[token_ends[row] : token_ends[row + 1]],
                        languages[row] if languages else None,
                        build_phrases(phrases[row]) if phrases else (),
                    )
                    for row in range(start, end)
                ]
                yield build_image_entry(imgid, file, split, cocoid, captions)


def _write_parquet(head: dict[str, Any], tables: TableFactory, out: Path, images: Path | None, inputs: list[Path]) -> Path:
    path = out / "dataset.parquet"

    def is_dataset(existing: Path) -> bool:
        return bool(ParquetColumns(InputFile(existing)).head.get("dataset") == head["dataset"])

    check_output(path, OutputKind(f"the data set {head['dataset']!r}", is_dataset), inputs)
    with lock_for_writing(out, folder=True):
        has_content = _has_equal_tables(path, head, tables)
        if path.exists() and not has_content and not may_replace_other_kinds():
            raise UserError(f"{path} already exists with other content; move it away, or give another --out or --force")
        remove_temporary_files(out)
        if images is not None and (out / "images").resolve() != images.resolve():
            link_images(out / "images", images.resolve())
        if not has_content:
            with open_atomic(path) as stream:
                writer = ParquetColumnsWriter(stream)
                for table in tables():
                    writer.write(table)
                writer.close(head)
    return path


def _has_equal_tables(path: Path, head: dict[str, Any], tables: TableFactory) -> bool:
    """Return whether a parquet file has this head and these tables; False if it is missing or damaged.

    A file may lack optional fields without values, because earlier versions had no phrases.

    ``head`` is in the metadata of the file: the keys of ``dataset.json`` besides ``images``. ``tables`` is a
    function that yields the images of each row group as a table (pyarrow).
    """
    parquet = import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path, page_checksum_verification=True)
        if ParquetColumns(InputFile(path)).head != head:
            return False
        n_equal = 0
        for n_equal, table in enumerate(tables(), 1):
            if n_equal > file.num_row_groups or not file.read_row_group(n_equal - 1).cast(table.schema).equals(table):
                return False
        return bool(n_equal == file.num_row_groups)
    except (UserError, OSError, import_module("pyarrow").ArrowException):
        return False
