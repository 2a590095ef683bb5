"""FAISS indexes for approximate search, in memory and in files.

The metadata of the index ``x.faiss`` are in the file ``x.faiss.json``. The metadata describe the vectors in the index, and
:func:`read_index` rejects an index of other vectors.
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

from vse.eval.files.array_folder import MAX_IN_MEMORY_BYTES
from vse.eval.ranking.answers import N_ROWS_PER_BLOCK, Corpus, Vectors, read_blocks
from vse.eval.search.gpu import strip_faiss_location
from vse.eval.search.top_k import RowIndices, search_index
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, changed_file_error
from vse.pipeline.files.outputs import OutputKind, json_kind, may_replace_other_kinds
from vse.pipeline.files.writing import open_atomic, read_json, write_json
from vse.pipeline.progress import progress_bar

FACTORY_EXAMPLES = "Flat; IVF1024,Flat; HNSW32; IVF4096,PQ64; OPQ64,IVF4096,PQ64"
MIN_TRAINING_SAMPLE_ROWS = 65_536  # smallest number of training rows, if the corpus is large enough
SAMPLE_ROWS_PER_CENTROID = 64  # smallest number of training rows for each centroid
MIN_ROWS_PER_CENTROID = 39  # FAISS warns if a centroid has fewer rows

# Accepted numbers of links of a node in an HNSW graph. With fewer links FAISS crashes, with many more it uses up the memory.
_ACCEPTED_GRAPH_LINKS = range(2, 257)


@dataclass(frozen=True)
class BuiltIndex:
    """A FAISS index of all rows of a corpus. ``n_training_rows`` is 0 for an index that needs no training."""

    index: Any
    factory: str
    n_training_rows: int


def build_index(
    corpus: Corpus, factory: str = "Flat", *, seed: int = 0, block: int = N_ROWS_PER_BLOCK, name: str = "corpus"
) -> BuiltIndex:
    """Build an index that finds the rows of ``corpus`` (n, dim) with the highest inner products with a query.

    ``factory`` is a factory string of FAISS, such as ``IVF1024,Flat``. An index that needs training is trained on a sample of
    rows that depends on ``seed``; then all rows are added, ``block`` at a time. With one thread, the same ``seed`` and
    ``block`` give the same index.

    Raises UserError if the factory string is unknown or does not fit the dimensions, or if the corpus has too few rows for
    training. The message calls the corpus ``name``.
    """
    n_rows, dim = corpus.shape
    index = _create_index(factory, dim)
    needed = MIN_ROWS_PER_CENTROID * (n_centroids := _max_centroids(index))
    if n_rows < needed:
        raise UserError(
            f"{factory}: its {n_centroids} centroids need {needed} rows to be trained, and {name} has {n_rows}; "
            "use fewer (the number after IVF), or Flat or HNSW32, which need no training"
        )
    n_training_rows = 0
    try:
        if not index.is_trained:
            n_training_rows = min(n_rows, max(MIN_TRAINING_SAMPLE_ROWS, SAMPLE_ROWS_PER_CENTROID * n_centroids))
            index.train(_sample_training_rows(corpus, n_training_rows, seed))
        with progress_bar(total=n_rows, desc=f"index {name}", unit="row") as progress:
            for _, rows in read_blocks(corpus, block):
                index.add(rows)
                progress.update(len(rows))
    except RuntimeError as error:
        reason = f"FAISS cannot build it for {name} ({strip_faiss_location(error)})"
        raise UserError(f"{factory}: {reason}; such as {FACTORY_EXAMPLES} work") from None
    return BuiltIndex(index, factory, n_training_rows)


def min_training_rows(factory: str, dim: int) -> int:
    """Return how many rows the training of an index needs. ``factory`` is its type in FAISS, such as ``IVF1024,Flat``.

    Raises UserError if FAISS has no such type.
    """
    index = _create_index(factory, dim)
    return MIN_ROWS_PER_CENTROID * _max_centroids(index)


def set_search_parameters(index: Any, parameters: str) -> None:
    """Set the search parameters of an index from a text such as ``nprobe=16`` (IVF) or ``efSearch=64`` (HNSW).

    Commas separate several parameters. Raises UserError if a value is not a positive integer, or if the index does not have
    the parameter.
    """
    space: Any = faiss.ParameterSpace()
    for parameter in filter(None, parameters.split(",")):
        if not re.fullmatch(r"\w+=[1-9]\d{0,8}", parameter):
            raise UserError(f"index parameter {parameter!r} is not of the form NAME=NUMBER, such as nprobe=16 or efSearch=64")
        try:
            space.set_index_parameters(index, parameter)
        except RuntimeError:
            known = "IVF has nprobe, HNSW has efSearch, and Flat has none"
            raise UserError(f"this index has no parameter {parameter.partition('=')[0]!r}; {known}") from None


class IndexVectors:
    """The vectors (n, dim) in a FAISS index, read by ``vectors[rows]``. A compressed index (PQ, SQ) returns approximations."""

    def __init__(self, index: Any) -> None:
        self.index = index
        self.shape = (int(index.ntotal), int(index.d))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | RowIndices) -> Vectors:
        wanted = np.arange(len(self))[rows]
        lists = faiss.try_extract_index_ivf(self.index)
        if lists is not None:
            lists.make_direct_map()
        vectors: Vectors = self.index.reconstruct_batch(wanted)
        return vectors


def stores_corpus_exactly(index: Any, corpus: Corpus) -> bool:
    """Return whether an index stores the first 100 rows of its corpus bit for bit."""
    first_rows = slice(0, 100)
    try:
        return bool(np.array_equal(IndexVectors(index)[first_rows], np.asarray(corpus[first_rows], np.float32)))
    except RuntimeError:  # the index cannot return its vectors
        return False


def _create_index(factory: str, dim: int) -> Any:
    """Create an empty index. Raises UserError if FAISS cannot create it, or would crash on a number in ``factory``."""
    links = [int(number) for number in re.findall(r"(?:HNSW|NSG)(\d+)", factory)]
    if re.search(r"(?<!\d)0+(?!\d)", factory) or any(number not in _ACCEPTED_GRAPH_LINKS for number in links):
        raise UserError(f"{factory}: a number in it is too small or too large; such as {FACTORY_EXAMPLES} work")
    if factory.startswith("IDMap"):
        raise UserError(f"{factory}: rows are numbered without IDMap; leave it out")
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = f"not an index of {dim} dimensions that FAISS can build ({strip_faiss_location(error)})"
        raise UserError(f"{factory!r}: {reason}; such as {FACTORY_EXAMPLES} work") from None


def _max_centroids(index: Any) -> int:
    """Return the largest number of centroids that a component of an index trains, such as its IVF lists or its PQ codes.

    The caller must keep a reference to ``index``, which owns its components.
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
    return max([*counts, *(_max_centroids(part) for part in parts if part is not None)])


