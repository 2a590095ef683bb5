"""``vse-data swap-phrases`` and ``vse-data import-choices``: captions to choose from, one of which is right."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import succeeds
from vse.cli import data_main as main
from vse.pipeline.dataset.choices import BigramModel, read_choices
from vse.pipeline.dataset.dataset import load_dataset_file

Fails = Any


def phrase(start: int, n: int, chain: str, *types: str) -> dict[str, Any]:
    return {"first_token": start, "n_tokens": n, "chain": chain, "types": list(types)}


MAN_ON_HORSE = ["a", "man", "rides", "a", "horse"]
CAPTIONS = [
    (MAN_ON_HORSE, [phrase(0, 2, "1", "people"), phrase(3, 2, "2", "animals")]),
    (["a", "boy", "and", "a", "girl"], [phrase(0, 2, "1", "people"), phrase(3, 2, "2", "people")]),  # still right if exchanged
    (["a", "boy", "sees", "a", "girl"], [phrase(0, 2, "1", "people"), phrase(3, 2, "2", "people")]),
    (["a", "boy", "sees", "himself"], [phrase(0, 2, "1", "people"), phrase(3, 1, "1", "people")]),  # the same person
    (["snow", "makes", "there", "cold"], [phrase(0, 1, "1", "scene"), phrase(2, 1, "", "notvisual")]),
    (["one", "dog"], [phrase(0, 2, "1", "animals")]),
]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    sentences = [
        {"sentid": k, "imgid": 7, "raw": " ".join(tokens).capitalize() + " .", "tokens": tokens, "phrases": phrases}
        for k, (tokens, phrases) in enumerate(CAPTIONS)
    ]
    train = [{"sentid": 9, "imgid": 8, "raw": "A man rides .", "tokens": ["a", "man", "rides"]}]
    images = [
        {"imgid": 7, "filename": "7.jpg", "split": "test", "sentences": sentences},
        {"imgid": 8, "filename": "8.jpg", "split": "train", "sentences": train},
    ]
    folder = tmp_path / "farm"
    folder.mkdir()
    path = folder / "dataset.json"
    path.write_text(json.dumps({"dataset": "farm", "pictures": False, "images": images}))
    return path


def texts(choices_file: Path) -> list[tuple[str, list[str]]]:
    """The kind of each choice, and its captions with the right one first."""
    dataset = load_dataset_file(choices_file.parent / "dataset.json")
    raw = {caption.sentid: caption.raw for image in dataset.images for caption in image.captions}
    content, _ = read_choices(choices_file)
    return [
        (one.kind, [raw[one.sentids[one.right]], *(raw[i] for i in one.sentids if i != one.sentids[one.right])])
        for one in content.choices
    ]


def test_two_phrases_that_name_different_things_are_exchanged(dataset: Path) -> None:
    succeeds(main, "swap-phrases", dataset)
    written = dataset.parent.with_name("farm_swapped")
    assert texts(written / "choices.json") == [
        ("other_type", ["a man rides a horse", "a horse rides a man"]),
        ("same_type", ["a boy sees a girl", "a girl sees a boy"]),
    ]
    copy = load_dataset_file(written / "dataset.json")
    assert (copy.name, copy.parent) == ("farm_swapped", "farm")
    assert [(image.imgid, len(image.captions)) for image in copy.images] == [(7, 4)], "it has no other images"
    assert min(caption.sentid for caption in copy.split("test")[0].captions) > 9, "no id of the data set is used again"


def test_equal_seeds_write_equal_files(dataset: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        succeeds(main, "swap-phrases", dataset, "--seed", 3, "--out", tmp_path / name)
    contents = [json.loads((tmp_path / name / "choices.json").read_text()) for name in ("a", "b")]
    assert contents[0] == contents[1] | {"dataset": "a"}


def test_a_data_set_without_phrases_is_refused(dataset: Path, fails: Fails) -> None:
    assert "no caption of the split 'train' has two phrases" in fails(main, "swap-phrases", dataset, "--split", "train")


def test_a_data_set_is_not_replaced_and_a_fold_is_refused(dataset: Path, tmp_path: Path, fails: Fails) -> None:
    assert "give another --out" in fails(main, "swap-phrases", dataset, "--out", tmp_path / "elsewhere" / "farm")
    fold = json.loads(dataset.read_text()) | {"dataset": "farm_0", "fold": "0 of 5", "parent": "farm"}
    dataset.write_text(json.dumps(fold))
    assert "is a fold; give its data set 'farm'" in fails(main, "swap-phrases", dataset)


def test_the_text_model_counts_pairs_of_words() -> None:
    model = BigramModel([["a", "dog"], ["a", "cat"]])
    # Six words, with the two ends of a caption; four different ones: a, dog, cat and the end.
    unseen = 0.2 / 11
    assert exp(3 * model.score(["a", "dog"])) == pytest.approx(
        (0.8 + 0.2 * 3 / 11) * (0.4 + 0.2 * 2 / 11) * (0.8 + 0.2 * 3 / 11)
    )
    assert exp(2 * model.score(["emu"])) == pytest.approx(unseen * (0.2 * 3 / 11))
    assert model.score(["a", "dog"]) > model.score(["dog", "a"])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    for name, size in (("1.png", (60, 40)), ("2.png", (30, 30)), ("deep/3.png", (20, 20))):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), np.uint8)).save(folder / name)
    return folder


FORMS: dict[str, tuple[str, Any, list[tuple[str, list[str]]]]] = {
    "SugarCrepe": (
        "swap_obj.json",
        {
            "0": {"filename": "1.png", "caption": "A cat on a dog.", "negative_caption": "A dog on a cat."},
            "1": {"filename": "1.png", "caption": "A cat on a dog.", "negative_caption": "A cat on a log."},
            "2": {"filename": "deep/3.png", "caption": "A cat.", "negative_caption": "A dog."},
        },
        [
            ("swap_obj", ["A cat on a dog.", "A dog on a cat."]),
            ("swap_obj", ["A cat on a dog.", "A cat on a log."]),
            ("swap_obj", ["A cat.", "A dog."]),
        ],
    ),
    "ARO": (
        "visual_genome_relation.json",
        [
            {
                "image_path": "1.png",
                **dict(zip(("bbox_x", "bbox_y", "bbox_w", "bbox_h"), (5, 6, 20, 10), strict=True)),
                "true_caption": "the cat is on the dog",
                "false_caption": "the dog is on the cat",
                "relation_name": "on",
            }
        ],
        [("visual_genome_relation", ["the cat is on the dog", "the dog is on the cat"])],
    ),
    "Winoground": (
        "examples.jsonl",
        [
            {
                "id": 0,
                "image_0": "1",
                "image_1": "2",
                "caption_0": "A cat on a dog",
                "caption_1": "A dog on a cat",
                "tag": "Object",
            }
        ],
        [("winoground", ["A cat on a dog", "A dog on a cat"]), ("winoground", ["A dog on a cat", "A cat on a dog"])],
    ),
}


def write_form(folder: Path, form: str) -> Path:
    name, content, _ = FORMS[form]
    file = folder / name
    lines = "\n".join(map(json.dumps, content)) if file.suffix == ".jsonl" else json.dumps(content)
    file.write_text(lines)
    return file


@pytest.mark.parametrize("form", FORMS)
def test_published_choices_are_converted(tmp_path: Path, photos: Path, dataset: Path, form: str) -> None:
    file = write_form(tmp_path, form)
    succeeds(main, "import-choices", file, "--images", photos, "--out", tmp_path / "out", "--corpus", dataset)
    written = tmp_path / "out" / "choices.json"
    assert texts(written) == FORMS[form][2]
    content, _ = read_choices(written)
    assert [one.group for one in content.choices] == ([0, 0] if form == "Winoground" else [None] * len(content.choices))
    assert all(len(one.text_scores) == 2 for one in content.choices)
    imported = load_dataset_file(tmp_path / "out" / "dataset.json")
    assert len(imported.images) == len({one.imgid for one in content.choices})
    with Image.open(imported.image_path(imported.images[0])) as first, Image.open(photos / "1.png") as photo:
        expected = photo.crop((5, 6, 25, 16)) if form == "ARO" else photo
        np.testing.assert_array_equal(np.asarray(first), np.asarray(expected))


def test_boxes_are_never_written_among_the_photos(tmp_path: Path, photos: Path, fails: Fails) -> None:
    before = sorted(photos.rglob("*"))
    succeeds(main, "import-choices", write_form(tmp_path, "SugarCrepe"), "--images", photos, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "images").is_symlink()
    boxes = write_form(tmp_path, "ARO")
    assert "give another --out" in fails(main, "import-choices", boxes, "--images", photos, "--out", tmp_path / "out")
    (tmp_path / "own").mkdir()
    photos.rename(own := tmp_path / "own" / "images")
    assert "give another --out" in fails(main, "import-choices", boxes, "--images", own, "--out", tmp_path / "own")
    assert sorted(path.relative_to(own) for path in own.rglob("*")) == [path.relative_to(photos) for path in before]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", [{"caption": "a"}], "x.json: choice 1: not the form of SugarCrepe"),
        ("x.json", ["a"], "x.json: choice 1: not the form of SugarCrepe"),
        ("x.json", [], "not the form of SugarCrepe"),
        ("x.json", {"0": {"filename": "9.png", "caption": "a", "negative_caption": "b"}}, "9.png: no such image; --images"),
        ("x.json", {"0": {"filename": "../1.png", "caption": "a", "negative_caption": "b"}}, "outside of the folder"),
        ("x.json", {"0": {"filename": "1.png", "caption": "a", "negative_caption": " "}}, "negative_caption is no text"),
    ],
)
def test_a_file_of_another_form_is_one_line(
    tmp_path: Path, photos: Path, fails: Fails, name: str, content: Any, message: str
) -> None:
    file = tmp_path / name
    file.write_text(json.dumps(content))
    assert message in fails(main, "import-choices", file, "--images", photos, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
