from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture

from tests.pipeline.conftest import Fails, Log, succeed
from tests.pipeline.import_files import photo_bytes, write_photos, write_table
from vse.cli import data_main as main
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.imports.rows import ImportedRow, ImportSettings, RowCollector


def imported(*arguments: object) -> Dataset:
    """Run the import command and load the data set that it writes."""
    succeed(main, "import", *arguments)
    return load_dataset_file(Path(arguments[arguments.index("--out") + 1]) / "dataset.json")


def failures(out: Path) -> list[tuple[str, str]]:
    lines = (out / "import.failures.jsonl").read_text(encoding="utf-8").splitlines()
    return [(entry["place"], entry["reason"]) for entry in map(json.loads, lines)]


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "birds", ["a.jpg", "sub/b.jpg", "c.jpg"])


ROWS: list[dict[str, Any]] = [
    {"file": "a.jpg", "caption": "Eine weiße Möwe.", "split": "train"},
    {"file": "sub/b.jpg", "caption": "A gull, flying", "split": "dev"},
    {"file": "a.jpg", "caption": 'A "white" gull', "split": "train"},
    {"file": "c.jpg", "caption": "Two\nlines", "split": "test"},
]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_row_is_a_caption_of_an_image(birds: Path, tmp_path: Path, kind: str) -> None:
    table = write_table(tmp_path / f"captions.{kind}", ROWS)
    dataset = imported(birds, "--captions", table, "--out", tmp_path / "data" / "gulls")
    assert (dataset.name, dataset.tokeniser) == ("gulls", "unicode_words")
    images = [(image.imgid, image.file, image.split) for image in dataset.images]
    assert images == [(0, "a.jpg", "train"), (1, "sub/b.jpg", "val"), (2, "c.jpg", "test")]
    captions = [(c.sentid, c.raw, c.tokens) for image in dataset.images for c in image.captions]
    assert captions == [
        (0, "Eine weiße Möwe.", ("eine", "weiße", "möwe")),
        (1, 'A "white" gull', ("a", "white", "gull")),
        (2, "A gull, flying", ("a", "gull", "flying")),
        (3, "Two\nlines", ("two", "lines")),
    ]
    assert all(dataset.image_path(image).read_bytes() == (birds / image.file).read_bytes() for image in dataset.images)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_may_have_a_list_of_captions_and_ids(birds: Path, tmp_path: Path, kind: str) -> None:
    rows = [
        {"image_id": 70, "file_name": "c.jpg", "captions": ["a tern", "terns"], "sentids": [9, 8], "cocoid": 42},
        {"image_id": 5, "file_name": "a.jpg", "captions": ["a gull"], "sentids": [3], "cocoid": 43},
    ]
    write_table(birds / f"metadata.{kind}", rows)  # among the photos it need not be named
    dataset = imported(birds, "--out", tmp_path / "out", "--name", "gulls", "--val", 0.5, "--test", 0)
    assert [(i.imgid, i.cocoid, [c.sentid for c in i.captions]) for i in dataset.images] == [(70, 42, [9, 8]), (5, 43, [3])]
    assert sorted(image.split for image in dataset.images) == ["train", "val"]


def test_other_names_of_columns_are_given(birds: Path, tmp_path: Path, fails: Fails) -> None:
    table = tmp_path / "results.csv"
    table.write_text("photo| one| two\na.jpg| a gull| \nc.jpg| a tern| it flies\n")
    arguments = (birds, "--captions", table, "--out", tmp_path / "out")
    dataset = imported(*arguments, "--column", "file=photo", "--column", "caption=one", "--column", "caption=two")
    assert [[c.raw for c in image.captions] for image in dataset.images] == [["a gull"], ["a tern", "it flies"]]
    other = tmp_path / "other.csv"
    other.write_text("photo|one\nunknown|a gull\n")
    line = fails(main, "import", birds, "--captions", other, "--out", tmp_path / "out")
    assert f"{other}: no column file or file_name or" in line
    assert "its columns are photo, one; name the right one with --column file=NAME" in line
    wrong = {"file=fhoto": "no column 'fhoto' (did you mean 'photo'?", "x=one": "no such field", "file": "FIELD=NAME"}
    for column, message in wrong.items():
        assert message in fails(main, "import", *arguments, "--column", column)


