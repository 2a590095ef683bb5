"""The option ``--compress`` of ``vse-eval``: codecs that store embeddings in fewer bytes, and their recalls."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import read_embeddings
from vse.eval.files.split import Embeddings
from vse.eval.protocols.correction import check_bank_file
from vse.eval.protocols.result_content import mean_and_std_over_seeds
from vse.eval.ranking.answers import Vectors, normalise_rows
from vse.eval.ranking.metrics import QueriesByDirection, Ranks, build_fold, compute_fold_metrics
from vse.eval.ranking.ranks import blocks_from_embeddings, ranks_from_blocks, shared_tensor
from vse.eval.ranking.statistics import compute_intervals
from vse.eval.search.approximate import find_candidates, rank_listed_candidates
from vse.eval.search.index import MIN_ROWS_PER_CENTROID
from vse.eval.search.top_k import compute_exact_scores
from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar

_PQ_BITS = 8
_BYTES_PER_FLOAT = 4
CODEC_EXAMPLES = "dims=256,128 int8 binary pq32"


@dataclass(frozen=True)
class Codec:
    """A method to store vectors of ``dim`` numbers in few bytes.

    ``kind`` is ``float32`` (uncompressed), ``dims`` (the first ``size`` dimensions), ``int8`` (a byte per dimension),
    ``binary`` (a bit per dimension) or ``pq`` (a product quantiser with ``size`` bytes per vector). ``size``
    is 0 for ``float32``, ``int8`` and ``binary``.
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
        """True if queries are encoded like the stored vectors, so that a pair has the same score in both directions."""
        return self.kind in ("float32", "dims", "binary")

    def fit(self, vectors: Vectors) -> FittedCodec:
        """Fit the codec to ``vectors`` (n, dim). Raises UserError if n is too small for a product quantiser."""
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
    """A codec with its fitted FAISS quantiser. ``quantiser`` is None for float32, dims and binary, which need no fit."""

    codec: Codec
    quantiser: Any

    def encode(self, vectors: Vectors) -> Any:
        """Return the codes of ``vectors`` (n, dim).

        The codes are uint8, (n, bytes_per_vector). Only for ``float32`` and ``dims`` they are float32 vectors; those of
        ``dims`` have length 1.
        """
        if self.quantiser is not None:
            return self.quantiser.compute_codes(np.ascontiguousarray(vectors))
        if self.codec.kind == "binary":
            return np.packbits(vectors >= 0, axis=1, bitorder="little")
        cut = vectors[:, : self.codec.size or self.codec.dim]
        return normalise_rows(shared_tensor(cut)).numpy() if self.codec.kind == "dims" else cut

    def decode(self, codes: Any) -> Vectors:
        """Return the float32 vectors that the codes stand for. For ``binary``, a bit stands for 1 or -1."""
        if self.quantiser is not None:
            decoded: Vectors = self.quantiser.decode(codes)
            return decoded
        if self.codec.kind == "binary":
            bits = np.unpackbits(codes, axis=1, count=self.codec.dim, bitorder="little")
            return 2 * bits.astype(np.float32) - 1
        vectors: Vectors = codes
        return vectors

    def encode_and_decode(self, vectors: Vectors) -> Vectors:
        """Return ``vectors`` (n, dim) after encoding and decoding. A search compares the decoded vectors with the queries."""
        return self.decode(self.encode(vectors))

    def prepare_queries(self, vectors: Vectors) -> Vectors:
        """Return query vectors whose inner products with the decoded vectors are the scores of the codec.

        If the codec encodes queries, these are the encoded and decoded ``vectors``; otherwise they are ``vectors``.
        """
        return self.encode_and_decode(vectors) if self.codec.encodes_queries else vectors

    def build_index(self, vectors: Vectors) -> Any:
        """Return a FAISS index of the codes of ``vectors``, for a search by inner products (``binary``: Hamming distances)."""
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
        """Return the rows of the ``k`` best vectors in ``index`` (from :meth:`build_index`) for each of n queries: (n, k)."""
        encoded = self.encode(queries) if self.codec.encodes_queries else queries
        return index.search(np.ascontiguousarray(encoded), k)[1]


