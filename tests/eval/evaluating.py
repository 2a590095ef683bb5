"""Evaluate files as ``vse-eval`` does, and return the result file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vse.eval.options import EvaluationOptions
from vse.eval.protocols.evaluate import evaluate_files


def write_result(
    files: Sequence[Path],
    out: Path,
    protocol: str | Sequence[str] = "auto",
    options: EvaluationOptions = EvaluationOptions(),
    iou: float | None = None,
) -> Path:
    evaluate_files(files, out, protocol, options if iou is None else options.model_copy(update={"iou": iou}))
    return out


def write_phrase_result(files: Sequence[Path], out: Path, iou: float | None = None, **options: Any) -> Path:
    return write_result(files, out, options=EvaluationOptions(**options), iou=iou)
