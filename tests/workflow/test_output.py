"""What the workflow prints: a line for each step, the metrics at the end, and for a failure its log and its command."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.workflow.test_workflow import Work

pytestmark = pytest.mark.slow
RESULT, REPORT = "results/demo_vsepp.json", "results/demo_vsepp.html"


@pytest.fixture(scope="module")
def output(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, str]:
    """The folder and the output of the tiny demo. Read only."""
    work = Work(tmp_path_factory.mktemp("output"), commands)
    return work, work.make(REPORT)


def test_each_step_is_a_line_and_the_metrics_and_the_report_are_the_end(output: tuple[Work, str]) -> None:
    _, text = output
    lines = text.splitlines()
    assert len(lines) <= 40
    steps = [line.split("  ")[0] for line in lines if re.search(r"  \d+ (s|min)   \S", line)]
    assert sorted(steps) == [
        "demo",
        "embed demo_vsepp seed 0 test",
        "evaluate demo_vsepp",
        "extract demo_fc7 shard 1 of 2",
        "extract demo_fc7 shard 2 of 2",
        "merge demo_fc7",
        "report demo_vsepp",
        "train demo_vsepp seed 0",
    ]
    table = [line.split() for line in lines[-5:-1]]
    assert table[0] == [RESULT, "(full)", "R@1", "R@5", "R@10", "Med", "r"]
    assert [line[:3] for line in table[1:3]] == [["image", "to", "text"], ["text", "to", "image"]]
    assert table[3][0] == "rsum"
    assert lines[-1] == f"report: {REPORT}"


def test_the_logs_have_the_output_of_the_steps(output: tuple[Work, str]) -> None:
    work, text = output
    log = (work.folder / "logs/train_demo_vsepp_seed-0.log").read_text()
    assert "epoch 2: loss " in log
    assert "epoch" not in text


def test_a_failed_step_is_reported_by_its_log_and_the_command_that_repeats_it(
    output: tuple[Work, str], commands: Path, tmp_path: Path
) -> None:
    shutil.copytree(output[0].folder, tmp_path, dirs_exist_ok=True)
    work = Work(tmp_path, commands)
    shutil.rmtree(work.folder / "results")
    (work.folder / "runs/demo_vsepp/seed-0/test.h5").write_text("broken")
    lines = work.make(RESULT, "--config", "device=cpu", expected=1).splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("evaluate demo_vsepp "))
    assert lines[first].endswith("failed (exit code 2)")
    assert lines[first + 1] == "The last lines of logs/eval_demo_vsepp.log:"
    assert "test.h5: not a readable HDF5 file" in lines[first + 2]
    command = f"vse-eval runs/demo_vsepp/seed-0/test.h5 --protocol auto --device cpu --out {RESULT}"
    assert lines[first + 3 :] == [
        "This command repeats the step:",
        f"    VSE_DEVICE=cpu {command}",
        "Failed: evaluate demo_vsepp. To continue, remove the cause and repeat your command.",
    ]


def test_verbose_brings_the_full_output_back(output: tuple[Work, str]) -> None:
    work, _ = output
    text = work.make("--dry-run", "--verbose", "--forceall", RESULT)
    assert "rule evaluate:" in text
    assert len(text.splitlines()) > 40
