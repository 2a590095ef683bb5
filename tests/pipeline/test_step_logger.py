"""The lines that the logger plugin prints for Snakemake's messages."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from tests.pipeline.conftest import Patch
from vse.pipeline.step_logger import LogHandler

STEP = {
    "jobid": 7,
    "rule_name": "train",
    "wildcards": {"dataset": "demo", "experiment": "vsepp", "seed": "0"},
    "output": ["run.json"],
    "log": ["train.log"],
    "reason": "Missing output files: run.json",
    "shellcmd": "vse-train 2>&1 | tee train.log",
    "rule_msg": None,
}
Report = Callable[..., str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def report(monkeypatch: Patch) -> Report:
    """Return a function that passes messages of Snakemake to a handler and returns the printed text."""

    def print_records(*records: tuple[Any, ...], **settings: bool) -> str:
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        handler = new_handler(**settings)
        for one in records:
            handler.handle(record(*one))
        handler.close()
        return stream.getvalue()

    return print_records


def new_handler(**settings: bool) -> LogHandler:
    names = ("verbose", "stdout", "dryrun", "printshellcmds")
    return LogHandler(SimpleNamespace(**(dict.fromkeys(names, False) | settings)), None)  # type: ignore[arg-type]


def record(event: LogEvent | None, content: dict[str, Any], text: str = "", level: int = logging.INFO) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text, "levelno": level, "event": event, "created": 0.0, **content})


def test_an_unknown_message_is_printed_and_the_usual_ones_are_not(report: Report) -> None:
    messages = ["Building DAG of jobs...", "SLURM run ID: 4711", "Select jobs to execute..."]
    assert report(*((None, {}, message) for message in messages)) == "SLURM run ID: 4711\n"
    assert report((LogEvent.SHELLCMD, {}, "Shell command: x"), (LogEvent.PROGRESS, {})) == ""


def test_with_verbose_the_output_is_that_of_snakemake(report: Report) -> None:
    assert report((None, {}, "SLURM run ID: 4711"), verbose=True) == ""
    assert new_handler(verbose=True).writes_to_stream is False


def test_an_error_has_no_heading_and_no_traceback(report: Report) -> None:
    error = 'InputFunctionException in rule prepare in file "data.smk", line 16:\nError:\n  WorkflowError:\n    no photographs'
    error += '\nWildcards:\n  dataset=f30k\nTraceback:\n  File "common.smk", line 139, in require'
    assert report((LogEvent.ERROR, {}, error, logging.ERROR)) == "snakemake: error: no photographs\n"


def test_a_dry_run_lists_the_steps_with_their_reasons_and_on_demand_with_their_commands(report: Report) -> None:
    records = [(LogEvent.RUN_INFO, {"stats": {"total": 1}}), (LogEvent.JOB_INFO, STEP), (LogEvent.JOB_FINISHED, {"job_id": 7})]
    lines = report(*records, dryrun=True, printshellcmds=True).splitlines()
    assert lines[0] == "Steps to run: 1"
    assert lines[1].split(maxsplit=4) == ["train", "demo_vsepp", "seed", "0", STEP["reason"]]
    assert lines[2:] == [f"    {STEP['shellcmd']}"]


def test_a_step_that_succeeds_when_it_is_repeated_has_not_failed(report: Report) -> None:
    records = [(LogEvent.JOB_INFO, STEP), (LogEvent.JOB_ERROR, STEP)]
    failed = report(*records, (LogEvent.JOB_ERROR, STEP))
    assert failed.count("This command repeats the step:\n    vse-train\n") == 1
    assert failed.endswith("Failed: train demo_vsepp seed 0. To continue, remove the cause and repeat your command.\n")
    repeated = report(*records, (LogEvent.JOB_INFO, STEP), (LogEvent.JOB_FINISHED, {"job_id": 7}))
    assert repeated.splitlines()[-1].split() == ["train", "demo_vsepp", "seed", "0", "0", "s", "run.json"]


def test_a_step_that_ctrl_c_stops_is_no_failure(report: Report) -> None:
    error = f"RuleException:\nCommand '{STEP['shellcmd']}' returned non-zero exit status 130."
    stopped = report((LogEvent.JOB_INFO, STEP), (LogEvent.ERROR, {}, error, logging.ERROR), (LogEvent.JOB_ERROR, STEP))
    assert stopped.split() == ["train", "demo_vsepp", "seed", "0", "0", "s", "stopped"]


def test_a_terminal_has_a_bar_of_the_finished_steps(monkeypatch: Patch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    handler = new_handler()
    for one in ((LogEvent.RUN_INFO, {"stats": {"total": 2}}), (LogEvent.JOB_INFO, STEP)):
        handler.handle(record(*one))
    assert "0 of 2 steps" in stream.getvalue()
    handler.handle(record(LogEvent.JOB_FINISHED, {"job_id": 7}))
    handler.close()
    assert "train demo_vsepp seed 0 " in stream.getvalue()
