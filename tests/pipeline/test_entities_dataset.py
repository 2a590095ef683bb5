"""The commands that convert the files of Flickr30K Entities to ``dataset.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import Fails, Output, succeed
from tests.pipeline.entities_files import annotation, thing, write_entities, write_photo
from vse.cli import data_main as main
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.images import Phrase

CAPTIONS = {
    "11": "[/EN#7/people Two dogs] run .\n[/EN#0/notvisual It] is [/EN#8/scene a t-shirt 's sea] .",
    "12": "[/EN#9/people/scene A man] .\nThe same .",
}
THINGS = {"11": [thing("7", (11, 21, 50, 40)), thing("7", (1, 31, 20, 60)), thing("8")], "12": [thing("9", (1, 1, 100, 80))]}
BOXES = ((10.0, 20.0, 50.0, 40.0), (0.0, 30.0, 20.0, 60.0))


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """Write the official files of two photos, and the photos."""
    folder = write_entities(tmp_path / "official", CAPTIONS, {number: annotation(things) for number, things in THINGS.items()})
    for split, text in {"train": "12\n", "val": "", "test": "11\n"}.items():
        (folder / f"{split}.txt").write_text(text)
    for number in CAPTIONS:
        write_photo(folder / "flickr30k-images" / f"{number}.jpg")
    return folder


def prepared(source: Path, out: Path) -> Dataset:
    succeed(main, "prepare", "f30k_entities", "--source", source, "--out", out)
    return load_dataset_file(out / "dataset.json")


def karpathy(path: Path, images: list[tuple[str, list[str]]], **fields: Any) -> Path:
    """Write the ``dataset.json`` of photos of ``train`` with captions whose tokens lack hyphens and apostrophes."""
    entries, sentid = [], 100
    for imgid, (filename, texts) in enumerate(images):
        sentences = []
        for text in texts:
            tokens = text.lower().replace("-", "").replace("'", "").replace(" .", "").split()
            sentences.append({"sentid": sentid, "imgid": imgid, "raw": text, "tokens": tokens})
            sentid += 1
        entries.append({"imgid": imgid, "filename": filename, "split": "train", "sentences": sentences})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"dataset": "photos", "images": entries, **fields}))
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write a data set of the same photos and one more, with file names like those of Flickr8k."""
    images = [
        ("12_0b1c.jpg", ["The same .", "A man ."]),
        ("11_693b.jpg", ["It is a tshirt's sea .", "Two dogs run .", "Two dogs run .", "Two dogs ran ."]),
        ("13_aa.jpg", ["Two dogs run ."]),
    ]
    for name, _ in images:
        write_photo(tmp_path / "photos" / "images" / name)
    return karpathy(tmp_path / "photos" / "dataset.json", images)


def test_captions_splits_and_phrases_are_those_of_the_official_files(official: Path, tmp_path: Path, capsys: Output) -> None:
    dataset = prepared(official, tmp_path / "out")
    assert capsys.readouterr().err.splitlines() == [
        f"{official}: read 2 photos, 4 captions and 3 boxes; the captions mark 4 phrases, 2 of them with a box",
        "added 4 phrases, 2 of them with a box",
    ]
    assert dataset.name == "f30k_entities"
    found = [(image.imgid, image.file, image.split) for image in dataset.images]
    assert found == [(12, "12.jpg", "train"), (11, "11.jpg", "test")]
    assert dataset.image_path(dataset.images[0]).is_file()
    first, second = dataset.images[1].captions
    assert (first.raw, first.tokens) == ("Two dogs run .", ("two", "dogs", "run"))
    assert first.phrases == (Phrase(0, 2, "7", ("people",), BOXES),)
    assert first.phrases[0].truth_box == (0.0, 20.0, 50.0, 60.0)
    assert second.tokens == ("it", "is", "a", "t", "shirt", "s", "sea")
    assert second.phrases == (Phrase(0, 1, "", ("notvisual",)), Phrase(2, 7, "8", ("scene",)))
    assert dataset.images[0].captions[0].phrases == (Phrase(0, 2, "9", ("people", "scene"), ((0.0, 0.0, 100.0, 80.0),)),)
    assert [caption.sentid for image in dataset.images for caption in image.captions] == [0, 1, 2, 3]


