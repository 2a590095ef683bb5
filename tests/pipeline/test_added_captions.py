"""Captions in another language, added to a data set from JSON and from tables."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import succeeds
from vse.cli import data_main
from vse.pipeline.dataset import dataset as datasets
from vse.pipeline.dataset.columns import ImageColumns
from vse.pipeline.dataset.dataset import load_dataset_file, select_languages
from vse.pipeline.errors import UserError
from vse.pipeline.imports.added_captions import add_captions

Fails = Callable[..., str]


def german(demo: Path, n_images: int = 40) -> dict[str, list[str]]:
    """Two German captions for each of the first images, by file name."""
    images = load_dataset_file(demo).images[:n_images]
    return {image.file: [f"Ein Überblick Nr. {image.imgid}", f"Größe {image.imgid}, schön"] for image in images}


def test_captions_are_added_by_file_name_and_nothing_else_changes(demo: Path, tmp_path: Path) -> None:
    captions = german(demo)
    (tmp_path / "de.json").write_text(json.dumps(captions))
    out = add_captions(demo, tmp_path / "de.json", "de", out=tmp_path / "demo_de")
    before, after = load_dataset_file(demo), load_dataset_file(out)
    assert (after.name, after.parent, after.tokeniser) == ("demo_de", "demo", "unicode_words")
    assert len({c.sentid for image in after.images for c in image.captions}) == sum(len(i.captions) for i in after.images)
    for old, new in zip(before.images, after.images, strict=True):
        assert (old.imgid, old.file, old.split) == (new.imgid, new.file, new.split)
        own = [c for c in new.captions if c.language == "en"]
        assert [(c.sentid, c.raw, c.tokens) for c in own] == [(c.sentid, c.raw, c.tokens) for c in old.captions]
        assert [c.raw for c in new.captions if c.language == "de"] == captions.get(new.file, [])
    words = [c.tokens for c in after.images[0].captions if c.language == "de"]
    imgid = str(after.images[0].imgid)
    assert words == [("ein", "überblick", "nr", imgid), ("größe", imgid, "schön")]


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_a_table_gives_the_same_captions_as_json(demo: Path, tmp_path: Path, encoding: str, delimiter: str) -> None:
    captions = german(demo)
    (tmp_path / "de.json").write_text(json.dumps(captions))
    with (tmp_path / "de.csv").open("w", encoding=encoding, newline="") as stream:
        table = csv.writer(stream, delimiter=delimiter)
        table.writerow(["file", "caption"])
        table.writerows([file.upper(), text] for file, texts in captions.items() for text in texts)
    files = [add_captions(demo, tmp_path / f"de.{kind}", "de", out=tmp_path / kind / "demo_de") for kind in ("json", "csv")]
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second


def test_a_third_language_is_added_and_the_default_folder_is_beside_the_data_set(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "toy").mkdir(parents=True)
    content = json.loads(demo.read_text())
    file = tmp_path / "data" / "toy" / "dataset.json"
    file.write_text(json.dumps({**content, "dataset": "toy"}))
    (tmp_path / "data" / "toy" / "images").symlink_to(demo.parent / "images")
    for language in ("de", "zh-Hans"):
        names = dict.fromkeys(german(demo, 66), f"{language} 图片")
        (tmp_path / "more.json").write_text(json.dumps(names))
        succeeds(data_main, "add-captions", file, "--language", language, "--file", tmp_path / "more.json")
        file = file.parent.with_name(f"{file.parent.name}_{language}") / "dataset.json"
    dataset = load_dataset_file(file)
    assert (dataset.name, dataset.parent) == ("toy_de_zh-Hans", "toy")
    assert [c.language for c in dataset.images[0].captions] == ["en"] * 5 + ["de", "zh-Hans"]
    assert dataset.images[0].captions[-1].tokens == ("zh", "hans", "图", "片")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"nobody.jpg": ["Ein Hund"]}, "none of its 1 rows"),
        ({"FIRST": ["!!"]}, "has no word"),
        ({"FIRST": [7]}, "is not a text"),
        ([], "not an object"),
    ],
)
def test_wrong_files_are_refused_before_anything_is_written(demo: Path, tmp_path: Path, content: Any, fault: str) -> None:
    first = load_dataset_file(demo).images[0].file
    (tmp_path / "de.json").write_text(json.dumps(content).replace("FIRST", first))
    with pytest.raises(UserError, match=fault):
        add_captions(demo, tmp_path / "de.json", "de", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_options_are_refused(demo: Path, tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "de.json").write_text(json.dumps(german(demo)))
    given = ["add-captions", demo, "--file", tmp_path / "de.json", "--out", tmp_path / "out", "--language"]
    assert "not a language" in fails(data_main, *given, "German language")
    assert "another name" in fails(data_main, *given, "de", "--name", "demo")
    once = add_captions(demo, tmp_path / "de.json", "de", out=tmp_path / "out")
    again = ["add-captions", once, "--file", tmp_path / "de.json", "--language"]
    assert "has captions in the language 'de' already" in fails(data_main, *again, "de")
    succeeds(data_main, "folds", once, "--out", tmp_path / "folds", "--only", 0)
    assert load_dataset_file(tmp_path / "folds" / "fold-0.json").parent == "demo"  # which has the features
    assert "is a fold" in fails(data_main, "add-captions", tmp_path / "folds" / "fold-0.json", *again[2:], "fr")


def test_languages_are_selected_and_kept_in_columns(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "de.json").write_text(json.dumps(german(demo)))
    file = add_captions(demo, tmp_path / "de.json", "de", out=tmp_path / "demo_de")
    dataset = load_dataset_file(file)
    of_german = select_languages(dataset.images, ["de"], file)
    assert {c.language for image in of_german for c in image.captions} == {"de"}
    assert select_languages(dataset.images, [], file) is dataset.images
    with pytest.raises(UserError, match="no caption in the language 'fr'"):
        select_languages(dataset.images, ["fr"], file)
    with pytest.raises(UserError, match="its captions name no language"):
        select_languages(load_dataset_file(demo).images, ["en"], demo)
    if any(c.phrases for image in dataset.images for c in image.captions):
        plain = json.loads(file.read_text())
        for image in plain["images"]:
            for sentence in image["sentences"]:
                sentence.pop("phrases", None)
        file.write_text(json.dumps(plain))
        dataset = load_dataset_file(file)
    monkeypatch.setattr(datasets, "MIN_LARGE_JSON_BYTES", 1)
    shutil.copy(file, tmp_path / "dataset.json")
    load_dataset_file(tmp_path / "dataset.json")
    read = load_dataset_file(tmp_path / "dataset.json").images
    assert isinstance(read, ImageColumns)
    assert tuple(read) == tuple(dataset.images)


def test_a_wrong_language_in_a_data_set_is_refused(demo: Path, tmp_path: Path) -> None:
    content = json.loads(demo.read_text())
    content["images"][0]["sentences"][0]["language"] = "german!"
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="'language' must be a tag"):
        load_dataset_file(tmp_path / "dataset.json")
