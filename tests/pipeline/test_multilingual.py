"""Published data sets with captions in several languages, as files in their published layouts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import succeeds
from vse.cli import data_main
from vse.pipeline.dataset.columns import count_languages
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file

Fails = Callable[..., str]


def photos(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / name)


def lines(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{text}\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def prepared(name: str, source: Path) -> Dataset:
    out = source.parent / name
    succeeds(data_main, "prepare", name, "--source", source, "--out", out)
    return load_dataset_file(out / "dataset.json")


def captions_of(dataset: Dataset, row: int) -> list[tuple[str, str]]:
    return [(caption.language, caption.raw) for caption in dataset.images[row].captions]


@pytest.fixture
def xm3600(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    photos(source / "images", "0a.jpg", "0b.jpg")
    entries = [
        {"image/key": "0a", "image/locale": "de", "de": {"caption": ["Ein Hund", "Hunde"]}, "th": {"caption": ["สุนัข"]}},
        {"image/key": "0b", "image/locale": "quz", "quz": {"caption": ["Huk allqu"]}},
    ]
    lines(source / "captions.jsonl", *map(json.dumps, entries))
    return source


@pytest.fixture
def multi30k(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    task = source / "data" / "task2"
    files = {"train": ("1.jpg", "2.jpg"), "val": ("3.jpg",), "test_2016": ("4.jpg",)}
    for split, names in files.items():
        photos(source / "flickr30k-images", *names)
        lines(task / "image_splits" / f"{split}_images.txt", *names)
        for language in ("de", "en"):
            for number in (1, 2):
                end = ".gz" if language == "de" else ""
                lines(task / "raw" / f"{split}.{number}.{language}{end}", *(f"{language} {number} {name}" for name in names))
    return source


@pytest.fixture
def xtd(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    names = ["COCO_train2014_000000000009.jpg", "COCO_val2014_000000000042.jpg"]
    photos(source / "images", *(f"{name.split('_')[1]}/{name}" for name in names))
    lines(source / "XTD10" / "test_image_names.txt", *names)
    lines(source / "XTD10" / "test_1kcaptions_it.txt", "un cane", "un gatto")
    lines(source / "MIC" / "test_1kcaptions_de.txt", "ein Hund", "eine Katze")
    lines(source / "MIC" / "test_1kcaptions_it.txt", "altro", "altro")
    lines(source / "STAIR" / "test_1kcaptions_jp.txt", "犬", "猫")
    return source


def test_xm3600(xm3600: Path) -> None:
    dataset = prepared("xm3600", xm3600)
    assert captions_of(dataset, 0) == [("de", "Ein Hund"), ("de", "Hunde"), ("th", "สุนัข")]
    assert captions_of(dataset, 1) == [("quz", "Huk allqu")]
    assert (dataset.tokeniser, list(dataset.splits)) == ("unicode_words", ["test"])


def test_multi30k(multi30k: Path) -> None:
    dataset = prepared("multi30k", multi30k)
    assert {split: len(images) for split, images in dataset.splits.items()} == {"train": 2, "val": 1, "test": 1}
    assert captions_of(dataset, 1) == [(language, f"{language} {k} 2.jpg") for language in ("de", "en") for k in (1, 2)]
    assert count_languages(dataset.images) == {"de": 8, "en": 8}


def test_xtd_has_ids_of_coco(xtd: Path) -> None:
    dataset = prepared("xtd", xtd)
    assert [(image.file, image.cocoid) for image in dataset.images] == [
        ("train2014/COCO_train2014_000000000009.jpg", 9),
        ("val2014/COCO_val2014_000000000042.jpg", 42),
    ]
    assert captions_of(dataset, 1) == [("it", "un gatto"), ("ja", "猫"), ("de", "eine Katze")]


def test_missing_or_wrong_files_are_one_line(multi30k: Path, fails: Fails, tmp_path: Path) -> None:
    given = ["prepare", "multi30k", "--source", multi30k, "--out", tmp_path / "out"]
    raw = multi30k / "data" / "task2" / "raw"
    lines(raw / "train.1.de.gz", "zu kurz")
    assert "has 1 lines, but the list of images has 2" in fails(data_main, *given)
    lines(raw / "train.1.de.gz", "gut", "!?")
    assert "has no word" in fails(data_main, *given)
    (raw / "train.1.de.gz").write_bytes(b"\x1f\x8b no archive")
    assert "train.1.de.gz" in fails(data_main, *given)
    (multi30k / "data" / "task2" / "image_splits" / "val_images.txt").unlink()
    lines(raw / "train.1.de.gz", "gut", "besser")
    assert "has no list of the images of val" in fails(data_main, *given)
    assert not (tmp_path / "out").exists()


def test_an_image_outside_the_folder_or_missing_is_refused(xm3600: Path, fails: Fails, tmp_path: Path) -> None:
    given = ["prepare", "xm3600", "--source", xm3600, "--out", tmp_path / "out"]
    for key in ("../0a", "gone"):
        lines(xm3600 / "captions.jsonl", json.dumps({"image/key": key, "de": {"caption": ["Ein Hund"]}}))
        assert "no such image file" in fails(data_main, *given)
    lines(xm3600 / "captions.jsonl", json.dumps({"image/key": 7, "de": "Ein Hund"}))
    assert "captions of XM3600 (line 1)" in fails(data_main, *given)