def test_phrases_that_are_left_out_or_have_no_box_are_counted(official: Path, tmp_path: Path, capsys: Output) -> None:
    (official / "UNRELATED_CAPTIONS").write_text("# format\n11 2\n12 5\n99 1\n")
    (official / "Sentences" / "12.txt").write_text("[/EN#0/notvisual &] he [/EN#5/other runs] .")
    images = prepared(official, tmp_path / "out").images
    assert images[0].captions[0].phrases == (Phrase(1, 2, "5", ("other",)),)
    first, second = images[1].captions
    assert first.phrases
    assert (second.raw, second.phrases) == ("It is a t-shirt 's sea .", ())
    log = capsys.readouterr().err
    assert "2 phrases are left out: UNRELATED_CAPTIONS" in log
    assert "1 phrases are left out: they have no letter and no digit" in log
    assert "1 phrases have no box" in log


def test_boxes_are_clipped_and_scaled_to_the_photo_with_one_warning(official: Path, tmp_path: Path, capsys: Output) -> None:
    (official / "Annotations" / "12.xml").write_text(annotation([thing("9", (1, 1, 101, 80))]))
    for number in CAPTIONS:
        write_photo(official / "flickr30k-images" / f"{number}.jpg", (300, 20))
    dataset = prepared(official, tmp_path / "out")
    assert dataset.images[0].captions[0].phrases[0].boxes == ((0.0, 0.0, 300.0, 20.0),)
    assert dataset.images[1].captions[0].phrases[0].boxes == ((30.0, 5.0, 150.0, 10.0), (0.0, 7.5, 60.0, 15.0))
    log = capsys.readouterr().err
    (line,) = [line for line in log.splitlines() if "were scaled" in line]
    assert line.startswith("2 photos ")
    assert "(12.jpg has 300 x 20 pixels instead of 100 x 80)" in line
    assert "1 boxes " in log


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no photo": (lambda f: (f / "flickr30k-images" / "11.jpg").unlink(), "1 of 2 image files are missing"),
    "no list": (lambda f: (f / "val.txt").unlink(), "official/val.txt not found"),
    "no captions": (lambda f: (f / "Sentences" / "11.txt").unlink(), "Sentences/11.txt: No such file"),
    "no annotation": (lambda f: (f / "Annotations" / "11.xml").unlink(), "Annotations/11.xml: No such file"),
    "two splits": (lambda f: (f / "val.txt").write_text("11\n"), "photo 11 is in two of train.txt, val.txt"),
    "no photos": (lambda f: [(f / f"{s}.txt").write_text("") for s in ("train", "test")], "name no photo"),
    "a broken photo": (lambda f: (f / "flickr30k-images" / "11.jpg").write_text("x"), "11.jpg: not a readable image"),
    "no words": (lambda f: (f / "Sentences" / "11.txt").write_text("Guys .\n. . .\n"), "11.txt: a caption has no let"),
    "an entity": (
        lambda f: (f / "Annotations" / "11.xml").write_text("<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>"),
        "Annotations/11.xml: has a document type declaration",
    ),
    "a lost phrase": (lambda f: (f / "Sentences" / "11.txt").write_text("Two\n[/EN#7/people guys], ok ."), "11.txt:2: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_and_nothing_is_written(fault: str, official: Path, tmp_path: Path, fails: Fails) -> None:
    spoil, message = FAULTS[fault]
    spoil(official)
    assert message in fails(main, "prepare", "f30k_entities", "--source", official, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_phrases_are_added_by_captions_and_photo_numbers(official: Path, photos: Path, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "both"
    succeed(main, "add-phrases", photos, "--entities", official, "--out", out)
    captured = capsys.readouterr()
    assert captured.out.strip() == str(out / "dataset.json")
    before, after = load_dataset_file(photos), load_dataset_file(out / "dataset.json")
    assert after.name == "both"
    assert after.image_path(after.images[0]).is_file()
    assert [(image.imgid, image.file, image.split) for image in after.images] == [
        (image.imgid, image.file, image.split) for image in before.images
    ]
    phrases = {}
    for one, other in zip(before.images, after.images, strict=True):
        for caption, marked in zip(one.captions, other.captions, strict=True):
            assert (marked.sentid, marked.raw, marked.tokens) == (caption.sentid, caption.raw, caption.tokens)
            phrases[marked.sentid] = marked.phrases
    assert phrases == {
        100: (),
        101: (Phrase(0, 2, "9", ("people", "scene"), ((0.0, 0.0, 100.0, 80.0),)),),
        102: (Phrase(0, 1, "", ("notvisual",)), Phrase(2, 5, "8", ("scene",))),  # it is a tshirts sea
        103: (Phrase(0, 2, "7", ("people",), BOXES),),
        104: (),  # the same words once more, but Entities has one such caption
        105: (),
        106: (),
    }
    assert captured.err.splitlines()[0] == (
        f"{official}: matched 2 of 3 images and 4 of 7 captions, 0 of them with another spelling; "
        "3 captions have no counterpart and get no phrases"
    )


def test_a_caption_of_another_spelling_is_matched_down_to_a_similarity(official: Path, tmp_path: Path, capsys: Output) -> None:
    data = karpathy(tmp_path / "x" / "dataset.json", [("11.jpg", ["Two doggs run ."])], pictures=False)
    for similar, phrases in ((0.6, (Phrase(0, 2, "7", ("people",), BOXES),)), (0.7, ()), (1, ())):
        succeed(main, "add-phrases", data, "--entities", official, "--out", tmp_path / "both", "--similar", similar)
        assert load_dataset_file(tmp_path / "both" / "dataset.json").images[0].captions[0].phrases == phrases
    assert "1 of 1 captions, 1 of them with another spelling" in capsys.readouterr().err


def test_phrases_are_replaced_and_an_image_may_have_no_captions(official: Path, photos: Path, tmp_path: Path) -> None:
    content = json.loads(photos.read_text())
    for sentence in (sentence for image in content["images"] for sentence in image["sentences"]):
        sentence["phrases"] = [{"first_token": 1, "n_tokens": 1}]
    del content["images"][2]["sentences"]
    photos.write_text(json.dumps(content))
    succeed(main, "add-phrases", photos, "--entities", official, "--out", tmp_path / "both", "--name", "mine")
    dataset = load_dataset_file(tmp_path / "both" / "dataset.json")
    assert (dataset.name, dataset.parent) == ("mine", load_dataset_file(photos).name)
    assert dataset.images[0].captions[0].phrases == ()
    assert dataset.images[2].captions == ()


def test_without_image_files_boxes_stay_in_pixels_of_the_annotated_photo(official: Path, tmp_path: Path) -> None:
    data = karpathy(tmp_path / "features" / "dataset.json", [("11.jpg", ["Two dogs run ."])], pictures=False)
    succeed(main, "add-phrases", data, "--entities", official, "--out", tmp_path / "both")
    dataset = load_dataset_file(tmp_path / "both" / "dataset.json")
    assert not dataset.has_image_files
    assert dataset.images[0].captions[0].phrases[0].boxes == BOXES
    assert not (tmp_path / "both" / "images").exists()


def test_no_photo_in_common_is_an_error(official: Path, tmp_path: Path, fails: Fails) -> None:
    for names in (["13_1.jpg"], ["a11.jpg", "photo.jpg"]):
        data = karpathy(tmp_path / "x" / "dataset.json", [(name, ["Two dogs run ."]) for name in names], pictures=False)
        line = fails(main, "add-phrases", data, "--entities", official, "--out", tmp_path / "both")
        assert f"{official}: annotates other images than these {len(names)}" in line
    assert not (tmp_path / "both").exists()


def test_bad_folders_outputs_and_names_are_refused(official: Path, photos: Path, tmp_path: Path, fails: Fails) -> None:
    before, out = photos.read_bytes(), tmp_path / "both"
    line = fails(main, "add-phrases", photos, "--entities", tmp_path, "--out", out)
    assert f"{tmp_path}: " in line
    assert "folder Annotations" in line
    assert "output is also an input" in fails(main, "add-phrases", photos, "--entities", official, "--out", photos.parent)
    line = fails(main, "add-phrases", photos, "--entities", official, "--out", out, "--name", "a/b")
    assert "'a/b' cannot be the name of a data set" in line
    assert photos.read_bytes() == before


def test_flickr8k_is_prepared_with_phrases_in_one_step(official: Path, photos: Path, tmp_path: Path) -> None:
    source = photos.parent
    photos.rename(source / "dataset_flickr8k.json")
    official.rename(source / "entities")
    succeed(main, "prepare", "f8k_entities", "--source", source, "--out", tmp_path / "out")
    dataset = load_dataset_file(tmp_path / "out" / "dataset.json")
    assert dataset.name == "f8k_entities"
    assert {image.split for image in dataset.images} == {"train"}
    assert sum(len(caption.phrases) for image in dataset.images for caption in image.captions) == 4


def test_the_error_for_missing_sources_tells_where_to_get_them(tmp_path: Path, fails: Fails) -> None:
    line = fails(main, "prepare", "f30k_entities", "--source", tmp_path)
    assert f"{tmp_path}/Annotations and {tmp_path}/Sentences and {tmp_path}/train.txt" in line
    assert "vse-data fetch f30k_entities downloads what may be downloaded" in line
