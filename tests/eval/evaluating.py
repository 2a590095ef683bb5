"""Run the evaluation's commands in this process, and evaluate files as ``vse-eval`` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import succeeds as succeeds
from vse.eval.options import AllEvaluateOptions
from vse.eval.protocols.evaluate import evaluate_files

Fails = Callable[..., str]  # the fixture ``fails``
Edit = Callable[[Path, Callable[[Any], Any]], Path]  # the fixture ``edit``
Printed = pytest.CaptureFixture[str]


def write_result(
    files: Sequence[Path],
    out: Path,
    protocol: str | Sequence[str] = "auto",
    options: AllEvaluateOptions = AllEvaluateOptions(),
    iou: float | None = None,
) -> Path:
    evaluate_files(files, out, protocol, options if iou is None else options.model_copy(update={"iou": iou}))
    return out


def write_phrase_result(files: Sequence[Path], out: Path, iou: float | None = None, **options: Any) -> Path:
    return write_result(files, out, options=AllEvaluateOptions(**options), iou=iou)


def result_of(files: Sequence[Path], protocol: str | Sequence[str] = "auto", **options: Any) -> dict[str, Any]:
    """Return the result of files, without intervals unless ``bootstrap`` is given, as JSON; it lies next to the first one."""
    out = write_result(files, files[0].with_suffix(".json"), protocol, AllEvaluateOptions(**{"bootstrap": 0, **options}))
    result: dict[str, Any] = json.loads(out.read_text())
    return result
