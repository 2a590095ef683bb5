"""What a report is made from: a result file, and all that lies where the result says, checked to be of that result."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vse.eval.defaults import PHRASE
from vse.eval.files.embeddings import Embeddings, read_embeddings
from vse.eval.files.hdf5_fields import FileMetadata
from vse.eval.files.phrase_scores import PhraseScores, check_same_phrases, read_phrase_scores
from vse.eval.files.results import Result, read_result
from vse.eval.protocols.ensemble import ensemble
from vse.pipeline.dataset.identity import check_same_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import read_run_file
from vse.pipeline.files.writing import read_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportedResult:
    """A result, and the embeddings and run files that lie where it says.

    ``run`` are the embeddings of its first seed, or ``phrases`` its phrase scores; ``record`` is that seed's ``run.json``, in
    its ``folder``; ``curves`` has a table per seed that has one, ``negatives`` is the first seed's; ``captions`` is where its
    ``dataset.json`` should be. ``missing`` says in a sentence each what is missing, without naming folders, since others will
    read it; ``files`` are all that it is made from.
    """

    path: Path
    result: Result
    run: Embeddings | None = None
    phrases: PhraseScores | None = None
    captions: Path | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    curves: tuple[pd.DataFrame, ...] = ()
    negatives: pd.DataFrame | None = None
    missing: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Features, settings and versions, as the evaluator wrote them."""
        return self.result.provenance

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings of the experiment; empty if the result does not have them."""
        config = self.provenance.get("config")
        return config if isinstance(config, Mapping) else {}


def read_reported(path: Path, embeddings: Path | None = None) -> ReportedResult:
    """A result, its embeddings (or those of its first seed at another place) and the files of their run.

    :class:`UserError` if embeddings are there but are not those that the result was made from.
    """
    reported = ReportedResult(path, read_result(path))
    references = _file_references(reported)
    files = [_beside(path, entry["file"]) for entry in references]
    if embeddings:
        files[:1] = [embeddings]
    # The first seed alone is shown; of an ensemble, which has more files than seeds, all its members make the scores.
    together = bool(reported.result.ensemble)
    shown = max(1, len(files) // len(reported.result.seeds)) if together else 1
    beside = [file.parent / name for file in files for name in ("run.json", "metrics.csv", "negatives.csv")]
    reported = replace(reported, files=(path, *files, *beside))
    add = _with_phrases if PHRASE in reported.result.protocols else _with_embeddings
    reported = add(reported, references, files[:shown], embeddings is not None)
    if together:
        return _lacking(reported, "the result is of an ensemble: its members' training curves are in their own reports")
    return _with_runs(reported, files)


def _file_references(reported: ReportedResult) -> list[Mapping[str, str]]:
    entries = reported.provenance.get("embeddings")
    entries = entries if isinstance(entries, list) else []
    if not all(isinstance(entry, Mapping) and {"file", "sha256"} <= entry.keys() for entry in entries):
        raise UserError(f"{reported.path}: its provenance names embeddings without 'file' and 'sha256'; evaluate again")
    return entries


def _with_embeddings(
    reported: ReportedResult, references: list[Mapping[str, str]], files: list[Path], given: bool
) -> ReportedResult:
    """Adds the embeddings of one file, or of an ensemble of several, if all are there."""
    if why := _not_there(files, given):
        return _lacking(reported, why)
    members = [read_embeddings(file) for file in files]
    first = members[0]
    for file, member, entry in zip(files, members, references, strict=False):
        _check_sum(reported, file, member, entry)
    result = reported.result
    run = first
    if result.ensemble:
        alpha = result.combination.alpha if result.combination else None
        run = replace(ensemble(list(zip(files, members, strict=True)), alpha=alpha), experiment=result.experiment)
    _check_same(reported, files[0], run)
    return replace(reported, run=run, captions=_captions_of(files[0], first))


def _with_phrases(
    reported: ReportedResult, references: list[Mapping[str, str]], files: list[Path], given: bool
) -> ReportedResult:
    """Adds the phrase scores of the first seed, if they are there."""
    if why := _not_there(files, given):
        return _lacking(reported, why)
    run = read_phrase_scores(files[0])
    for entry in references[:1]:
        _check_sum(reported, files[0], run, entry)
    _check_same(reported, files[0], run)
    return replace(reported, phrases=run, captions=_captions_of(files[0], run))


def _not_there(files: Sequence[Path], given: bool) -> str:
    """Why embeddings or phrase scores are not shown; blank if they are there, or if what was ``given`` will be refused."""
    if not files:
        return "the result does not say where its embeddings lie (--embeddings does): no ranks, no gallery"
    lost = [file for file in files if not file.is_file()]
    if not lost or (given and files[0] in lost):
        return ""
    log.warning("%s: no such file", lost[0])
    return "the embeddings are not where the result says (--embeddings does): no ranks, no gallery"


def _check_sum(reported: ReportedResult, file: Path, run: FileMetadata, entry: Mapping[str, str]) -> None:
    if run.source is not None and run.source.sha256 != entry["sha256"]:
        raise UserError(
            f"{file}: not the embeddings that {reported.path} was made from, their sha256 is another; "
            "evaluate them again, or give the right ones with --embeddings"
        )


def _check_same(reported: ReportedResult, file: Path, run: Embeddings | PhraseScores) -> None:
    """:class:`UserError` if a file is of another split, or of another model, than the result."""
    result = reported.result
    theirs = {"n_images": result.n_images, "n_captions": result.n_captions, "dataset": result.dataset, "split": result.split}
    n_images, n_captions = (len(np.unique(ids)) for ids in (run.image_ids, run.caption_ids))
    ours = {"n_images": n_images, "n_captions": n_captions, "dataset": run.dataset, "split": run.split}
    if run.experiment is not None:
        theirs["experiment"], ours["experiment"] = result.experiment, run.experiment
    for name, value in ours.items():
        if theirs[name] != value:
            raise UserError(f"{file}: of {name} {value!r}, {reported.path} of {theirs[name]!r}")


def _captions_of(file: Path, run: FileMetadata) -> Path | None:
    """Where the embeddings say that ``dataset.json`` is."""
    try:
        captions = json.loads(run.provenance)["captions"]
    except (json.JSONDecodeError, TypeError, KeyError):
        return None
    return _beside(file, captions) if isinstance(captions, str) else None


def _beside(file: Path, relative: str) -> Path:
    """A path as seen from a file's folder; by names alone, as it was written, even if the folder is a link."""
    return Path(os.path.normpath(file.parent / relative))


