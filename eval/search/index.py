"""An index kept in a file, ``x.faiss``, with a note beside it, ``x.faiss.json``, of what it is an index of.

FAISS indexes for approximate search, by a factory string: how they are built, set and searched.
"""

from __future__ import annotations

import hashlib
import logging
import re
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

from vse.eval.files.array_folder import IN_MEMORY_BYTES
from vse.eval.search.exact import BLOCK, Corpus, TopK, merge_top_k, read_blocks
from vse.eval.search.gpu import faiss_reason
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, changed_file_error
from vse.pipeline.files.outputs import OutputKind, json_kind, may_replace_others
from vse.pipeline.files.writing import open_atomic, read_json, write_json
from vse.pipeline.progress import progress_bar

EXAMPLES = "Flat; IVF1024,Flat; HNSW32; IVF4096,PQ64; OPQ64,IVF4096,PQ64"
TRAIN_LEAST = 65_536  # rows to train on, if there are so many, and
TRAIN_EACH = 64  # for each centroid. Fewer than this many for one, and FAISS warns:
TRAIN_ENOUGH = 39

_LINKS = range(2, 257)  # of a node of a graph: with fewer FAISS crashes, with many more it needs all memory


@dataclass(frozen=True)
class BuiltIndex:
    """An index of a corpus, row after row, and on how many rows it was trained (0 if it needs no training)."""

    index: Any
    factory: str
    trained_on: int


def build_index(
    corpus: Corpus, factory: str = "Flat", *, seed: int = 0, block: int = BLOCK, name: str = "corpus"
) -> BuiltIndex:
    """An index for the highest inner products with the rows of ``corpus`` (n, dim), which is read ``block`` rows at a time.

    ``factory`` is a string as FAISS has them. What needs training is trained on rows drawn with ``seed``. On one thread an
    index is the same every time; the links of HNSW depend on ``block``, and on how several threads take turns.
    :class:`UserError` if there is no such index, if it does not suit the dimensions, or if there are too few rows to train
    it; ``name`` says of what.
    """
    n_rows, dim = corpus.shape
    index = _made(factory, dim)
    needed = TRAIN_ENOUGH * (n_centroids := _most_centroids(index))
    if n_rows < needed:
        raise UserError(
            f"{factory}: its {n_centroids} centroids need {needed} rows to be trained, and {name} has {n_rows}; "
            "ask for fewer (of IVF, the number after it), or for Flat or HNSW32, which need none"
        )
    trained_on = 0
    try:
        if not index.is_trained:
            trained_on = min(n_rows, max(TRAIN_LEAST, TRAIN_EACH * n_centroids))
            index.train(_sample(corpus, trained_on, seed))
        with progress_bar(total=n_rows, desc=f"index {name}", unit="row") as progress:
            for _, rows in read_blocks(corpus, block):
                index.add(rows)
                progress.update(len(rows))
    except RuntimeError as error:
        reason = f"FAISS cannot build it for {name} ({faiss_reason(error)})"
        raise UserError(f"{factory}: {reason}; such as {EXAMPLES} work") from None
    return BuiltIndex(index, factory, trained_on)


def min_training_rows(factory: str, dim: int) -> int:
    """How many rows at least such an index is trained on; :class:`UserError` if there is no such index."""
    index = _made(factory, dim)
    return TRAIN_ENOUGH * _most_centroids(index)


def set_parameters(index: Any, parameters: str) -> None:
    """How thoroughly an index is searched: ``nprobe=16`` of IVF, ``efSearch=64`` of HNSW, several with commas between.

    :class:`UserError` if a value is no positive integer, or if the index has no such parameter.
    """
    space: Any = faiss.ParameterSpace()
    for parameter in filter(None, parameters.split(",")):
        if not re.fullmatch(r"\w+=[1-9]\d{0,8}", parameter):
            raise UserError(f"index parameter {parameter!r} is not of the form NAME=NUMBER, such as nprobe=16 or efSearch=64")
        try:
            space.set_index_parameters(index, parameter)
        except RuntimeError:
            known = "nprobe is one of IVF, efSearch one of HNSW, and Flat has none"
            raise UserError(f"this index has no parameter {parameter.partition('=')[0]!r}; {known}") from None


def search_index(index: Any, queries: NDArray[np.float32], k: int) -> TopK:
    """The ``k`` rows with the highest inner products that the index finds for each query (m, dim), fewer if it has fewer."""
    k = min(k, index.ntotal)
    if not k or not len(queries):
        return TopK(np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64))
    return merge_top_k(k, TopK(*index.search(np.ascontiguousarray(queries, np.float32), k)))


class IndexVectors:
    """The vectors (n, dim) that an index holds, as a :class:`vse.eval.search.exact.Corpus`; of PQ or SQ approximately."""

    def __init__(self, index: Any) -> None:
        self.index = index
        self.shape = (int(index.ntotal), int(index.d))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        wanted = np.arange(len(self))[rows]
        lists = faiss.try_extract_index_ivf(self.index)
        if lists is not None:
            lists.make_direct_map()
        vectors: NDArray[np.float32] = self.index.reconstruct_batch(wanted)
        return vectors


def stores_exactly(index: Any, corpus: Corpus) -> bool:
    """Whether the first rows of an index are those of its corpus, bit for bit; then all of them are."""
    some = slice(0, 100)
    try:
        return bool(np.array_equal(IndexVectors(index)[some], np.asarray(corpus[some], np.float32)))
    except RuntimeError:  # it cannot give vectors back
        return False


