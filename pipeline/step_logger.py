"""A logger plugin of Snakemake, which prints the name, duration and result of each step, and the log of a failed step.

With ``--verbose``, Snakemake prints its own, longer output instead.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging import ERROR, INFO, Handler, LogRecord
from pathlib import Path
from threading import Event, Thread
from typing import Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from tqdm import tqdm

from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.files.writing import read_json

_N_LOG_LINES = 10  # lines of the log of a failed step
_MAX_TABLES = 6  # tables of metrics at the end of a workflow; if there would be more, none is printed
_MAX_REASON_LENGTH = 100  # characters of the reason why a step runs
_REFRESH_SECONDS = 1.0
_CTRL_C_EXIT_CODE = "130"
_BAR_FORMAT = "{n_fmt} of {total_fmt} steps |{bar:16}| {elapsed}  {desc}"
_HIDDEN_EVENTS = (
    LogEvent.WORKFLOW_STARTED,
    LogEvent.JOB_STARTED,
    LogEvent.RESOURCES_INFO,
    LogEvent.PROGRESS,
    LogEvent.SHELLCMD,
    LogEvent.GROUP_INFO,
    LogEvent.RULEGRAPH,
)
# The beginnings of Snakemake's messages that are not printed. Unknown messages are printed, so that no error is lost.
_HIDDEN_MESSAGES = (
    "Assuming unrestricted shared filesystem",
    "At least one job did not complete successfully",
    "Building DAG of jobs",
    "Complete log",
    "Elapsed time",
    "Exiting because a job execution failed",
    "Reasons:",
    "Removing output files of failed job",
    "Rules with provenance triggered jobs",
    "Select jobs to execute",
    "Shutting down",
    "Some jobs were triggered by provenance information",
    "Using shell:",
    "Waiting for more resources",
    "host:",
)
_ERROR_HEADER_PATTERN = re.compile(
    r"(IncompleteFiles|InputFunction|Lock|MissingInput|MissingRule)Exception\b.*:|WorkflowError\b.*:|Error:"
)


@dataclass(frozen=True)
class _Step:
    """A step that Snakemake has started."""

    rule: str
    name: str
    outputs: list[Path]
    logs: list[Path]
    started: float

    def format_line(self, now: float, result: str) -> str:
        return f"{self.name:<44} {format_duration(now - self.started):>7}   {result}"


class LogHandler(LogHandlerBase):
    """The logger plugin ``vse``. Snakemake passes each of its messages to :meth:`emit`, and calls :meth:`close` at the end."""

    writes_to_file = False
    has_filter = False  # Snakemake's own filter applies --quiet and --printshellcmds
    has_formatter = True
    needs_rulegraph = False

    def __post_init__(self) -> None:
        Handler.__init__(self)  # not called by the base class in snakemake-interface-logger-plugins 1
        self._stream = sys.stdout if self.common_settings.stdout else sys.stderr
        self._environment = dict(os.environ)  # before the workflow sets variables for its steps
        self._running: dict[int, _Step] = {}
        self._finished: list[_Step] = []
        self._failed: dict[int, str] = {}  # the names of failed steps by the number of the job
        self._has_error = False  # whether an error outside of a step occurred
        self._rule_error = ""  # Snakemake's message about the last error of a step
        self._bar: Any = None
        self._ended = Event()

    @property
    def writes_to_stream(self) -> bool:
        """False with --verbose: then Snakemake prints its own output. Otherwise True."""
        return not self.common_settings.verbose

    def emit(self, record: LogRecord) -> None:
        if not self.writes_to_stream or record.levelno < INFO:
            return
        try:
            self._emit(record)
        except Exception:  # an error would end the thread that prints all messages
            self.handleError(record)

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            if self._bar is not None:
                self._bar.close()
            self._print_summary()
        super().close()

    def _emit(self, record: Any) -> None:
        event, message = getattr(record, "event", None), record.getMessage()
        if event == LogEvent.RUN_INFO:
            self._start_progress(record.stats["total"])
        elif event == LogEvent.JOB_INFO:
            self._start_step(record)
        elif event == LogEvent.JOB_FINISHED:
            self._finish_step(record)
        elif event == LogEvent.JOB_ERROR:
            self._fail_step(record)
        elif message.startswith("RuleException"):
            self._rule_error = message
        elif record.levelno >= ERROR:
            message = _remove_traceback(message)
            if not message.startswith(_HIDDEN_MESSAGES):
                self._has_error = True
                self._print(f"snakemake: error: {message}")
        elif event not in _HIDDEN_EVENTS and not message.startswith(_HIDDEN_MESSAGES):
            self._print(message)

    def _start_progress(self, n_steps: int) -> None:
        if self.common_settings.dryrun:
            if not self._running:
                self._print(f"Steps to run: {n_steps}")
        elif self._bar is None and self._stream.isatty():
            self._bar = tqdm(total=n_steps, bar_format=_BAR_FORMAT, file=self._stream, leave=False, dynamic_ncols=True)
            Thread(target=self._refresh_bar, daemon=True).start()

    def _start_step(self, record: Any) -> None:
        names = (record.output, record.log)
        outputs, logs = ([Path(name.removesuffix(" (send to storage)")) for name in files] for files in names)
        step = _Step(record.rule_name, build_step_name(record.rule_name, record.wildcards), outputs, logs, record.created)
        self._running[record.jobid] = step
        self._failed.pop(record.jobid, None)  # the step is repeated
        if self.common_settings.dryrun:
            reason = to_printable_line(record.reason)
            self._print(f"{step.name:<44} {reason[:_MAX_REASON_LENGTH]}{'…' if len(reason) > _MAX_REASON_LENGTH else ''}")
        if self.common_settings.printshellcmds:
            self._print(f"    {record.shellcmd}")

    def _finish_step(self, record: Any) -> None:
        step = self._running.pop(record.job_id, None)
        if step is None or self.common_settings.dryrun:
            return
        self._finished.append(step)
        self._print(step.format_line(record.created, describe_result(step.rule, step.outputs[0])))
        if self._bar is not None:
            self._bar.update()

    def _fail_step(self, record: Any) -> None:
        if record.jobid in self._failed:  # older versions of Snakemake report an error twice
            return
        step = self._running.pop(record.jobid, None) or _Step(record.rule_name, record.rule_name, [], [], record.created)
        command = record.shellcmd or ""
        code = re.search(r"non-zero exit status (\d+)", self._rule_error) if command in self._rule_error else None
        if code and code[1] == _CTRL_C_EXIT_CODE:
            self._print(step.format_line(record.created, "stopped"))
            return
        self._failed[record.jobid] = step.name
        lines = [step.format_line(record.created, f"failed (exit code {code[1]})" if code else "failed")]
        lines += [to_printable_line(record.rule_msg)] if record.rule_msg else []
        for log in map(Path, record.log):
            if last_lines := read_last_lines(log, _N_LOG_LINES):
                lines += [f"The last lines of {log}:", *(f"    {line}" for line in last_lines)]
        if command:
            lines += ["This command repeats the step:", f"    {build_repeat_command(command, self._list_added_variables())}"]
        self._print("\n".join(lines))

    def _list_added_variables(self) -> dict[str, str]:
        """Return the environment variables that the workflow has set for its steps."""
        return {
            name: value
            for name, value in os.environ.items()
            if name.startswith("VSE_") and value and self._environment.get(name) != value
        }

    def _print_summary(self) -> None:
        if self._failed:
            self._print(f"Failed: {', '.join(self._failed.values())}. To continue, remove the cause and repeat your command.")
        if self._failed or self._has_error:
            return
        files = [(step.rule, step.outputs[0]) for step in self._finished if step.outputs]
        reports = [path for rule, path in files if rule == "report"]
        results = [path for rule, path in files if rule == "evaluate"]
        results += [path.with_suffix(".json") for path in reports if path.with_suffix(".json") not in results]
        results = [path for path in results if path.is_file()]  # a result in a bucket is no local file
        if len(results) <= _MAX_TABLES:
            for result in results:
                self._print("\n".join(["", *format_metrics(result)]))
        for path in reports:
            self._print(f"report: {path}")

    def _refresh_bar(self) -> None:
        """Update the text behind the bar every second until the workflow ends.

        The text is the name and the last log line of the step that started last.
        """
        while not self._ended.wait(_REFRESH_SECONDS):
            if running := list(self._running.values()):
                lines = [line for log in running[-1].logs for line in read_last_lines(log, 1)]
                self._bar.set_description_str(": ".join([running[-1].name, *lines]))

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)


def _remove_traceback(message: str) -> str:
    """Return an error of Snakemake without its traceback and headings."""
    message = re.split(r"^Traceback\b", message, maxsplit=1, flags=re.M)[0]
    message = re.sub(r"^Wildcards:\n(  .*\n?)*", "", message, flags=re.M)
    lines = [line.strip() for line in message.splitlines()]
    return "\n".join(line for line in lines if line and not _ERROR_HEADER_PATTERN.fullmatch(line))


_TITLES_BY_DIRECTION = {"i2t": "image to text", "t2i": "text to image", "phrase": "phrase to region"}
_TITLES_BY_METRIC = {"r1": "R@1", "r5": "R@5", "r10": "R@10", "medr": "Med r"}
_LOG_TAIL_BYTES = 20_000
_LOG_SUFFIX_PATTERN = re.compile(r"\s*2>&1 \| tee \S+$")


def build_step_name(rule: str, wildcards: Mapping[str, str]) -> str:
    """Return the name of a step, such as ``train demo_vsepp seed 0`` or ``extract demo_fc7 shard 1 of 4``."""
    subject = [wildcards[key] for key in ("dataset", "feature", "experiment", "table") if key in wildcards]
    words = [rule.replace("_", " "), *(["_".join(subject)] if subject else [])]
    words += [f"{word} {wildcards[key]}" for word, key in (("seed", "seed"), ("fold", "number")) if key in wildcards]
    if "shard" in wildcards:
        words.append(f"shard {int(wildcards['shard']) + 1} of {int(wildcards['shards'])}")
    return " ".join([*words, *(wildcards[key] for key in ("split", "suffix") if key in wildcards)])


def format_duration(seconds: float) -> str:
    """Return a duration such as ``34 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def describe_result(rule: str, output: Path) -> str:
    """Return the result of a finished step as text: rsum or R@1 of a training or an evaluation, or else the ``output`` path.

    rsum is the sum of the recalls R@1, R@5 and R@10 in both directions.
    """
    try:
        if rule == "train":
            return f"val rsum {read_json(output)['best_rsum']:.1f}"
        if rule == "evaluate":
            *_, protocol = _read_metrics_by_protocol(output).values()
            return _describe_rsum(protocol) or f"R@1 {_mean_over_seeds(protocol['phrase']['r1']):.1f}"
    except (UserError, KeyError, TypeError, ValueError):
        pass  # the file lacks the metric: a run without validation has no rsum
    return re.sub("^s3:/", "s3://", str(output))  # a path has single slashes


