"""Compare two models on the same queries: write the comparison file, and tabulate comparison files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from vse.eval.files.cards import list_differing_facts
from vse.eval.files.embeddings import Embeddings, check_same_split, experiment_name, parse_provenance, read_embeddings
from vse.eval.files.judgements import read_judgement_files
from vse.eval.files.phrase_scores import PhraseScores, check_same_phrases, read_phrase_scores
from vse.eval.files.results import (
    COMPARISON_KIND,
    COMPARISON_VERSION,
    ComparedMetric,
    Comparison,
    check_consistent_data,
    display_name,
    drop_repeated_protocols,
    file_reference,
    hash_file_content,
    read_comparison,
)
from vse.eval.options import DEFAULT_IOU_THRESHOLD, N_COMPARISON_SAMPLES, PHRASE_PROTOCOL, AllEvaluateOptions, TableRequest
from vse.eval.protocols.choices import read_choice_sets
from vse.eval.protocols.phrase_evaluation import are_phrase_score_files, compute_phrase_differences, read_seed_phrase_scores
from vse.eval.protocols.protocols import (
    RankingOptions,
    describe_test_set,
    join_folds,
    rank_queries_of_seeds,
    read_seed_embeddings,
    select_languages_of_seeds,
    select_protocols,
)
from vse.eval.protocols.result_content import list_unfinished_runs
from vse.eval.ranking.metrics import metric_title
from vse.eval.ranking.statistics import SIGNIFICANCE_LEVEL, compute_differences
from vse.eval.tables.table import EMPTY_TABLE_REQUEST, PrintedTable, TableKind, metric_cell
from vse.pipeline.command import current_provenance, format_code_version
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import FileMetadata
from vse.pipeline.files.outputs import check_output
from vse.pipeline.files.writing import write_json


def compare_files(
    files: Sequence[Path],
    out: Path | None = None,
    protocol: str | Sequence[str] = "auto",
    options: AllEvaluateOptions = AllEvaluateOptions(),
) -> Path:
    """Compare two models, given as files of embeddings, scores or phrase scores; write and return the comparison file.

    Two files are the two models. More files are the seeds of two models, equally many of each, and are paired in their order.
    See :func:`vse.eval.ranking.statistics.compute_differences` for the values of each metric. The file is ``out`` or, if that
    is None, ``results/<dataset>_<a>_vs_<b>.json``.
    """
    phrases, threshold = (
        are_phrase_score_files(files, protocol, options.iou),
        DEFAULT_IOU_THRESHOLD if options.iou is None else options.iou,
    )
    samples = N_COMPARISON_SAMPLES if options.bootstrap is None else options.bootstrap
    if not samples:
        raise UserError("a comparison needs samples: leave --bootstrap out, or give a number such as 1,000")
    models = _split_models(files, read_phrase_scores if phrases else read_embeddings)
    if phrases:
        scores = [read_seed_phrase_scores(paths) for paths in models]
        check_same_phrases(models[0][0], scores[0][0], models[1][0], scores[1][0])
        out = _prepare_output(files, scores, out)
        not_finished = list_unfinished_runs([run for seeds in scores for run in seeds], out, options.allow_unfinished)
        compared = {PHRASE_PROTOCOL: compute_phrase_differences(models, scores, samples, threshold)}
        return _write_comparison(scores, out, compared, samples, not_finished, {"iou": threshold})
    runs = [select_languages_of_seeds(paths, read_seed_embeddings(paths), options.language) for paths in models]
    (a_parts, *_), (b_parts, *_) = map(join_folds, runs)
    check_same_split(models[0][0], describe_test_set(a_parts), models[1][0], describe_test_set(b_parts))
    names, others = (
        select_protocols(paths, seeds, protocol, options.pairs) for paths, seeds in zip(models, runs, strict=True)
    )
    out = _prepare_output(files, runs, out)
    not_finished = list_unfinished_runs([run for seeds in runs for run in seeds], out, options.allow_unfinished)
    judgements = read_judgement_files(options, models[0][0], describe_test_set(a_parts))
    choices = read_choice_sets(options.choices, describe_test_set(a_parts), out)
    ranking = RankingOptions(options.cross_check, options.cross_checked, judgements=judgements, choices=choices)
    compared = {}
    for name in choices or (*names, *judgements):
        if name in others or name in judgements or name in choices:
            first, second = (
                rank_queries_of_seeds(paths, seeds, name, ranking) for paths, seeds in zip(models, runs, strict=True)
            )
            compared[name] = compute_differences([one.folds for one in first], [one.folds for one in second], samples)
    settings = {} if options.language is None else {"language": options.language}
    return _write_comparison(runs, out, compared, samples, not_finished, settings)


def _prepare_output(files: Sequence[Path], runs: Sequence[Sequence[FileMetadata]], out: Path | None) -> Path:
    """Return the file to write, named after the two models if ``out`` is None. Raises UserError if it must not be replaced."""
    if out is None:
        names = [str(seeds[0].experiment) for seeds in runs]
        if names[0] == names[1]:
            numbers = [seeds[0].seed for seeds in runs]
            suffixes = "ab" if None in numbers else numbers
            names = [f"{name}-{suffix}" for name, suffix in zip(names, suffixes, strict=True)]
        name = f"{runs[0][0].dataset}_{'_vs_'.join(names)}"
        out = Path("results") / f"{re.sub(r'[^A-Za-z0-9_+-]+', '-', name)}.json"
    check_output(out, COMPARISON_KIND, files)
    return out


def _write_comparison(
    runs: Sequence[Sequence[Embeddings]] | Sequence[Sequence[PhraseScores]],
    out: Path,
    compared: Mapping[str, Any],
    samples: int,
    unfinished: Sequence[Mapping[str, str]],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    first = runs[0][0]
    if isinstance(first, Embeddings):
        first = describe_test_set(join_folds([run for run in runs[0] if isinstance(run, Embeddings)])[0])
    comparison = {
        "version": COMPARISON_VERSION,
        "dataset": first.dataset,
        "split": first.split,
        "data": first.identity.checksums.model_dump(),
        "n_images": len(np.unique(first.image_ids)),
        "n_captions": len(np.unique(first.caption_ids)),
        **settings,
        "a": _model_entry(runs[0], out),
        "b": _model_entry(runs[1], out),
        "samples": samples,
        "comparisons": compared,
        "differing_facts": [fact.model_dump() for fact in list_differing_facts(*(parse_provenance(one[0]) for one in runs))],
        **({"unfinished": unfinished} if unfinished else {}),
        "provenance": {"made": current_provenance()},
    }
    return write_json(out, {**comparison, "sha256": hash_file_content(comparison)})


def build_significance(comparisons: Sequence[Path]) -> pd.DataFrame:
    """Return a row per comparison, protocol and metric: both values, their difference, its 95% interval and p-value.

    The last columns have the name of the comparison file, the seeds and files of both models, the facts in which the models
    differ, and the version and commit of the program.
    """
    rows = []
    contents = [(path, read_comparison(path)) for path in comparisons]
    check_consistent_data(contents)
    for path, comparison in contents:
        origin = _describe_origin(path, comparison)
        models = dict(zip("ab", _label_models(comparison), strict=True))
        for protocol, metrics in drop_repeated_protocols(comparison.comparisons, comparison.n_images).items():
            for direction, name, metric in _flatten_metrics(metrics):
                row: dict[str, Any] = {
                    "dataset": comparison.dataset,
                    "split": comparison.split,
                    "protocol": protocol,
                    **models,
                }
                row |= {"direction": direction, "metric": name, "a_value": metric.a, "b_value": metric.b}
                row |= {"difference": metric.difference, "low": metric.ci95[0], "high": metric.ci95[1], "p": metric.p}
                rows.append(row | {"significant": "yes" if metric.p < SIGNIFICANCE_LEVEL else "no", **origin})
    return pd.DataFrame(rows)


def _describe_origin(path: Path, comparison: Comparison) -> dict[str, str]:
    made = comparison.provenance.get("made")
    code = made.get("code") if isinstance(made, Mapping) else None
    origin = {"comparison": path.stem}
    for side, model in (("a", comparison.a), ("b", comparison.b)):
        origin[f"{side}_seeds"] = " ".join(map(str, model.seeds))
        origin[f"{side}_files"] = " ".join(os.path.normpath(path.parent / one["file"]) for one in model.embeddings)
    return {**origin, "differing": _describe_differing_facts(comparison), "code": format_code_version(code) or ""}


def _describe_differing_facts(comparison: Comparison) -> str:
    if comparison.differing_facts is None:
        return "not recorded"
    return "; ".join(f"{fact.name}: {fact.a} | {fact.b}" for fact in comparison.differing_facts)


class SignificanceTable(TableKind):
    """``vse-table significance``: a row per metric of comparison files. A LaTeX table has a single pair of models."""

    first_columns = ("dataset", "split", "protocol", "a", "b", "difference", "low", "high", "p", "significant")

    def build_frame(self, request: TableRequest) -> pd.DataFrame:
        return build_significance(request.results)

    def build_cells(self, frame: pd.DataFrame, request: TableRequest) -> PrintedTable:
        return build_printed_significance(frame)

    def write(self, frame: pd.DataFrame, out: Path, request: TableRequest = EMPTY_TABLE_REQUEST) -> Path:
        """Write the table and return ``out``. Raises UserError if LaTeX is requested for several pairs of models."""
        if out.suffix == ".tex" and len(frame[["dataset", "a", "b"]].drop_duplicates()) > 1:
            raise UserError(f"{out}: a LaTeX table has a single pair of models; give one comparison, or write .csv")
        if out.suffix == ".csv":
            frame = frame.assign(p=[f"{value:.4f}" for value in frame["p"]])
        return super().write(frame, out, request)


def build_printed_significance(table: pd.DataFrame) -> PrintedTable:
    """Return the printed columns of :func:`build_significance`; if there are several pairs, each line names its models."""
    models = table[["dataset", "a", "b"]].drop_duplicates()
    several = len(models) > 1
    a, b = ("a", "b") if several else (f"{side}: {models[side].iloc[0]}" for side in ("a", "b"))
    intervals = [f"[{low:+.1f}, {high:+.1f}]".replace("-", "−") for low, high in zip(table["low"], table["high"], strict=True)]
    printed = table[["protocol", "direction", "metric"]].copy()
    if several:
        printed.insert(0, "models", [f"{row.dataset} {row.a} - {row.b}" for row in table.itertuples()])
    printed[a] = [metric_cell(value, 1) for value in table["a_value"]]
    printed[b] = [metric_cell(value, 1) for value in table["b_value"]]
    signed = (metric_cell(value, 1, signed=True) for value in table["difference"])
    printed["a − b"] = [
        cell if significant == "yes" else f"({cell})" for cell, significant in zip(signed, table["significant"], strict=True)
    ]
    printed["95% interval"] = intervals
    printed["p"] = [f"{value:.4f}" if value >= 0.001 else "<0.001" for value in table["p"]]
    notes = [
        f"{', '.join(models['dataset'].unique())}: paired bootstrap (interval) and randomisation test (p, two-sided) "
        "over test images",
        f"(in parentheses): not significant, p is {SIGNIFICANCE_LEVEL} or more; not corrected for the number of metrics",
    ]
    return PrintedTable(printed.to_numpy().tolist(), [("", str(name)) for name in printed], 4 if several else 3, notes)


def format_difference_lines(comparison: Comparison) -> list[str]:
    """Return printable lines: the differences of R@1 and rsum for each protocol, and the facts in which the models differ.

    Each difference has its interval and p-value.
    """
    title = " - ".join(_label_models(comparison))
    lines = []
    for protocol, metrics in drop_repeated_protocols(comparison.comparisons, comparison.n_images).items():
        parts = [
            f"{f'{direction} ' if direction else ''}{name} {metric.difference:+.1f} "
            f"[{metric.ci95[0]:+.1f}, {metric.ci95[1]:+.1f}] p {metric.p:.2g}"
            for direction, name, metric in _flatten_metrics(metrics)
            if name in ("R@1", "rsum", "mAP@R")
        ]
        lines.append(f"{comparison.dataset} {title} {protocol}: {', '.join(parts)}")
    if comparison.differing_facts is not None:
        lines.append(f"{title} differ in: {_describe_differing_facts(comparison) or 'no recorded setting'}")
    return lines


def _label_models(comparison: Comparison) -> tuple[str, str]:
    """Return a name for each model. Equal names are followed by the seeds or, if these are equal or unknown, by A and B."""
    a, b = (model.name or model.experiment for model in (comparison.a, comparison.b))
    seeds = comparison.a.seeds, comparison.b.seeds
    if a != b:
        return a, b
    if seeds[0] == seeds[1] or None in (*seeds[0], *seeds[1]):
        return f"{a} A", f"{b} B"
    return f"{a} seed {' '.join(map(str, seeds[0]))}", f"{b} seed {' '.join(map(str, seeds[1]))}"


def _flatten_metrics(
    metrics: Mapping[str, ComparedMetric | dict[str, ComparedMetric]],
) -> list[tuple[str, str, ComparedMetric]]:
    """Return direction, name and values of every compared metric; rsum and mean recall have a blank direction."""
    leaves = []
    for key, value in metrics.items():
        if key == "per_type" and not isinstance(value, ComparedMetric):
            leaves += [(PHRASE_PROTOCOL, f"R@1 of {name}", metric) for name, metric in value.items()]
            continue
        direction, of_direction = ("", {key: value}) if isinstance(value, ComparedMetric) else (key, value)
        leaves += [(direction, metric_title(name), metric) for name, metric in of_direction.items()]
    return leaves


def _split_models(files: Sequence[Path], read: Callable[[Path], FileMetadata]) -> tuple[list[Path], list[Path]]:
    """Return the files of each model. Raises UserError unless they are two models with equally many seeds."""
    if len(files) < 2:
        raise UserError("--compare needs the files of two models")
    if len(files) == 2:
        if files[0].resolve() == files[1].resolve():
            raise UserError(f"{files[0]} is given twice; --compare needs two models")
        return [files[0]], [files[1]]
    by_name: dict[str, list[Path]] = {}
    for path in files:
        run = read(path)
        by_name.setdefault(display_name(experiment_name(path, run), parse_provenance(run)), []).append(path)
    if len(by_name) != 2 or len({len(side) for side in by_name.values()}) != 1:
        found = ", ".join(f"{len(side)} of {name}" for name, side in by_name.items())
        raise UserError(f"--compare needs equally many seeds of two experiments; there are {found}")
    first, second = by_name.values()
    return first, second


def _model_entry(runs: Sequence[FileMetadata], out: Path) -> dict[str, Any]:
    return {
        "experiment": runs[0].experiment,
        "name": display_name(str(runs[0].experiment), parse_provenance(runs[0])),
        **({"trained_on": runs[0].trained_on} if runs[0].trained_on else {}),
        "seeds": [run.seed for run in runs],
        "embeddings": [file_reference(run, out) for run in runs],
    }
