"""Snakemake that is killed at a random moment, and then unlocked and run again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.suite import StartSuite
from tests.test_killed import files
from tests.workflow.test_workflow import DEMO, ROOT

RESULT = "results/demo_vsepp.json"


def numbers(folder: Path) -> dict[str, Any]:
    return {name: value for name, value in json.loads((folder / RESULT).read_text()).items() if name == "protocols"}


@pytest.mark.nightly
def test_a_killed_workflow_and_the_next_give_the_same_result(
    commands: Path, suite_of_faults: StartSuite, tmp_path: Path
) -> None:
    suite, rng = suite_of_faults("killed workflow", 1), random.Random(0)
    presets = tmp_path / "presets" / "datasets"
    presets.mkdir(parents=True)
    (presets / "demo.yaml").write_text(DEMO)
    environment = {**os.environ, "VSE_PRESETS": str(presets.parent), "PATH": f"{commands}:{os.environ['PATH']}"}
    command = [str(commands / "snakemake"), "--snakefile", str(ROOT / "Snakefile"), "--cores", "8", RESULT]

    def start(folder: Path, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *options], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(folder: Path, *options: str) -> tuple[int, str]:
        process = start(folder, *options)
        output, _ = process.communicate()
        return process.returncode, output

    whole = tmp_path / "whole"
    whole.mkdir()
    began = time.monotonic()
    code, output = run(whole)
    seconds = time.monotonic() - began
    assert code == 0, output
    names = {name for name in files(whole) if not name.startswith((".snakemake", "logs", "benchmarks"))}
    for number in range(suite.n_tries):
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        process, moment = start(folder), rng.uniform(0, seconds)
        with suppress(subprocess.TimeoutExpired):
            process.wait(moment)
        process.send_signal(signal.SIGKILL)
        process.communicate()  # until no job of it can write any more
        codes = [run(folder, "--unlock")[0]]
        code, output = run(folder, "--rerun-incomplete")
        left = {name for name in files(folder) if not name.startswith((".snakemake", "logs", "benchmarks"))}
        detail = f"killed after {moment:.1f} of {seconds:.1f} s: {codes}, {code}"
        if code != 0:
            suite.record("wrong", f"{detail}: {output[-800:]}")
        elif numbers(folder) != numbers(whole):
            suite.record("silent", detail)
        else:
            suite.record("harmless" if left == names else "wrong", f"{detail}: {left ^ names}")
