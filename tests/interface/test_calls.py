"""A call becomes a command: what files record of it, and errors in the names of arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import vse
from vse.arguments import as_paths, as_sets, in_python
from vse.pipeline.presets.presets import apply_overrides
from vse.train.experiment import ExperimentConfig


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("--trec-depth is that of run files", "trec_depth is that of run files"),
        ("x.csv: no caption (--skip-bad leaves them out)", "x.csv: no caption (skip_bad leaves them out)"),
        ("--set takes key=value, got 'a'", "sets takes key=value, got 'a'"),
        ("/tmp/--odd/my--name.h5: no such file", "/tmp/--odd/my--name.h5: no such file"),
        ("a -- b, --k 3", "a -- b, k 3"),
    ],
)
def test_options_in_errors_are_named_as_arguments(message: str, said: str) -> None:
    assert in_python(message) == said


def test_settings_of_python_are_those_of_the_shell() -> None:
    values = {"train.epochs": 3, "train.learning_rate": np.float64(1e-05), "loss.name": "sum", "train.restval": False}
    content = apply_overrides(ExperimentConfig, {}, as_sets(values))
    assert content["train"] == {"epochs": 3, "learning_rate": 1e-05, "restval": False}
    assert as_sets(["a=1", "b=2"]) == ["a=1", "b=2"]
    assert as_sets({"rows": ["1", None]}) == ["rows=['1', null]"]
    with pytest.raises(vse.UserError, match="loss.margin: a object is no setting"):
        as_sets({"loss.margin": object()})


def test_paths_are_texts_paths_or_what_was_opened(demo: Path) -> None:
    data = vse.open_dataset(demo)
    assert as_paths(data) == as_paths(str(demo)) == as_paths([demo]) == [demo]
    assert os.fspath(data) == str(demo)
    with pytest.raises(vse.UserError, match="no file is given"):
        vse.evaluate([])


def test_files_record_the_call(cache: Path, tmp_path: Path) -> None:
    images = np.eye(4)
    vse.evaluate(images=images, captions=images, caption_image_ids=range(4), out="r.json")
    made = json.loads((tmp_path / "r.json").read_text())["provenance"]["made"]
    assert made["command"] == (
        "vse.evaluate(images=<ndarray 4 x 4>, captions=<ndarray 4 x 4>, caption_image_ids=range(0, 4), out='r.json')"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vse.draw_demo("d", images=66, seed=-1), "seed=-1: a whole number from 0 on is needed"),
        (lambda: vse.draw_demo("d", images=2), "images 2: the demo needs at least 6 images"),
        (lambda: vse.extract("d.json"), r"by its preset \(feature\), or as that of another cache \(like\)"),
        (lambda: vse.extract("d.json", "fc7", shards=0), "shards=0: a whole number from 1 on"),
        (lambda: vse.train("f.h5", threads=True), "threads=True: a whole number from 1 on"),
        (lambda: vse.search("run", "text", k=0), "k=0: a whole number from 1 on"),
        (lambda: vse.import_data("x", "d", val=1.5), "val=1.5: a number from 0 to 1"),
        (lambda: vse.embed(["a", "b"]), "b: a second run; vse-embed takes one, and several files only with as_features"),
        (lambda: vse.evaluate("e.h5", alpha=0.5), "alpha is of an ensemble: give ensemble, too"),
        (lambda: vse.evaluate("e.h5", bootstrap=5), "bootstrap 5: an interval takes 100 samples at least"),
        (lambda: vse.evaluate(), "what is evaluated are files, or arrays"),
        (lambda: vse.compare(["e.h5"]), "compare needs the files of two models"),
        (lambda: vse.report([], "r.html"), "no file is given"),
        (lambda: vse.table("sumary"), "did you mean 'summary'"),
        (lambda: vse.table("summary"), "summary needs result files"),
        (lambda: vse.Run("nowhere"), "nowhere: no run"),
    ],
)
def test_bad_arguments_are_one_line(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(vse.UserError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_what_the_system_refuses_is_a_user_error(demo: Path) -> None:
    Path("taken").write_text("a file")
    with pytest.raises(vse.UserError, match="taken"):
        vse.draw_demo("taken/demo", images=6)