def _sample_training_rows(corpus: Corpus, size: int, seed: int) -> Vectors:
    rows = np.sort(np.random.default_rng(seed).choice(len(corpus), size, replace=False))
    sample = np.ascontiguousarray(corpus[rows], np.float32)
    finite = np.isfinite(sample.sum(1, dtype=np.float64))
    if not finite.all():
        raise UserError(f"corpus row {rows[np.argmin(finite)]} is not finite (NaN)")
    return sample


log = logging.getLogger(__name__)
INDEX_FORMAT = "vse-index"
INDEX_VERSION = 1
_HASH_DIGITS = 64  # digits of a SHA-256; error messages do not print values of this length or more
_REBUILD_ADVICE = "delete it to rebuild it, or name another file"


class _IndexMetadata(BaseModel):
    """The fields that are read from the metadata file of an index."""

    model_config = ConfigDict(strict=True)
    version: int = Field(ge=INDEX_VERSION, le=INDEX_VERSION)
    dim: PositiveInt
    factory: str
    trained_on: NonNegativeInt
    count: NonNegativeInt
    similarity: str
    ids_sha256: str
    properties: dict[str, str] = Field(alias="of")
    sha256: str

    @field_validator("factory")
    @classmethod
    def _check_factory(cls, factory: str, info: ValidationInfo) -> str:
        try:
            min_training_rows(factory, info.data.get("dim", 1))
        except UserError as error:
            raise ValueError(str(error)) from None
        return factory


@dataclass(frozen=True)
class IndexSource:
    """A description of the vectors in an index: ``count`` rows of ``dim`` dimensions, whose ids have the hash ``ids_sha256``.

    ``properties`` describes where the vectors come from, such as ``{"split": "test"}``. Two sources with equal properties have
    equal vectors. Metadata files store the properties under the key ``of``.
    """

    count: int
    dim: int
    similarity: str
    ids_sha256: str
    properties: Mapping[str, str]


INDEX_METADATA_KIND = json_kind("the metadata of an index", "format", "factory", "ids_sha256")
INDEX_KIND = OutputKind(
    "an index that vse wrote, with its metadata next to it",
    lambda path: INDEX_METADATA_KIND.recognises_file_at(metadata_file(path)),
)


