"""``vse-data audit`` reports the images and captions that two data sets, or two splits, share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture

from vse.cli import data_main as main
from vse.pipeline.dataset.dataset import Caption, Dataset, Image
from vse.pipeline.dataset.duplicates import parse_published_id, report_shared_captions

Audited = Callable[..., list[str]]
LEAK = "  <- trained on in one, tested on in the other"


@pytest.mark.parametrize(
    ("file", "cocoid", "published"),
    [
        *(("1000268201_693b08cb0e.jpg", None, "flickr 1000268201"), ("photos/1000268201.jpg", None, "flickr 1000268201")),
        *(("36979.jpg", None, "flickr 36979"), ("val2014/COCO_val2014_000000000042.jpg", None, "coco 42")),
        *(("000000391895.jpg", None, "coco 391895"), ("whatever.jpg", 42, "coco 42")),
        *((name, None, None) for name in ("1234.jpg", "0001.jpg", "demo_000123.jpg", "100026820x.jpg")),
    ],
)
def test_the_published_id_is_read_from_the_file_name(file: str, cocoid: int | None, published: str | None) -> None:
    assert parse_published_id(Image(0, file, "test", (), cocoid)) == published


def written(folder: Path, name: str, entries: list[dict[str, object]], **fields: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps({"dataset": name, "images": entries, **fields}))
    return folder / "dataset.json"


def photos(folder: Path, name: str, splits: Mapping[str, str], seeds: Mapping[str, int] | None = None) -> Path:
    """Write a data set of images in these splits; two photos are the same if they have the same seed."""
    (folder / "images").mkdir(parents=True)
    for imgid, file in enumerate(splits):
        spots = np.random.default_rng((seeds or {}).get(file, [imgid, *name.encode()])).integers(0, 256, (6, 6, 3), np.uint8)
        Picture.fromarray(spots).resize((64 + imgid, 48), Picture.Resampling.BICUBIC).save(folder / "images" / file)
    entries = [
        {"imgid": imgid, "filename": file, "split": split, "sentences": []}
        for imgid, (file, split) in enumerate(splits.items())
    ]
    return written(folder, name, entries)


def test_shared_images_are_counted_by_pairs_of_splits(tmp_path: Path, audited: Audited) -> None:
    one = photos(
        tmp_path / "a", "one", {"10001_a.jpg": "train", "10002_a.jpg": "train", "10003_a.jpg": "test", "x.jpg": "val"}
    )
    two = photos(tmp_path / "b", "two", {"10003.jpg": "train", "10002.jpg": "train", "10001.jpg": "test", "x.jpg": "val"})
    lines = audited(one, "--against", two)
    assert lines[0].startswith(f"{one}: data set 'one'")
    assert f"{two}: data set 'two'" in lines
    start = lines.index(f"3 images of {one} are in {two}, too")
    assert lines[start + 1 : start + 4] == [
        "        1 in train of 'one' and train of 'two'",
        f"        1 in train of 'one' and test of 'two'{LEAK}",
        f"        1 in test of 'one' and train of 'two'{LEAK}",
    ]


def test_photos_with_other_names_are_found_by_their_bytes(tmp_path: Path, audited: Audited) -> None:
    one = photos(tmp_path / "a", "mine", {"holiday.png": "val", "dog.png": "train"}, {"holiday.png": 7})
    two = photos(tmp_path / "b", "mine", {"DSC_1.png": "test", "dog.png": "train"}, {"DSC_1.png": 7})
    (tmp_path / "b" / "images" / "dog.png").write_bytes((tmp_path / "a" / "images" / "dog.png").read_bytes() + b"\0")
    lines = audited(one, "--against", two)
    start = lines.index(f"1 images of {one} are in {two}, too")
    assert lines[start + 1] == "        1 in val of 'mine' and test of the other one"


def test_without_image_files_names_alone_are_compared(tmp_path: Path, audited: Audited) -> None:
    one = photos(tmp_path / "a", "one", {"10001_a.jpg": "train", "x.jpg": "val"})
    two = photos(tmp_path / "b", "two", {"10001_b.jpg": "train", "x.jpg": "val"})
    one.write_text(json.dumps({**json.loads(one.read_text()), "pictures": False}))
    lines = audited(one, "--against", two)
    start = lines.index(f"1 images of {one} are in {two}, too")
    assert lines[start + 1] == "        1 in train of 'one' and train of 'two'"
    assert f"{one} has no image files, so no photos are compared" in audited(one)
    assert not any("no photos are compared" in line for line in audited(one, "--no-look-alikes"))


def test_photos_that_look_alike_are_counted_across_splits(tmp_path: Path, audited: Audited) -> None:
    splits = {"a.jpg": "test", "b.jpg": "train", "c.jpg": "train", "d.jpg": "val", "e.jpg": "train"}
    one = photos(tmp_path / "a", "one", splits, {"a.jpg": 7, "b.jpg": 7, "c.jpg": 7, "d.jpg": 8})
    assert audited(one)[-2:] == [
        f"2 pairs of photos across the splits of {one} look alike (perceptual hash)",
        f"        2 in train and test, e.g. b.jpg and a.jpg{LEAK}",
    ]
    two = photos(tmp_path / "b", "two", {"f.jpg": "test", "g.jpg": "train"}, {"f.jpg": 8})
    assert audited(one, "--against", two)[-2:] == [
        f"1 pairs of photos of {one} and {two} look alike (perceptual hash)",
        "        1 in val and test, e.g. d.jpg and f.jpg",
    ]


def test_the_other_data_set_is_audited_too(tmp_path: Path, fails: Callable[..., str]) -> None:
    one, two = photos(tmp_path / "a", "one", {"a.jpg": "train"}), photos(tmp_path / "b", "two", {"a.jpg": "train"})
    (tmp_path / "b" / "images" / "a.jpg").unlink()
    assert f"{two}: 1 of 1 image files are missing" in fails(main, "audit", one, "--against", two)
    for arguments in ([one, "--against", tmp_path / "c.json"], [tmp_path / "c.json"]):
        assert "No such file" in fails(main, "audit", *arguments)


def data(folder: Path, images: Mapping[str, tuple[str, Sequence[str]]], name: str = "mine") -> Path:
    """Write a data set without image files; ``images`` gives the split and the captions of each file."""
    entries, sentid = [], 0
    for imgid, (file, (split, captions)) in enumerate(images.items()):
        sentences = [{"sentid": sentid + k, "raw": raw} for k, raw in enumerate(captions)]
        sentid += len(captions)
        entries.append({"imgid": imgid, "filename": file, "split": split, "sentences": sentences})
    return written(folder, name, entries, pictures=False)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder without published data sets."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def test_equal_captions_are_counted_across_splits(tmp_path: Path, audited: Audited) -> None:
    images = {
        "a.jpg": ("train", ["A gull flies.", "a gull flies", "a tern"]),
        "b.jpg": ("train", ["a tern", "only here"]),
        "c.jpg": ("val", ["a gull, flies!"]),
        "d.jpg": ("test", ["a TERN", "A tern.", "a gull flies"]),
    }
    lines = audited(data(tmp_path / "one", images), "--no-look-alikes")
    assert lines[4:] == [
        f"2 texts of captions are the same across the splits of {tmp_path / 'one' / 'dataset.json'}",
        f"        2 in train and 1 in val, e.g. 'a gull flies'{LEAK}",
        f"        4 in train and 3 in test, e.g. 'a gull flies'{LEAK}",
        "        1 in val and 1 in test, e.g. 'a gull flies'",
    ]


def test_equal_captions_of_two_data_sets_are_counted(tmp_path: Path, audited: Audited) -> None:
    one = data(tmp_path / "one", {"a.jpg": ("train", ["a gull", "a tern"])})
    two = data(tmp_path / "two", {"b.jpg": ("test", ["a gull"]), "c.jpg": ("train", ["a gull", "an auk"])}, "two")
    lines = audited(one, "--against", two, "--no-look-alikes")
    start = lines.index(f"1 texts of captions are the same in {one} and {two}")
    assert lines[start + 1 : start + 3] == [
        "        1 in train and 1 in train, e.g. 'a gull'",
        f"        1 in train and 1 in test, e.g. 'a gull'{LEAK}",
    ]


TEXTS = st.lists(st.tuples(st.sampled_from(["train", "val", "test"]), st.sampled_from("abcd")), max_size=12)


@given(TEXTS)
def test_counts_are_those_of_all_pairs(texts: list[tuple[str, str]]) -> None:
    images = tuple(Image(k, f"{k}", split, (Caption(k, k, text, (text,)),)) for k, (split, text) in enumerate(texts))
    lines = report_shared_captions(Dataset("x", Path("x"), images)).splitlines()
    shared = {text for _, text in texts if len({split for split, other in texts if other == text}) > 1}
    assert lines[0].startswith(f"{len(shared)} texts")
    counts = Counter(texts)
    for line in lines[1:]:
        n_first, _, first, _, n_second, _, second = line.split(",")[0].split()
        in_both = [text for text in "abcd" if counts[first, text] and counts[second, text]]
        assert int(n_first) == sum(counts[first, text] for text in in_both)
        assert int(n_second) == sum(counts[second, text] for text in in_both)


@pytest.mark.usefixtures("elsewhere")
def test_test_images_of_a_published_data_set_are_found_by_name(tmp_path: Path, audited: Audited) -> None:
    published = {"1000092795.jpg": ("train", ["x"]), "10002456.jpg": ("test", ["x"]), "1000268201.jpg": ("test", ["x"])}
    known = data(tmp_path / "data" / "f30k", published, "f30k")
    mine = data(
        tmp_path / "data" / "mine",
        {
            "10002456_a1b2.jpg": ("train", ["a gull"]),
            "1000268201.jpg": ("test", ["a tern"]),
            "1000092795.jpg": ("val", ["an auk"]),
            "COCO_val2014_000000000042.jpg": ("train", ["a puffin"]),
            "holiday.jpg": ("train", ["a skua"]),
        },
    )
    lines = audited(mine, "--no-look-alikes")
    start = lines.index(f"2 images of {mine} have names of test images of 'f30k'")
    assert lines[start + 1 : start + 3] == [f"        1 in train{LEAK}", "        1 in test"]
    assert (
        "1 images have names as in coco; whether it tests on them is not known without data/coco/dataset.json "
        "(vse-data fetch NAME --no-images)" in lines
    )
    assert "3 images have names as in f8k; " in lines[-1]
    known.unlink()
    assert "3 images have names as in f30k and f8k; " in audited(mine, "--no-look-alikes")[-1]


@pytest.mark.usefixtures("elsewhere")
def test_a_published_data_set_is_not_compared_with_itself(tmp_path: Path, audited: Audited) -> None:
    known = data(tmp_path / "data" / "f30k", {"10002456.jpg": ("test", ["a gull"])}, "f30k")
    assert "names" not in "\n".join(audited(known, "--no-look-alikes"))


@pytest.mark.usefixtures("elsewhere")
def test_a_data_set_to_compare_with_is_given_by_its_name(tmp_path: Path, audited: Audited, fails: Callable[..., str]) -> None:
    mine = data(tmp_path / "data" / "mine", {"1000268201.jpg": ("train", ["a gull"])}, "mine")
    known = data(tmp_path / "data" / "f30k", {"1000268201.jpg": ("test", ["a gull"])}, "f30k")
    leak = f"        1 in train of 'mine' and test of 'f30k'{LEAK}"
    assert leak in audited(mine, "--against", "f30k", "--no-look-alikes")
    known.write_text(json.dumps({**json.loads(known.read_text()), "pictures": True}))  # its photos are missing
    lines = audited(mine, "--against", "f30k")
    assert leak in lines
    assert any("has no image files, so no photos are compared" in line for line in lines)
    message = fails(main, "audit", mine, "--against", "coco")
    assert "--against coco: there is no data/coco/dataset.json" in message
    assert "vse-data fetch coco --no-images" in message
    assert "vse-data demo --out data/demo" in fails(main, "audit", mine, "--against", "demo")
    assert "did you mean 'coco'" in fails(main, "audit", mine, "--against", "cocoo")
