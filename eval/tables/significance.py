"""Whether two models differ by more than the choice of test images explains: the comparison file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from vse.eval.defaults import COMPARISON_SAMPLES, CROSS_CHECK_QUERIES, IOU, PHRASE
from vse.eval.files.embeddings import Embeddings, check_same_split, experiment_name, parse_provenance, read_embeddings
from vse.eval.files.hdf5_fields import FileMetadata
from vse.eval.files.phrase_scores import PhraseScores, check_same_phrases, read_phrase_scores
from vse.eval.files.results import (
    COMPARISON,
    COMPARISON_VERSION,
    ComparedMetric,
    Comparison,
    check_one_dataset,
    content_sha256,
    display_name,
    distinct_protocols,
    file_reference,
    read_comparison,
)
from vse.eval.protocols.evaluate import all_queries, read_seeds, select_protocols, unfinished_runs
from vse.eval.protocols.phrase_evaluation import (
    check_no_iou,
    check_protocol,
    of_phrases,
    phrase_differences,
    read_phrase_seeds,
)
from vse.eval.protocols.protocols import AskedOfQueries
from vse.eval.ranking.bootstrap import ALPHA, differences
from vse.eval.ranking.metrics import metric_title
from vse.eval.tables.table import NO_REQUEST, Cells, TableKind, TableRequest, metric_cell
from vse.pipeline.command import current_provenance
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import check_output
from vse.pipeline.files.writing import write_json


def compare_files(
    files: Sequence[Path],
    out: Path | None = None,
    protocol: str | Sequence[str] = "auto",
    cross_check: bool = True,
    samples: int = COMPARISON_SAMPLES,
    unfinished: bool = False,
    iou: float | None = None,
    cross_checked: int = CROSS_CHECK_QUERIES,
) -> Path:
    """Compare two models whatever the files hold; returns the file. See :func:`compare` and :func:`compare_phrases`."""
    phrases = of_phrases(files)
    check_protocol(files, protocol, phrases)
    check_no_iou(files, iou, phrases)
    if phrases:
        return compare_phrases(files, out, IOU if iou is None else iou, samples, unfinished)
    return compare(files, out, protocol, cross_check, samples, unfinished, cross_checked)


def compare(
    files: Sequence[Path],
    out: Path | None = None,
    protocol: str | Sequence[str] = "auto",
    cross_check: bool = True,
    samples: int = COMPARISON_SAMPLES,
    unfinished: bool = False,
    cross_checked: int = CROSS_CHECK_QUERIES,
) -> Path:
    """Write how far two models are apart, metric by metric, on the same queries; returns the file.

    Two files are the two models. More are seeds of two experiments, or of one with two settings, as many of each, paired in
    their order. See
    :func:`vse.eval.ranking.bootstrap.differences` for what is computed of each metric. ``out`` is
    ``results/<dataset>_<a>_vs_<b>.json`` unless it is given. ``unfinished`` and ``cross_checked``: see
    :class:`vse.eval.protocols.options.EvaluationOptions`.
    """
    _check_samples(samples)
    sides = _sides(files, read_embeddings)
    runs = [read_seeds(side) for side in sides]
    check_same_split(sides[0][0], runs[0][0], sides[1][0], runs[1][0])
    names = [
        name for name in select_protocols(sides[0], runs[0], protocol) if name in select_protocols(sides[1], runs[1], protocol)
    ]
    out, not_finished = _begun(files, runs, out, unfinished)
    compared: dict[str, Any] = {}
    for name in names:
        a, b = (
            [
                of_run.folds
                for of_run in all_queries(paths, side, name, cross_check, AskedOfQueries(cross_checked=cross_checked))
            ]
            for paths, side in zip(sides, runs, strict=True)
        )
        compared[name] = differences(a, b, samples)
    return _written(runs, out, compared, samples, not_finished)


def compare_phrases(
    files: Sequence[Path],
    out: Path | None = None,
    iou: float = IOU,
    samples: int = COMPARISON_SAMPLES,
    unfinished: bool = False,
) -> Path:
    """As :func:`compare` of two models that localise phrases: ``files`` hold phrase scores; returns the file.

    A candidate is right if its IoU with the truth is ``iou`` or more.
    """
    _check_samples(samples)
    sides = _sides(files, read_phrase_scores)
    runs = [read_phrase_seeds(side) for side in sides]
    check_same_phrases(sides[0][0], runs[0][0], sides[1][0], runs[1][0])
    out, not_finished = _begun(files, runs, out, unfinished)
    compared = {PHRASE: phrase_differences(sides, runs, samples, iou)}
    return _written(runs, out, compared, samples, not_finished, {"iou": iou})


def _check_samples(samples: int) -> None:
    if not samples:
        raise UserError("a comparison needs samples: leave --bootstrap out, or give a number of 1,000 or so")


def _begun(
    files: Sequence[Path], runs: Sequence[Sequence[FileMetadata]], out: Path | None, unfinished: bool
) -> tuple[Path, list[dict[str, str]]]:
    """Where to write, which without ``out`` is named by the two models, and the files of runs that did not finish."""
    if out is None:
        models = [str(side[0].experiment) for side in runs]
        if models[0] == models[1]:
            seeds = [side[0].seed for side in runs]
            models = [
                f"{name}-{letter if None in seeds else seed}" for name, letter, seed in zip(models, "ab", seeds, strict=True)
            ]
        name = f"{runs[0][0].dataset}_{'_vs_'.join(models)}"
        out = Path("results") / f"{re.sub(r'[^A-Za-z0-9_+-]+', '-', name)}.json"
    check_output(out, COMPARISON, files)
    return out, unfinished_runs([run for side in runs for run in side], out, unfinished)


def _written(
    runs: Sequence[Sequence[Embeddings]] | Sequence[Sequence[PhraseScores]],
    out: Path,
    compared: Mapping[str, Any],
    samples: int,
    unfinished: Sequence[Mapping[str, str]],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write the comparison file; returns ``out``."""
    first = runs[0][0]
    result = {
        "version": COMPARISON_VERSION,
        "dataset": first.dataset,
        "split": first.split,
        "data": first.identity.checksums.model_dump(),
        "n_images": len(np.unique(first.image_ids)),
        "n_captions": len(np.unique(first.caption_ids)),
        **settings,
        "a": _side(runs[0], out),
        "b": _side(runs[1], out),
        "samples": samples,
        "comparisons": compared,
        **({"unfinished": unfinished} if unfinished else {}),
        "provenance": {"made": current_provenance()},
    }
    return write_json(out, {**result, "sha256": content_sha256(result)})


