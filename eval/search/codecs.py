"""Codecs: ways to store embeddings in fewer bytes. ``int8`` and ``pq`` are quantisers of FAISS, fitted to training vectors.

Scores are inner products of stored vectors with queries. Queries of ``int8`` and ``pq`` keep their full precision. For
``binary`` and ``dims``, queries are encoded like the stored vectors. For ``binary``, the inner product of two vectors of 1 and
-1 gives the same order as the Hamming distance of their bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from vse.eval.ranking.answers import unit_rows
from vse.eval.ranking.ranks import shared_tensor
from vse.eval.search.index import MIN_ROWS_PER_CENTROID
from vse.eval.search.vectors import Vectors
from vse.pipeline.errors import UserError

_PQ_BITS = 8
_BYTES_PER_FLOAT = 4
CODEC_EXAMPLES = "dims=256,128 int8 binary pq32"


@dataclass(frozen=True)
class Codec:
    """A codec of vectors of ``dim`` numbers. ``kind`` is float32, dims, int8, binary or pq.

    ``size`` : for ``dims``, the number of leading dimensions that are kept; for ``pq``, the bytes per vector; otherwise 0.
    """

    kind: str
    dim: int
    size: int = 0

    @property
    def name(self) -> str:
        return {"dims": f"dims={self.size}", "pq": f"pq{self.size}"}.get(self.kind, self.kind)

    @property
    def bytes_per_vector(self) -> int:
        sizes = {"float32": _BYTES_PER_FLOAT * self.dim, "dims": _BYTES_PER_FLOAT * self.size, "int8": self.dim}
        return {**sizes, "binary": -(-self.dim // 8), "pq": self.size}[self.kind]

    @property
    def encodes_queries(self) -> bool:
        """True if queries are encoded like the stored vectors. Then a pair has the same score in both directions."""
        return self.kind in ("float32", "dims", "binary")

    def fit(self, vectors: Vectors) -> FittedCodec:
        """Fit the codec to ``vectors`` (n, dim). Raises UserError if they are too few for a product quantiser."""
        if self.kind == "int8":
            scalar = faiss.ScalarQuantizer(self.dim, faiss.ScalarQuantizer.QT_8bit)
            scalar.train(np.ascontiguousarray(vectors))
            return FittedCodec(self, scalar)
        if self.kind == "pq":
            needed = MIN_ROWS_PER_CENTROID * 2**_PQ_BITS
            if len(vectors) < needed:
                raise UserError(
                    f"--compress {self.name}: needs {needed:,} vectors to be fitted, and there are {len(vectors):,}; with the "
                    "embeddings of the training split (vse-embed RUN --split train), it is fitted to these"
                )
            product = faiss.ProductQuantizer(self.dim, self.size, _PQ_BITS)
            product.train(np.ascontiguousarray(vectors))
            return FittedCodec(self, product)
        return FittedCodec(self, None)


@dataclass(frozen=True)
class FittedCodec:
    """A codec with its fitted FAISS quantiser; ``quantiser`` is None for codecs without a quantiser."""

    codec: Codec
    quantiser: Any

    def encode(self, vectors: Vectors) -> Any:
        """Return the codes of ``vectors`` (n, dim): (n, bytes_per_vector) uint8, or float32 for ``float32`` and ``dims``."""
        if self.quantiser is not None:
            return self.quantiser.compute_codes(np.ascontiguousarray(vectors))
        if self.codec.kind == "binary":
            return np.packbits(vectors >= 0, axis=1, bitorder="little")
        cut = vectors[:, : self.codec.size or self.codec.dim]
        return unit_rows(shared_tensor(cut)).numpy() if self.codec.kind == "dims" else cut

    def decode(self, codes: Any) -> Vectors:
        """Return the vectors of codes in float32: for ``binary``, 1 and -1 for each bit."""
        if self.quantiser is not None:
            decoded: Vectors = self.quantiser.decode(codes)
            return decoded
        if self.codec.kind == "binary":
            bits = np.unpackbits(codes, axis=1, count=self.codec.dim, bitorder="little")
            return 2 * bits.astype(np.float32) - 1
        vectors: Vectors = codes
        return vectors

    def encode_and_decode(self, vectors: Vectors) -> Vectors:
        """Encode ``vectors`` (n, dim), and return the decoded vectors. A search compares these with the queries."""
        return self.decode(self.encode(vectors))

    def prepare_queries(self, vectors: Vectors) -> Vectors:
        """Return query vectors in the form whose inner products with decoded vectors are the scores."""
        return self.encode_and_decode(vectors) if self.codec.encodes_queries else vectors

    def build_index(self, vectors: Vectors) -> Any:
        """Return a FAISS index of the codes of ``vectors``. ``binary`` compares by the Hamming distance."""
        codec = self.codec
        index: Any
        if codec.kind == "binary":
            index = faiss.IndexBinaryFlat(8 * codec.bytes_per_vector)
        elif codec.kind == "int8":
            index = faiss.IndexScalarQuantizer(codec.dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
            index.sq, index.is_trained = self.quantiser, True
        elif codec.kind == "pq":
            index = faiss.IndexPQ(codec.dim, codec.size, _PQ_BITS, faiss.METRIC_INNER_PRODUCT)
            index.pq, index.is_trained = self.quantiser, True
        else:
            index = faiss.IndexFlatIP(codec.size or codec.dim)
        index.add(np.ascontiguousarray(self.encode(vectors) if codec.encodes_queries else vectors))
        return index

    def search(self, index: Any, queries: Vectors, k: int) -> Any:
        """Return the rows (n, k) of the nearest stored vectors, by an index of :meth:`build_index`."""
        encoded = self.encode(queries) if self.codec.encodes_queries else queries
        return index.search(np.ascontiguousarray(encoded), k)[1]


def parse_codecs(texts: Sequence[str], dim: int) -> list[Codec]:
    """Return the codecs that texts such as ``dims=256,128`` and ``int8 binary pq32`` name, for vectors of ``dim`` numbers.

    Raises UserError if a name is unknown, or if a number does not fit ``dim``.
    """
    codecs: list[Codec] = []
    for part in (part for text in texts for part in text.split()):
        dims, product = re.fullmatch(r"dims=(\d{1,6}(?:,\d{1,6})*)", part), re.fullmatch(r"pq(\d{1,6})", part)
        if part in ("int8", "binary"):
            codecs.append(Codec(part, dim))
        elif dims:
            codecs += [Codec("dims", dim, int(number)) for number in dims[1].split(",")]
        elif product:
            codecs.append(Codec("pq", dim, int(product[1])))
        else:
            raise UserError(f"--compress {part}: no such codec; such as {CODEC_EXAMPLES} work")
    for codec in codecs:
        if codec.kind == "dims" and not 1 <= codec.size < dim:
            raise UserError(
                f"--compress {codec.name}: give a number from 1 to {dim - 1}, because the vectors have {dim} numbers"
            )
        if codec.kind == "pq" and (not codec.size or dim % codec.size):
            raise UserError(f"--compress {codec.name}: {dim} dimensions cannot be divided into {codec.size} equal parts")
    return list(dict.fromkeys(codecs))
