"""From embeddings files to the result file: every protocol, over one or several seeds."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import faiss
import numpy as np
import torch

from vse.eval.defaults import RECALLS, TREC_DEPTH
from vse.eval.files.embeddings import Embeddings, check_same_split, experiment_name, parse_provenance, read_embeddings
from vse.eval.files.hdf5_fields import FileMetadata
from vse.eval.files.phrase_scores import PhraseScores
from vse.eval.files.query_files import FoldAnswers, check_per_query, check_trec, write_per_query, write_trec
from vse.eval.files.results import RESULT, VERSION, content_sha256, file_reference
from vse.eval.files.split import split_identity
from vse.eval.protocols.coco import read_judged_pairs
from vse.eval.protocols.ensemble import (
    Members,
    Share,
    ensemble,
    ensemble_plan,
    members_by_seed,
    phrases_of,
    save_ensemble,
    share_of_phrases,
)
from vse.eval.protocols.options import EvaluationOptions
from vse.eval.protocols.protocols import (
    NOTHING_MORE,
    AskedOfQueries,
    ProtocolQueries,
    named_protocols,
    protocols_of,
    queries_of,
)
from vse.eval.ranking.bootstrap import intervals
from vse.eval.ranking.metrics import Fold, average, fold_metrics
from vse.eval.search.approximate import approximate_recalls, reranked_metrics
from vse.pipeline import __version__
from vse.pipeline.command import current_provenance
from vse.pipeline.dataset.identity import check_all_same_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import check_output
from vse.pipeline.files.writing import write_json

log = logging.getLogger(__name__)
_Run = TypeVar("_Run", Embeddings, PhraseScores)
_SAME = ("experiment", "similarity")  # that embeddings of one model share


def evaluate(
    files: Sequence[Path], out: Path, protocol: str | Sequence[str] = "auto", asked: EvaluationOptions = EvaluationOptions()
) -> Path:
    """Write the result file of one model's embeddings, a file per seed; returns ``out``. See :func:`evaluated`."""
    check_output(out, RESULT, files)
    return write_json(out, evaluated(files, out, protocol, asked))


def evaluated(
    files: Sequence[Path], out: Path, protocol: str | Sequence[str] = "auto", asked: EvaluationOptions = EvaluationOptions()
) -> dict[str, Any]:
    """The content of the result file ``out`` of one model's embeddings, a file per seed, or of an ensemble.

    ``protocol``, one or several, is ``1k`` (the mean over consecutive folds of 1,000 images), ``full`` (the whole
    split), ``sentence`` (captions query captions, over the whole split), ``sentence-1k`` (the same over the folds), ``cxc`` or
    ``eccv`` (see :mod:`vse.eval.protocols.coco`), or ``auto`` (see :func:`vse.eval.protocols.protocols.protocols_of`). With
    several seeds every metric becomes ``{"mean": ..., "std": ...}`` (the sample's standard deviation). Beside them stand 95%
    intervals, ``ci95``. What else is ``asked`` for may write files, but not ``out``.
    """
    started = time.perf_counter()
    if asked.per_query is not None:
        check_per_query(asked.per_query, [*files, out])
    if asked.trec is not None:
        check_trec(asked.trec, files)
    return _result(_opened(files, out, protocol, asked), out, protocol, asked, started)


def evaluated_run(
    name: str,
    run: Embeddings,
    out: Path,
    protocol: str | Sequence[str] = "auto",
    asked: EvaluationOptions = EvaluationOptions(),
) -> dict[str, Any]:
    """As :func:`evaluated` of embeddings that lie in no file; errors call them by ``name``."""
    started = time.perf_counter()
    if asked.together:
        raise UserError(f"{name}: an ensemble is of several files of embeddings; leave --ensemble out")
    if asked.per_query is not None:
        check_per_query(asked.per_query, [out])
    if asked.trec is not None:
        check_trec(asked.trec)
    path = Path(name)
    runs = as_one_model([path], [run], check_same_split, _SAME)
    return _result(_Opened([path], runs, [[(path, run)]]), out, protocol, asked, started)


class _Opened(NamedTuple):
    """Models, one for each seed, with the files that name them; ``by_seed`` are their members, themselves if no ensemble."""

    files: Sequence[Path]
    runs: Sequence[Embeddings]
    by_seed: Sequence[Members]
    share: Share | None = None

    @property
    def read(self) -> Members:
        """All embeddings that were read."""
        return [member for members in self.by_seed for member in members]


