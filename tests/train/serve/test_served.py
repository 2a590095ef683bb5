"""Runs that are loaded side by side: of which data set they are, what they read, and what is loaded but once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.train.conftest import experiment, forget_captions
from tests.train.serve.conftest import MANY
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import decode_image
from vse.train.options import RunFiles
from vse.train.serve.answers import ServedRuns, UnknownId
from vse.train.training import train


def test_runs_of_one_name_are_known_by_their_folders(served: ServedRuns, vectors_run: Path, sets_run: Path) -> None:
    assert [run.name for run in served.runs] == [f"vsepp, seed 0 ({run})" for run in (vectors_run, sets_run)]
    assert [run.attends for run in served.runs] == [False, True]
    assert served.n_images == 12


def test_a_query_reads_no_file_of_a_run_or_of_the_data_set(own_cache: Path, tmp_path: Path) -> None:
    run = train(own_cache, experiment("train.epochs=1"), out=tmp_path / "run")
    served = ServedRuns([run], "test", [RunFiles()], MANY, "cpu")
    before = served.answers("a red square", 3)[0]
    images = own_cache.parent.parent / "data" / "images"
    photo = decode_image(next(images.iterdir()))
    captions = served.answers(photo, 3)[0]
    for folder in (run, own_cache.parent, images.parent):
        shutil.rmtree(folder)
    assert served.answers("a red square", 3)[0].hits == before.hits
    assert served.answers(photo, 3)[0].hits == captions.hits


def test_runs_of_two_data_sets_are_one_line(
    vectors_run: Path, own_cache: Path, tmp_path: Path, edit: Callable[..., Path]
) -> None:
    data = own_cache.parent.parent / "data" / "dataset.json"

    def change(content: dict[str, Any]) -> None:
        content["images"][-1]["sentences"][0]["raw"] += "!"

    edit(data, change)
    other = train(forget_captions(own_cache), experiment("train.epochs=1"), out=tmp_path / "run")
    with pytest.raises(UserError, match="runs side by side search one file"):
        ServedRuns([vectors_run, other], "test", [RunFiles()] * 2, MANY, "cpu")


def test_imported_features_read_texts_alone(regions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = train(regions, experiment("train.epochs=1", "model.similarity={name: scan}", *WORDS), out=tmp_path / "run")
    served = ServedRuns([run], "test", [RunFiles()], MANY, "cpu")
    assert "reads no photos" in caplog.text
    assert not served.reads_photos
    assert len(served.answers("a red square", 3)[0].hits) == 3
    (answer,) = served.answers(Image.new("RGB", (32, 32)), 3)
    assert answer.error == "It reads no photos here; the terminal of vse-serve says why."


WORDS = ["model.caption_encoder={name: gru, states: all, bidirectional: true}"]


def test_a_photo_that_cannot_be_read_has_no_number(own_cache: Path, tmp_path: Path) -> None:
    run = train(own_cache, experiment("train.epochs=1"), out=tmp_path / "run")
    served = ServedRuns([run], "test", [RunFiles()], MANY, "cpu")
    image = served.dataset.split("test")[0]
    served.dataset.image_path(image).write_bytes(b"spoilt")
    for number in (image.imgid, -5):
        with pytest.raises(UnknownId):
            served.small_photo(number)