def hash_ids(ids: RowIndices) -> str:
    """Return the SHA-256 of ids in their order."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<i8").tobytes()).hexdigest()


def metadata_file(path: Path) -> Path:
    """Return the path of the metadata file of the index file ``path``."""
    return path.with_name(f"{path.name}.json")


def write_index(path: Path, built: BuiltIndex, source: IndexSource) -> Path:
    """Write an index to ``path`` and its metadata next to it, each atomically, and return ``path``.

    The metadata are written first, because metadata without an index do no harm.
    """
    digest = hashlib.sha256()
    with open_atomic(path) as stream:

        def put(content: bytes) -> int:
            digest.update(content)
            return stream.write(content)

        faiss.write_index(built.index, faiss.PyCallbackIOWriter(put))  # type: ignore[attr-defined]
        metadata = {
            "format": INDEX_FORMAT,
            "version": INDEX_VERSION,
            "factory": built.factory,
            "trained_on": built.n_training_rows,
            "count": source.count,
            "dim": source.dim,
            "similarity": source.similarity,
            "ids_sha256": source.ids_sha256,
            "of": dict(source.properties),
            "faiss": faiss.__version__,
            "sha256": digest.hexdigest(),
        }
        write_json(metadata_file(path), metadata)
    return path


def has_index_to_read(path: Path, source: IndexSource) -> bool:
    """Return whether the caller must call :func:`read_index` for ``path``; if not, the caller builds the index.

    The result is False in three cases: there is no file; the file has no metadata of an index, and ``--force`` permits its
    replacement; or a killed process has left the index, that is, the metadata file is missing and the index has the expected
    numbers of rows and dimensions. Any other file without metadata may belong to somebody else. :func:`read_index` then raises
    UserError.
    """
    if may_replace_other_kinds() and not INDEX_KIND.recognises_file_at(path):
        return False
    if not path.is_file() or metadata_file(path).exists():
        return path.exists()
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except (OSError, RuntimeError, MemoryError):
        return True
    if (index.ntotal, index.d) != (source.count, source.dim):
        return True
    missing = metadata_file(path).name
    log.warning("%s: %s is missing, perhaps because a process was killed; the index is built again", path, missing)
    return False


def read_index(path: Path, source: IndexSource, factory: str | None = None) -> BuiltIndex:
    """Read an index from a file. A large index is memory-mapped if FAISS can map this type of index.

    Raises UserError if the file is missing, has changed since it was written, or cannot be read by FAISS. Raises UserError if
    the index was built from another source, or is not of the type ``factory`` (None allows any type).
    """
    metadata = _read_metadata(path)
    if difference := _find_source_difference(source, metadata):
        raise UserError(f"{path}: was built from something else ({difference}); {_REBUILD_ADVICE}")
    if factory not in (None, metadata["factory"]):
        raise UserError(f"{path}: an index of type {metadata['factory']}, not {factory}; {_REBUILD_ADVICE}")
    try:
        file = InputFile(path)
        if file.sha256 != metadata["sha256"]:
            raise UserError(f"{path}: has changed since it was built (its SHA-256 does not match); {_REBUILD_ADVICE}")
        index = faiss.read_index(str(file.descriptor_path), faiss.IO_FLAG_MMAP_IFC if file.size > MAX_IN_MEMORY_BYTES else 0)
        if file.has_changed:
            raise changed_file_error(path)
        search_index(index, np.zeros((1, index.d), np.float32), 1)  # this search fails if a part of the index is damaged
    except (OSError, RuntimeError, MemoryError) as error:
        raise UserError(f"{path}: FAISS cannot read it ({strip_faiss_location(error)}); {_REBUILD_ADVICE}") from None
    if (index.ntotal, index.d) != (source.count, source.dim):
        raise UserError(f"{path}: has {index.ntotal} rows of {index.d} dimensions, unlike its metadata; {_REBUILD_ADVICE}")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(f"{path}: does not search by inner products; {_REBUILD_ADVICE}")
    return BuiltIndex(index, metadata["factory"], metadata["trained_on"])


def _find_source_difference(source: IndexSource, metadata: Mapping[str, Any]) -> str:
    properties = metadata["properties"]
    compared = [(name, properties.get(name), source.properties.get(name)) for name in {**source.properties, **properties}]
    compared += [(name, metadata[name], getattr(source, name)) for name in ("similarity", "count", "dim", "ids_sha256")]
    for name, before, now in compared:
        if before != now:
            if max(len(str(before)), len(str(now))) >= _HASH_DIGITS:
                return f"other {name.removesuffix('_sha256')}"
            return f"{name}: {before or 'none'} there, {now or 'none'} here"
    return ""


def _read_metadata(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such index file")
    file = metadata_file(path)
    if not file.is_file():
        raise UserError(f"{path}: not an index that vse wrote: there is no {file.name} next to it; name another file")
    metadata = read_json(file)
    if not isinstance(metadata, dict) or metadata.get("format") != INDEX_FORMAT:
        raise UserError(f"{file}: not the metadata of an index; name another file")
    try:
        return _IndexMetadata.model_validate(metadata).model_dump()
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise UserError(f"{file}: its field {field!r} is missing or invalid; {_REBUILD_ADVICE}") from None
