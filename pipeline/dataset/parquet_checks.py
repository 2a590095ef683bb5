"""Check the values of a data set in a parquet file, because another program may have written the file.

:mod:`vse.pipeline.dataset.parquet_io` reads the file afterwards.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from vse.pipeline.dataset import SPLITS
from vse.pipeline.dataset.images import read_phrases
from vse.pipeline.dataset.languages import is_language_tag
from vse.pipeline.dataset.parquet_io import column_schema, read_phrase_field, to_numpy
from vse.pipeline.errors import UserError, did_you_mean, to_printable_line
from vse.pipeline.files.columnar import read_parquet_batches
from vse.pipeline.files.inputs import InputFile, wrap_read_errors

_OPTIONAL_NAMES = ("cocoid", "language", "phrases", "chain", "types", "boxes")
# Matches paths that are absolute, lead out of the folder, are not in their shortest form, or cannot exist.
_BAD_PATH_PATTERN = r"^$|^/|/$|//|(^|/)\.\.?(/|$)|\x00|[^/]{256}"


def check_parquet_columns(file: InputFile) -> None:
    """Check all values in the columns of a data set, by the rules for ``dataset.json``.

    In addition, the path of an image must be in its shortest form. Raises UserError for columns that are missing or of another
    type, for null values, for ids or files that occur twice, and for a damaged file. Raises UserError, which names the image
    or caption, for unknown splits, empty captions, invalid languages, and images outside the folder ``images``.
    """
    arrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    ids: dict[str, list[Any]] = {"imgid": [], "sentid": [], "image file": []}

    def choose_columns(names: list[str]) -> list[str]:
        wanted = column_schema().names
        if missing := [name for name in wanted if name not in names and name not in _OPTIONAL_NAMES]:
            raise UserError(f"{file.path}: no column {missing[0]!r}; its columns are {', '.join(names)}")
        return [name for name in wanted if name in names]

    with wrap_read_errors(file.path, "a data set in a parquet file"):
        for batch in read_parquet_batches(file.path, file.stream, choose_columns):
            _check_types(file.path, batch.schema)
            batch.validate(full=True)  # also checks that texts are UTF-8
            captions = _check_images(file.path, batch)
            columns = batch.column("imgid"), captions.field("sentid"), _as_text(batch.column("filename"))
            for name, values in zip(ids, columns, strict=True):
                ids[name].append(values)
        if not sum(map(len, ids["imgid"])):
            raise UserError(f"{file.path}: no images")
        for name, parts in ids.items():
            counts = compute.value_counts(arrow.chunked_array(parts))
            if len(counts) < sum(map(len, parts)):
                double = counts.filter(compute.greater(counts.field("counts"), 1))
                raise UserError(f"{file.path}: duplicate {name} {to_printable_line(double.field('values')[0].as_py())}")


def _check_types(path: Path, schema: Any) -> None:
    """Raise UserError if a column of a data set has the wrong type. A missing column is not an error here.

    Large lists, large texts and dictionary-encoded texts (types of Arrow) are allowed.
    """

    def check_column_type(name: str, found: Any, wanted: Any) -> None:
        kind = import_module("pyarrow.types")
        plain = found.value_type if kind.is_dictionary(found) else found  # texts are read as dictionaries
        is_wanted = found == wanted or (name in _OPTIONAL_NAMES and kind.is_null(plain))
        if kind.is_string(wanted):
            is_wanted = is_wanted or kind.is_string(plain) or kind.is_large_string(plain)
        elif kind.is_list(wanted) and (kind.is_list(found) or kind.is_large_list(found)):
            return check_column_type(name, found.value_type, wanted.value_type)
        elif kind.is_struct(wanted) and kind.is_struct(found):
            there = {field.name: field.type for field in found}
            for field in wanted:
                if field.name in there:
                    check_column_type(field.name, there[field.name], field.type)
                elif field.name not in _OPTIONAL_NAMES:
                    raise UserError(f"{path}: the {name} have no field {field.name!r}; they have {', '.join(there)}")
            return None
        if not is_wanted:
            raise UserError(
                f"{path}: the column {name} has the type {to_printable_line(plain)}; it must be {to_printable_line(wanted)}"
            )
        return None

    for field in column_schema():
        if field.name in schema.names:
            check_column_type(field.name, schema.field(field.name).type, field.type)


def _check_images(path: Path, batch: Any) -> Any:
    """Check the images of a record batch, and return their captions (pyarrow)."""
    compute = import_module("pyarrow.compute")
    imgids, files, splits, lists = (batch.column(name) for name in ("imgid", "filename", "split", "sentences"))
    for name, values in (("imgid", imgids), ("filename", files), ("split", splits), ("sentences", lists)):
        if values.null_count:
            raise UserError(f"{path}: the column {name} has a null value")
    captions = lists.flatten()
    if captions.null_count or captions.field("sentid").null_count:
        raise UserError(f"{path}: a caption has no sentid")

    def refuse(where: str, ids: Any, is_bad: Any, reason: str) -> NoReturn:
        raise UserError(f"{path}: {where} {ids[compute.index(is_bad, True).as_py()].as_py()}{reason}")

    names, texts = _as_text(files), _as_text(splits)
    is_bad = compute.match_substring_regex(names.cast("binary"), _BAD_PATH_PATTERN)
    if compute.any(is_bad).as_py():
        name = to_printable_line(names[compute.index(is_bad, True).as_py()].as_py())[:200]
        refuse("image", imgids, is_bad, f": the file {name!r} is not a path inside the images folder in its shortest form")
    if wrong := [split for split in texts.unique().to_pylist() if split not in SPLITS]:
        hint = did_you_mean(to_printable_line(wrong[0])[:100], SPLITS)
        refuse("image", imgids, compute.equal(texts, wrong[0]), f": unknown split{hint}")
    _check_captions(path, captions, refuse)
    return captions


def _check_captions(path: Path, captions: Any, refuse: Any) -> None:
    arrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    sentids, raws, tokens = captions.field("sentid"), _as_text(captions.field("raw")), captions.field("tokens")
    words = tokens.flatten()
    for name, values in (("raw", raws), ("tokens", tokens)):
        if values.null_count:
            refuse("caption", sentids, values.is_null(), f": its {name} is null")
    if words.null_count:
        raise UserError(f"{path}: a token is null")
    # NumPy compares, because pyarrow would import pandas to convert 0 and the empty text.
    n_letters, n_words = to_numpy(compute.utf8_length(compute.utf8_trim_whitespace(raws))), to_numpy(tokens.value_lengths())
    is_empty = (n_letters == 0) | (n_words == 0)
    if is_empty.any():
        refuse("caption", sentids, arrow.array(is_empty), " is empty")
    if any(field.name == "language" for field in captions.type):
        languages = _as_text(captions.field("language"))
        known = [language for language in languages.unique().to_pylist() if language is not None]
        if wrong := [language for language in known if not is_language_tag(language)]:
            refuse(
                "caption", sentids, compute.equal(languages, wrong[0]), ": 'language' must be a tag such as en, de or pt-BR"
            )
    if any(field.name == "phrases" for field in captions.type):
        n_tokens, lists = tokens.value_lengths().to_pylist(), captions.field("phrases")
        if not _are_valid_phrases(lists, n_tokens):
            for sentid, entries, length in zip(sentids.to_pylist(), lists.to_pylist(), n_tokens, strict=True):
                _check_phrases(entries or [], length, f"{path}: caption {sentid}")


def _are_valid_phrases(lists: Any, n_tokens: list[int]) -> bool:
    """Return True if the phrases of all captions are valid, and False if :func:`_check_phrases` must check them.

    ``lists`` is a pyarrow array with the phrases of each caption. ``n_tokens`` has the number of tokens of each caption.
    """
    if lists.null_count == len(lists) or not len(phrases := lists.flatten()):
        return True
    if phrases.null_count:
        return False
    spans = [read_phrase_field(phrases, name) for name in ("first_token", "n_tokens")]
    boxes, types = (read_phrase_field(phrases, name).flatten() for name in ("boxes", "types"))
    if any(values.null_count for values in (*spans, types, boxes, boxes.flatten())):
        return False
    firsts, lengths = map(to_numpy, spans)
    n_phrases = [length or 0 for length in lists.value_lengths().to_pylist()]
    n_left = np.repeat(np.asarray(n_tokens, np.int64), n_phrases) - firsts
    is_span = (firsts >= 0) & (lengths >= 1) & (lengths <= n_left)
    if not is_span.all() or not (to_numpy(boxes.value_lengths()) == 4).all():
        return False
    corners = to_numpy(boxes.flatten()).reshape(-1, 4)
    return bool(np.isfinite(corners).all() and (corners[:, 2:] > corners[:, :2]).all())


def _check_phrases(entries: list[Any], n_tokens: int, where: str) -> None:
    """Raise UserError if a phrase in a column is invalid. A field that is null is treated as a missing field."""
    read_phrases([one and {key: value for key, value in one.items() if value is not None} for one in entries], n_tokens, where)


def _as_text(values: Any) -> Any:
    return values.cast("string") if not import_module("pyarrow.types").is_string(values.type) else values
