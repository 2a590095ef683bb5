"""Targets of the workflow, checked by name before Snakemake builds anything, so that a mistyped one is one line.

The jobs that the workflow would run for some targets, as Snakemake's own summary has them; nothing is run.
"""

from __future__ import annotations

import csv
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import is_path
from vse.pipeline.presets.presets import known_presets, load_plan
from vse.pipeline.presets.schema import parse_composed_name

PLANNING_VARIABLE = "VSE_PLANNING"  # set while jobs are asked for: published files that are missing are then no error


@dataclass(frozen=True)
class PlannedFile:
    """A file that a job of a rule would make."""

    rule: str
    path: Path


def plan_files(targets: Sequence[str], settings: Sequence[str] = (), snakefile: Path = Path("Snakefile")) -> list[PlannedFile]:
    """The files that the workflow has to make for ``targets``, those that are there and up to date left out.

    ``settings`` are what ``snakemake --config`` takes. :class:`UserError` has Snakemake's own words if it refuses.
    """
    if not snakefile.is_file():
        raise UserError(f"{snakefile}: no such file; run this in the folder of the workflow, where snakemake runs")
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "--summary", *targets, "--nolock"]
    command += ["--config", *settings] if settings else []
    environment = {**os.environ, PLANNING_VARIABLE: "1"}
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = asked.stdout.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith("output_file\t")), None)
    if asked.returncode or start is None:
        raise UserError(_refusal(asked.stderr or asked.stdout))
    rows = csv.DictReader(lines[start:], delimiter="\t", quoting=csv.QUOTE_NONE)
    return [PlannedFile(row["rule"], Path(row["output_file"])) for row in rows if row["plan"].startswith("update")]


def _refusal(text: str) -> str:
    """The line of Snakemake's output that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for mark in ("snakemake: error: ", "MissingRuleException", "WorkflowError", "Error"):
        for number, line in enumerate(lines):
            if mark in line:
                said = line.partition("snakemake: error: ")[2] or " ".join(lines[number : number + 2])
                return f"the workflow refuses: {said}"
    return f"the workflow refuses: {lines[-1] if lines else 'snakemake said nothing'}"


_FOLDERS = ("data", "features", "results", "runs")
_FLAGS = (
    "--",
    "-n",
    "--dry-run",
    "-p",
    "-np",
    "-k",
    "--keep-going",
    "-F",
    "--forceall",
    "--rerun-incomplete",
)  # without a value
_WITH_VALUE = re.compile(r"-[cj]\w+|--(cores|jobs)=\w+")  # -c4
_SUFFIXES = (".csv", ".h5", ".html", ".json", ".tex")
_NAMED = (  # patterns in which {dataset} stands for that of data sets' names
    (r"features/(?P<dataset>{dataset})_(?P<experiment>[^/.]+)-\d+_(images|captions)\.h5", "experiments"),
    (r"features/(?P<dataset>{dataset})_(?P<feature>(?![^/.]*-\d+_(?:images|captions)\.)[^/.]+)\.h5", "features"),
    (r"results/tables/(?:ladder|summary)_(?P<dataset>[^/.]+)\.(csv|svg)", ""),
    (r"results/(?P<dataset>{dataset})_(?P<experiment>[^/.]+)\.(json|html)", "experiments"),
    (r"runs/(?P<dataset>{dataset})_(?P<experiment>[^/.]+)/.*", "experiments"),
    (r"data/(?P<dataset>[^/]+)/dataset\.json", ""),
)


def dataset_pattern() -> str:
    """What names of data sets look like in those of files.

    A name with an underscore, such as f30k_entities, is a data set's if there is a preset of that name.
    """
    return "|".join([*(re.escape(name) for name in known_presets("datasets") if "_" in name), "[^_/]+"])


def check_targets(arguments: Sequence[str]) -> None:
    """:class:`UserError` if a file that was asked for is of no preset, or of a folder in which the workflow makes nothing.

    The nearest name is suggested. ``arguments`` are those of Snakemake, its own name first, which parses the rules before it
    knows its targets. What may be the value of an option, and what is no file of the workflow, is left to Snakemake.
    """
    for before, argument in pairwise(arguments):
        complete = before in _FLAGS or not before.startswith("-") or _WITH_VALUE.fullmatch(before)
        if complete and is_path(argument) and not Path(argument).exists():
            _check(argument)


def _check(target: str) -> None:
    folder, slash, rest = target.partition("/")
    near = difflib.get_close_matches(folder, _FOLDERS, n=1, cutoff=0.7)
    if slash and folder not in _FOLDERS and near and rest.endswith(_SUFFIXES):
        raise UserError(f"nothing makes {target}; did you mean {near[0]}/{rest}?")
    datasets = dataset_pattern()
    for pattern, kind in _NAMED:
        if match := re.fullmatch(pattern.replace("{dataset}", datasets), target):
            dataset, *others = match.groupdict().values()
            _check_name("datasets", dataset)
            for name in others:
                _check_names(kind, name)
            if kind == "experiments":
                _check_experiment(dataset, others[0], run=folder != "results")


def _check_experiment(dataset: str, name: str, run: bool) -> None:
    plan = load_plan(name, dataset)
    if run and plan.ensemble_of:
        members = " and ".join(f"runs/{dataset}_{member}" for member in plan.ensemble_of)
        raise UserError(f"{name} is an ensemble and has no run but {members}; ask for results/{dataset}_{name}.json")


def _check_names(kind: str, name: str) -> None:
    """That a preset is known or, of a composed experiment, all of its parts are."""
    made = parse_composed_name(name) if kind == "experiments" else None
    _check_name(kind, name if made is None else made.experiment)
    for feature in (made.feature, made.caption_feature) if made is not None else ():
        if feature is not None:
            _check_name("features", feature)


def _check_name(kind: str, name: str) -> None:
    known = known_presets(kind)
    if name not in known:
        raise UserError(f"unknown {kind.removesuffix('s')} {name!r}{did_you_mean(name, known)}")