def _opened(files: Sequence[Path], out: Path, protocol: str | Sequence[str], asked: EvaluationOptions) -> _Opened:
    """Read one model's embeddings, or put an ensemble together, which is saved if that is asked for."""
    if not asked.together:
        runs = read_seeds(files)
        return _Opened(files, runs, [[(path, run)] for path, run in zip(files, runs, strict=True)])
    sentence = any(name.startswith("sentence") for name in named_protocols(protocol))
    plan = None if asked.experiment is None else ensemble_plan(asked.experiment)
    by_seed = members_by_seed(files, plan)
    firsts = [path for (path, _), *_ in by_seed]
    share = share_of_phrases(by_seed, asked.alpha)
    averaged_runs = [ensemble(members, sentence, plan, share.alpha if share else None) for members in by_seed]
    runs = as_one_model(firsts, averaged_runs, check_same_split, _SAME)
    if asked.save is not None:
        save_ensemble(asked.save, runs, [out, *files])
    return _Opened(firsts, runs, by_seed, share)


def _result(
    opened: _Opened, out: Path, protocol: str | Sequence[str], asked: EvaluationOptions, started: float
) -> dict[str, Any]:
    """What a result says of models, protocol by protocol, signed; files of each query's answers are written beside it."""
    files, runs, read, first = opened.files, opened.runs, opened.read, opened.runs[0]
    not_finished = unfinished_runs([run for _, run in read], out, asked.unfinished)
    for path, run in zip(files, runs, strict=True):
        _warn_of_lengths(path, run)
    names = select_protocols(files, runs, protocol)
    tried: dict[str, Any] = {}
    if asked.index is not None:
        tried["index"] = _tried_index(files[0], first, asked.index, asked.index_parameters)
    if asked.rerank:
        tried["rerank"] = _tried_rerank(files[0], first, asked.rerank)
    pairs = None if asked.cxc is None else read_judged_pairs(asked.cxc)
    if pairs is not None and "cxc" not in names:
        raise UserError(f"{asked.cxc}: the pairs of CxC are of the protocol cxc, which is not evaluated here (--protocol cxc)")
    protocols: dict[str, Any] = {}
    checks: dict[str, Any] = {}
    answers: list[FoldAnswers] = []
    of_queries = AskedOfQueries(asked.per_query is not None, sorted({*RECALLS, *asked.ks}), pairs, asked.cross_checked)
    for name in names:
        queries = all_queries(files, runs, name, asked.cross_check, of_queries)
        folds, checks[name] = [of_run.folds for of_run in queries], _checked(queries)
        protocols[name] = over_seeds([_protocol(run, name, of_run) for run, of_run in zip(runs, folds, strict=True)])
        if asked.bootstrap:
            protocols[name]["ci95"] = intervals(folds, asked.bootstrap)
        answers += _answers(runs, name, folds) if asked.per_query is not None else []
    measured = {
        "split_identity": split_identity(first).model_dump(),
        "data": first.identity.checksums.model_dump(),
        "n_images": len(first.image_ids),
        "n_captions": len(first.caption_ids),
        "seeds": [run.seed for run in runs],
        "protocols": protocols,
        "cross_check": checks,
        **({"bootstrap": {"over": "images", "samples": asked.bootstrap}} if asked.bootstrap else {}),
        **tried,
        **({"cxc": pairs.files} if pairs is not None else {}),
        **({"ensemble": [_member(*member) for member in read]} if asked.together else {}),
        **({"combination": opened.share.said(phrases_of(opened.by_seed[0]))} if opened.share else {}),
    }
    if asked.per_query is not None:
        write_per_query(asked.per_query, answers)
    if asked.trec is not None:
        write_trec(asked.trec, runs, TREC_DEPTH if asked.trec_depth is None else asked.trec_depth)
    seconds = round(time.perf_counter() - started, 2)
    return signed_result(first, [run for _, run in read], out, not_finished, measured, seconds)


