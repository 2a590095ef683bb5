"""Every line of a CSV table belongs to a row, and every row is taken or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.import_files import write_photos
from tests.pipeline.test_import_table import failures, imported
from vse.features.data_cli import main

Fails = Callable[..., str]


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "birds", ["a.jpg", "b.jpg", "c.jpg"])


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "captions.csv"
    path.write_text(text, newline="")
    return path


def captions(birds: Path, path: Path, *options: str) -> list[str]:
    dataset = imported(birds, "--captions", path, "--out", path.parent / "out", *options)
    return [each.raw for image in dataset.images for each in image.captions]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_quoted_caption_may_span_lines_and_have_delimiters(birds: Path, tmp_path: Path, end: str) -> None:
    text = 'file,caption\na.jpg,"Two, and\nlines, here"\nb.jpg,one\n'.replace("\n", end)
    assert captions(birds, table(tmp_path, text)) == [f"Two, and{end}lines, here", "one"]


def test_two_marks_that_would_swallow_a_row_stop_the_import(birds: Path, tmp_path: Path, fails: Fails) -> None:
    path = table(tmp_path, 'file,caption\na.jpg,"tall\nb.jpg,one\nc.jpg,27"\n')
    for options in ((), ("--skip-bad",)):
        line = fails(main, "import", birds, "--captions", path, "--out", tmp_path / "out", *options)
        assert f"{path}: line 2: a quotation mark in the column caption is open" in line
        assert "line 4" in line
        assert "--quoting none" in line
    assert captions(birds, path, "--quoting", "none") == ['"tall', "one", '27"']


def test_one_mark_costs_its_own_row_alone(birds: Path, tmp_path: Path) -> None:
    path = table(tmp_path, 'file,caption\na.jpg,"tall\nb.jpg,"one, two"\nc.jpg,three\n')
    assert captions(birds, path, "--skip-bad") == ["one, two", "three"]
    assert [place for place, _ in failures(tmp_path / "out")] == [f"{path}: line 2"]


@pytest.mark.parametrize("header", ['file,capt"ion', '"file,caption', 'file,caption,split"'])
def test_a_mark_in_the_header_is_refused(birds: Path, tmp_path: Path, fails: Fails, header: str) -> None:
    path = table(tmp_path, f"{header}\na.jpg,one,train\n")
    assert "not a CSV file with the names of its columns" in fails(
        main, "import", birds, "--captions", path, "--out", tmp_path / "o"
    )


def test_lines_and_rows_are_counted(birds: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vse")
    path = table(tmp_path, 'file,caption,split\n\na.jpg,"Two\nlines",train\nb.jpg,one,\nb.jpg,two,\nnone.jpg,x,train\n')
    assert captions(birds, path, "--skip-bad") == ["Two\nlines"]
    assert "7 lines: 1 header, 1 blank, 4 rows" in caplog.text
    assert "4 rows read: 1 taken, 3 refused" in caplog.text
    assert len(failures(tmp_path / "out")) == 3, "each row of an image without a split is listed"
