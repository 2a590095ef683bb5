"""The inputs of a report: the result file and the files that it names. This module also selects the queries to display."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vse.eval.files.embeddings import Embeddings, find_dataset_file, read_embeddings, resolve_path
from vse.eval.files.phrase_scores import PhraseScores, check_same_phrases, read_phrase_scores
from vse.eval.files.results import Result, read_result
from vse.eval.options import PHRASE_PROTOCOL
from vse.eval.protocols.correction import repeat_correction
from vse.eval.protocols.ensemble import build_ensemble
from vse.eval.protocols.protocols import select_languages_of_seeds
from vse.eval.ranking.metrics import Ints
from vse.pipeline.dataset.identity import check_same_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import ModelOutputMetadata
from vse.pipeline.files.inputs import read_run_file
from vse.pipeline.files.writing import read_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportInput:
    """A result file, with the embeddings and the files of training runs that the result names.

    ``embeddings``, ``phrase_scores``, ``run_folder``, ``run_record`` (``run.json``) and ``negative_table`` (``negatives.csv``)
    belong to the first seed. ``curve_tables`` has the ``metrics.csv`` of all seeds. ``dataset_file`` is the path of
    ``dataset.json`` that the embeddings name. ``missing_sentences`` has a sentence for each input that was not found. The
    sentences name no folders, because other people read the report. ``readable_files`` are all files that a report would read.
    """

    path: Path
    result: Result
    embeddings: Embeddings | None = None
    phrase_scores: PhraseScores | None = None
    dataset_file: Path | None = None
    run_record: Mapping[str, Any] = field(default_factory=dict)
    run_folder: Path | None = None
    curve_tables: tuple[pd.DataFrame, ...] = ()
    negative_table: pd.DataFrame | None = None
    missing_sentences: tuple[str, ...] = ()
    readable_files: tuple[Path, ...] = ()

    @property
    def result_provenance(self) -> Mapping[str, Any]:
        return self.result.provenance

    @property
    def config(self) -> Mapping[str, Any]:
        return self.result.config


def read_report_input(path: Path, embeddings: Path | None = None) -> ReportInput:
    """Read a result file, its embeddings, and files of the runs that computed the embeddings.

    If given, ``embeddings`` replaces the embeddings file that the result names for the first seed. Raises UserError if the
    result was computed from other embeddings.
    """
    report_input = ReportInput(path, read_result(path))
    references = _list_file_references(report_input)
    files = [resolve_path(path, entry["file"]) for entry in references]
    if embeddings:
        files[:1] = [embeddings]
    # A report displays the first seed. The scores of an ensemble need the files of all members of this seed.
    is_ensemble = bool(report_input.result.ensemble)
    n_read = max(1, len(files) // len(report_input.result.seeds)) if is_ensemble else 1
    run_files = [file.parent / name for file in files for name in ("run.json", "metrics.csv", "negatives.csv")]
    report_input = replace(report_input, readable_files=(path, *files, *run_files))
    add = _add_phrase_scores if PHRASE_PROTOCOL in report_input.result.protocols else _add_embeddings
    report_input = add(report_input, references, files[:n_read], embeddings is not None)
    if is_ensemble:
        return _add_missing_sentence(
            report_input, "the result is an ensemble: its members' training curves are in their own reports"
        )
    return _add_run_files(report_input, files)


def _list_file_references(report_input: ReportInput) -> list[Mapping[str, str]]:
    entries = report_input.result_provenance.get("embeddings")
    entries = entries if isinstance(entries, list) else []
    if not all(isinstance(entry, Mapping) and {"file", "sha256"} <= entry.keys() for entry in entries):
        raise UserError(f"{report_input.path}: its provenance names embeddings without 'file' and 'sha256'; evaluate again")
    return entries


def _add_embeddings(
    report_input: ReportInput, references: list[Mapping[str, str]], files: list[Path], named_by_user: bool
) -> ReportInput:
    if reason := _find_missing_reason(files, named_by_user):
        return _add_missing_sentence(report_input, reason)
    members = [read_embeddings(file) for file in files]
    first = members[0]
    for file, member, entry in zip(files, members, references, strict=False):
        _check_sha256(report_input, file, member, entry)
    result = report_input.result
    run = first
    if result.ensemble:
        alpha = result.combination.alpha if result.combination else None
        run = replace(build_ensemble(list(zip(files, members, strict=True)), alpha=alpha), experiment=result.experiment)
    (run,) = select_languages_of_seeds(files[:1], [run], result.language)
    _check_against_result(report_input, files[0], run)
    (run,) = repeat_correction(report_input.path, result, files[:1], [run])
    if first.fold is not None and result.split != first.split:
        sentence = f"the result covers all folds; the queries below are those of fold {first.fold}"
        report_input = _add_missing_sentence(report_input, sentence)
    return replace(report_input, embeddings=run, dataset_file=find_dataset_file(files[0], first))


def _add_phrase_scores(
    report_input: ReportInput, references: list[Mapping[str, str]], files: list[Path], named_by_user: bool
) -> ReportInput:
    if reason := _find_missing_reason(files, named_by_user):
        return _add_missing_sentence(report_input, reason)
    run = read_phrase_scores(files[0])
    for entry in references[:1]:
        _check_sha256(report_input, files[0], run, entry)
    _check_against_result(report_input, files[0], run)
    return replace(report_input, phrase_scores=run, dataset_file=find_dataset_file(files[0], run))


def _find_missing_reason(files: Sequence[Path], named_by_user: bool) -> str:
    """Return the reason why embeddings or phrase scores cannot be read; blank if all ``files`` exist.

    ``named_by_user`` is True if the user named the first file. If this file is missing, the reason is also blank, because
    the reader of the file then raises an error.
    """
    if not files:
        return "the result does not name its embeddings (give --embeddings): no ranks, no gallery"
    lost = [file for file in files if not file.is_file()]
    if not lost or (named_by_user and files[0] in lost):
        return ""
    log.warning("%s: no such file", lost[0])
    return "the embeddings are not where the result names them (give --embeddings): no ranks, no gallery"


def _check_sha256(report_input: ReportInput, file: Path, metadata: ModelOutputMetadata, entry: Mapping[str, str]) -> None:
    if metadata.source is not None and metadata.source.sha256 != entry["sha256"]:
        raise UserError(
            f"{file}: {report_input.path} was computed from other embeddings, with another sha256; "
            "evaluate again, or give the right embeddings with --embeddings"
        )


def _check_against_result(report_input: ReportInput, file: Path, run: Embeddings | PhraseScores) -> None:
    result = report_input.result
    theirs = {"n_images": result.n_images, "n_captions": result.n_captions, "dataset": result.dataset, "split": result.split}
    n_images, n_captions = (len(np.unique(ids)) for ids in (run.image_ids, run.caption_ids))
    ours = {"n_images": n_images, "n_captions": n_captions, "dataset": run.dataset, "split": run.split}
    if isinstance(run, Embeddings) and run.fold is not None and result.split != run.split:
        ours = {"dataset": run.dataset}  # a result of several folds counts the images of all folds
    if run.experiment is not None:
        theirs["experiment"], ours["experiment"] = result.experiment, run.experiment
    for name, value in ours.items():
        if theirs[name] != value:
            raise UserError(f"{file}: has {name} {value!r}, but {report_input.path} has {theirs[name]!r}")


def _add_run_files(report_input: ReportInput, files: list[Path]) -> ReportInput:
    records = [
        _read_run_record(report_input, file.parent, seed) for file, seed in zip(files, report_input.result.seeds, strict=False)
    ]
    folders = [file.parent for file, record in zip(files, records, strict=False) if record is not None]
    found = [record for record in records if record is not None]
    tables = [
        _read_run_table(folder / "metrics.csv", ["epoch"], record) for folder, record in zip(folders, found, strict=True)
    ]
    curves = [table for table in tables if table is not None]
    if not curves:
        report_input = _add_missing_sentence(
            report_input, "there is no metrics.csv of the run next to the embeddings: no training curves"
        )
    if not records or records[0] is None:
        return replace(report_input, curve_tables=tuple(curves))
    columns = ["epoch", "query", "cost", "imgid", "negative_imgid", "caption", "negative_caption"]
    negatives = _read_run_table(folders[0] / "negatives.csv", columns, records[0])
    folder = folders[0] if records[0] else None
    return replace(
        report_input, curve_tables=tuple(curves), run_record=records[0], run_folder=folder, negative_table=negatives
    )


def _read_run_record(report_input: ReportInput, folder: Path, seed: int | None) -> Mapping[str, Any] | None:
    """Return the content of ``run.json`` in ``folder``: empty if the file is missing, and None if it belongs to another run.

    A record belongs to the run of the result if the data set, the experiment and the training seed (``seed``) are the same.
    """
    file = folder / "run.json"
    if not file.is_file():
        return {}
    record = read_json(file)
    trained_on = report_input.result.trained_on or report_input.result.dataset
    ours = {"dataset": trained_on, "experiment": report_input.result.experiment, "seed": seed}
    if isinstance(record, Mapping) and trained_on != record.get("dataset"):
        # If the training data have the same name as the test data, but are others, the result calls them e.g. demo-1a2b3c4d.
        ours["dataset"] = trained_on.rpartition("-")[0] or trained_on
    if not isinstance(record, Mapping) or any(record.get(name, value) != value for name, value in ours.items()):
        log.warning("%s belongs to another run than %s: left out", folder, report_input.path)
        return None
    return record


def _read_run_table(file: Path, columns: list[str], record: Mapping[str, Any]) -> pd.DataFrame | None:
    """Read a CSV file of a run. Return None if the file is missing or has no rows.

    Raises UserError if the file lacks one of ``columns``, or does not have the hash in ``record`` (the content of
    ``run.json``).
    """
    if not file.is_file():
        return None
    content, _ = read_run_file(file, record)
    try:
        table = pd.read_csv(BytesIO(content), encoding="utf-8", keep_default_na=False)  # a caption may be the word NA
    except pd.errors.EmptyDataError:
        return None
    except (ValueError, OSError) as error:  # ParserError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{file}: not a readable CSV file ({error})") from None
    lacking = [name for name in columns if name not in table]
    if lacking:
        raise UserError(f"{file}: lacks the column {lacking[0]!r}")
    return None if table.empty else table


def _add_missing_sentence(report_input: ReportInput, sentence: str) -> ReportInput:
    log.warning("%s: %s", report_input.path, sentence)
    return replace(report_input, missing_sentences=(*report_input.missing_sentences, sentence))


def align_queries(first: ReportInput, second: ReportInput) -> ReportInput:
    """Return ``second`` with its images and captions in the order of ``first``. Raises UserError if the queries differ."""
    for name in ("dataset", "split"):
        ours, theirs = getattr(first.result, name), getattr(second.result, name)
        if ours != theirs:
            raise UserError(
                f"{second.path} has {name} {theirs!r}, {first.path} has {ours!r}: "
                "results side by side must have the same queries"
            )
    if first.phrase_scores is not None and second.phrase_scores is not None:
        check_same_phrases(first.path, first.phrase_scores, second.path, second.phrase_scores)
    if first.embeddings is None or second.embeddings is None:
        return second
    rows = {}
    for name in ("image_ids", "caption_ids"):
        ours, theirs = getattr(first.embeddings, name), getattr(second.embeddings, name)
        differing = np.setxor1d(ours, theirs)
        if len(differing):
            raise UserError(
                f"{second.path} and {first.path} have different queries: {differing[0]} is in the {name} of one only"
            )
        order = np.argsort(theirs)
        rows[name] = order[np.searchsorted(theirs[order], ours)]
    check_same_data(second.path, second.embeddings.identity, first.path, first.embeddings.identity)
    run = second.embeddings
    if not all(np.array_equal(order, np.arange(len(order))) for order in rows.values()):
        run = run.select(rows["image_ids"], rows["caption_ids"])
    if not np.array_equal(run.caption_image_ids, first.embeddings.caption_image_ids):
        raise UserError(f"{second.path} and {first.path} disagree on which image a caption belongs to")
    return replace(second, embeddings=run)


MAX_NEAR_MISS_RANK = 10  # a query is a near miss if its first right answer has at most this rank (1-based)


def select_query_groups(
    ranks: Sequence[Ints], images: Ints, n: int, seed: int, extremes: bool = False
) -> tuple[list[str], Sequence[list[int]], tuple[int, int, int] | None]:
    """Select groups of queries to display. Return the titles of the groups, the query indices of each group, and counts.

    ``ranks`` has the ranks (n_queries,) of one or two models. ``images`` (n_queries,) has the row of each query's image. At
    most ``n`` queries are selected or, with ``extremes``, ``n`` for each of two groups.

    For one model, the groups are successes, near misses and failures or, with ``extremes``, the worst and the best queries.
    The counts are None. For two models, one group has queries that the first model ranks better, the other group queries that
    the second model ranks better. The counts are the numbers of queries that the first model, the second model and neither
    model ranks better.
    """
    if len(ranks) == 1 and extremes:
        worst, best = select_extreme_queries(ranks[0], n, seed)
        return [f"The worst {len(worst)} queries", f"The best {len(best)} queries"], (worst, best), None
    if len(ranks) == 1:
        titles = [
            "Right answer at rank 1",
            f"Near misses: right answer at rank 2 to {MAX_NEAR_MISS_RANK}",
            "Failures: the largest ranks of all",
        ]
        return titles, select_queries(ranks[0], images, n, seed), None
    first, second = ranks
    better, worse = int(np.count_nonzero(first < second)), int(np.count_nonzero(first > second))
    titles = ["A ranks the right answer higher", "B ranks the right answer higher"]
    n_selected = 2 * n if extremes else n
    selected = select_contrasting_queries(first, second, images, n_selected)
    return titles, selected, (better, worse, len(first) - better - worse)


def select_extreme_queries(ranks: Ints, n: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the ``n`` queries with the largest ranks, and of ``n`` other queries with the smallest ranks.

    The first list starts with the largest rank, and the second list with the smallest. Queries with the same rank are in
    random order, by ``seed``.
    """
    sample = np.random.default_rng(seed).permutation(len(ranks))
    order = sample[np.argsort(ranks[sample], kind="stable")].tolist()
    n_worst = min(n, len(order) // 2)
    return order[len(order) - n_worst :][::-1], order[: min(n, len(order) - n_worst)]


def select_queries(ranks: Ints, images: Ints, n: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Return the indices of up to ``n`` queries, a third each of successes, near misses and failures.

    Successes (0-based rank 0) and near misses (ranks 1 to 9) are sampled with ``seed``. Failures have the largest ranks.
    ``images`` (n_queries,) has the row of each query's image. No two selected queries have the same image.
    """
    parts = [n // 3 + (part < n % 3) for part in range(3)]
    sample = np.random.default_rng(seed).permutation(len(ranks))
    worst = np.argsort(-ranks, kind="stable")
    used: set[int] = set()
    failures = take_queries_of_new_images(worst[ranks[worst] > 0], images, parts[2], used)
    near = sample[(ranks[sample] > 0) & (ranks[sample] < MAX_NEAR_MISS_RANK)]
    near_misses = take_queries_of_new_images(near, images, parts[1], used)
    successes = take_queries_of_new_images(sample[ranks[sample] == 0], images, parts[0], used)
    near_misses.sort(key=lambda query: int(ranks[query]))
    return successes, near_misses, failures


def select_contrasting_queries(first: Ints, second: Ints, images: Ints, n: int) -> tuple[list[int], list[int]]:
    """Return the indices of up to ``n`` queries: half are ranked better by the first model, half by the second model.

    ``first`` and ``second`` are the 0-based ranks (n_queries,) of the two models. Queries with rank 0 by only one model come
    first, as in Tables II and III of the TOD-Net paper. The others are sorted by the quotient of their two 1-based ranks, the
    largest first. ``images`` (n_queries,) has the row of each query's image. No two selected queries have the same image.
    """
    gain = np.log1p(second) - np.log1p(first)
    solved = (first == 0) | (second == 0)
    used: set[int] = set()
    halves = []
    for sign, size in ((1, n - n // 2), (-1, n // 2)):
        order = np.lexsort((-sign * gain, ~solved))
        halves.append(take_queries_of_new_images(order[sign * gain[order] > 0], images, size, used))
    return halves[0], halves[1]


def take_queries_of_new_images(queries: Ints, images: Ints, n: int, used: set[int]) -> list[int]:
    """Return the first ``n`` of ``queries`` whose images are not in ``used``, and add these images to ``used``.

    ``queries`` has indices of queries, and ``images`` has the image row of every query.
    """
    selected: list[int] = []
    for query in queries.tolist():
        if len(selected) == n:
            break
        if images[query] not in used:
            used.add(int(images[query]))
            selected.append(query)
    return selected
