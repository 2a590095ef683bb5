"""Read and write a data set in a parquet file, column by column.

A row is an image with all captions (:func:`column_schema`). The key ``vse-dataset`` in the metadata of the file holds all keys
of ``dataset.json`` besides ``images``, the *head*. Columns are read on access: ids for all images at once, texts for one row
group at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from importlib import import_module
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.dataset import SPLITS
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, wrap_read_errors

NO_COCOID = np.iinfo(np.int64).min  # marks an image without an id in MS-COCO
IMAGES_PER_GROUP = 4096  # images in a row group, the smallest part of a file to read
HEAD_KEY, SOURCE_VERSION_KEY = b"vse-dataset", b"vse-copied-sha256"
_CAPTION_LEAF = "sentences.list.element."
_CACHED_GROUPS = 8
_DICTIONARY_LEAVES = ["split", f"{_CAPTION_LEAF}tokens.list.element", f"{_CAPTION_LEAF}language"]


@cache
def column_schema() -> Any:
    """Return the schema of the columns (pyarrow). Fields may be null if they are optional in ``dataset.json``."""
    arrow = import_module("pyarrow")
    box = arrow.list_(arrow.field("element", arrow.float64(), nullable=False))
    phrase = arrow.struct(
        [
            arrow.field("first_token", arrow.int64(), nullable=False),
            arrow.field("n_tokens", arrow.int64(), nullable=False),
            arrow.field("chain", arrow.string()),
            arrow.field("types", arrow.list_(arrow.field("element", arrow.string(), nullable=False))),
            arrow.field("boxes", arrow.list_(arrow.field("element", box, nullable=False))),
        ]
    )
    caption = arrow.struct(
        [
            arrow.field("sentid", arrow.int64(), nullable=False),
            arrow.field("raw", arrow.string(), nullable=False),
            arrow.field("tokens", arrow.list_(arrow.field("element", arrow.string(), nullable=False)), nullable=False),
            arrow.field("language", arrow.string()),
            arrow.field("phrases", arrow.list_(arrow.field("element", phrase, nullable=False))),
        ]
    )
    return arrow.schema(
        [
            arrow.field("imgid", arrow.int64(), nullable=False),
            arrow.field("filename", arrow.string(), nullable=False),
            arrow.field("split", arrow.string(), nullable=False),
            arrow.field("cocoid", arrow.int64()),
            arrow.field("sentences", arrow.list_(arrow.field("element", caption, nullable=False)), nullable=False),
        ]
    )


def read_phrase_field(phrases: Any, name: str) -> Any:
    """Return the field ``name`` of a pyarrow array of phrases, as an array of the type in :func:`column_schema`.

    If the array lacks an optional field, the values are null.
    """
    wanted = column_schema().field("sentences").type.value_type.field("phrases").type.value_type.field(name).type
    if phrases.type.get_field_index(name) < 0:
        return import_module("pyarrow").nulls(len(phrases), wanted)
    return phrases.field(name).cast(wanted)


# The fields of a Phrase in their order: start, stop, chain, types and boxes.
PhraseFields = tuple[int, int, str, tuple[str, ...], tuple[tuple[float, float, float, float], ...]]


class CaptionTexts(NamedTuple):
    """The texts and phrases of n consecutive captions. Caption k has the tokens ``tokens[ends[k]:ends[k + 1]]``.

    ``ends`` has n + 1 numbers. ``languages`` is None if the file has no column of languages; its values are None for captions
    without a language. ``phrases`` is None if no caption has phrases.
    """

    raw_texts: list[str]
    tokens: list[str]
    ends: list[int]
    languages: list[str | None] | None
    phrases: list[tuple[PhraseFields, ...]] | None


class ParquetColumns:
    """The columns of a data set in a parquet file, whose values :mod:`vse.pipeline.dataset.parquet_checks` has checked.

    The constructor, or a later access, raises UserError if the file is damaged.
    """

    def __init__(self, file: InputFile) -> None:
        self.path, self.input_file = file.path, file  # the open file: a later file at the same path is not read
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        with wrap_read_errors(self.path, "a parquet file"):
            source = arrow.OSFile(str(file.descriptor_path))  # has no shared position, so that forked processes may read, too
            self._file = parquet.ParquetFile(source, page_checksum_verification=True)
        leaves = {self._file.schema.column(index).path for index in range(len(self._file.schema))}
        if f"{_CAPTION_LEAF}sentid" not in leaves:
            raise UserError(f"{self.path}: not a data set; it needs the nested column {_CAPTION_LEAF}sentid")
        groups = (self._file.metadata.row_group(index).num_rows for index in range(self._file.num_row_groups))
        self.group_ends = np.cumsum([*groups], dtype=np.int64)
        self.read_files = lru_cache(_CACHED_GROUPS)(self._read_files)
        self.read_captions = lru_cache(_CACHED_GROUPS)(self._read_captions)
        self._read_group_once = cache(self._read_group)

    @property
    def n_images(self) -> int:
        return int(self._file.metadata.num_rows)

    @property
    def head(self) -> dict[str, Any]:
        """The keys of ``dataset.json`` besides ``images``. Raises UserError if the file lacks them."""
        with wrap_read_errors(self.path, "a data set: its metadata need the key vse-dataset with a JSON object"):
            head = json.loads((self._file.schema_arrow.metadata or {})[HEAD_KEY])
            if not isinstance(head, dict):
                raise ValueError("not an object")
            return head

    @property
    def source_version(self) -> str | None:
        """A text that identifies the ``dataset.json`` of which this file is a copy; None if the file is not a copy.

        The text holds the SHA-256 of the ``dataset.json``, and the version of the checks that it passed.
        """
        value = (self._file.schema_arrow.metadata or {}).get(SOURCE_VERSION_KEY)
        return None if value is None else value.decode(errors="replace")

    @cached_property
    def imgids(self) -> NDArray[np.int64]:
        return to_numpy(self._read("imgid"))

    @cached_property
    def splits(self) -> NDArray[np.int8]:
        """The split of each image as an index in :data:`SPLITS`, (n_images,)."""
        # pyarrow could find the index of each split. But it would import pandas to convert SPLITS, which takes 0.3 s.
        texts = self._read("split").combine_chunks().cast("string")  # a dictionary array may have values that no image has
        encoded = texts.dictionary_encode()
        numbers = np.array([SPLITS.index(split) for split in encoded.dictionary.to_pylist()], np.int8)
        return np.take(numbers, to_numpy(encoded.indices))

    @cached_property
    def cocoids(self) -> NDArray[np.int64]:
        """The id of each image in MS-COCO, (n_images,); :data:`NO_COCOID` for an image without such an id."""
        # Nulls are filled only where a file has both nulls and ids, because fill_null imports pandas, too.
        column = self._read("cocoid").cast("int64") if "cocoid" in self._file.schema_arrow.names else None
        if column is None or column.null_count == len(column):
            return np.full(self.n_images, NO_COCOID)
        return to_numpy(column.fill_null(NO_COCOID) if column.null_count else column)

    @cached_property
    def has_languages(self) -> bool:
        """True if the file has a column of languages."""
        return any(field.name == "language" for field in self._file.schema_arrow.field("sentences").type.value_type)

    @property
    def caption_ends(self) -> NDArray[np.int64]:
        """The number of captions up to and including each image, (n_images,)."""
        return self._caption_ends_and_ids[0]

    @property
    def sentids(self) -> NDArray[np.int64]:
        return self._caption_ends_and_ids[1]

    @cached_property
    def _caption_ends_and_ids(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        compute = import_module("pyarrow.compute")
        lists = self._read(f"{_CAPTION_LEAF}sentid")
        ends = np.cumsum(to_numpy(compute.list_value_length(lists)), dtype=np.int64)
        return ends, to_numpy(compute.struct_field(compute.list_flatten(lists), [0]))

    def read_raw_texts(self, group: int) -> list[str]:
        """Return the text of each caption of a row group."""
        raws: list[str] = self._read_caption_field("raw", group).to_pylist()
        return raws

    def read_encoded_tokens(self, group: int) -> tuple[NDArray[np.int32], NDArray[np.int64], list[str]]:
        """Return the tokens of the captions in a row group as ``indices``, ``ends`` and ``words``.

        ``words`` are the distinct tokens, and token k of the row group is ``words[indices[k]]``. ``ends`` (n_captions,) is the
        number of tokens up to and including each caption.
        """
        return _encode_tokens(self._read_caption_field("tokens", group))

    def read_languages(self, group: int) -> list[str | None]:
        """Return the language (or None) of each caption in a row group; an empty list if the file has no languages."""
        return self._read_caption_field("language", group).to_pylist() if self.has_languages else []

    def read_file_and_captions(self, group: int, row: int) -> tuple[str, Any]:
        """Return the file name of image ``row`` of a row group, and its captions as a pyarrow array.

        The columns of every group that was read stay in memory, because a search reads single images in any order. They are
        not decoded: a million captions take about 170 MB.
        """
        files, sentences = self._read_group_once(group)
        return files[row].as_py(), sentences[row].values

    def _read_group(self, group: int) -> tuple[Any, Any]:
        return self._read("filename", [group]).combine_chunks(), self._read("sentences", [group]).combine_chunks()

    def _read_files(self, group: int) -> list[str]:
        files: list[str] = self._read("filename", [group]).to_pylist()
        return files

    def _read_captions(self, group: int) -> CaptionTexts:
        return decode_captions(self._read("sentences", [group]).combine_chunks())

    def _read_caption_field(self, name: str, group: int) -> Any:
        return self._read(f"{_CAPTION_LEAF}{name}", [group]).combine_chunks().flatten().field(0)

    def _read(self, leaf: str, groups: Sequence[int] | None = None) -> Any:
        """Return a column (pyarrow) for the row groups ``groups``; None stands for all row groups.

        ``leaf`` is the path of the column in the schema, such as ``sentences.list.element.raw``.
        """
        with wrap_read_errors(self.path, "readable: it is damaged, so write it again; a copy of dataset.json may be deleted"):
            chosen = range(self._file.num_row_groups) if groups is None else groups
            return self._file.read_row_groups(chosen, columns=[leaf], use_threads=False).column(0)


def decode_captions(sentences: Any) -> CaptionTexts:
    """Return the texts of the captions in ``sentences``, a pyarrow array from the column ``sentences``."""
    captions = sentences.flatten()
    tokens, ends, words = _encode_tokens(captions.field("tokens"))
    has_languages = any(field.name == "language" for field in captions.type)
    languages = captions.field("language").to_pylist() if has_languages else None
    texts = list(map(words.__getitem__, tokens.tolist()))  # equal words are one object
    return CaptionTexts(captions.field("raw").to_pylist(), texts, [0, *ends.tolist()], languages, decode_phrases(captions))


def decode_phrases(captions: Any) -> list[tuple[PhraseFields, ...]] | None:
    """Return the phrases of each caption in ``captions``, a pyarrow array of structs; None if no caption has phrases."""
    has_phrases = any(field.name == "phrases" for field in captions.type)
    if not has_phrases or captions.field("phrases").null_count == len(captions):
        return None
    lists = captions.field("phrases")
    phrases = lists.flatten()
    if not len(phrases):
        return None
    names = ("first_token", "n_tokens", "chain", "types", "boxes")
    firsts, lengths, chains, types, boxes = (read_phrase_field(phrases, name) for name in names)
    corners = iter(boxes.flatten().flatten().to_pylist())
    decoded = [
        (first, first + length, chain or "", some_types, some_boxes)
        for first, length, chain, some_types, some_boxes in zip(
            firsts.to_pylist(),
            lengths.to_pylist(),
            chains.to_pylist(),
            _split_into_tuples(types.flatten().to_pylist(), types),
            _split_into_tuples(zip(corners, corners, corners, corners, strict=True), boxes),
            strict=True,
        )
    ]
    return list(_split_into_tuples(decoded, lists))


def _split_into_tuples(items: Iterable[Any], lists: Any) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple for each list of a pyarrow array: the next ``items``, as many as the list has. A null list has none."""
    iterator = iter(items)
    for length in lists.value_lengths().to_pylist():
        yield tuple(islice(iterator, length or 0))


