"""A phrase that is searched in one photo, by the command; and a run of phrases from its scores to a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vse.eval.cli import eval_main
from vse.eval.files.results import read_result
from vse.train.cli import embed_main, report_main, search_main


def done(command: Callable[[list[str]], None], *arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        command([str(argument) for argument in arguments])
    assert stop.value.code == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--split", "val"], "--image searches one photo, and --split is of a split"),
        (["--rerank", 5], "--image searches one photo, and --rerank is of a split"),
        (["--index", "i.faiss"], "--image searches one photo, and --index is of a split"),
    ],
)
def test_options_of_a_split_are_refused(
    options: list[Any], reason: str, phrase_run: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    assert reason in fails(search_main, phrase_run, "--image", tmp_path / "it.jpg", "a hat", *options)


def test_a_photo_that_is_not_there_or_would_be_overwritten_is_refused(
    phrase_run: Path, own_demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    assert "no such image file" in fails(search_main, phrase_run, "--image", tmp_path / "it.jpg", "a hat")
    photo = next((own_demo.parent / "images").iterdir())
    before = photo.read_bytes()
    assert str(photo) in fails(search_main, phrase_run, "--image", photo, "a hat", "--html", photo)
    assert photo.read_bytes() == before


def test_scores_become_a_result_and_a_report(phrase_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done(embed_main, phrase_run, "--out", tmp_path / "test.h5")
    done(eval_main, tmp_path / "test.h5", "--out", tmp_path / "r.json")
    done(report_main, tmp_path / "r.json", "--out", tmp_path / "r.html")
    protocol = read_result(tmp_path / "r.json").protocols["phrase"]
    assert set(protocol.phrase) == {"r1", "r5", "r10", "bound", "mean_iou"}
    assert (tmp_path / "r.html").read_text().count("<article") == 2