CSV_FAULTS = [
    ("a.jpg,Möwe über Rügen,dev\n".encode(), None), (b"nope.jpg,A gull,train\n", "nope.jpg: no such image file"),
    (b"../a.jpg,A gull,train\n", "the file '../a.jpg'"), (b",A gull,train\n", "names no image file"),
    (b"c.jpg,,train\n", "the caption is empty"), (b"c.jpg,...!,train\n", "the caption '...!' has no word"),
    (b"c.jpg,A gull, flying,train\n", "4 cells"), (b"c.jpg,A gull\n", "2 cells"),
    (b"c.jpg,A gull,tset\n", "unknown split 'tset'; known: train, val"),
    (b"a.jpg,A gull,test\n", "a.jpg has split test, but split val at"), (b"c.jpg,A g\xffull,train\n", "with --encoding"),
    (b'c.jpg,"A" gull,train\n', "',' expected after '\"'"), (b"broken.jpg,A gull,train\n", "not a readable image"),
    (b"c.jpg,A tern,train\n", None), (b'c.jpg,"A tern\n', "unexpected end of data"),
]  # fmt: skip


def test_each_bad_row_of_a_csv_file_is_named_with_its_line(birds: Path, tmp_path: Path, fails: Fails, caplog: Log) -> None:
    (birds / "broken.jpg").write_bytes(photo_bytes()[:10])
    table, out = tmp_path / "captions.csv", tmp_path / "out"
    table.write_bytes(b"file,caption,split\n\n" + b"".join(row for row, _ in CSV_FAULTS))
    faults = [(f"{table}: line {line}", fault) for line, (_, fault) in enumerate(CSV_FAULTS, 3) if fault]
    line = fails(main, "import", birds, "--captions", table, "--out", out)
    assert f"{table}: line 4:" in line
    assert f"({len(faults)} of {len(CSV_FAULTS)} rows cannot be imported; --skip-bad leaves them out)" in line
    assert not (out / "dataset.json").exists()
    dataset = imported(birds, "--captions", table, "--out", out, "--skip-bad")
    assert [image.file for image in dataset.images] == ["a.jpg", "c.jpg"]
    listed = failures(out)
    assert [place for place, _ in listed] == [place for place, _ in faults]
    for (_, reason), (_, fault) in zip(listed, faults, strict=True):
        assert fault in reason
    assert "rows cannot be imported and are left out" in caplog.text


JSON_FAULTS = [
    ('{"file": "a.jpg", "caption": "a gull", "split": "train", "imgid": 4}', None),
    ('{"file": "a.jpg", "caption": "a gull"', "not valid JSON"),
    ('["a.jpg", "a gull"]', "not a JSON object"),
    ('{"caption": "a gull", "split": "train", "imgid": 5}', "no column file or"),
    ('{"file": 7, "caption": "a gull", "split": "train", "imgid": 5}', "names no image file"),
    ('{"file": "c.jpg", "caption": [["a gull"]], "split": "train", "imgid": 5}', "the caption"),
    ('{"file": "c.jpg", "caption": [], "split": "train", "imgid": 5}', "has no caption"),
    ('{"file": "c.jpg", "caption": null, "split": "train", "imgid": 5}', "the caption is empty"),
    ('{"file": "c.jpg", "caption": "a gull", "split": 1, "imgid": 5}', "the split 1"),
    ('{"file": "c.jpg", "caption": "a gull", "split": "train", "imgid": "five"}', "imgid 'five'"),
    ('{"file": "c.jpg", "caption": "a gull", "split": "train", "imgid": true}', "imgid True"),
    ('{"file": "c.jpg", "caption": "a gull", "split": "train", "imgid": 4}', "a.jpg also has imgid 4"),
    ('{"file": "a.jpg", "caption": "a gull", "split": "train", "imgid": 5}', "a.jpg has imgid 5, but imgid 4 at"),
    ('{"file": "c.jpg", "caption": "a gull", "split": "train"}', "c.jpg has no imgid"),
    ('{"file": "sub/b.jpg", "caption": "a gull", "imgid": 6}', "sub/b.jpg has no split"),
]