def signed_result(
    first: FileMetadata,
    read: Sequence[FileMetadata],
    out: Path,
    unfinished: Sequence[Mapping[str, str]],
    measured: Mapping[str, Any],
    seconds: float | None = None,
) -> dict[str, Any]:
    """The content of the result file ``out`` of what was ``measured``: with the model and the split, and signed.

    ``first`` names the model, ``read`` is all that it was made from, of which files are named; what each cost is repeated,
    and how many ``seconds`` the evaluation took is added, if that is known.
    """
    embeddings = [file_reference(run, out) for run in read if run.source is not None]
    costs = [parse_provenance(run).get("cost") for run in read]
    spent = {**({"costs": costs} if any(costs) else {}), **({} if seconds is None else {"evaluation_s": seconds})}
    result = {
        "version": VERSION,
        "dataset": first.dataset,
        "experiment": first.experiment,
        "split": first.split,
        **({"trained_on": first.trained_on} if first.trained_on not in (None, first.dataset) else {}),
        **({"unfinished": unfinished} if unfinished else {}),
        **measured,
        "provenance": {**_provenance(first), **spent, "made": current_provenance(), "embeddings": embeddings},
    }
    return {**result, "sha256": content_sha256(result)}


def read_seeds(files: Sequence[Path]) -> list[Embeddings]:
    """The embeddings of one model, a file per seed; :class:`UserError` if they are not of one split and experiment.

    If no file names its experiment, it is called as the first file is.
    """
    return as_one_model(files, [read_embeddings(path) for path in files], check_same_split, _SAME)


def as_one_model(
    files: Sequence[Path],
    runs: Sequence[_Run],
    same: Callable[[Path, _Run, Path, _Run, Sequence[str]], None],
    of: Sequence[str],
) -> list[_Run]:
    """The ``runs`` of some ``files`` under one name; :class:`UserError` if they are not seeds of one model.

    ``same`` refuses runs of unlike queries, or that differ in an attribute ``of`` theirs.
    """
    named_path, named = next(
        ((path, run) for path, run in zip(files, runs, strict=True) if run.experiment), (files[0], runs[0])
    )
    experiment = experiment_name(named_path, named)
    of_seed: dict[int, Path] = {}
    for path, run in zip(files, runs, strict=True):
        same(named_path, named, path, run, of)
        if run.trained_on != named.trained_on:
            raise UserError(f"{path} and {named_path} are of runs that were trained on different data sets")
        if list(files).count(path) > 1:
            raise UserError(f"{path} is given twice; a seed counts once")
        if run.seed is not None and of_seed.setdefault(run.seed, path) != path:
            raise UserError(f"{path} and {of_seed[run.seed]} are of the same seed {run.seed}")
    check_all_same_data([(path, run.identity) for path, run in zip(files, runs, strict=True)])
    return [replace(run, experiment=experiment) for run in runs]


def unfinished_runs(runs: Sequence[FileMetadata], out: Path, allowed: bool) -> list[dict[str, str]]:
    """The files of ``runs`` whose training did not finish, with its state; :class:`UserError` if that is not ``allowed``."""
    unfinished = []
    for run in runs:
        state = parse_provenance(run).get("unfinished")
        if not state or run.source is None:
            continue
        if not allowed:
            raise UserError(
                f"{run.source.path}: of a run whose training did not finish (state: {state}); continue the run and embed "
                "again, or evaluate it with --unfinished"
            )
        unfinished.append({"file": os.path.relpath(run.source.path, out.parent), "state": str(state)})
    return unfinished


def select_protocols(files: Sequence[Path], runs: Sequence[Embeddings], protocol: str | Sequence[str]) -> list[str]:
    """The protocols that all runs can serve; :class:`UserError` names the file that cannot serve one that was asked for."""
    asked, served = named_protocols(protocol), []
    for path, run in zip(files, runs, strict=False):
        try:
            served.append(protocols_of(run, asked))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return [name for name in served[0] if all(name in others for others in served)]


def all_queries(
    files: Sequence[Path],
    runs: Sequence[Embeddings],
    protocol: str,
    cross_check: bool,
    asked: AskedOfQueries = NOTHING_MORE,
) -> list[ProtocolQueries]:
    """What became of the queries of a protocol, run by run; :class:`UserError` names the file."""
    queries = []
    for path, run in zip(files, runs, strict=False):
        try:
            queries.append(queries_of(run, protocol, cross_check, asked))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return queries