def significance(comparisons: Sequence[Path]) -> pd.DataFrame:
    """A row per comparison, protocol and metric: both values, their difference, its 95% interval and p."""
    rows = []
    opened = [(path, read_comparison(path)) for path in comparisons]
    check_one_dataset(opened)
    for _, comparison in opened:
        models = dict(zip("ab", _labels(comparison), strict=True))
        for protocol, metrics in distinct_protocols(comparison.comparisons, comparison.n_images).items():
            for direction, name, metric in _leaves(metrics):
                row: dict[str, Any] = {
                    "dataset": comparison.dataset,
                    "split": comparison.split,
                    "protocol": protocol,
                    **models,
                }
                row |= {"direction": direction, "metric": name, "a_value": metric.a, "b_value": metric.b}
                row |= {"difference": metric.difference, "low": metric.ci95[0], "high": metric.ci95[1], "p": metric.p}
                rows.append(row | {"significant": "yes" if metric.p < ALPHA else "no"})
    return pd.DataFrame(rows)


class SignificanceTable(TableKind):
    """``vse-table significance``: a row for each metric of comparisons. LaTeX has one pair of models."""

    columns = ("dataset", "split", "protocol", "a", "b", "difference", "low", "high", "p", "significant")

    def frame(self, request: TableRequest) -> pd.DataFrame:
        """Return the table of :func:`significance`."""
        return significance(request.results)

    def cells(self, frame: pd.DataFrame, request: TableRequest) -> Cells:
        """Return the differences, in parentheses where they are not significant."""
        return significance_cells(frame)

    def write(self, frame: pd.DataFrame, out: Path, request: TableRequest = NO_REQUEST) -> Path:
        """Write the table; returns ``out``. Raises UserError if LaTeX is requested for several pairs of models."""
        if out.suffix == ".tex" and len(frame[["dataset", "a", "b"]].drop_duplicates()) > 1:
            raise UserError(f"{out}: a LaTeX table has one pair of models; give one comparison, or write .csv")
        if out.suffix == ".csv":
            frame = frame.assign(p=[f"{value:.4f}" for value in frame["p"]])
        return super().write(frame, out, request)


