from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import Patch, succeed
from vse.cli import data_main
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.preparation import check_and_describe_dataset
from vse.pipeline.errors import UserError
from vse.pipeline.files import inputs as input_files

Edit = Callable[[Path, Callable[[Any], None]], Path]


def first(content: Any) -> Any:
    return content["images"][0]


def set_in(key: str, value: object) -> Callable[[Any], None]:
    return lambda content: first(content).__setitem__(key, value)


def set_in_sentence(key: str, value: object) -> Callable[[Any], None]:
    return lambda content: first(content)["sentences"][0].__setitem__(key, value)


def test_the_error_for_a_split_without_images_tells_what_to_do(demo: Path) -> None:
    dataset = load_dataset_file(demo)
    with pytest.raises(UserError, match='no images in split \'restval\'.*; give some of its images "split": "restval"'):
        dataset.split("restval")
    with pytest.raises(UserError, match=r"no images in split 'tset' \(did you mean 'test'.*\)$"):
        dataset.split("tset")


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "duplicate image id": (set_in("imgid", 1), "caption 0 .*image 1|duplicate imgid 1"),
    "duplicate file": (set_in("filename", "demo_000001.jpg"), "duplicate image file demo_000001.jpg"),
    "duplicate sentence id": (lambda c: [set_in_sentence("sentid", 7)(c), set_in("sentids", [7, 1, 2, 3, 4])(c)], "sentid 7"),
    "caption of another image": (set_in_sentence("imgid", 5), "caption 0 .*image 0 .*5"),
    "sentids that are not the sentences'": (set_in("sentids", [9, 1, 2, 3, 4]), "'sentids'"),
    "empty caption": (set_in_sentence("tokens", []), "caption 0 of image 0 is empty"),
    "blank caption": (set_in_sentence("raw", " "), "caption 0 of image 0 is empty"),
    "unknown split": (set_in("split", "tset"), "did you mean 'test'"),
    "path out of the folder": (set_in("filename", "../secret.jpg"), "image 0: .*secret.jpg"),
    "missing field": (lambda content: first(content).pop("imgid"), "imgid"),
    "no images": (lambda content: content.update(images=[]), "no images"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, own_json: Path, edit: Edit) -> None:
    spoil, message = FAULTS[fault]
    with pytest.raises(UserError, match=message):
        load_dataset_file(edit(own_json, spoil))


def test_a_sound_data_set_is_counted(demo: Path) -> None:
    text = check_and_describe_dataset(demo)
    assert "train         48 images     240 captions (5 per image)" in text


def test_prepare_says_what_to_put_where(tmp_path: Path, fails: Callable[..., str]) -> None:
    line = fails(data_main, "prepare", "f30k", "--source", tmp_path)
    assert f"{tmp_path}/dataset_flickr30k.json and {tmp_path}/flickr30k-images not found" in line
    assert "--config f30k_dir=FOLDER" in line


def test_prepare_links_the_images_and_keeps_every_field(own_demo: Path, tmp_path: Path) -> None:
    own_demo.rename(own_demo.with_name("dataset_flickr8k.json"))
    out = tmp_path / "prepared"
    succeed(data_main, "prepare", "f8k", "--source", own_demo.parent, "--out", out)
    dataset = load_dataset_file(out / "dataset.json")
    assert dataset.name == "f8k"
    assert len(dataset.images) == 66
    assert (out / "images").is_symlink()
    assert dataset.image_path(dataset.images[0]).is_file()
    assert '"phrases"' in (out / "dataset.json").read_text()


def test_prepare_writes_nothing_when_an_image_is_missing(own_demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    own_demo.rename(own_demo.with_name("dataset_flickr8k.json"))
    (own_demo.parent / "images" / "demo_000003.jpg").unlink()
    line = fails(data_main, "prepare", "f8k", "--source", own_demo.parent, "--out", tmp_path / "prepared")
    assert "1 of 66 image files are missing, the first is" in line
    assert not (tmp_path / "prepared").exists()


def test_a_data_set_in_use_is_read_again_once_its_file_changes(own_json: Path, edit: Edit, monkeypatch: Patch) -> None:
    monkeypatch.setattr(input_files, "COARSEST_CLOCK_NS", 0)  # as if the file had been written long ago
    loaded = load_dataset_file(own_json)
    assert load_dataset_file(own_json) is loaded
    edit(own_json, lambda content: content["images"].pop())
    assert len(load_dataset_file(own_json).images) == len(loaded.images) - 1


def test_a_data_set_that_was_just_written_is_read_again(own_json: Path, edit: Edit) -> None:
    for name in ("demo", "omed"):
        edit(own_json, lambda content, name=name: content.update(dataset=name))
        assert load_dataset_file(own_json).name == name
