"""Describe the steps of the workflow for a terminal: their names, durations, results and logs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.files.writing import read_json

_DIRECTIONS = {"i2t": "image to text", "t2i": "text to image", "phrase": "phrase to region"}
_COLUMNS = {"r1": "R@1", "r5": "R@5", "r10": "R@10", "medr": "Med r"}
_LOG_TAIL_BYTES = 20_000
_LOG_SUFFIX_PATTERN = re.compile(r"\s*2>&1 \| tee \S+$")


def name_step(rule: str, wildcards: Mapping[str, str]) -> str:
    """Return a step in words, such as ``train demo_vsepp seed 0`` or ``extract demo_fc7 shard 1 of 4``."""
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
    """Return the result of a finished step: the metric of a training or an evaluation, and otherwise the file it wrote."""
    try:
        if rule == "train":
            return f"val rsum {read_json(output)['best_rsum']:.1f}"
        if rule == "evaluate":
            *_, protocol = _distinct_protocols(output).values()
            return _describe_rsum(protocol) or f"R@1 {_mean(protocol['phrase']['r1']):.1f}"
    except (UserError, KeyError, TypeError, ValueError):
        pass  # a metric that the file does not have, such as the rsum of a run without validation
    return re.sub("^s3:/", "s3://", str(output))  # a path has single slashes


def format_metrics(result: Path) -> Iterator[str]:
    """Yield the lines of a table of a result file: R@K and the median rank of each direction, and rsum, of each protocol."""
    for name, protocol in _distinct_protocols(result).items():
        columns = [key for key in _COLUMNS if any(key in protocol.get(direction, {}) for direction in _DIRECTIONS)]
        if not columns:
            continue
        title = f"{result} ({name})"
        yield f"{title:<44}" + "".join(f"{_COLUMNS[key]:>7}" for key in columns)
        for direction, words in _DIRECTIONS.items():
            if direction in protocol:
                metrics = protocol[direction]
                values = (f"{_mean(metrics[key]):7.1f}" if key in metrics else " " * 7 for key in columns)
                yield f"  {words:<42}" + "".join(values)
        if rsum := _describe_rsum(protocol):
            yield f"  {rsum}"


def read_last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not blank, safe for a terminal; none if there is no such file."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [to_printable_line(line) for line in re.split(r"[\r\n]+", text) if line.strip()][-count:]


def repeat_command(shell_command: str, variables: Mapping[str, str]) -> str:
    """Return the command that repeats a step in a terminal: with its environment variables, and without writing a log."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*assignments, _LOG_SUFFIX_PATTERN.sub("", shell_command)])


def _distinct_protocols(result: Path) -> dict[str, dict[str, Any]]:
    """Return the protocols of a result file. Return only the last of several with the same metrics."""
    protocols = read_json(result)["protocols"]
    names = {str([protocol.get(direction) for direction in _DIRECTIONS]): name for name, protocol in protocols.items()}
    return {name: protocols[name] for name in names.values()}


def _describe_rsum(protocol: Mapping[str, Any]) -> str:
    if protocol.get("rsum") is None:
        return ""
    interval = protocol.get("ci95", {}).get("rsum")
    return f"rsum {_mean(protocol['rsum']):.1f}" + (f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else "")


def _mean(metric: Any) -> float:
    """Return a metric, or its mean over several seeds."""
    return float(metric["mean"] if isinstance(metric, Mapping) else metric)
