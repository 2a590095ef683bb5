"""The table ``summary`` with the metrics of results, and the table ``cards`` with facts about their training.

This module also builds the columns that describe a result in all tables.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vse.eval import DEFAULT_KS
from vse.eval.files.cards import build_training_card, format_changes_suffix, list_changed_settings
from vse.eval.files.results import (
    ProtocolMetrics,
    Result,
    SeedStatistics,
    check_consistent_data,
    drop_comparisons,
    drop_repeated_protocols,
    mean_and_std,
    read_result,
)
from vse.eval.options import PHRASE_PROTOCOL, TableRequest
from vse.eval.ranking.metrics import POSITION_METRICS, RANK_METRICS
from vse.eval.tables.table import COMPARED_PROTOCOL, PrintedTable, ResultGroups, TableKind, column_title, metric_cell
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import is_experiment, load_experiment_outline

_MODEL_COLUMNS = ("method", "feature", "run", "settings")  # columns of build_result_columns that describe the model


def build_result_columns(path: Path, result: Result) -> dict[str, str]:
    """Return the columns that describe a result in all tables: experiment, method, features, run folders, changed settings.

    ``path`` is the path of the result file.
    """
    return {
        "experiment": result.display_name,
        "method": method_name(result),
        "feature": _describe_features(result),
        "run": _list_run_folders(path, result),
        "settings": "; ".join(list_changed_settings(result.provenance)),
    }


def method_name(result: Result) -> str:
    """Return the name of a result's method: the title of its preset, such as ``VSE++ (1C)``, and the changed settings.

    A name that the user gave (``vse-train --name``) replaces both. If the preset has no title, the name of the experiment
    replaces the title. The language of the captions or the correction of the scores is appended.
    """
    config, title = result.config, result.config.get("title")
    if not title and is_experiment(result.experiment):
        title = load_experiment_outline(result.experiment).title
    if config.get("label") or not title:
        return result.display_name
    return f"{title}{format_changes_suffix(result.provenance)}{result.evaluation_suffix}"


def _describe_features(result: Result) -> str:
    config = result.config
    settings = [config.get(key) for key in (["backbone"] if config.get("backbone") else ["feature", "caption_feature"])]
    names = [name for name in settings if isinstance(name, str)]
    features = result.provenance.get("features")
    return " + ".join(names or (map(str, features) if isinstance(features, Mapping) else []))


def _list_run_folders(path: Path, result: Result) -> str:
    """Return the folders of a result's embeddings as a text, relative to the working directory; blank if unknown."""
    entries = result.provenance.get("embeddings")
    files = [entry.get("file") for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    folders = [os.path.normpath(path.parent / Path(file).parent) for file in files if isinstance(file, str)]
    return " ".join(dict.fromkeys(folders))


_RESULT_COLUMNS = (
    "dataset",
    "experiment",
    "trained_on",
    "unfinished",
    "split",
    "protocol",
    "n_images",
    "n_captions",
    "seeds",
    *_MODEL_COLUMNS,
)
_OPTIONAL_COLUMNS = ("trained_on", "unfinished")  # columns that are left out if they are blank for all results
_PHRASE_COLUMNS = ("iou", "n_phrases", "n_without_box")  # columns of phrase results
GROUP_COLUMN = "group"  # results that share a letter do not differ significantly
BEST_GROUP_COLUMN = "in_best_group"  # ``yes`` if the result does not differ significantly from the best result
_TYPE_PREFIX = "type_"  # prefix of a column such as type_people_r1
_UNPRINTED_SUFFIXES = ("_std", "_low", "_high", "_meanr", *(f"_{name}" for name in POSITION_METRICS))
UNKNOWN_INTERVAL = (math.nan, math.nan)
_METRIC_NAMES = (*(f"r{k}" for k in DEFAULT_KS), *RANK_METRICS)
_METRIC_COLUMNS = (*(f"{direction}_{name}" for direction in ("i2t", "t2i") for name in _METRIC_NAMES), "rsum")


def build_summary(results: Sequence[Path]) -> pd.DataFrame:
    """Read result files, and return a table with a row of metrics per result and protocol. Comparison files are left out."""
    return summarise_results([(path, read_result(path)) for path in drop_comparisons(results)])


def summarise_results(results: Sequence[tuple[Path, Result]], groups: ResultGroups | None = None) -> pd.DataFrame:
    """Return a row per result and protocol: R@K, Med r, mean r, nDCG@10, MRR and mAP in both directions, and rsum.

    Columns with ``_low`` and ``_high`` have the 95% interval of a metric; with several seeds, columns with ``_std`` have its
    standard deviation. The columns ``trained_on`` and ``unfinished`` are left out if they are blank for all results. A test
    set of at most 1,000 images has no row ``1k``, which would repeat ``full``. The row ``full`` also has the metrics of the
    protocol ``sentence``, and the row ``1k`` has the metrics of ``sentence-1k``. Without ``full`` or ``1k``, these protocols
    have their own row. Phrase results have columns ``phrase_…``, the number of phrases, the ``iou``, and ``type_<name>_r1``
    for each type of phrases.

    ``results`` are pairs of a result file and its content. ``groups`` has the results that do not differ significantly. With
    it, the row ``full`` has the letters of the result in the column ``group``: results that share a letter do not differ. The
    column ``in_best_group`` is ``yes`` if the result does not differ from the best result, else blank.
    """
    rows = []
    check_consistent_data(results)
    for path, result in results:
        protocols = drop_repeated_protocols(result.protocols, result.n_images)
        for whole, captions in (("full", "sentence"), ("1k", "sentence-1k")):
            if {whole, captions} <= set(protocols):
                both, sentence = protocols[whole], protocols.pop(captions)
                added = {"directions": both.directions | sentence.directions, "ci95": both.ci95 | sentence.ci95}
                protocols[whole] = both.model_copy(update=added)
        for name, protocol in protocols.items():
            row = _build_summary_row(path, result, name, protocol)
            if groups is not None:
                is_compared = name == COMPARED_PROTOCOL
                row[GROUP_COLUMN] = groups.letters_by_path[path] if is_compared else ""
                row[BEST_GROUP_COLUMN] = "yes" if is_compared and path in groups.best else ""
            rows.append(row)
    if not rows:
        raise UserError("no result among the files, so there is no table")
    table = pd.DataFrame(rows)
    empty = [name for name in _OPTIONAL_COLUMNS if not table[name].any()]
    empty += [] if (table["protocol"] == PHRASE_PROTOCOL).any() else _PHRASE_COLUMNS
    if (table["protocol"] == PHRASE_PROTOCOL).all():  # phrase results have no image-caption metrics
        empty += [name for name in map(str, table) if name.removesuffix("_low").removesuffix("_high") in _METRIC_COLUMNS]
    return table.drop(columns=empty)


class SummaryTable(TableKind):
    """``vse-table summary``: a row for each result and protocol."""

    first_columns = ("dataset", "experiment", "split", "protocol", "n_images", "n_captions", "seeds")
    option_names = frozenset({"family"})

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        if request.family is None:
            return build_summary(request.results)
        from vse.eval.tables.groups import group_results  # lazy: imports torch

        paths = drop_comparisons(request.results)
        groups = group_results(paths, request.family)
        frame = summarise_results([(path, read_result(path)) for path in paths], groups)
        frame.attrs["note"] = groups.note
        return frame

    def build_printed_table(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        return build_printed_summary(frame)


def build_printed_summary(table: pd.DataFrame) -> PrintedTable:
    """Return the printed columns of a summary, without intervals, mean ranks, nDCG@10, MRR and mAP."""
    described = (*_RESULT_COLUMNS, *_PHRASE_COLUMNS, GROUP_COLUMN, BEST_GROUP_COLUMN)
    has_groups = GROUP_COLUMN in table
    metrics = [
        column
        for column in map(str, table)
        if column not in described and not column.endswith(_UNPRINTED_SUFFIXES) and not column.startswith(_TYPE_PREFIX)
    ]
    texts = ["method", *(name for name in _OPTIONAL_COLUMNS if name in table)]
    texts += [name for name in ("dataset", "feature", "protocol", "seeds") if table[name].nunique() > 1]
    lines = []
    for row in table.to_dict("records"):
        cells = [metric_cell(row[name], 1, row.get(f"{name}_std", math.nan)) for name in metrics]
        if has_groups:
            place = metrics.index("rsum")
            cells[place] = f"**{cells[place]}**" if row[BEST_GROUP_COLUMN] else cells[place]
            cells.append(row[GROUP_COLUMN])
        lines.append([*(str(row[name]) for name in texts), *cells])
    titles = [("", name) for name in texts] + [column_title(name) for name in metrics]
    titles += [("", GROUP_COLUMN)] if has_groups else []
    facts = [name for name in ("dataset", "split", "protocol", *_PHRASE_COLUMNS) if name in table]
    same = [f"{name} {table[name].iloc[0]}" for name in facts if table[name].nunique() == 1]
    return PrintedTable(lines, titles, len(texts), [", ".join(same), *([table.attrs["note"]] if has_groups else [])])


def _build_summary_row(path: Path, result: Result, name: str, protocol: ProtocolMetrics) -> dict[str, Any]:
    row: dict[str, Any] = {"dataset": result.dataset, "experiment": ""}
    row |= {"trained_on": result.trained_on or "", "unfinished": ", ".join({run["state"]: run for run in result.unfinished})}
    row |= {"split": result.split}
    row |= {"protocol": name, "n_images": result.n_images, "n_captions": result.n_captions, "seeds": len(result.seeds)}
    row |= {name: "" if getattr(protocol, name) is None else getattr(protocol, name) for name in _PHRASE_COLUMNS}
    row |= build_result_columns(path, result)
    of_directions = (f"{direction}_{metric}" for direction, metrics in protocol.directions.items() for metric in metrics)
    for column in dict.fromkeys([*_METRIC_COLUMNS, *of_directions]):
        metric = protocol.metric(column)
        row[column], deviation = mean_and_std(metric)
        if isinstance(metric, SeedStatistics):
            row[f"{column}_std"] = deviation
        if protocol.ci95:
            row[f"{column}_low"], row[f"{column}_high"] = protocol.interval(column) or UNKNOWN_INTERVAL
    for name, metrics in protocol.per_type.items():
        column = f"{_TYPE_PREFIX}{name}_r1"
        row[column], deviation = mean_and_std(metrics.get("r1"))
        if isinstance(metrics.get("r1"), SeedStatistics):
            row[f"{column}_std"] = deviation
        if protocol.ci95:
            row[f"{column}_low"], row[f"{column}_high"] = protocol.type_interval(name, "r1") or UNKNOWN_INTERVAL
    return row


class CardsTable(TableKind):
    """``vse-table cards``: the data, seeds, features and training of each result, a row per result."""

    first_columns = ("dataset", "experiment", "split", "n_images", "seeds", "features", "epochs", "selection")

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        """Return a row for each result file. Comparison files are left out. Raises UserError if there is no result file."""
        rows = []
        for path in drop_comparisons(request.results):
            result = read_result(path)
            names = {"dataset": result.dataset, "experiment": result.display_name, "split": result.split}
            counts = {"n_images": result.n_images, "seeds": " ".join(map(str, result.seeds))}
            described = build_result_columns(path, result)
            rows.append({**names, **counts, **build_training_card(result.provenance), "run": described["run"]})
        if not rows:
            raise UserError("no result among the files, so there is no table")
        return pd.DataFrame(rows)

    def build_printed_table(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        """Return all columns except ``run``."""
        printed = frame.drop(columns="run")
        return PrintedTable(printed.to_numpy().tolist(), [("", str(name)) for name in printed], len(printed.columns), [])