def _made(factory: str, dim: int) -> Any:
    """An empty index. FAISS crashes on some numbers, rather than refuse them."""
    links = [int(number) for number in re.findall(r"(?:HNSW|NSG)(\d+)", factory)]
    if re.search(r"(?<!\d)0+(?!\d)", factory) or any(number not in _LINKS for number in links):
        raise UserError(f"{factory}: a number in it is too small or too large; such as {EXAMPLES} work")
    if factory.startswith("IDMap"):
        raise UserError(f"{factory}: rows have their numbers without IDMap, leave it out")
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = f"not an index of {dim} dimensions that FAISS can make ({faiss_reason(error)})"
        raise UserError(f"{factory!r}: {reason}; such as {EXAMPLES} work") from None


def _most_centroids(index: Any) -> int:
    """The most that any part of an index is trained to have: lists of IVF, codes of PQ.

    ``index`` owns what is looked at, so the caller keeps it.
    """
    kind = faiss.downcast_index(index)
    counts = [int(getattr(kind, "nlist", 0))]
    if hasattr(kind, "pq"):
        counts.append(int(kind.pq.ksub))
    if hasattr(kind, "aq"):
        counts += [2 ** int(bits) for bits in faiss.vector_to_array(kind.aq.nbits)]
    if hasattr(kind, "chain"):
        transforms = [faiss.downcast_VectorTransform(kind.chain.at(k)) for k in range(kind.chain.size())]
        counts += [256 for transform in transforms if isinstance(transform, faiss.OPQMatrix)]
    parts = [getattr(kind, name, None) for name in ("index", "base_index", "refine_index", "storage")]
    return max([*counts, *(_most_centroids(part) for part in parts if part is not None)])


def _sample(corpus: Corpus, size: int, seed: int) -> NDArray[np.float32]:
    rows = np.sort(np.random.default_rng(seed).choice(len(corpus), size, replace=False))
    sample = np.ascontiguousarray(corpus[rows], np.float32)
    finite = np.isfinite(sample.sum(1, dtype=np.float64))
    if not finite.all():
        raise UserError(f"corpus row {rows[np.argmin(finite)]} is not finite (NaN)")
    return sample


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
            min_training_rows(factory, before.data.get("dim", 1))
        except UserError as error:
            raise ValueError(str(error)) from None
        return factory


@dataclass(frozen=True)
class IndexSource:
    """What an index is of: ``ids_sha256`` of the ids of its ``count`` rows, and ``of`` all that decides their vectors.

    ``of`` maps names that a person understands, such as ``split``, to texts.
    """

    count: int
    dim: int
    similarity: str
    ids_sha256: str
    of: Mapping[str, str]


INDEX_METADATA = json_kind("the note of an index", "format", "factory", "ids_sha256")
INDEX = OutputKind("an index of ours, with its note beside it", lambda path: INDEX_METADATA.is_at(metadata_file(path)))


def ids_sha256(ids: NDArray[np.int64]) -> str:
    """SHA-256 of ids in their order."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<i8").tobytes()).hexdigest()


def metadata_file(path: Path) -> Path:
    """Where the note of an index lies."""
    return path.with_name(f"{path.name}.json")


def write_index(path: Path, built: BuiltIndex, indexed: IndexSource) -> Path:
    """Write the index and its note, each of them atomically, and the note first; returns ``path``.

    So that after a kill no index is without a note. A note without an index hinders nobody.
    """
    digest = hashlib.sha256()
    with open_atomic(path) as stream:

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
        write_json(metadata_file(path), note)
    return path


def index_exists(path: Path, indexed: IndexSource) -> bool:
    """Whether there is an index to read. One that lost its note, but is of as many rows as long, counts as absent.

    Any other file without a note is there, and :func:`read_index` refuses it: it may be somebody else's.
    """
    if may_replace_others() and not INDEX.is_at(path):
        return False
    if not path.is_file() or metadata_file(path).exists():
        return path.exists()
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except (OSError, RuntimeError, MemoryError):
        return True
    if (index.ntotal, index.d) != (indexed.count, indexed.dim):
        return True
    log.warning("%s: there is no %s beside it, as after a kill; it is built again", path, metadata_file(path).name)
    return False


def read_index(path: Path, indexed: IndexSource, factory: str | None = None) -> BuiltIndex:
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
        file = InputFile(path)
        if file.sha256 != note["sha256"]:
            raise UserError(f"{path}: was changed or cut short since it was built (its SHA-256 differs); {_REBUILD}")
        index = faiss.read_index(str(file.descriptor_path), faiss.IO_FLAG_MMAP_IFC if file.size > IN_MEMORY_BYTES else 0)
        if file.has_changed:
            raise changed_file_error(path)
        search_index(index, np.zeros((1, index.d), np.float32), 1)  # what is wrong with its parts is found here
    except (OSError, RuntimeError, MemoryError) as error:
        raise UserError(f"{path}: FAISS cannot read it ({faiss_reason(error)}); {_REBUILD}") from None
    if (index.ntotal, index.d) != (indexed.count, indexed.dim):
        raise UserError(f"{path}: has {index.ntotal} rows of {index.d} dimensions, not what its note says; {_REBUILD}")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(f"{path}: is not searched by inner products; {_REBUILD}")
    return BuiltIndex(index, note["factory"], note["trained_on"])


def _read_note(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such index file")
    file = metadata_file(path)
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
