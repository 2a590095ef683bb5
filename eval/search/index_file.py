"""An index kept in a file, ``x.faiss``, with a note beside it, ``x.faiss.json``, of what it is an index of."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from vse.eval.files.array_folder import HELD_BYTES
from vse.eval.search.gpu import faiss_reason
from vse.eval.search.index import Built, rows_needed, search_index
from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, write_json, written
from vse.pipeline.input_files import changed_while_read
from vse.pipeline.outputs import OutputKind, json_kind, may_replace_others
from vse.pipeline.read_once import ReadOnce

log = logging.getLogger(__name__)
FORMAT = "vse-index"
VERSION = 1
_REBUILD = "delete it to rebuild it, or name another file"


class _Note(BaseModel):
    """What is read of the note of an index."""

    model_config = ConfigDict(strict=True)
    version: int = Field(ge=VERSION, le=VERSION)
    dim: PositiveInt
    factory: str
    trained_on: NonNegativeInt
    count: NonNegativeInt
    similarity: str
    ids_sha256: str
    of: dict[str, str]
    sha256: str

    @field_validator("factory")
    @classmethod
    def _can_be_made(cls, factory: str, before: ValidationInfo) -> str:
        try:
            rows_needed(factory, before.data.get("dim", 1))
        except UserError as error:
            raise ValueError(str(error)) from None
        return factory


@dataclass(frozen=True)
class Indexed:
    """What an index is of: ``ids_sha256`` of the ids of its ``count`` rows, and ``of`` all that decides their vectors.

    ``of`` maps names that a person understands, such as ``split``, to texts.
    """

    count: int
    dim: int
    similarity: str
    ids_sha256: str
    of: Mapping[str, str]


INDEX_NOTE = json_kind("the note of an index", "format", "factory", "ids_sha256")
INDEX = OutputKind("an index of ours, with its note beside it", lambda path: INDEX_NOTE.is_at(note_file(path)))


def ids_sha256(ids: NDArray[np.int64]) -> str:
    """SHA-256 of ids in their order."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<i8").tobytes()).hexdigest()


def note_file(path: Path) -> Path:
    """Where the note of an index lies."""
    return path.with_name(f"{path.name}.json")


def write_index(path: Path, built: Built, indexed: Indexed) -> Path:
    """Write the index and its note, each of them atomically, and the note first; returns ``path``.

    So that after a kill no index is without a note. A note without an index hinders nobody.
    """
    digest = hashlib.sha256()
    with written(path) as stream:

        def put(content: bytes) -> int:
            digest.update(content)
            return stream.write(content)

        faiss.write_index(built.index, faiss.PyCallbackIOWriter(put))  # type: ignore[attr-defined]
        note = {
            "format": FORMAT,
            "version": VERSION,
            "factory": built.factory,
            "trained_on": built.trained_on,
            "count": indexed.count,
            "dim": indexed.dim,
            "similarity": indexed.similarity,
            "ids_sha256": indexed.ids_sha256,
            "of": dict(indexed.of),
            "faiss": faiss.__version__,
            "sha256": digest.hexdigest(),
        }
        write_json(note_file(path), note)
    return path


def is_there(path: Path, indexed: Indexed) -> bool:
    """Whether there is an index to read. One that lost its note, but is of as many rows as long, counts as absent.

    Any other file without a note is there, and :func:`read_index` refuses it: it may be somebody else's.
    """
    if may_replace_others() and not INDEX.is_at(path):
        return False
    if not path.is_file() or note_file(path).exists():
        return path.exists()
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except (OSError, RuntimeError, MemoryError):
        return True
    if (index.ntotal, index.d) != (indexed.count, indexed.dim):
        return True
    log.warning("%s: there is no %s beside it, as after a kill; it is built again", path, note_file(path).name)
    return False


def read_index(path: Path, indexed: Indexed, factory: str | None = None) -> Built:
    """The index in a file; the vectors of a large one are mapped from there where FAISS can.

    :class:`UserError` if it is not there, if it is an index of something else than ``indexed`` or of another ``factory``
    than asked for (the message names what differs), if it was changed or cut short, or if FAISS cannot read it.
    """
    note = _read_note(path)
    differs = [name for name in {**indexed.of, **note["of"]} if indexed.of.get(name) != note["of"].get(name)]
    differs += [name for name in ("similarity", "count", "dim", "ids_sha256") if getattr(indexed, name) != note[name]]
    if differs:
        name = differs[0]
        there, here = str(note["of"].get(name, note.get(name, ""))), str(indexed.of.get(name, getattr(indexed, name, "")))
        hashes = max(len(there), len(here)) >= 64
        what = f"other {name.removesuffix('_sha256')}" if hashes else f"{name}: {there or 'none'} there, {here or 'none'} here"
        raise UserError(f"{path}: was built of something else ({what}); {_REBUILD}")
    if factory not in (None, note["factory"]):
        raise UserError(f"{path}: an index of type {note['factory']}, not {factory}; {_REBUILD}")
    try:
        file = ReadOnce(path)
        if file.sha256 != note["sha256"]:
            raise UserError(f"{path}: was changed or cut short since it was built (its SHA-256 differs); {_REBUILD}")
        index = faiss.read_index(str(file.name), faiss.IO_FLAG_MMAP_IFC if file.size > HELD_BYTES else 0)
        if file.has_changed:
            raise changed_while_read(path)
        search_index(index, np.zeros((1, index.d), np.float32), 1)  # what is wrong with its parts is found here
    except (OSError, RuntimeError, MemoryError) as error:
        raise UserError(f"{path}: FAISS cannot read it ({faiss_reason(error)}); {_REBUILD}") from None
    if (index.ntotal, index.d) != (indexed.count, indexed.dim):
        raise UserError(f"{path}: has {index.ntotal} rows of {index.d} dimensions, not what its note says; {_REBUILD}")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(f"{path}: is not searched by inner products; {_REBUILD}")
    return Built(index, note["factory"], note["trained_on"])


def _read_note(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such index file")
    file = note_file(path)
    if not file.is_file():
        raise UserError(f"{path}: not an index of ours, there is no {file.name} beside it; name another file")
    note = read_json(file)
    if not isinstance(note, dict) or note.get("format") != FORMAT:
        raise UserError(f"{file}: not the note of an index; name another file")
    try:
        return _Note.model_validate(note).model_dump()
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise UserError(f"{file}: its field {field!r} is missing or not as this version writes it; {_REBUILD}") from None
