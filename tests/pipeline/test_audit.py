"""``vse-data audit`` reports the images that two data sets, or two splits, share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Picture

from vse.pipeline.cli import main
from vse.pipeline.dataset.dataset import Image
from vse.pipeline.dataset.duplicates import parse_published_id


@pytest.mark.parametrize(
    ("file", "cocoid", "published"),
    [
        ("1000268201_693b08cb0e.jpg", None, "flickr 1000268201"),
        ("photos/1000268201.jpg", None, "flickr 1000268201"),
        ("36979.jpg", None, "flickr 36979"),
        ("val2014/COCO_val2014_000000000042.jpg", None, "coco 42"),
        ("000000391895.jpg", None, "coco 391895"),
        ("whatever.jpg", 42, "coco 42"),
        ("1234.jpg", None, None),
        ("0001.jpg", None, None),
        ("demo_000123.jpg", None, None),
        ("100026820x.jpg", None, None),
    ],
)
def test_the_published_id_is_read_from_the_file_name(file: str, cocoid: int | None, published: str | None) -> None:
    assert parse_published_id(Image(0, file, "test", (), cocoid)) == published


def data(folder: Path, name: str, splits: Mapping[str, str], seeds: Mapping[str, int] | None = None) -> Path:
    """Write a data set of images in these splits; two photos are the same if they have the same seed."""
    (folder / "images").mkdir(parents=True)
    entries = []
    for imgid, (file, split) in enumerate(splits.items()):
        spots = np.random.default_rng((seeds or {}).get(file, [imgid, *name.encode()])).integers(0, 256, (6, 6, 3), np.uint8)
        Picture.fromarray(spots).resize((64 + imgid, 48), Picture.Resampling.BICUBIC).save(folder / "images" / file)
        entries.append({"imgid": imgid, "filename": file, "split": split, "sentences": []})
    (folder / "dataset.json").write_text(json.dumps({"dataset": name, "images": entries}))
    return folder / "dataset.json"


def test_shared_images_are_counted_by_pairs_of_splits(tmp_path: Path, audited: Callable[..., list[str]]) -> None:
    one = data(tmp_path / "a", "one", {"10001_a.jpg": "train", "10002_a.jpg": "train", "10003_a.jpg": "test", "x.jpg": "val"})
    two = data(tmp_path / "b", "two", {"10003.jpg": "train", "10002.jpg": "train", "10001.jpg": "test", "x.jpg": "val"})
    lines = audited(one, "--against", two)
    assert lines[0].startswith(f"{one}: data set 'one'")
    assert f"{two}: data set 'two'" in lines
    start = lines.index(f"3 images of {one} are in {two}, too")
    assert lines[start + 1 : start + 4] == [
        "        1 in train of 'one' and train of 'two'",
        "        1 in train of 'one' and test of 'two'  <- trained on in one, tested on in the other",
        "        1 in test of 'one' and train of 'two'  <- trained on in one, tested on in the other",
    ]


def test_photos_with_other_names_are_found_by_their_bytes(tmp_path: Path, audited: Callable[..., list[str]]) -> None:
    one = data(tmp_path / "a", "mine", {"holiday.png": "val", "dog.png": "train"}, {"holiday.png": 7})
    two = data(tmp_path / "b", "mine", {"DSC_1.png": "test", "dog.png": "train"}, {"DSC_1.png": 7})
    (tmp_path / "b" / "images" / "dog.png").write_bytes((tmp_path / "a" / "images" / "dog.png").read_bytes() + b"\0")
    lines = audited(one, "--against", two)
    start = lines.index(f"1 images of {one} are in {two}, too")
    assert lines[start : start + 2] == [
        f"1 images of {one} are in {two}, too",
        "        1 in val of 'mine' and test of the other one",
    ]


def test_without_image_files_names_are_compared(tmp_path: Path, audited: Callable[..., list[str]]) -> None:
    one = data(tmp_path / "a", "one", {"10001_a.jpg": "train", "x.jpg": "val"})
    two = data(tmp_path / "b", "two", {"10001_b.jpg": "train", "x.jpg": "val"})
    one.write_text(json.dumps({**json.loads(one.read_text()), "pictures": False}))
    lines = audited(one, "--against", two)
    start = lines.index(f"1 images of {one} are in {two}, too")
    assert lines[start : start + 2] == [
        f"1 images of {one} are in {two}, too",
        "        1 in train of 'one' and train of 'two'",
    ]


def test_photos_that_look_alike_are_counted_across_splits(tmp_path: Path, audited: Callable[..., list[str]]) -> None:
    splits = {"a.jpg": "test", "b.jpg": "train", "c.jpg": "train", "d.jpg": "val", "e.jpg": "train"}
    one = data(tmp_path / "a", "one", splits, {"a.jpg": 7, "b.jpg": 7, "c.jpg": 7, "d.jpg": 8})
    assert audited(one)[-2:] == [
        f"2 pairs of photos across the splits of {one} look alike (perceptual hash)",
        "        2 in train and test, e.g. b.jpg and a.jpg  <- trained on in one, tested on in the other",
    ]
    two = data(tmp_path / "b", "two", {"f.jpg": "test", "g.jpg": "train"}, {"f.jpg": 8})
    assert audited(one, "--against", two)[-2:] == [
        f"1 pairs of photos of {one} and {two} look alike (perceptual hash)",
        "        1 in val and test, e.g. d.jpg and f.jpg",
    ]


def test_a_data_set_without_image_files_is_audited_without_photos(tmp_path: Path, audited: Callable[..., list[str]]) -> None:
    one = data(tmp_path / "a", "one", {"a.jpg": "train"})
    one.write_text(json.dumps({**json.loads(one.read_text()), "pictures": False}))
    assert audited(one)[-1] == f"{one} has no image files, so no photos are compared"
    assert audited(one, "--no-look-alikes")[-1] == f"0 texts of captions are the same across the splits of {one}"


def test_the_other_data_set_is_audited_too(tmp_path: Path, fails: Callable[..., str]) -> None:
    one, two = data(tmp_path / "a", "one", {"a.jpg": "train"}), data(tmp_path / "b", "two", {"a.jpg": "train"})
    (tmp_path / "b" / "images" / "a.jpg").unlink()
    assert f"{two}: 1 of 1 image files are missing" in fails(main, "audit", one, "--against", two)
    assert "No such file" in fails(main, "audit", one, "--against", tmp_path / "c.json")
