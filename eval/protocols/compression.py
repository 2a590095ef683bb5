"""The option ``--compress`` of ``vse-eval``: recall against the bytes in which the candidates are stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import read_embeddings
from vse.eval.files.split import Embeddings
from vse.eval.protocols.correction import check_bank
from vse.eval.protocols.result_content import mean_and_std_over_seeds
from vse.eval.ranking.metrics import QueriesByDirection, build_fold, fold_metrics
from vse.eval.ranking.rank_arrays import Ranks
from vse.eval.ranking.ranks import blocks_from_embeddings, ranks_from_blocks, shared_tensor
from vse.eval.ranking.statistics import compute_intervals
from vse.eval.search.approximate import find_candidates, rank_listed_candidates
from vse.eval.search.codecs import Codec, FittedCodec, parse_codecs
from vse.eval.search.top_k import compute_exact_scores
from vse.eval.search.vectors import Vectors
from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar

_BANK_SPLIT = "train"
_N_TIMED_ANSWERS = 10  # results per query in a timed search


class _DirectionVectors(NamedTuple):
    """The vectors of the queries and candidates of one direction, before and after a codec encoded and decoded them."""

    queries: Vectors
    stored: Vectors
    original_queries: Vectors
    original_candidates: Vectors


def measure_compression(
    files: Sequence[Path], seeds: Sequence[Embeddings], texts: Sequence[str], rescored: int | None, samples: int
) -> list[dict[str, Any]]:
    """Return the entries ``compression`` of a result: the metrics of uncompressed vectors, and of each codec.

    Codecs are fitted to the embeddings of the training split, ``train.h5`` next to each file. If there is no such file, they
    are fitted to the vectors of the file itself. Ranks are exact ranks by the codec's scores, with ties against the model.

    Parameters
    ----------
    texts : names of codecs, see :func:`vse.eval.search.codecs.parse_codecs`
    rescored : number of best candidates per query that are also ranked again by the uncompressed vectors; None for no
        such ranking
    samples : number of bootstrap samples for intervals; 0 computes none
    """
    banks = [_read_bank(file, run) for file, run in zip(files, seeds, strict=True)]
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


def _read_bank(file: Path, run: Embeddings) -> tuple[tuple[Vectors, Vectors], str]:
    """Return the vectors (images and captions) to which the codecs of a seed are fitted, and the name of their split."""
    if run.vectors is None or run.similarity != "cosine":
        raise UserError(f"{file}: --compress needs vectors that are compared by inner products; leave it out")
    if run.fold is not None:
        raise UserError(f"{file}: is one fold of a cross-validation, and --compress is for one test set; leave it out")
    path = file.with_name(f"{_BANK_SPLIT}.h5")
    if run.split == _BANK_SPLIT or not path.is_file():
        return run.vectors, run.split
    bank = read_embeddings(path)
    check_bank(path, bank, file, run)
    assert bank.vectors is not None
    return bank.vectors, _BANK_SPLIT


def _measure_metrics(folds: Sequence[QueriesByDirection], samples: int) -> dict[str, Any]:
    measured: dict[str, Any] = mean_and_std_over_seeds([fold_metrics(fold) for fold in folds])
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
    images, captions = map(shared_tensor, (sides["i2t"].queries, sides["i2t"].stored))
    i2t, t2i = blocks_from_embeddings(images, captions, image_of_caption), None
    if not fitted.codec.encodes_queries:
        images, captions = map(shared_tensor, (sides["t2i"].stored, sides["t2i"].queries))
        t2i = blocks_from_embeddings(images, captions, image_of_caption)
    return build_fold(ranks_from_blocks(i2t, t2i), run.image_of_caption())


def _rerank_queries(run: Embeddings, fitted: FittedCodec, candidates: int) -> QueriesByDirection:
    """Take the best candidates of each query by the codec's scores, and rank them by the original vectors."""
    image_of_caption = run.image_of_caption()
    image_of = {"image": np.arange(len(run.image_ids)), "caption": image_of_caption}
    rows_of_queries = {"i2t": np.unique(image_of_caption), "t2i": np.arange(len(image_of_caption))}
    ranks: dict[str, NDArray[np.int64]] = {}
    for direction, side in _encode_directions(run, fitted).items():
        query_kind, candidate_kind = ("image", "caption") if direction == "i2t" else ("caption", "image")
        queries, image_of_candidate = rows_of_queries[direction], image_of[candidate_kind]
        near, sure, _ = find_candidates(side.stored, side.queries[queries], candidates)
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
    """Return, by direction, the seconds that FAISS needs to find the best ten candidates of all queries."""
    seconds = {}
    for direction, side in _encode_directions(run, fitted).items():
        index = fitted.build_index(side.original_candidates)
        started = time.perf_counter()
        fitted.search(index, side.original_queries, min(_N_TIMED_ANSWERS, len(side.original_candidates)))
        seconds[direction] = round(time.perf_counter() - started, 4)
    return seconds
