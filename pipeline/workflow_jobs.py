"""The jobs that the workflow would run for some targets, as Snakemake's own summary has them; nothing is run."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vse.pipeline.errors import UserError

PLANNING = "VSE_PLANNING"  # set while jobs are asked for: published files that are missing are then no error


@dataclass(frozen=True)
class PlannedFile:
    """A file that a job of a rule would make."""

    rule: str
    path: Path


def planned_files(
    targets: Sequence[str], settings: Sequence[str] = (), snakefile: Path = Path("Snakefile")
) -> list[PlannedFile]:
    """The files that the workflow has to make for ``targets``, those that are there and up to date left out.

    ``settings`` are what ``snakemake --config`` takes. :class:`UserError` has Snakemake's own words if it refuses.
    """
    if not snakefile.is_file():
        raise UserError(f"{snakefile}: no such file; run this in the folder of the workflow, where snakemake runs")
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "--summary", *targets, "--nolock"]
    command += ["--config", *settings] if settings else []
    environment = {**os.environ, PLANNING: "1"}
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