def test_each_bad_line_of_json_is_named(birds: Path, tmp_path: Path) -> None:
    table, out = tmp_path / "captions.jsonl", tmp_path / "out"
    table.write_text("\n".join(line for line, _ in JSON_FAULTS) + "\n")
    dataset = imported(birds, "--captions", table, "--out", out, "--skip-bad")
    assert [image.imgid for image in dataset.images] == [4]
    listed = dict(failures(out))
    faults = {f"{table}: line {line}": fault for line, (_, fault) in enumerate(JSON_FAULTS, 1) if fault}
    assert listed.keys() == faults.keys()
    assert all(fault in listed[place] for place, fault in faults.items())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("captions.csv", b"", "not a CSV file with the names of its columns"),
        ("captions.csv", b"file,file,caption\n", "not a CSV file with the names of its columns"),
        ("captions.csv", b"\xff\xfe,caption\n", "not a CSV file with the names of its columns"),
        ("captions.csv", b'file,capt"ion\na.jpg,one\n', "not a CSV file with the names of its columns"),
        ("captions.csv", b'"file,caption\na.jpg,one\n', "not a CSV file with the names of its columns"),
        ("captions.csv", b"file,caption\n", "all 0 rows lack an image with a caption"),
        ("captions.xlsx", b"PK", "captions.xlsx: not a spreadsheet (.xlsx)"),
        ("none/captions.csv", None, "No such file"),
    ],
)
def test_another_file_is_refused(
    birds: Path, tmp_path: Path, fails: Fails, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert message in fails(main, "import", birds, "--captions", tmp_path / name, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_an_import_again_is_the_same_and_nothing_else_is_replaced(birds: Path, tmp_path: Path, fails: Fails) -> None:
    table, out = write_table(tmp_path / "captions.csv", ROWS), tmp_path / "out"
    arguments = (birds, "--captions", table, "--out", out)
    before = imported(*arguments).sha256
    assert imported(*arguments).sha256 == before
    write_table(table, ROWS[:-1])
    assert f"{out / 'dataset.json'} already exists" in fails(main, "import", *arguments)
    assert load_dataset_file(out / "dataset.json").sha256 == before


def test_a_bad_name_and_wrong_options_are_refused(birds: Path, tmp_path: Path, fails: Fails) -> None:
    table = write_table(tmp_path / "captions.csv", ROWS)
    arguments = ("import", birds, "--captions", table, "--out", tmp_path / "out")
    assert "cannot be the name of a data set" in fails(main, *arguments, "--name", "../x")
    assert "--val and --test" in fails(main, *arguments, "--val", 0.2)
    assert "no tokeniser 'words'" in fails(main, *arguments, "--tokeniser", "words")
    assert "--format tabel: unknown (did you mean 'table'?" in fails(main, *arguments, "--format", "tabel")
    other = ("import", birds, "--format", "webdataset", "--out", tmp_path / "out")
    assert "--images: the format webdataset " in fails(main, *other, "--images", birds)
    assert "--quoting all: captions.csv: it is minimal or none" in fails(main, *arguments, "--quoting", "all")
    (tmp_path / "empty").mkdir()
    assert "holds nothing that can be imported" in fails(main, "import", tmp_path / "empty", "--out", tmp_path / "out")
    assert "no such file or folder" in fails(main, "import", tmp_path / "none", "--out", tmp_path / "out")
    write_table(table, [{"file": "a.jpg", "caption": "a gull"}])
    assert "--val 0.5 and --test 0.5" in fails(main, *arguments, "--val", 0.5, "--test", 0.5)


def sampled_splits(files: list[str], seed: int) -> dict[str, str]:
    rows = RowCollector(ImportSettings("x", Path("none"), val=0.2, test=0.3, seed=seed))
    for file in files:
        rows.add(ImportedRow("here", file, ("a gull", "it flies")))
    return {image["filename"]: image["split"] for image in rows.build_dataset_content(None)["images"]}


@given(st.lists(st.text("abcdefgh", min_size=1), min_size=1, max_size=30, unique=True), st.integers(0, 9), st.randoms())
def test_splits_are_sampled_by_file_and_seed_whatever_the_order(files: list[str], seed: int, rng: random.Random) -> None:
    splits = sampled_splits(files, seed)
    assert sampled_splits(rng.sample(files, len(files)), seed) == splits
    counts = [list(splits.values()).count(split) for split in ("val", "test")]
    assert counts == [round(0.2 * len(files)), round(0.3 * len(files))]
    many = [f"{number}.jpg" for number in range(50)]
    assert sampled_splits(many, seed) != sampled_splits(many, seed + 1)


def write_spots(path: Path, seed: int, side: int = 64) -> None:
    """Write a photo of random spots; one of another size with the same seed looks alike."""
    spots = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), np.uint8)
    Picture.fromarray(spots).resize((side, side), Picture.Resampling.BICUBIC).save(path)


