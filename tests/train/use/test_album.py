"""Photos without captions as a data set."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vse.features.cli import main as extract_main
from vse.features.data_cli import main
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.sources import check_dataset
from vse.train.cli import search_main


@pytest.fixture
def photos(few: Path, tmp_path: Path) -> Path:
    """Three photos, one of them in a folder, and a file that is none."""
    (tmp_path / "photos" / "2019").mkdir(parents=True)
    files = sorted((few.parent / "images").iterdir())
    for file, name in zip(files, ["b.JPG", "a.jpeg", "2019/c.jpg"], strict=False):
        shutil.copy(file, tmp_path / "photos" / name)
    (tmp_path / "photos" / "notes.txt").write_text("mine")
    return tmp_path / "photos"


def done(command: Callable[..., None], *arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        command([str(argument) for argument in arguments])
    assert stop.value.code == 0


def test_a_folder_of_photos_becomes_a_data_set(photos: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done(main, "album", photos, "--out", tmp_path / "album")
    dataset = load_dataset_file(tmp_path / "album" / "dataset.json")
    assert (dataset.name, [image.file for image in dataset.images]) == ("album", ["2019/c.jpg", "a.jpeg", "b.JPG"])
    assert "3 images       0 captions" in check_dataset(dataset.path)
    assert sorted(path.name for path in (tmp_path / "album").iterdir()) == ["dataset.json", "images"]


def test_what_is_no_album_is_one_line(photos: Path, few: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "no such folder" in fails(main, "album", tmp_path / "none", "--out", tmp_path / "album")
    (tmp_path / "empty").mkdir()
    assert "no JPEG, PNG or WebP" in fails(main, "album", tmp_path / "empty", "--out", tmp_path / "album")
    shutil.copytree(few.parent, tmp_path / "demo")
    before = (tmp_path / "demo" / "dataset.json").read_bytes()
    for name in ("demo", "album"):
        line = fails(main, "album", photos, "--out", tmp_path / "demo", "--name", name)
        assert {"demo": "describes another data set", "album": "is not the data set 'album'"}[name] in line
    assert (tmp_path / "demo" / "dataset.json").read_bytes() == before


def test_an_album_is_extracted_like_the_cache_of_a_run_and_searched(
    photos: Path,
    run: Path,
    cache: Path,
    tfidf: Path,
    tmp_path: Path,
    fails: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    done(main, "album", photos, "--out", tmp_path / "album")
    data, out = tmp_path / "album" / "dataset.json", tmp_path / "album_tiny.h5"
    of_album = ["cnn", "--dataset", data, "--out", out, "--like"]
    assert "--set does not go with --like" in fails(extract_main, *of_album, cache, "--set", "grid=1")
    assert f"{tfidf}: --like " in fails(extract_main, *of_album, tfidf)
    done(extract_main, *of_album, cache)
    capsys.readouterr()
    done(search_main, run, "a red circle", "--features", out, "-k", 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert {line.split("\t")[2] for line in lines} < {str(image) for image in (tmp_path / "album" / "images").rglob("*.*")}
