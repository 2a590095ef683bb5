"""A run is not tested on images that it was trained on, whatever these are called."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

from tests.conftest import TINY_FEATURE
from vse.eval.cli import eval_main
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.cnn import CnnExtractor
from vse.train.cli import embed_main

Edit = Callable[[Path, Callable[[Any], None]], Path]


def done(main: Callable[..., None], *arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 0


@pytest.fixture
def leaking(demo: Path, tmp_path: Path) -> Path:
    """The cache of another data set: 2 training and 3 test images of the demo under other names, to be tested on."""
    images = json.loads(demo.read_text())["images"]
    taken = [image for image in images if image["split"] == "train"][:2]
    taken += [image for image in images if image["split"] == "test"][:3]
    (tmp_path / "other" / "images").mkdir(parents=True)
    for number, image in enumerate(taken):
        shutil.copy(demo.parent / "images" / image["filename"], tmp_path / "other" / "images" / f"photo{number}.jpg")
        image.update(filename=f"photo{number}.jpg", split="test")
    file = tmp_path / "other" / "dataset.json"
    file.write_text(json.dumps({"dataset": "other", "images": taken}))
    extract_shards(file, CnnExtractor(TINY_FEATURE), tmp_path / "features" / "other_tiny.h5", 1)
    return merge(file, tmp_path / "features" / "other_tiny.h5", 1)


def test_images_of_another_data_set_that_were_trained_on_are_refused(
    own_run: Path, leaking: Path, demo: Path, fails: Callable[..., str]
) -> None:
    line = fails(embed_main, own_run, "--features", leaking)
    assert f"{own_run}: was trained on 2 of the 5 images of split 'test'" in line
    assert "photo0.jpg is demo_000000.jpg in split 'train' of" in line
    assert "--allow-leak" in line
    assert not (own_run / "other_test.h5").exists()


def test_to_go_on_is_an_option_and_the_result_says_so(
    own_run: Path, leaking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done(embed_main, own_run, "--features", leaking, "--allow-leak")
    assert "was trained on 2 of the 5 images" in capsys.readouterr().err
    with h5py.File(own_run / "other_test.h5") as file:
        assert json.loads(file.attrs["provenance"])["images_trained_on"] == {"images": 2, "of": 5}
    done(eval_main, own_run / "other_test.h5", "--bootstrap", 0, "--out", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["provenance"]["images_trained_on"] == {"images": 2, "of": 5}


def test_other_splits_of_the_same_images_are_refused(
    own_run: Path, own_demo: Path, edit: Edit, fails: Callable[..., str]
) -> None:
    def exchange(content: Any) -> None:
        for image in content["images"]:
            image["split"] = {"train": "test", "test": "train"}.get(image["split"], image["split"])

    line = fails(embed_main, own_run, "--captions", edit(own_demo, exchange))
    assert "was trained on 48 of the 48 images of split 'test'" in line


def test_its_own_training_split_may_be_embedded(own_run: Path) -> None:
    done(embed_main, own_run, "--split", "train")
    with h5py.File(own_run / "train.h5") as file:
        assert len(file["image_ids"]) == 48
        assert "images_trained_on" not in json.loads(file.attrs["provenance"])


def test_if_its_own_data_set_is_gone_that_is_said(own_run: Path, leaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((own_run / "run.json").read_text())
    for features in (record["features"], record.get("eval_features", {})):
        features["path"] = "../gone.h5"
    (own_run / "run.json").write_text(json.dumps(record))
    done(embed_main, own_run, "--features", leaking)
    assert "whether it was trained on images of" in capsys.readouterr().err
