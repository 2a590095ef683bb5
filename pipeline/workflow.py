"""Plan the jobs of the workflow without running them, and check the names of its targets."""

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
from vse.pipeline.files.inputs import is_path_text
from vse.pipeline.presets.presets import list_preset_names, load_experiment_outline
from vse.pipeline.presets.schema import parse_composed_name

PLANNING_VARIABLE = "VSE_PLANNING"  # set while jobs are planned, so that missing published files are no error


@dataclass(frozen=True)
class PlannedFile:
    """A file that a planned job would write, with the rule of this job."""

    rule: str
    path: Path


def plan_files(targets: Sequence[str], settings: Sequence[str] = (), snakefile: Path = Path("Snakefile")) -> list[PlannedFile]:
    """Return the files that the workflow would write for ``targets``. Files that are up to date are left out.

    ``settings`` are the arguments of ``snakemake --config``. Raises UserError with Snakemake's message if Snakemake fails.
    """
    if not snakefile.is_file():
        raise UserError(f"{snakefile}: no such file; run this in the folder of the workflow, where snakemake runs")
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "--summary", *targets, "--nolock"]
    command += ["--config", *settings] if settings else []
    environment = {**os.environ, PLANNING_VARIABLE: "1"}
    summary = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = summary.stdout.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith("output_file\t")), None)
    if summary.returncode or start is None:
        raise UserError(_find_error_message(summary.stderr or summary.stdout))
    rows = csv.DictReader(lines[start:], delimiter="\t", quoting=csv.QUOTE_NONE)
    return [PlannedFile(row["rule"], Path(row["output_file"])) for row in rows if row["plan"].startswith("update")]


def _find_error_message(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for mark in ("snakemake: error: ", "MissingRuleException", "WorkflowError", "Error"):
        for index, line in enumerate(lines):
            if mark in line:
                message = line.partition("snakemake: error: ")[2] or " ".join(lines[index : index + 2])
                return f"the workflow refuses: {message}"
    return f"the workflow refuses: {lines[-1] if lines else 'snakemake printed no message'}"


_TARGET_FOLDERS = ("data", "features", "results", "runs")
# Options of Snakemake without a value, after which an argument is a target.
_OPTIONS_WITHOUT_VALUE = ("--", "-n", "--dry-run", "-p", "-np", "-k", "--keep-going", "-F", "--forceall", "--rerun-incomplete")
_OPTION_WITH_VALUE_PATTERN = re.compile(r"-[cj]\w+|--(cores|jobs)=\w+")  # options that contain their value, such as -c4
_TARGET_SUFFIXES = (".csv", ".h5", ".html", ".json", ".tex")
# Pairs of a pattern for targets and a kind of presets. In the pattern, {dataset} stands for build_dataset_pattern(). Every
# group but ``dataset`` matches the name of a preset of this kind.
_TARGET_PATTERNS = (
    (r"features/(?P<dataset>{dataset})_(?P<experiment>[^/.]+)-\d+_(images|captions)\.h5", "experiments"),
    (r"features/(?P<dataset>{dataset})_(?P<feature>(?![^/.]*-\d+_(?:images|captions)\.)[^/.]+)\.h5", "features"),
    (r"results/tables/(?:ladder|summary)_(?P<dataset>[^/.]+)\.(csv|svg)", ""),
    (r"results/(?P<dataset>{dataset})_(?P<experiment>[^/.]+)\.(json|html)", "experiments"),
    (r"runs/(?P<dataset>{dataset})_(?P<experiment>[^/.]+)/.*", "experiments"),
    (r"data/(?P<dataset>[^/]+)/(?:dataset|fold-\d+)\.json", ""),
)


def build_dataset_pattern() -> str:
    """Return a regular expression for the name of a data set in a file name.

    The expression matches names without an underscore, and names of presets with an underscore, such as f30k_entities.
    """
    return "|".join([*(re.escape(name) for name in list_preset_names("datasets") if "_" in name), "[^_/]+"])


def check_targets(arguments: Sequence[str]) -> None:
    """Raise UserError, with the nearest name, if a target has an unknown preset or a misspelt folder.

    ``arguments`` is the command line of Snakemake, including the name of the program. Existing files, paths that no rule
    writes, and arguments that may be values of options are not checked.
    """
    for before, argument in pairwise(arguments):
        is_target = (
            before in _OPTIONS_WITHOUT_VALUE or not before.startswith("-") or _OPTION_WITH_VALUE_PATTERN.fullmatch(before)
        )
        if is_target and is_path_text(argument) and not Path(argument).exists():
            _check_target(argument)


def _check_target(target: str) -> None:
    folder, slash, rest = target.partition("/")
    near = difflib.get_close_matches(folder, _TARGET_FOLDERS, n=1, cutoff=0.7)
    if slash and folder not in _TARGET_FOLDERS and near and rest.endswith(_TARGET_SUFFIXES):
        raise UserError(f"no rule writes {target}; did you mean {near[0]}/{rest}?")
    datasets = build_dataset_pattern()
    for pattern, kind in _TARGET_PATTERNS:
        if match := re.fullmatch(pattern.replace("{dataset}", datasets), target):
            dataset, *others = match.groupdict().values()
            _check_preset_name("datasets", dataset)
            for name in others:
                _check_preset_or_composed_name(kind, name)
            if kind == "experiments":
                _check_experiment(dataset, others[0], needs_run=folder != "results")


def _check_experiment(dataset: str, name: str, needs_run: bool) -> None:
    outline = load_experiment_outline(name, dataset)
    if needs_run and outline.ensemble_of:
        members = " and ".join(f"runs/{dataset}_{member}" for member in outline.ensemble_of)
        raise UserError(f"{name} is an ensemble and has no run but {members}; request results/{dataset}_{name}.json instead")


def _check_preset_or_composed_name(kind: str, name: str) -> None:
    composed = parse_composed_name(name) if kind == "experiments" else None
    _check_preset_name(kind, name if composed is None else composed.experiment)
    for feature in (composed.feature, composed.caption_feature) if composed is not None else ():
        if feature is not None:
            _check_preset_name("features", feature)


def _check_preset_name(kind: str, name: str) -> None:
    known = list_preset_names(kind)
    if name not in known:
        raise UserError(f"unknown {kind.removesuffix('s')} {name!r}{did_you_mean(name, known)}")
