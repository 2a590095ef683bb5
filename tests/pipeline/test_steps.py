"""The names, durations and results by which the workflow reports its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vse.pipeline.step_logger import (
    build_repeat_command,
    build_step_name,
    describe_result,
    format_duration,
    format_metrics,
    read_last_lines,
)


@pytest.mark.parametrize(
    ("rule", "wildcards", "name"),
    [
        ("train", {"dataset": "demo", "experiment": "vsepp", "seed": "0"}, "train demo_vsepp seed 0"),
        ("extract", {"dataset": "f8k", "feature": "fc7", "shard": "00000", "shards": "00004"}, "extract f8k_fc7 shard 1 of 4"),
        ("embed", {"dataset": "demo", "experiment": "vsepp", "seed": "2", "split": "val"}, "embed demo_vsepp seed 2 val"),
        ("embed_as_features", {"dataset": "demo", "experiment": "cca", "seed": "0"}, "embed as features demo_cca seed 0"),
        ("fold", {"dataset": "mine", "number": "3"}, "fold mine fold 3"),
        ("published_table", {"table": "vsepp_4", "suffix": "tex"}, "published table vsepp_4 tex"),
        ("demo", {}, "demo"),
    ],
)
def test_a_step_is_named_in_words(rule: str, wildcards: dict[str, str], name: str) -> None:
    assert build_step_name(rule, wildcards) == name


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (34, "34 s"), (720, "12 min"), (12600, "3.5 h")])
def test_a_duration_has_a_fitting_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_result_of_a_step_is_its_metric_or_its_file(tmp_path: Path) -> None:
    record = write(tmp_path / "run.json", {"best_rsum": 356.64})
    assert describe_result("train", record) == "val rsum 356.6"
    assert describe_result("train", write(tmp_path / "other.json", {})) == str(tmp_path / "other.json")
    phrases = write(tmp_path / "phrases.json", {"protocols": {"phrase": {"phrase": {"r1": 41.26}}}})
    assert describe_result("evaluate", phrases) == "R@1 41.3"
    assert describe_result("merge", Path("features/demo_fc7.h5")) == "features/demo_fc7.h5"


def test_metrics_are_a_table_of_the_directions_and_means_over_seeds(tmp_path: Path) -> None:
    i2t = {"r1": {"mean": 53.21, "std": 1.0}, "r5": 85.6, "r10": 93.0, "medr": 1.0, "map": 40.0}
    t2i = {"r1": 20.6, "r5": 45.2, "r10": 57.1, "medr": 8.0}
    same = {"i2t": i2t, "t2i": t2i, "rsum": {"mean": 354.7, "std": 2.0}, "ci95": {"rsum": [346.9, 362.3]}}
    result = write(tmp_path / "demo_vsepp.json", {"protocols": {"1k": {**same, "folds": 1}, "full": same, "other": {}}})
    assert [line.split() for line in format_metrics(result)] == [
        [str(result), "(full)", "R@1", "R@5", "R@10", "Med", "r"],
        ["image", "to", "text", "53.2", "85.6", "93.0", "1.0"],
        ["text", "to", "image", "20.6", "45.2", "57.1", "8.0"],
        ["rsum", "354.7", "[346.9,", "362.3]"],
    ]


def test_the_last_lines_of_a_log_are_safe_for_a_terminal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"\n10%\r20%\n\n\x1b[31mred\xff\n")
    assert read_last_lines(log, 2) == ["20%", "red\ufffd"]
    assert read_last_lines(tmp_path / "none", 2) == []


def test_a_step_is_repeated_with_its_variables_and_without_its_log() -> None:
    command = "vse-train --seed 0 2>&1 | tee logs/train.log"
    assert build_repeat_command(command, {"VSE_WORDS": "my words"}) == "VSE_WORDS='my words' vse-train --seed 0"