def parse_codecs(texts: Sequence[str], dim: int) -> list[Codec]:
    """Parse texts such as ``dims=256,128`` and ``int8 binary pq32`` as codecs for vectors of ``dim`` numbers.

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


_FITTING_SPLIT = "train"
_N_TIMED_ANSWERS = 10  # results per query in a timed search


class _DirectionVectors(NamedTuple):
    """The query and candidate vectors that a codec compares in one direction, and the original vectors before compression."""

    queries: Vectors
    candidates: Vectors
    original_queries: Vectors
    original_candidates: Vectors


def measure_compression(
    files: Sequence[Path], seeds: Sequence[Embeddings], texts: Sequence[str], rescored: int | None, samples: int
) -> list[dict[str, Any]]:
    """Return the entries under ``compression`` of a result: the metrics of uncompressed vectors, and of each codec.

    Codecs are fitted to the embeddings of the training split, ``train.h5`` next to each file. Without ``train.h5``, codecs are
    fitted to the evaluated vectors. Ranks are exact ranks by the codec's scores, and ties count against the model.

    Parameters
    ----------
    files, seeds : the embeddings file of each seed of the model, and its content
    texts : names of codecs, such as ``dims=256,128`` and ``int8 binary pq32``
    rescored : number of best candidates of each query that are ranked again by the uncompressed vectors, for further metrics;
        None leaves these metrics out
    samples : number of bootstrap samples for intervals; 0 leaves the intervals out
    """
    banks = [_read_fitting_vectors(file, run) for file, run in zip(files, seeds, strict=True)]
    first_vectors = seeds[0].vectors
    assert first_vectors is not None
    dim = first_vectors[0].shape[1]
    codecs = [Codec("float32", dim), *parse_codecs(texts, dim)]
    entries = []
    for codec in progress_bar(codecs, desc="codecs", unit="codec"):
        fitted = [codec.fit(np.concatenate([*bank])) for bank, _ in banks]
        entry: dict[str, Any] = {
            "codec": codec.name,
            "bytes": codec.bytes_per_vector,
            "fitted_on": banks[0][1],
            **_measure_metrics([_rank_queries(run, one) for run, one in zip(seeds, fitted, strict=True)], samples),
            "search_s": mean_and_std_over_seeds([_time_searches(run, one) for run, one in zip(seeds, fitted, strict=True)]),
        }
        if rescored is not None and codec.kind != "float32":
            folds = [_rerank_queries(run, one, rescored) for run, one in zip(seeds, fitted, strict=True)]
            entry["rescored"] = {"candidates": rescored, **_measure_metrics(folds, samples)}
        entries.append(entry)
    return entries


def _read_fitting_vectors(file: Path, run: Embeddings) -> tuple[tuple[Vectors, Vectors], str]:
    """Return the image and caption vectors to which codecs are fitted, and the name of the split of these vectors.

    ``run`` has the embeddings of one training seed, which were read from ``file``. If ``train.h5`` is next to ``file``, the
    vectors are those of the training split; otherwise they are the vectors of ``run``. Raises UserError if the vectors are not
    compared by inner products, or if ``run`` is one fold of a cross-validation.
    """
    if run.vectors is None or run.similarity != "cosine":
        raise UserError(f"{file}: --compress needs vectors that are compared by inner products; leave it out")
    if run.fold is not None:
        raise UserError(f"{file}: is one fold of a cross-validation, and --compress is for one test set; leave it out")
    path = file.with_name(f"{_FITTING_SPLIT}.h5")
    if run.split == _FITTING_SPLIT or not path.is_file():
        return run.vectors, run.split
    bank = read_embeddings(path)
    check_bank_file(path, bank, file, run)
    assert bank.vectors is not None
    return bank.vectors, _FITTING_SPLIT


def _measure_metrics(folds: Sequence[QueriesByDirection], samples: int) -> dict[str, Any]:
    measured: dict[str, Any] = mean_and_std_over_seeds([compute_fold_metrics(fold) for fold in folds])
    if samples:
        measured["ci95"] = compute_intervals([[fold] for fold in folds], samples)
    return measured


def _encode_directions(run: Embeddings, fitted: FittedCodec) -> dict[str, _DirectionVectors]:
    assert run.vectors is not None
    images, captions = run.vectors
    return {
        "i2t": _DirectionVectors(fitted.prepare_queries(images), fitted.encode_and_decode(captions), images, captions),
        "t2i": _DirectionVectors(fitted.prepare_queries(captions), fitted.encode_and_decode(images), captions, images),
    }


def _rank_queries(run: Embeddings, fitted: FittedCodec) -> QueriesByDirection:
    sides, image_of_caption = _encode_directions(run, fitted), torch.from_numpy(run.image_of_caption())
    images, captions = map(shared_tensor, (sides["i2t"].queries, sides["i2t"].candidates))
    i2t, t2i = blocks_from_embeddings(images, captions, image_of_caption), None
    if not fitted.codec.encodes_queries:
        images, captions = map(shared_tensor, (sides["t2i"].candidates, sides["t2i"].queries))
        t2i = blocks_from_embeddings(images, captions, image_of_caption)
    return build_fold(ranks_from_blocks(i2t, t2i), run.image_of_caption())


def _rerank_queries(run: Embeddings, fitted: FittedCodec, n_candidates: int) -> QueriesByDirection:
    """Return the queries after a search in two stages.

    The compressed vectors select the best ``n_candidates`` of each query. The original vectors rank the selected candidates.
    """
    image_of_caption = run.image_of_caption()
    image_of = {"image": np.arange(len(run.image_ids)), "caption": image_of_caption}
    rows_of_queries = {"i2t": np.unique(image_of_caption), "t2i": np.arange(len(image_of_caption))}
    ranks: dict[str, NDArray[np.int64]] = {}
    for direction, side in _encode_directions(run, fitted).items():
        query_kind, candidate_kind = ("image", "caption") if direction == "i2t" else ("caption", "image")
        queries, image_of_candidate = rows_of_queries[direction], image_of[candidate_kind]
        near, sure, _ = find_candidates(side.candidates, side.queries[queries], n_candidates)
        exact = compute_exact_scores(
            side.original_candidates, side.original_queries[queries], near.numpy(), "cosine", direction
        )
        images = image_of[query_kind][queries]
        right = torch.from_numpy(image_of_candidate[near.numpy()] == images[:, None])
        n_right = np.bincount(image_of_candidate, minlength=len(run.image_ids))[images]
        n_wrong = torch.from_numpy(len(image_of_candidate) - n_right)
        ranks[direction] = rank_listed_candidates(right, sure, torch.from_numpy(exact), n_wrong).numpy()
    return build_fold(Ranks(ranks["i2t"], ranks["t2i"]), image_of_caption)


def _time_searches(run: Embeddings, fitted: FittedCodec) -> dict[str, float]:
    """Return the seconds in which FAISS finds the best ten candidates of all queries, for ``i2t`` and ``t2i``."""
    seconds = {}
    for direction, side in _encode_directions(run, fitted).items():
        index = fitted.build_index(side.original_candidates)
        started = time.perf_counter()
        fitted.search(index, side.original_queries, min(_N_TIMED_ANSWERS, len(side.original_candidates)))
        seconds[direction] = round(time.perf_counter() - started, 4)
    return seconds
