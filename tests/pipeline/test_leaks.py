from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.cli import main
from vse.pipeline.dataset.dataset import Caption, Dataset, Image
from vse.pipeline.dataset.duplicates import report_shared_captions


def data(folder: Path, images: Mapping[str, tuple[str, Sequence[str]]], name: str = "mine") -> Path:
    """Write a data set without image files; ``images`` gives the split and the captions of each file."""
    folder.mkdir(parents=True)
    entries, sentid = [], 0
    for imgid, (file, (split, captions)) in enumerate(images.items()):
        sentences = [{"sentid": sentid + k, "raw": raw} for k, raw in enumerate(captions)]
        sentid += len(captions)
        entries.append({"imgid": imgid, "filename": file, "split": split, "sentences": sentences})
    content = {"dataset": name, "pictures": False, "images": entries}
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder / "dataset.json"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder without published data sets."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def test_equal_captions_are_counted_across_splits(tmp_path: Path, audited: Callable[..., list[str]]) -> None:
    images = {
        "a.jpg": ("train", ["A gull flies.", "a gull flies", "a tern"]),
        "b.jpg": ("train", ["a tern", "only here"]),
        "c.jpg": ("val", ["a gull, flies!"]),
        "d.jpg": ("test", ["a TERN", "A tern.", "a gull flies"]),
    }
    lines = audited(data(tmp_path / "one", images), "--no-look-alikes")
    assert lines[4:] == [
        f"2 texts of captions are the same across the splits of {tmp_path / 'one' / 'dataset.json'}",
        "        2 in train and 1 in val, e.g. 'a gull flies'  <- trained on in one, tested on in the other",
        "        4 in train and 3 in test, e.g. 'a gull flies'  <- trained on in one, tested on in the other",
        "        1 in val and 1 in test, e.g. 'a gull flies'",
    ]


def test_equal_captions_of_two_data_sets_are_counted(tmp_path: Path, audited: Callable[..., list[str]]) -> None:
    one = data(tmp_path / "one", {"a.jpg": ("train", ["a gull", "a tern"])})
    two = data(tmp_path / "two", {"b.jpg": ("test", ["a gull"]), "c.jpg": ("train", ["a gull", "an auk"])}, "two")
    lines = audited(one, "--against", two, "--no-look-alikes")
    start = lines.index(f"1 texts of captions are the same in {one} and {two}")
    assert lines[start + 1 : start + 3] == [
        "        1 in train and 1 in train, e.g. 'a gull'",
        "        1 in train and 1 in test, e.g. 'a gull'  <- trained on in one, tested on in the other",
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


def test_test_images_of_a_published_data_set_are_found_by_name(tmp_path: Path, audited: Callable[..., list[str]]) -> None:
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
    assert lines[start + 1 : start + 3] == [
        "        1 in train  <- trained on in one, tested on in the other",
        "        1 in test",
    ]
    assert (
        "1 images have names as in coco; whether it tests on them is not known without data/coco/dataset.json "
        "(vse-data fetch NAME --no-images)" in lines
    )
    assert "3 images have names as in f8k; " in lines[-1]
    known.unlink()
    assert "3 images have names as in f30k and f8k; " in audited(mine, "--no-look-alikes")[-1]


def test_a_published_data_set_is_not_compared_with_itself(tmp_path: Path, audited: Callable[..., list[str]]) -> None:
    known = data(tmp_path / "data" / "f30k", {"10002456.jpg": ("test", ["a gull"])}, "f30k")
    assert "names" not in "\n".join(audited(known, "--no-look-alikes"))


def test_the_audit_of_a_missing_file_is_refused(tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "No such file" in fails(main, "audit", tmp_path / "dataset.json")


def test_a_data_set_to_compare_with_is_given_by_its_name(
    tmp_path: Path, audited: Callable[..., list[str]], fails: Callable[..., str]
) -> None:
    mine = data(tmp_path / "data" / "mine", {"1000268201.jpg": ("train", ["a gull"])}, "mine")
    known = data(tmp_path / "data" / "f30k", {"1000268201.jpg": ("test", ["a gull"])}, "f30k")
    leak = "        1 in train of 'mine' and test of 'f30k'  <- trained on in one, tested on in the other"
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