def _with_runs(reported: ReportedResult, files: list[Path]) -> ReportedResult:
    """Adds what lies in the folders of the embeddings, where these are the runs that the result is of."""
    records = [_record(reported, file.parent, seed) for file, seed in zip(files, reported.result.seeds, strict=False)]
    folders = [file.parent for file, record in zip(files, records, strict=False) if record is not None]
    found = [record for record in records if record is not None]
    tables = [_table(folder / "metrics.csv", ["epoch"], record) for folder, record in zip(folders, found, strict=True)]
    curves = [table for table in tables if table is not None]
    if not curves:
        reported = _lacking(reported, "there is no metrics.csv of the run beside the embeddings: no training curves")
    if not records or records[0] is None:
        return replace(reported, curves=tuple(curves))
    columns = ["epoch", "query", "cost", "imgid", "negative_imgid", "caption", "negative_caption"]
    negatives = _table(folders[0] / "negatives.csv", columns, records[0])
    folder = folders[0] if records[0] else None
    return replace(reported, curves=tuple(curves), record=records[0], folder=folder, negatives=negatives)


def _record(reported: ReportedResult, folder: Path, seed: int | None) -> Mapping[str, Any] | None:
    """``run.json`` of a folder; empty if there is none, and None if the folder is another run's."""
    file = folder / "run.json"
    if not file.is_file():
        return {}
    record = read_json(file)
    trained_on = reported.result.trained_on or reported.result.dataset
    ours = {"dataset": trained_on, "experiment": reported.result.experiment, "seed": seed}
    if isinstance(record, Mapping) and trained_on != record.get("dataset"):
        # demo-1a2b3c4d: the data set demo of the run, where another one of this name was tested on
        ours["dataset"] = trained_on.rpartition("-")[0] or trained_on
    if not isinstance(record, Mapping) or any(record.get(name, value) != value for name, value in ours.items()):
        log.warning("%s is of another run than %s: left out", folder, reported.path)
        return None
    return record


def _table(file: Path, columns: list[str], record: Mapping[str, Any]) -> pd.DataFrame | None:
    """Read a CSV file of these columns and perhaps others; None if it is not there or empty.

    :class:`UserError` if it is not the file of the run's ``record``.
    """
    if not file.is_file():
        return None
    content, _ = read_run_file(file, record)
    try:
        table = pd.read_csv(BytesIO(content), encoding="utf-8", keep_default_na=False)  # a caption may read NA
    except pd.errors.EmptyDataError:
        return None
    except (ValueError, OSError) as error:  # ParserError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{file}: not a readable CSV file ({error})") from None
    lacking = [name for name in columns if name not in table]
    if lacking:
        raise UserError(f"{file}: lacks the column {lacking[0]!r}")
    return None if table.empty else table


def _lacking(reported: ReportedResult, what: str) -> ReportedResult:
    log.warning("%s: %s", reported.path, what)
    return replace(reported, missing=(*reported.missing, what))


def on_the_same_queries(first: ReportedResult, second: ReportedResult) -> ReportedResult:
    """``second`` with its embeddings in the order of ``first``'s; :class:`UserError` if they are not of the same queries."""
    for name in ("dataset", "split"):
        ours, theirs = getattr(first.result, name), getattr(second.result, name)
        if ours != theirs:
            raise UserError(
                f"{second.path} is of {name} {theirs!r}, {first.path} of {ours!r}: "
                "results side by side must be on the same queries"
            )
    if first.phrases is not None and second.phrases is not None:
        check_same_phrases(first.path, first.phrases, second.path, second.phrases)
    if first.run is None or second.run is None:
        return second
    rows = {}
    for name in ("image_ids", "caption_ids"):
        ours, theirs = getattr(first.run, name), getattr(second.run, name)
        differing = np.setxor1d(ours, theirs)
        if len(differing):
            raise UserError(f"{second.path} and {first.path} are of different queries: {differing[0]} is in the {name} of one")
        order = np.argsort(theirs)
        rows[name] = order[np.searchsorted(theirs[order], ours)]
    check_same_data(second.path, second.run.identity, first.path, first.run.identity)
    run = second.run
    if not all(np.array_equal(order, np.arange(len(order))) for order in rows.values()):
        run = run.select(rows["image_ids"], rows["caption_ids"])
    if not np.array_equal(run.caption_image_ids, first.run.caption_image_ids):
        raise UserError(f"{second.path} and {first.path} disagree on which image a caption belongs to")
    return replace(second, run=run)
