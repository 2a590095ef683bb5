from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.pipeline.conftest import Fails, Patch
from tests.pipeline.import_files import photo_bytes
from tests.pipeline.saved_datasets import save
from tests.pipeline.test_import_table import failures, imported
from vse.cli import data_main as main
from vse.pipeline.errors import extra_install_command


def row(shade: int, caption: Any, path: str | None = None, **more: Any) -> dict[str, Any]:
    return {"image": {"bytes": photo_bytes(shade), "path": path}, "caption": caption, **more}


def test_splits_and_images_are_those_that_were_saved(tmp_path: Path) -> None:
    splits = {"train": [row(1, ["a gull", "it flies"], "x.jpg"), row(2, ["a tern"])], "validation": [row(3, ["an auk"])]}
    dataset = imported(save(tmp_path / "saved", splits), "--out", tmp_path / "out")
    assert [(image.file, image.split, [c.raw for c in image.captions]) for image in dataset.images] == [
        ("train/x.jpg", "train", ["a gull", "it flies"]),
        ("train/00000001.jpg", "train", ["a tern"]),
        ("validation/00000000.jpg", "val", ["an auk"]),
    ]
    assert dataset.image_path(dataset.images[0]).read_bytes() == photo_bytes(1)


def test_columns_and_splits_of_a_data_set_without_splits_are_given(tmp_path: Path) -> None:
    rows = [
        {"photo": {"bytes": photo_bytes(k), "path": None}, "alt": f"gull {k}", "split": name, "image_id": 40 + k}
        for k, name in enumerate(("train", "test"))
    ]
    options = ("--column", "file=photo", "--column", "caption=alt")
    dataset = imported(save(tmp_path / "saved", {"": rows}, "photo"), "--out", tmp_path / "out", *options)
    found = [(image.imgid, image.file, image.split) for image in dataset.images]
    assert found == [(40, "00000000.jpg", "train"), (41, "00000001.jpg", "test")]


def test_bad_rows_are_named(tmp_path: Path, fails: Fails) -> None:
    rows = [
        row(1, "a gull", "a.jpg"),
        row(2, "", "b.jpg"),
        {**row(3, "a gull", "c.jpg"), "image": {"bytes": photo_bytes()[:9], "path": "c.jpg"}},
        {**row(4, "a gull"), "image": None},
        row(5, "a tern", "a.jpg"),
    ]
    saved, out = save(tmp_path / "saved", {"train": rows}), tmp_path / "out"
    assert f"{saved}: train row 1: the caption is empty (3 of 5 rows" in fails(main, "import", saved, "--out", out)
    dataset = imported(saved, "--out", out, "--skip-bad")
    assert [image.file for image in dataset.images] == ["train/a.jpg", "train/00000004_a.jpg"]
    assert [place for place, _ in failures(out)] == [f"{saved}: train row {number}" for number in (1, 2, 3)]


def test_no_images_no_data_set_and_no_package_are_one_line(tmp_path: Path, fails: Fails, monkeypatch: Patch) -> None:
    saved, out = save(tmp_path / "saved", {"train": [row(1, "a gull")]}), tmp_path / "out"
    assert "no column 'caption' of images" in fails(main, "import", saved, "--out", out, "--column", "file=caption")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dataset_info.json").write_text("{")
    line = fails(main, "import", tmp_path / "other", "--out", out)
    assert "not a data set that the library 'datasets' saved" in line
    monkeypatch.setitem(sys.modules, "datasets", None)
    line = fails(main, "import", saved, "--out", out)
    assert f"a Hugging Face data set needs the package datasets: {extra_install_command('datasets')}" in line


def test_a_folder_of_a_data_set_is_loaded_as_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        (folder / split / "x.png").write_bytes(photo_bytes(1, "PNG"))
        (folder / split / "metadata.jsonl").write_text(json.dumps({"file_name": "x.png", "caption": f"a {split}"}) + "\n")
    dataset = imported(folder, "--format", "hugging-face", "--out", tmp_path / "out")
    assert [(image.split, image.captions[0].raw) for image in dataset.images] == [("train", "a train"), ("test", "a test")]


def test_a_name_that_the_hub_cannot_give_is_one_line(tmp_path: Path, monkeypatch: Patch, fails: Fails) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = fails(main, "import", "no-such/gulls", "--format", "hugging-face", "--out", tmp_path / "out")
    assert "no-such/gulls: cannot be loaded from the Hugging Face hub (" in message
    assert "where there is no network, import a folder that save_to_disk wrote elsewhere" in message
    hint = "no-such/gulls: no such file or folder; --format hugging-face loads a data set of that name"
    assert hint in fails(main, "import", "no-such/gulls", "--out", tmp_path / "out")
