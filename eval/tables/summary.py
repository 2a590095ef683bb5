"""Tables of result files, as CSV and LaTeX.

What tables say of a result beside its metrics: method, features, where the run lies, which settings were changed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vse.eval.defaults import PHRASE, RECALLS
from vse.eval.files.results import (
    ProtocolMetrics,
    Result,
    SeedStatistics,
    changed_settings,
    changes_suffix,
    check_one_dataset,
    distinct_protocols,
    drop_comparisons,
    mean_and_std,
    read_result,
)
from vse.eval.ranking.metrics import POSITION_METRICS
from vse.eval.tables.table import Cells, TableKind, TableRequest, metric_cell, title_of
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import is_experiment, load_plan

ABOUT = ("method", "feature", "run", "settings")


def described(path: Path, result: Result) -> dict[str, str]:
    """The columns ``experiment``, ``method``, ``feature``, ``run`` and ``settings`` of the result in the file ``path``."""
    return {
        "experiment": result.display_name,
        "method": method_of(result),
        "feature": _features(result),
        "run": _runs(path, result),
        "settings": "; ".join(changed_settings(result.provenance)),
    }


def method_of(result: Result) -> str:
    """The method as papers call it, e.g. ``VSE++ (1C)``: the preset's title, with the settings that were changed.

    A name given by ``vse-train --name`` stands for both; without a title it is the name of the experiment.
    """
    config = result.provenance.get("config")
    config = config if isinstance(config, Mapping) else {}
    title = config.get("title")
    if not title and is_experiment(result.experiment):
        title = load_plan(result.experiment).title
    return result.display_name if config.get("label") or not title else f"{title}{changes_suffix(result.provenance)}"


def _features(result: Result) -> str:
    """The backbone whose embeddings are read, or the features of images and, if they are not read as words, of captions."""
    config = result.provenance.get("config")
    config = config if isinstance(config, Mapping) else {}
    asked = [config.get(key) for key in (["backbone"] if config.get("backbone") else ["feature", "caption_feature"])]
    names = [name for name in asked if isinstance(name, str)]
    there = result.provenance.get("features")
    return " + ".join(names or (map(str, there) if isinstance(there, Mapping) else []))


def _runs(path: Path, result: Result) -> str:
    """The folders of the embeddings, as seen from here or, if the result does not name them, nothing."""
    files = result.provenance.get("embeddings")
    named = [one.get("file") for one in files if isinstance(one, Mapping)] if isinstance(files, list) else []
    folders = [os.path.normpath(path.parent / Path(file).parent) for file in named if isinstance(file, str)]
    return " ".join(dict.fromkeys(folders))


_DESCRIBED = (
    "dataset",
    "experiment",
    "trained_on",
    "unfinished",
    "split",
    "protocol",
    "n_images",
    "n_captions",
    "seeds",
    *ABOUT,
)
_SAID = ("trained_on", "unfinished")  # of results that have something to say there
_OF_PHRASES = ("iou", "n_phrases", "n_without_box")  # of results of phrases
_TYPE = "type_"  # before the name of a type of phrases, and after it the metric
_NOT_PRINTED = ("_std", "_low", "_high", "_meanr", *(f"_{name}" for name in POSITION_METRICS))
NO_INTERVAL = (math.nan, math.nan)
_METRICS = (*(f"r{k}" for k in RECALLS), "medr", "meanr")
_COLUMNS = (*(f"{direction}_{name}" for direction in ("i2t", "t2i") for name in _METRICS), "rsum")


def summary(results: Sequence[Path]) -> pd.DataFrame:
    """A row per result and protocol: R@K, Med r, mean r, nDCG@10, MRR and mAP in both directions, and rsum.

    Each metric comes with its 95% interval (``_low``, ``_high``) where the result has one, and with several seeds with its
    standard deviation. The columns ``trained_on`` and ``unfinished`` are there if a result was tested on another data set than
    it was trained on, or is of a run that did not finish. A test set of one fold has one row, ``full``, since ``1k`` would
    repeat it. The metrics of captions that query captions stand in the row ``full``, too, which is also over the whole split,
    or in ``1k`` if theirs are folds, too; without that row, in a row of their own. Results of phrases have columns
    ``phrase_…``, how many phrases there are, the ``iou``, and ``type_<name>_r1`` of each type.
    """
    return summary_of([(path, read_result(path)) for path in drop_comparisons(results)])


def summary_of(results: Sequence[tuple[Path, Result]]) -> pd.DataFrame:
    """As :func:`summary` of results that were read; the folders of runs are named as seen from their files."""
    rows = []
    check_one_dataset(results)
    for path, result in results:
        protocols = distinct_protocols(result.protocols, result.n_images)
        for whole, captions in (("full", "sentence"), ("1k", "sentence-1k")):
            if {whole, captions} <= set(protocols):
                both, sentence = protocols[whole], protocols.pop(captions)
                added = {"directions": both.directions | sentence.directions, "ci95": both.ci95 | sentence.ci95}
                protocols[whole] = both.model_copy(update=added)
        rows += [_row(path, result, name, protocol) for name, protocol in protocols.items()]
    if not rows:
        raise UserError("no result among the files, so there is no table")
    table = pd.DataFrame(rows)
    empty = [name for name in _SAID if not table[name].any()]
    empty += [] if (table["protocol"] == PHRASE).any() else _OF_PHRASES
    return table.drop(columns=[*empty, *(_both_directions(table) if (table["protocol"] == PHRASE).all() else [])])


def _both_directions(table: pd.DataFrame) -> list[str]:
    """The columns of metrics that results of phrases do not have."""
    return [name for name in map(str, table) if name.removesuffix("_low").removesuffix("_high") in _COLUMNS]


class SummaryTable(TableKind):
    """``vse-table summary``: a row for each result and protocol."""

    columns = ("dataset", "experiment", "split", "protocol", "n_images", "n_captions", "seeds")

    def frame(self, request: TableRequest) -> pd.DataFrame:
        """Return the table of :func:`summary`."""
        return summary(request.results)

    def cells(self, frame: pd.DataFrame, request: TableRequest) -> Cells:
        """Return recalls, Med r and rsum, each with its standard deviation if there is one."""
        return summary_cells(frame)


def summary_cells(table: pd.DataFrame) -> Cells:
    """What is shown of a :func:`summary` to people."""
    described = (*_DESCRIBED, *_OF_PHRASES)
    metrics = [
        column
        for column in map(str, table)
        if column not in described and not column.endswith(_NOT_PRINTED) and not column.startswith(_TYPE)
    ]
    texts = ["method", *(name for name in _SAID if name in table)]
    texts += [name for name in ("dataset", "feature", "protocol", "seeds") if table[name].nunique() > 1]
    lines = []
    for row in table.to_dict("records"):
        cells = [metric_cell(row[name], 1, row.get(f"{name}_std", math.nan)) for name in metrics]
        lines.append([*(str(row[name]) for name in texts), *cells])
    titles = [("", name) for name in texts] + [title_of(name) for name in metrics]
    facts = [name for name in ("dataset", "split", "protocol", *_OF_PHRASES) if name in table]
    same = [f"{name} {table[name].iloc[0]}" for name in facts if table[name].nunique() == 1]
    return Cells(lines, titles, len(texts), [", ".join(same)])


def _row(path: Path, result: Result, name: str, protocol: ProtocolMetrics) -> dict[str, Any]:
    row: dict[str, Any] = {"dataset": result.dataset, "experiment": ""}
    row |= {"trained_on": result.trained_on or "", "unfinished": ", ".join({run["state"]: run for run in result.unfinished})}
    row |= {"split": result.split}
    row |= {"protocol": name, "n_images": result.n_images, "n_captions": result.n_captions, "seeds": len(result.seeds)}
    row |= {name: "" if getattr(protocol, name) is None else getattr(protocol, name) for name in _OF_PHRASES}
    row |= described(path, result)
    of_directions = (f"{direction}_{metric}" for direction, metrics in protocol.directions.items() for metric in metrics)
    for column in dict.fromkeys([*_COLUMNS, *of_directions]):
        metric = protocol.metric(column)
        row[column], deviation = mean_and_std(metric)
        if isinstance(metric, SeedStatistics):
            row[f"{column}_std"] = deviation
        if protocol.ci95:
            row[f"{column}_low"], row[f"{column}_high"] = protocol.interval(column) or NO_INTERVAL
    for name, metrics in protocol.per_type.items():
        column = f"{_TYPE}{name}_r1"
        row[column], deviation = mean_and_std(metrics.get("r1"))
        if isinstance(metrics.get("r1"), SeedStatistics):
            row[f"{column}_std"] = deviation
        if protocol.ci95:
            row[f"{column}_low"], row[f"{column}_high"] = protocol.type_interval(name, "r1") or NO_INTERVAL
    return row