def _answers(runs: Sequence[Embeddings], protocol: str, folds: Sequence[Sequence[Fold]]) -> list[FoldAnswers]:
    """The best answers to the queries of a protocol: seed by seed, fold by fold, in each direction."""
    return [
        FoldAnswers(run.seed, protocol, k, direction, queries.answers)
        for run, of_run in zip(runs, folds, strict=True)
        for k, fold in enumerate(of_run)
        for direction, queries in fold.items()
        if queries.answers is not None
    ]


def _checked(queries: Sequence[ProtocolQueries]) -> dict[str, Any]:
    """Whether ranks were compared with FAISS: with what, how many queries of how many, and ties, over all folds
    and seeds; or why not.
    """
    agreements = [agreement for of_run in queries for agreement in of_run.agreements]
    if not agreements:
        return {"checked": False, "why": queries[0].unchecked}
    counts = {
        name: {direction: sum(getattr(one, name)[direction] for one in agreements) for direction in agreements[0].queries}
        for name in ("queries", "of", "ties")
    }
    return {"checked": True, "against": agreements[0].against, **counts}


def _warn_of_lengths(path: Path, run: Embeddings) -> None:
    """A line if the inner products of ``cosine`` are no cosines on the side of captions: some model forgot to divide."""
    if run.similarity != "cosine" or run.vectors is None:
        return
    _, captions = run.vectors
    squares = np.einsum("nd,nd->n", captions, captions)
    low, high = float(squares.min()) ** 0.5, float(squares.max()) ** 0.5
    if low < 0.99 or high > 1.01:
        log.warning("%s: captions are of length %.3g to %.3g, not 1; their inner products are what is ranked", path, low, high)


def _member(path: Path, run: Embeddings) -> dict[str, Any]:
    return {"experiment": experiment_name(path, run), "seed": run.seed}


def _tried_index(path: Path, run: Embeddings, factory: str, parameters: str) -> dict[str, Any]:
    if run.vectors is None:
        raise UserError(f"{path}: holds scores, and FAISS indexes embeddings; leave --index out")
    return approximate_recalls(*run.vectors, run.image_of_caption(), run.similarity, factory, parameters)


def _tried_rerank(path: Path, run: Embeddings, rerank: Sequence[int]) -> list[dict[str, Any]]:
    vectors = run.pooled if run.vectors is None else run.vectors
    if vectors is None:
        lacking = "has no pooled_images and pooled_captions, by which a first stage finds candidates"
        raise UserError(f"{path}: {lacking} (vse-embed writes them, docs/formats.md); leave --rerank out")
    if run.vectors is not None and run.similarity == "cosine":
        raise UserError(f"{path}: its scores are inner products, which FAISS finds exactly; leave --rerank out")
    return [reranked_metrics(*run.score_blocks(), *vectors, number) for number in rerank]


def _protocol(run: Embeddings, protocol: str, folds: Sequence[Fold]) -> dict[str, Any]:
    """The metrics of one seed."""
    per_fold = [fold_metrics(fold) for fold in folds]
    if protocol == "sentence-1k":
        n_queries = sum(len(fold["s2s"].images) for fold in folds)
        return {"folds": len(per_fold), **average(per_fold), "n_queries": n_queries, "per_fold": per_fold}
    if protocol == "1k":
        return {"folds": len(per_fold), **average(per_fold), "per_fold": per_fold}
    if protocol == "sentence":
        return {**per_fold[0], "n_queries": len(folds[0]["s2s"].images)}
    asked = {direction: len(queries.images) for direction, queries in folds[0].items()}
    every = {"i2t": len(run.image_ids), "t2i": len(run.caption_ids)}
    return per_fold[0] if asked == every else {**per_fold[0], "n_queries": asked}


def over_seeds(results: Sequence[Any]) -> Any:
    """One seed's metrics as they are; of several, mean and standard deviation of each that is no count."""
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, dict):
        counts = ("folds", "n_queries")
        return {key: first[key] if key in counts else over_seeds([r[key] for r in results]) for key in first}
    if isinstance(first, list):
        return [over_seeds(list(items)) for items in zip(*results, strict=True)]
    return {"mean": float(np.mean(results)), "std": float(np.std(results, ddof=1))}


def _provenance(run: FileMetadata) -> dict[str, Any]:
    versions = {
        "vse": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "faiss": faiss.__version__,
        "python": platform.python_version(),
    }
    return {"features": {}, "config": {}, **parse_provenance(run), "versions": versions}