def format_metrics(result: Path) -> Iterator[str]:
    """Yield the lines of a table for a result file: R@K and median rank for each protocol and direction, rsum per protocol."""
    for name, protocol in _read_metrics_by_protocol(result).items():
        columns = [
            key for key in _TITLES_BY_METRIC if any(key in protocol.get(direction, {}) for direction in _TITLES_BY_DIRECTION)
        ]
        if not columns:
            continue
        title = f"{result} ({name})"
        yield f"{title:<44}" + "".join(f"{_TITLES_BY_METRIC[key]:>7}" for key in columns)
        for direction, words in _TITLES_BY_DIRECTION.items():
            if direction in protocol:
                metrics = protocol[direction]
                values = (f"{_mean_over_seeds(metrics[key]):7.1f}" if key in metrics else " " * 7 for key in columns)
                yield f"  {words:<42}" + "".join(values)
        if rsum := _describe_rsum(protocol):
            yield f"  {rsum}"


def read_last_lines(log: Path, count: int) -> list[str]:
    """Return the last ``count`` lines of a log that are not blank, safe for a terminal; no lines if it is missing."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [to_printable_line(line) for line in re.split(r"[\r\n]+", text) if line.strip()][-count:]


def build_repeat_command(shell_command: str, variables: Mapping[str, str]) -> str:
    """Return a command that repeats a step in a terminal. The command sets ``variables`` and writes no log file."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*assignments, _LOG_SUFFIX_PATTERN.sub("", shell_command)])


def _read_metrics_by_protocol(result: Path) -> dict[str, dict[str, Any]]:
    """Return the metrics in a result file by protocol. If several protocols have equal metrics, return only the last one."""
    protocols = read_json(result)["protocols"]
    names = {
        str([protocol.get(direction) for direction in _TITLES_BY_DIRECTION]): name for name, protocol in protocols.items()
    }
    return {name: protocols[name] for name in names.values()}


def _describe_rsum(protocol: Mapping[str, Any]) -> str:
    if protocol.get("rsum") is None:
        return ""
    interval = protocol.get("ci95", {}).get("rsum")
    return f"rsum {_mean_over_seeds(protocol['rsum']):.1f}" + (f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else "")


def _mean_over_seeds(metric: Any) -> float:
    """Return a metric. For a result of several seeds, return the mean of the metric over the seeds."""
    return float(metric["mean"] if isinstance(metric, Mapping) else metric)