@pytest.mark.parametrize("seed", range(3))
def test_photos_that_look_alike_are_in_one_split(tmp_path: Path, seed: int) -> None:
    """Every third photo has two copies of other sizes."""
    folder = tmp_path / "photos"
    folder.mkdir()
    scenes = {f"{number}{letter}.png": number for number in range(20) for letter in ("abc" if number % 3 == 0 else "a")}
    for side, (name, number) in enumerate(scenes.items(), 64):
        write_spots(folder / name, number, side)
    table = write_table(tmp_path / "captions.csv", [{"file": name, "caption": "spots"} for name in scenes])
    dataset = imported(folder, "--captions", table, "--out", tmp_path / "out", "--seed", seed, "--val", 0.2, "--test", 0.2)
    splits_by_scene: dict[int, set[str]] = {}
    for image in dataset.images:
        splits_by_scene.setdefault(scenes[image.file], set()).add(image.split)
    assert all(len(splits) == 1 for splits in splits_by_scene.values())
    counts = Counter(image.split for image in dataset.images)
    assert counts["val"] == counts["test"] == round(0.2 * len(scenes))


def test_an_album_in_which_all_photos_look_alike_is_split_by_photo(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    names = [f"{number}.png" for number in range(20)]
    for name in names:
        write_spots(folder / name, 0)
    table = write_table(tmp_path / "captions.csv", [{"file": name, "caption": "spots"} for name in names])
    dataset = imported(folder, "--captions", table, "--out", tmp_path / "out")
    assert Counter(image.split for image in dataset.images) == {"train": 16, "val": 2, "test": 2}
    assert "20 of 20 photos look like others" in caplog.text


def csv_table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "captions.csv"
    path.write_text(text, newline="")
    return path


def captions(birds: Path, path: Path, *options: str) -> list[str]:
    dataset = imported(birds, "--captions", path, "--out", path.parent / "out", *options)
    return [each.raw for image in dataset.images for each in image.captions]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_quoted_caption_may_span_lines_and_have_delimiters(birds: Path, tmp_path: Path, end: str) -> None:
    text = 'file,caption\na.jpg,"Two, and\nlines, here"\nsub/b.jpg,one\n'.replace("\n", end)
    assert captions(birds, csv_table(tmp_path, text)) == [f"Two, and{end}lines, here", "one"]


def test_two_marks_that_would_swallow_a_row_stop_the_import(birds: Path, tmp_path: Path, fails: Fails) -> None:
    path = csv_table(tmp_path, 'file,caption\na.jpg,"tall\nsub/b.jpg,one\nc.jpg,27"\n')
    for options in ((), ("--skip-bad",)):
        line = fails(main, "import", birds, "--captions", path, "--out", tmp_path / "out", *options)
        assert f"{path}: line 2: a quotation mark in the column caption is open" in line
        assert "line 4" in line
        assert "--quoting none" in line
    assert captions(birds, path, "--quoting", "none") == ['"tall', "one", '27"']


def test_lines_and_rows_are_counted(birds: Path, tmp_path: Path, caplog: Log) -> None:
    caplog.set_level(logging.INFO, "vse")
    path = csv_table(
        tmp_path, 'file,caption,split\n\na.jpg,"Two\nlines",train\nsub/b.jpg,one,\nsub/b.jpg,two,\nnone.jpg,x,train\n'
    )
    assert captions(birds, path, "--skip-bad") == ["Two\nlines"]
    assert "7 lines: 1 header, 1 blank, 4 rows" in caplog.text
    assert "4 rows read: 1 taken, 3 refused" in caplog.text
    assert len(failures(tmp_path / "out")) == 3, "each row of an image without a split is listed"