def _encode_tokens(lists: Any) -> tuple[NDArray[np.int32], NDArray[np.int64], list[str]]:
    compute = import_module("pyarrow.compute")
    encoded = lists.flatten().dictionary_encode()
    ends = np.cumsum(to_numpy(compute.list_value_length(lists)), dtype=np.int64)
    return to_numpy(encoded.indices), ends, encoded.dictionary.to_pylist()


def to_numpy(array: Any) -> NDArray[Any]:
    """Return the numbers of a pyarrow array, which must have no nulls. The array's own ``to_numpy`` imports pandas."""
    whole = array.combine_chunks() if hasattr(array, "chunks") else array
    return np.from_dlpack(whole)


class ParquetColumnsWriter:
    """A writer of images, as pyarrow tables, to a parquet file. A table becomes a row group. :meth:`close` adds metadata."""

    def __init__(self, stream: BinaryIO) -> None:
        parquet = import_module("pyarrow.parquet")
        self._writer = parquet.ParquetWriter(
            stream,
            column_schema(),
            compression="zstd",
            use_dictionary=_DICTIONARY_LEAVES,
            write_page_checksum=True,
            store_schema=False,
        )

    def write(self, table: Any) -> None:
        self._writer.write_table(table, row_group_size=max(1, len(table)))

    def close(self, head: dict[str, Any], source_version: str | None = None) -> None:
        """Write the metadata, and finish the file.

        ``head`` has all keys of ``dataset.json`` besides ``images``. If this file is a copy of a ``dataset.json``,
        ``source_version`` is a text with the SHA-256 of the ``dataset.json``, and the version of the checks that it passed.
        """
        copied = {} if source_version is None else {SOURCE_VERSION_KEY: source_version}
        self._writer.add_key_value_metadata({HEAD_KEY: json.dumps(head, ensure_ascii=False), **copied})
        self._writer.close()
