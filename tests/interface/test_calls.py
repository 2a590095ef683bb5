"""The arguments of calls: conversion, records in files, errors that name arguments, and errors that show the new call."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import vse
from vse import former_calls
from vse.arguments import as_paths, replace_option_names, settings_as_texts
from vse.pipeline.presets.presets import apply_overrides
from vse.training.experiment import ExperimentConfig


def test_options_in_errors_are_named_as_arguments() -> None:
    assert replace_option_names("--set takes key=value, got 'a'") == "sets takes key=value, got 'a'"
    assert replace_option_names("x.csv: no caption (--skip-bad omits it)") == "x.csv: no caption (skip_bad omits it)"
    assert replace_option_names("/--odd/my--name.h5 -- b, --k 3") == "/--odd/my--name.h5 -- b, k 3"


def test_settings_in_python_equal_settings_in_the_shell() -> None:
    values = {"train.epochs": 3, "train.learning_rate": np.float64(1e-05), "loss.name": "sum", "train.restval": False}
    content = apply_overrides(ExperimentConfig, {}, settings_as_texts(values))
    assert content["train"] == {"epochs": 3, "learning_rate": 1e-05, "restval": False}
    assert settings_as_texts(["a=1", "b=2"]) == ["a=1", "b=2"]
    assert settings_as_texts({"rows": ["1", None]}) == ["rows=['1', null]"]
    with pytest.raises(vse.UserError, match="loss.margin: a value of type object cannot be a setting"):
        settings_as_texts({"loss.margin": object()})


def test_paths_are_texts_path_objects_or_opened_files(demo: Path) -> None:
    data = vse.open_dataset(demo)
    assert as_paths(data) == as_paths(str(demo)) == as_paths([demo]) == [demo]
    assert os.fspath(data) == str(demo)


def test_files_record_the_call(tmp_path: Path) -> None:
    images = np.eye(4)
    embedded = vse.embeddings(images, images, range(4))
    result = vse.evaluate(embedded, options=vse.EvaluateOptions(cross_check=False)).save("r.json")
    made = json.loads((tmp_path / "r.json").read_text())["provenance"]["made"]
    call = "vse.evaluate(SplitEmbeddings('arrays'), options=vse.EvaluateOptions(cross_check=False))"
    assert made["command"] == call
    indexed = result.with_index("Flat")
    assert indexed.json["provenance"]["made"]["command"] == f"{call}.with_index('Flat')"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vse.draw_demo("d", images=2), "images 2: the demo needs at least 6 images"),
        (lambda: vse.draw_demo(Path(__file__, "demo"), images=6), "test_calls.py"),
        (lambda: vse.extract("d.json"), r"by its preset \(feature\) or by another cache \(like\)"),
        (lambda: vse.TrainOptions(threads=True), "threads=True: a whole number from 1 on"),
        (lambda: vse.TrainOptions(thread=1), r"thread=1: TrainOptions has no such argument .*'threads'"),
        (lambda: vse.evaluate("e.h5", bootstrap=5), "bootstrap 5: .*100"),
        (lambda: vse.evaluate(), r"embeddings=None: vse.embeddings\(...\), a path"),
        (lambda: vse.evaluate(np.eye(3)), r"embeddings=<ndarray 3 x 3>: vse.embeddings\(...\), a path"),
        (lambda: vse.table("sumary"), "did you mean 'summary'"),
        (lambda: vse.table("summary"), "summary needs result files"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_are_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(vse.UserError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_former_functions_and_arguments_show_the_new_call() -> None:
    for name in former_calls.NEW_CALLS_BY_FUNCTION:
        assert name not in dir(vse)
        with pytest.raises(vse.UserError, match=rf"vse\.{name}\(...\) is now vse\.\w+\("):
            getattr(vse, name)("a", b=1)
    for name, moved in former_calls.NEW_CALLS_BY_ARGUMENT.items():
        for argument, call in moved.items():
            with pytest.raises(vse.UserError) as refusal:
                getattr(vse, name)("a", **{argument: 1})
            assert str(refusal.value) == f"vse.{name}(..., {argument}=...) is now {call}"


def test_no_function_or_method_has_more_than_eight_parameters() -> None:
    for name in set(vse.__all__) - {"__version__", "UserError"}:
        part = getattr(vse, name)
        members = inspect.getmembers(part, inspect.isfunction) if inspect.isclass(part) else []
        public = [code for key, code in members if not key.startswith("_") and code.__module__.startswith("vse.")]
        for function in [part, *public]:
            assert len([parameter for parameter in inspect.signature(function).parameters if parameter != "self"]) <= 8
