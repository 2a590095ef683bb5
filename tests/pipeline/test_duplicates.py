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
from PIL import ImageFilter

from tests.hostile import NOT_FILES
from vse.pipeline.cli import main
from vse.pipeline.dataset import duplicates
from vse.pipeline.dataset.dataset import Caption, Dataset, Image
from vse.pipeline.dataset.duplicates import (
    MAX_DIFFERENT_BITS,
    N_HASH_BITS,
    compute_perceptual_hash,
    find_similar_hashes,
    parse_published_id,
    report_shared_captions,
)
from vse.pipeline.files.images import BadImage

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


def photo(seed: int, size: tuple[int, int] = (300, 200)) -> Picture.Image:
    """Return soft spots of colour that depend on the seed."""
    spots = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), np.uint8)
    return Picture.fromarray(spots).resize(size, Picture.Resampling.BICUBIC)


def distance(a: Path, b: Path) -> int:
    return int((compute_perceptual_hash(a) != compute_perceptual_hash(b)).sum())


def test_the_bits_compare_the_lowest_frequencies_with_their_median(tmp_path: Path) -> None:
    photo(3, (32, 32)).convert("L").save(tmp_path / "a.png")
    grey = np.asarray(Picture.open(tmp_path / "a.png"), np.float64)
    wave = [[np.cos(np.pi * u * (2 * x + 1) / 64) for x in range(32)] for u in range(8)]
    low = [sum(grey[y, x] * wave[v][y] * wave[u][x] for y in range(32) for x in range(32)) for v in range(8) for u in range(8)]
    assert compute_perceptual_hash(tmp_path / "a.png").tolist() == [value > np.median(low) for value in low]


def test_16_bits_and_transparency_are_handled(tmp_path: Path) -> None:
    grey = np.asarray(photo(0).convert("L"))
    Picture.fromarray(grey).save(tmp_path / "a.png")
    Picture.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    assert distance(tmp_path / "a.png", tmp_path / "deep.png") <= MAX_DIFFERENT_BITS
    clear = photo(1).convert("RGBA")
    clear.putalpha(Picture.fromarray(255 - grey))
    clear.save(tmp_path / "clear.png")
    Picture.alpha_composite(Picture.new("RGBA", clear.size, "white"), clear).convert("RGB").save(tmp_path / "white.png")
    assert distance(tmp_path / "clear.png", tmp_path / "white.png") <= MAX_DIFFERENT_BITS


def test_a_photo_stays_near_itself_and_far_from_others(tmp_path: Path) -> None:
    original = photo(0)
    original.save(tmp_path / "a.png")
    variants = {
        "small.png": original.resize((150, 100)),
        "squashed.jpg": original.resize((224, 224)),
        "coarse.jpg": original.filter(ImageFilter.GaussianBlur(1)),
        "grey.webp": original.convert("L"),
        "large.jpg": original.resize((1200, 800)),
    }
    for name, variant in variants.items():
        variant.save(tmp_path / name, quality=60)
        assert distance(tmp_path / "a.png", tmp_path / name) <= MAX_DIFFERENT_BITS, name
    for seed in range(1, 9):
        photo(seed).save(tmp_path / "other.png")
        assert distance(tmp_path / "a.png", tmp_path / "other.png") > MAX_DIFFERENT_BITS


@given(st.integers(0, 7), st.integers(0, 5), st.integers(0, N_HASH_BITS), st.integers(0, 2**32 - 1))
def test_near_pairs_are_those_that_a_loop_over_bits_finds(n: int, m: int, most: int, seed: int) -> None:
    """Two hashes are compared at a time."""
    rng = np.random.default_rng(seed)
    hashes, others = rng.random((n, N_HASH_BITS)) < 0.5, rng.random((m, N_HASH_BITS)) < 0.5
    expected = [
        (i, j) for i in range(n) for j in range(m) if sum(x != y for x, y in zip(hashes[i], others[j], strict=True)) <= most
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_HASHES_PER_CHUNK", 2)
        assert find_similar_hashes(hashes, others, most) == expected


def test_a_file_that_is_not_an_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_text("x")
    with pytest.raises(BadImage, match=r"a\.jpg: not a readable image"):
        compute_perceptual_hash(tmp_path / "a.jpg")
    for make in NOT_FILES.values():
        make(tmp_path / "b.jpg")
        with pytest.raises(BadImage, match=r"b\.jpg: no such image file"):
            compute_perceptual_hash(tmp_path / "b.jpg")
        (tmp_path / "b.jpg").rmdir() if (tmp_path / "b.jpg").is_dir() else (tmp_path / "b.jpg").unlink()


def test_a_bomb_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo(0).save(tmp_path / "a.png")
    monkeypatch.setattr(duplicates, "MAX_PIXELS", 59_999)
    with pytest.raises(BadImage, match="300 x 200 pixels are too many"):
        compute_perceptual_hash(tmp_path / "a.png")
