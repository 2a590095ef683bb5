"""FAISS indexes for approximate search, by a factory string: how they are built, set and searched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from vse.eval.search.exact import BLOCK, Corpus, TopK, blocks_of, merged
from vse.eval.search.gpu import faiss_reason
from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar

EXAMPLES = "Flat; IVF1024,Flat; HNSW32; IVF4096,PQ64; OPQ64,IVF4096,PQ64"
TRAIN_LEAST = 65_536  # rows to train on, if there are so many, and
TRAIN_EACH = 64  # for each centroid. Fewer than this many for one, and FAISS warns:
TRAIN_ENOUGH = 39

_LINKS = range(2, 257)  # of a node of a graph: with fewer FAISS crashes, with many more it needs all memory


@dataclass(frozen=True)
class Built:
    """An index of a corpus, row after row, and on how many rows it was trained (0 if it needs no training)."""

    index: Any
    factory: str
    trained_on: int


def build_index(corpus: Corpus, factory: str = "Flat", *, seed: int = 0, block: int = BLOCK, name: str = "corpus") -> Built:
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
            for _, rows in blocks_of(corpus, block):
                index.add(rows)
                progress.update(len(rows))
    except RuntimeError as error:
        reason = f"FAISS cannot build it for {name} ({faiss_reason(error)})"
        raise UserError(f"{factory}: {reason}; such as {EXAMPLES} work") from None
    return Built(index, factory, trained_on)


def rows_needed(factory: str, dim: int) -> int:
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
    return merged(k, TopK(*index.search(np.ascontiguousarray(queries, np.float32), k)))


class StoredRows:
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


def holds_exactly(index: Any, corpus: Corpus) -> bool:
    """Whether the first rows of an index are those of its corpus, bit for bit; then all of them are."""
    some = slice(0, 100)
    try:
        return bool(np.array_equal(StoredRows(index)[some], np.asarray(corpus[some], np.float32)))
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
