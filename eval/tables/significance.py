"""Whether two models differ by more than the choice of test images explains: the comparison file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vse.eval.files.embeddings import Embeddings, read_embeddings, same_split
from vse.eval.files.results import COMPARISON_VERSION, content_sha256, distinct, file_reference, read_comparison
from vse.eval.protocols.evaluate import all_queries, read_seeds, select_protocols
from vse.eval.ranking.bootstrap import ALPHA, COMPARED, differences
from vse.eval.ranking.metrics import NAMES
from vse.eval.tables.summary import as_latex, figure_cell, write_table
from vse.pipeline.errors import UserError
from vse.pipeline.files import check_out, write_json, write_text


def compare(
    files: Sequence[Path],
    out: Path | None = None,
    protocol: str | Sequence[str] = "auto",
    cross_check: bool = True,
    samples: int = COMPARED,
) -> Path:
    """Write how far two models are apart, figure by figure, on the same queries; returns the file.

    Two files are the two models. More are seeds of two experiments, as many of each, paired in their order. See
    :func:`vse.eval.ranking.bootstrap.differences` for what is said of each figure. ``out`` is
    ``results/<dataset>_<a>_vs_<b>.json`` unless it is given.
    """
    if not samples:
        raise UserError("a comparison needs samples: leave --bootstrap out, or give a number of 1,000 or so")
    sides = _sides(files)
    runs = [read_seeds(side) for side in sides]
    same_split(sides[0][0], runs[0][0], sides[1][0], runs[1][0])
    names = [
        name for name in select_protocols(sides[0], runs[0], protocol) if name in select_protocols(sides[1], runs[1], protocol)
    ]
    first = runs[0][0]
    if out is None:
        models = [side[0].experiment for side in runs]
        if models[0] == models[1]:
            models = [f"{side[0].experiment}-{side[0].seed}" for side in runs]
        name = f"{first.dataset}_{'_vs_'.join(models)}"
        out = Path("results") / f"{re.sub(r'[^A-Za-z0-9_+-]+', '-', name)}.json"
    check_out(out, files)
    found = {}
    for name in names:
        a, b = (all_queries(paths, side, name, cross_check) for paths, side in zip(sides, runs, strict=True))
        found[name] = differences(a, b, samples)
    result = {
        "version": COMPARISON_VERSION,
        "dataset": first.dataset,
        "split": first.split,
        "n_images": len(first.image_ids),
        "n_captions": len(first.caption_ids),
        "a": _side(sides[0], runs[0], out),
        "b": _side(sides[1], runs[1], out),
        "samples": samples,
        "comparisons": found,
    }
    return write_json(out, {**result, "sha256": content_sha256(result)})


def significance(comparisons: Sequence[Path]) -> pd.DataFrame:
    """A row per comparison, protocol and figure: both figures, their difference, its 95% interval and p."""
    rows = []
    for path in comparisons:
        content = read_comparison(path)
        models = dict(zip("ab", _labels(content), strict=True))
        for protocol, found in distinct(content["comparisons"], content["n_images"]).items():
            for way, name, leaf in _leaves(found):
                row = {"dataset": content["dataset"], "split": content["split"], "protocol": protocol, **models}
                row |= {"way": way, "figure": name, "a_figure": leaf["a"], "b_figure": leaf["b"]}
                row |= {"difference": leaf["difference"], "low": leaf["ci95"][0], "high": leaf["ci95"][1], "p": leaf["p"]}
                rows.append(row | {"significant": "yes" if leaf["p"] < ALPHA else "no"})
    return pd.DataFrame(rows)


def write_significance(table: pd.DataFrame, out: Path) -> Path:
    """Write what :func:`significance` returned as ``.csv`` or ``.tex``, where a difference that is not significant is in
    parentheses; returns ``out``.
    """
    p = [f"{value:.4f}" if value >= 0.001 else "<0.001" for value in table["p"]]
    if out.suffix != ".tex":
        return write_table(table.assign(p=[f"{value:.4f}" for value in table["p"]]), out)
    models = table[["dataset", "a", "b"]].drop_duplicates()
    if len(models) > 1:
        raise UserError(f"{out}: a LaTeX table is of one pair of models; give one comparison, or write .csv")
    a, b = (f"{side}: {models[side].iloc[0]}" for side in ("a", "b"))
    sure = zip(table["difference"], table["significant"], strict=True)
    interval = [f"[{low:+.1f}, {high:+.1f}]".replace("-", "−") for low, high in zip(table["low"], table["high"], strict=True)]
    shown = table[["protocol", "way", "figure"]].copy()
    shown[a] = [figure_cell(figure, 1) for figure in table["a_figure"]]
    shown[b] = [figure_cell(figure, 1) for figure in table["b_figure"]]
    cells = ((figure_cell(difference, 1, sign="+"), yes) for difference, yes in sure)
    shown["a − b"] = [cell if yes == "yes" else f"({cell})" for cell, yes in cells]
    shown["95% interval"] = interval
    shown["p"] = p
    notes = [
        f"{models['dataset'].iloc[0]}: paired bootstrap (interval) and randomisation test (p, two-sided) over test images",
        f"(in parentheses): not significant, p is {ALPHA} or more; not corrected for how many figures there are",
    ]
    return write_text(out, as_latex(shown.to_numpy().tolist(), [("", str(name)) for name in shown], 3, notes))


def difference_lines(comparison: Mapping[str, Any]) -> list[str]:
    """A line per protocol for a person: R@1 each way and rsum, with interval and p."""
    title = " - ".join(_labels(comparison))
    lines = []
    for protocol, found in distinct(comparison["comparisons"], comparison["n_images"]).items():
        shown = [
            f"{f'{way} ' if way else ''}{name} {leaf['difference']:+.1f} "
            f"[{leaf['ci95'][0]:+.1f}, {leaf['ci95'][1]:+.1f}] p {leaf['p']:.2g}"
            for way, name, leaf in _leaves(found)
            if name in ("R@1", "rsum", "mAP@R")
        ]
        lines.append(f"{comparison['dataset']} {title} {protocol}: {', '.join(shown)}")
    return lines


def _labels(comparison: Mapping[str, Any]) -> tuple[str, str]:
    """What to call the two models: their experiments, with the seeds if these are the same."""
    a, b = (comparison[side] for side in "ab")
    if a["experiment"] != b["experiment"]:
        return a["experiment"], b["experiment"]
    first, second = (f"{model['experiment']} seed {' '.join(map(str, model['seeds']))}" for model in (a, b))
    return first, second


def _leaves(found: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Way, name and comparison of every figure of a protocol; the way of a sum is blank."""
    leaves = []
    for name, value in found.items():
        for figure, leaf in [(name, value)] if "p" in value else value.items():
            way = "" if "p" in value else name
            leaves.append((way, NAMES.get(figure, figure), leaf))
    return leaves


def _sides(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The files of the two models."""
    if len(files) < 2:
        raise UserError("--compare needs the files of two models")
    if len(files) == 2:
        if files[0].resolve() == files[1].resolve():
            raise UserError(f"{files[0]} is given twice; --compare needs two models")
        return [files[0]], [files[1]]
    by_experiment: dict[str, list[Path]] = {}
    for path in files:
        by_experiment.setdefault(read_embeddings(path).experiment, []).append(path)
    if len(by_experiment) != 2 or len({len(side) for side in by_experiment.values()}) != 1:
        there = ", ".join(f"{len(side)} of {name}" for name, side in by_experiment.items())
        raise UserError(f"--compare needs as many seeds of one experiment as of another; there are {there}")
    first, second = by_experiment.values()
    return first, second


def _side(files: Sequence[Path], runs: Sequence[Embeddings], out: Path) -> dict[str, Any]:
    return {
        "experiment": runs[0].experiment,
        "seeds": [run.seed for run in runs],
        "embeddings": [file_reference(path, out) for path in files],
    }
