"""Whatever lies where ``dataset.json`` should: one line and exit 2, or a data set."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile import (
    NOT_FILES,
    NOT_JSON,
    WRONG_VALUES,
    any_json,
    changed_bytes,
    places,
    refused,
    refused_or_done,
    spoilt_json,
)
from vse.cli import data_main as main

SUITE = "hostile data sets"

FIRST = ("images", 0)
SENTENCE = (*FIRST, "sentences", 0)
PHRASE = (*SENTENCE, "phrases", 0)
FIELDS: dict[str, tuple[str | int, ...]] = {
    **{"name": ("dataset",), "images": ("images",), "image": FIRST, "sentence": SENTENCE, "phrase": PHRASE},
    **{key: (*FIRST, key) for key in ("imgid", "cocoid", "filename", "filepath", "split", "sentids", "sentences")},
    **{key: (*SENTENCE, key) for key in ("sentid", "raw", "tokens", "phrases")},
    **{"image of sentence": (*SENTENCE, "imgid"), "first token": (*PHRASE, "first_token")},
}
MAY_BE = {
    "name": ("a text",),
    "cocoid": ("null", "a number", "a negative number"),
    "filepath": ("null", "an empty text", "an empty list", "an empty object"),
    "raw": ("a text", "a long text", "a path", "an escape sequence", "a zero byte"),
    "phrases": ("null", "an empty list"),
    "first token": ("a number",),
}


@pytest.fixture
def file(few: Path, tmp_path: Path) -> Path:
    shutil.copytree(few.parent, tmp_path / "data")
    return tmp_path / "data" / "dataset.json"


@pytest.mark.parametrize("kind", [*NOT_JSON, *NOT_FILES])
def test_what_is_no_json_or_no_file_is_refused(kind: str, file: Path) -> None:
    if kind in NOT_FILES:
        NOT_FILES[kind](file)
    else:
        content = NOT_JSON[kind]
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert f"{file}: " in refused(main, "check", file)


@pytest.mark.parametrize("path", ["x" * 300 + ".json", "a/" * 3000 + "b.json", "\udcff.json"])
def test_a_path_that_cannot_be_is_refused(path: str) -> None:
    refused(main, "check", path)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", WRONG_VALUES)
def test_a_wrong_value_is_refused(field: str, kind: str, file: Path) -> None:
    spoilt_json(file, FIELDS[field], WRONG_VALUES[kind])
    error = refused_or_done(main, "check", file)
    may_be = kind in MAY_BE.get(field, ())
    assert (error is None) == may_be
    assert error is None or str(file.parent) in error


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_missing_is_named_or_needless(field: str, file: Path) -> None:
    if field in ("cocoid", "filepath"):
        spoilt_json(file, FIELDS[field], None)
    spoilt_json(file, FIELDS[field], ...)
    refused_or_done(main, "check", file)


NO_NAMES = ["../../x", "a/b", ".hidden", "a\\b", "x" * 200, "ä" * 60, "a\nb", "a\tb", "\x1b[2J", " a", "~a"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_data_set_whose_name_is_no_name_is_refused(name: str, file: Path) -> None:
    spoilt_json(file, ("dataset",), name)
    assert "must name the data set" in refused(main, "check", file)


@pytest.mark.parametrize("target", ["self.jpg", "/dev/zero", "pipe", ".", "gone"])
def test_an_image_that_is_no_file_is_named(target: str, file: Path) -> None:
    first = sorted((file.parent / "images").iterdir())[0]
    first.unlink()
    if target == "pipe":
        os.mkfifo(first)
    elif target != "gone":
        first.symlink_to(first.name if target == "self.jpg" else target)
    assert f"the first is {first}" in refused(main, "check", file)


@given(data=st.data(), value=any_json)
def test_any_value_anywhere_is_refused_or_read(data: st.DataObject, value: Any, few: Path, tmp_path: Path) -> None:
    content = json.loads(few.read_text())
    content["images"] = content["images"][:2]
    keys = data.draw(st.sampled_from(list(places(content))))
    (tmp_path / "images").mkdir(exist_ok=True)
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    refused_or_done(main, "check", spoilt_json(tmp_path / "dataset.json", keys, value))


@given(data=st.data())
def test_any_bytes_are_refused_or_read(data: st.DataObject, few: Path, tmp_path: Path) -> None:
    content = json.dumps({**json.loads(few.read_text()), "images": json.loads(few.read_text())["images"][:2]}).encode()
    (tmp_path / "dataset.json").write_bytes(data.draw(changed_bytes(content)))
    refused_or_done(main, "check", tmp_path / "dataset.json")