def significance_cells(table: pd.DataFrame) -> Cells:
    """What is shown of :func:`significance` to people; of several pairs of models each line names its own."""
    models = table[["dataset", "a", "b"]].drop_duplicates()
    several = len(models) > 1
    a, b = ("a", "b") if several else (f"{side}: {models[side].iloc[0]}" for side in ("a", "b"))
    sure = zip(table["difference"], table["significant"], strict=True)
    interval = [f"[{low:+.1f}, {high:+.1f}]".replace("-", "−") for low, high in zip(table["low"], table["high"], strict=True)]
    shown = table[["protocol", "direction", "metric"]].copy()
    if several:
        shown.insert(0, "models", [f"{row.dataset} {row.a} - {row.b}" for row in table.itertuples()])
    shown[a] = [metric_cell(value, 1) for value in table["a_value"]]
    shown[b] = [metric_cell(value, 1) for value in table["b_value"]]
    cells = ((metric_cell(difference, 1, sign="+"), yes) for difference, yes in sure)
    shown["a − b"] = [cell if yes == "yes" else f"({cell})" for cell, yes in cells]
    shown["95% interval"] = interval
    shown["p"] = [f"{value:.4f}" if value >= 0.001 else "<0.001" for value in table["p"]]
    notes = [
        f"{', '.join(models['dataset'].unique())}: paired bootstrap (interval) and randomisation test (p, two-sided) "
        "over test images",
        f"(in parentheses): not significant, p is {ALPHA} or more; not corrected for how many metrics there are",
    ]
    return Cells(shown.to_numpy().tolist(), [("", str(name)) for name in shown], 4 if several else 3, notes)


def difference_lines(comparison: Comparison) -> list[str]:
    """A line per protocol for a person: R@1 of each direction and rsum, with interval and p."""
    title = " - ".join(_labels(comparison))
    lines = []
    for protocol, metrics in distinct_protocols(comparison.comparisons, comparison.n_images).items():
        shown = [
            f"{f'{direction} ' if direction else ''}{name} {metric.difference:+.1f} "
            f"[{metric.ci95[0]:+.1f}, {metric.ci95[1]:+.1f}] p {metric.p:.2g}"
            for direction, name, metric in _leaves(metrics)
            if name in ("R@1", "rsum", "mAP@R")
        ]
        lines.append(f"{comparison.dataset} {title} {protocol}: {', '.join(shown)}")
    return lines


def _labels(comparison: Comparison) -> tuple[str, str]:
    """What to call the two models: their names, with the seeds if these are the same, or with A and B."""
    a, b = (model.name or model.experiment for model in (comparison.a, comparison.b))
    seeds = comparison.a.seeds, comparison.b.seeds
    if a != b:
        return a, b
    if seeds[0] == seeds[1] or None in (*seeds[0], *seeds[1]):
        return f"{a} A", f"{b} B"
    return f"{a} seed {' '.join(map(str, seeds[0]))}", f"{b} seed {' '.join(map(str, seeds[1]))}"


def _leaves(metrics: Mapping[str, ComparedMetric | dict[str, ComparedMetric]]) -> list[tuple[str, str, ComparedMetric]]:
    """Direction, name and comparison of every metric of a protocol; the direction of a sum is blank."""
    leaves = []
    for key, value in metrics.items():
        if key == "per_type" and not isinstance(value, ComparedMetric):
            leaves += [(PHRASE, f"R@1 of {name}", metric) for name, metric in value.items()]
            continue
        direction, of_direction = ("", {key: value}) if isinstance(value, ComparedMetric) else (key, value)
        leaves += [(direction, metric_title(name), metric) for name, metric in of_direction.items()]
    return leaves


def _sides(files: Sequence[Path], read: Callable[[Path], FileMetadata]) -> tuple[list[Path], list[Path]]:
    """The files of the two models."""
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
        there = ", ".join(f"{len(side)} of {name}" for name, side in by_name.items())
        raise UserError(f"--compare needs as many seeds of one experiment as of another; there are {there}")
    first, second = by_name.values()
    return first, second


def _side(runs: Sequence[FileMetadata], out: Path) -> dict[str, Any]:
    return {
        "experiment": runs[0].experiment,
        "name": display_name(str(runs[0].experiment), parse_provenance(runs[0])),
        **({"trained_on": runs[0].trained_on} if runs[0].trained_on else {}),
        "seeds": [run.seed for run in runs],
        "embeddings": [file_reference(run, out) for run in runs],
    }
