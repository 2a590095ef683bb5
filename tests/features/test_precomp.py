from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.features.conftest import Edit, Fails, sets, succeed
from vse.cli import data_main as main
from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cli import extract_main as extract
from vse.features.exchange.precomp import BOM, CaptionFile, export_precomp, import_precomp
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

COUNTS = {"train": 4, "dev": 2, "test": 3}


def layout(
    folder: Path, counts: dict[str, int] | None = None, repeats: dict[str, int] | None = None, ids: bool = True,
    shape: tuple[int, ...] = (6,), dtype: str = "float32", newline: str = "\n", head: bytes = b"", end: str = "\n",
) -> Path:  # fmt: skip
    """A folder of the layout with five captions per image; rows of dev and test repeated five times, as published."""
    folder.mkdir(exist_ok=True)
    chance, first = np.random.default_rng(0), 100
    for split, n in (counts or COUNTS).items():
        times = ({"train": 1} if repeats is None else repeats).get(split, 5)
        rows = chance.random((n, *shape)).astype(dtype)
        np.save(folder / f"{split}_ims.npy", np.repeat(rows, times, axis=0))
        captions = [f"Image {first + k}, caption {c}: a café “dog”." for k in range(n) for c in range(5)]
        (folder / f"{split}_caps.txt").write_bytes(head + (newline.join(captions) + end.replace("\n", newline)).encode())
        if ids:
            lines = [str(first + k) for k in range(n) for _ in range(times)]
            (folder / f"{split}_ids.txt").write_text("\n".join(lines) + "\n")
        first += n
    return folder


def imported(folder: Path, **options: object) -> Path:
    return import_precomp(folder, "demo", folder / "f" / "demo_x.h5", folder / "d" / "dataset.json", **options)  # type: ignore[arg-type]


def test_images_captions_and_rows_belong_together(tmp_path: Path) -> None:
    cache = verify_cache(imported(layout(tmp_path / "in")))
    dataset = load_dataset_file(cache.dataset_file)
    assert {split: len(images) for split, images in dataset.splits.items()} == {"train": 4, "val": 2, "test": 3}
    assert cache.ids.tolist() == list(range(100, 109))
    for image in dataset.images:
        assert [caption.raw.split(",")[0] for caption in image.captions] == [f"Image {image.imgid}"] * 5
    stored = np.load(tmp_path / "in" / "test_ims.npy")
    reader = FeatureReader(cache)
    for k, image in enumerate(dataset.split("test")):
        np.testing.assert_array_equal(reader.read_rows(reader.find_rows([image.imgid]))[0], stored[5 * k])


@pytest.mark.parametrize(
    ("repeats", "ids", "how"),
    [
        ((1, 5, 5), True, {"dtype": "float16", "head": BOM, "end": ""}),
        ((5, 5, 5), True, {"shape": (4, 6), "newline": "\r\n", "head": BOM}),
        ((1, 1, 1), True, {}),
        ((1, 5, 5), False, {}),
        ((5, 5, 5), False, {"newline": "\r\n", "end": ""}),
        ((1, 1, 1), False, {"shape": (4, 6)}),
    ],
)
def test_a_round_trip_loses_nothing(repeats: tuple[int, ...], ids: bool, how: dict[str, Any], tmp_path: Path) -> None:
    folder = layout(tmp_path / "in", None, dict(zip(COUNTS, repeats, strict=True)), ids, **how)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    out = export_precomp(imported(folder), tmp_path / "out")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_ids_per_caption_beside_rows_per_image_are_reduced(tmp_path: Path) -> None:
    folder = layout(tmp_path / "in", {"train": 4, "testall": 3}, {"train": 1, "testall": 1})
    ids = [str(104 + k) for k in range(3) for _ in range(5)]
    (folder / "testall_ids.txt").write_text("\n".join(ids) + "\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    cache = imported(folder)
    assert open_cache(cache).ids.tolist() == list(range(100, 107))
    out = export_precomp(cache, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    once = export_precomp(cache, tmp_path / "once", repeats=1)
    assert (once / "testall_ids.txt").read_text() == "104\n105\n106\n"
    (folder / "testall_ids.txt").write_text("\n".join([*ids[:6], "9", *ids[7:]]))
    with pytest.raises(UserError, match="testall_ids.txt: lines from 6 on: 5 captions of an image have different ids"):
        imported(folder)


def test_a_missing_split_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for splits, missing in {("train", "dev", "testall"): [], ("test",): ["train", "dev"], ("train",): ["dev", "test"]}.items():
        caplog.clear()
        imported(layout(tmp_path / splits[-1], dict.fromkeys(splits, 2)))
        lines = [record.getMessage() for record in caplog.records if "no split" in record.getMessage()]
        for name, line in zip(missing, lines, strict=True):
            assert f"put {name}_ims.npy and {name}_caps.txt there and import again" in line


@pytest.mark.parametrize("shape", [(6,), (4, 6)])
def test_what_is_odd_is_said(shape: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = layout(tmp_path / "in", {"train": 4, "test": 2}, shape=shape)
    lines = ["A dog.", "A cat.\r", "Two\rbirds.", "A horse.", " A cow. "]
    (folder / "test_caps.txt").write_bytes(("\n".join(lines * 2) + "\n").encode())
    rows = np.load(folder / "train_ims.npy")
    assert "all zeros" not in caplog.text
    rows[1], rows[2], rows[3, ..., 1:] = rows[0], 0, 0
    np.save(folder / "train_ims.npy", rows)
    image = load_dataset_file(open_cache(imported(folder)).dataset_file).split("test")[0]
    assert [caption.raw for caption in image.captions] == lines
    assert [caption.tokens for caption in image.captions][1:3] == [("a", "cat"), ("two", "birds")]
    assert "4 of 10 lines contain a carriage return" in caplog.text
    assert "1 of 6 rows are all zeros, the first is of id 102" in caplog.text
    assert "1 images have exactly the features of another image" in caplog.text


def test_an_exported_cache_comes_back_as_it_was(own_cache: Path, tmp_path: Path) -> None:
    out = export_precomp(own_cache, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {f"{s}_{e}" for s in COUNTS for e in ("ims.npy", "caps.txt", "ids.txt")}
    cache, again = open_cache(own_cache), open_cache(imported(out))
    order = FeatureReader(cache).find_rows(again.ids)
    np.testing.assert_array_equal(FeatureReader(cache).read_rows(order), FeatureReader(again).read_rows(np.arange(len(order))))
    raw = {c.sentid: c.raw for image in load_dataset_file(cache.dataset_file).images for c in image.captions}
    repeated = export_precomp(own_cache, tmp_path / "repeated", repeats=5)
    rows = np.load(repeated / "test_ims.npy")
    assert len(rows) == 60
    np.testing.assert_array_equal(rows[0], rows[4])
    assert len(set((repeated / "test_ids.txt").read_text().split())) == 12
    assert sorted(raw.values()) == sorted(c.raw for i in load_dataset_file(again.dataset_file).images for c in i.captions)


def test_testall_is_the_test_split_unless_asked_otherwise(tmp_path: Path) -> None:
    folder = layout(tmp_path / "in", {"train": 3, "test": 2, "testall": 4}, ids=False)
    assert len(load_dataset_file(open_cache(imported(folder)).dataset_file).split("test")) == 4
    shutil.rmtree(folder / "f")
    shutil.rmtree(folder / "d")
    assert len(load_dataset_file(open_cache(imported(folder, test="test")).dataset_file).split("test")) == 2


def test_one_caption_per_image_is_no_repetition(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    np.save(folder / "test_ims.npy", np.arange(20, dtype=np.float32).reshape(10, 2))
    (folder / "test_caps.txt").write_text("".join(f"caption {k}\n" for k in range(10)))
    cache = open_cache(imported(folder))
    assert len(cache.ids) == 10


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1), min_size=1, max_size=8),
    newline=st.sampled_from(["\n", "\r\n"]),
    ends=st.booleans(),
)
def test_the_bytes_of_captions_survive(newline: str, ends: bool, lines: list[str]) -> None:
    lines = [f"a {line}" for line in lines]
    content = (newline.join(lines) + newline * ends).encode()
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        text = CaptionFile.read(Path(file.name))
    assert text.to_bytes() == content
    assert len(text.captions) == len(lines)


def changed_rows(change: Callable[[Any], Any]) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / "dev_ims.npy", change(np.load(folder / "dev_ims.npy")))


def drop_line(folder: Path, of: str) -> None:
    file = folder / f"dev_{of}.txt"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))


def replace(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new, 1))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a row missing": (changed_rows(lambda rows: np.delete(rows, 3, axis=0)), "dev_ids.txt: 10 ids for the 9 rows"),
    "a row and a caption missing": (
        lambda f: (changed_rows(lambda rows: np.delete(rows, 3, axis=0))(f), drop_line(f, "caps"), drop_line(f, "ids")),
        "dev_ims.npy: .* but row 4 .* rows are missing",
    ),
    "rows out of order": (changed_rows(lambda rows: np.roll(rows, 2, axis=0)), "dev_ims.npy: .* but row 2 "),
    "an id twice": (replace("test_ids.txt", "106\n106\n106\n106\n106", "107\n107\n107\n107\n107"), "id 107 occurs twice"),
    "an id of another split": (replace("test_ids.txt", "106\n" * 4 + "106", "101\n" * 4 + "101"), "id 101 occurs twice"),
    "ids that differ in a group": (replace("test_ids.txt", "106", "999"), "test_ids.txt: lines from 1 on: 5 equal rows"),
    "an id that is no number": (replace("test_ids.txt", "106", "x"), "not a file of integer ids"),
    "no ids for one split": (lambda f: (f / "dev_ids.txt").unlink(), "train has an ids file, but dev has none"),
    "an empty caption": (replace("dev_caps.txt", "caption 1:", "caption 1:\n\n"), "dev_caps.txt: line 3 is an empty caption"),
    "bytes that are no UTF-8": (
        lambda f: (f / "dev_caps.txt").write_bytes((f / "dev_caps.txt").read_bytes().replace(b"dog", b"\xff", 1)),
        "dev_caps.txt: line 1 is not UTF-8",
    ),
    "no captions": (lambda f: (f / "dev_caps.txt").unlink(), "dev_caps.txt: No such file"),
    "an array of doubles": (changed_rows(lambda rows: rows.astype(float)), "features are float64; .* convert them first"),
    "a cut array": (
        lambda f: (f / "dev_ims.npy").write_bytes((f / "dev_ims.npy").read_bytes()[:-20]),
        "not a readable .npy file",
    ),
    "another length of vectors": (changed_rows(lambda rows: rows[:, :4]), "the splits' features differ in shape or type"),
    "nothing": (lambda f: [path.unlink() for path in f.iterdir()], "no <split>_ims.npy and <split>_caps.txt"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_nothing_is_written(fault: str, tmp_path: Path, fails: Fails) -> None:
    folder = layout(tmp_path / "in")
    spoil, message = FAULTS[fault]
    spoil(folder)
    out = ["--dataset", "demo", "--out-features", tmp_path / "f" / "demo_x.h5", "--out-data", tmp_path / "d" / "dataset.json"]
    line = fails(main, "import-precomp", folder, *out)
    assert re.search(message, line), line
    assert not (tmp_path / "f").exists()
    assert not (tmp_path / "d").exists()


def test_an_import_is_repeated_but_never_put_over_another_data_set(tmp_path: Path) -> None:
    folder = layout(tmp_path / "in")
    first = imported(folder)
    key = open_cache(first).key
    assert open_cache(imported(folder)).key == key
    (folder / "test_caps.txt").write_text((folder / "test_caps.txt").read_text().replace("Image", "Picture"))
    with pytest.raises(UserError, match="dataset.json exists and has other content"):
        imported(folder)


def test_images_of_4_and_5_captions_are_not_exported(own_cache: Path, tmp_path: Path, edit: Edit, fails: Fails) -> None:
    def drop(content: dict) -> None:
        image = content["images"][0]
        image["sentences"].pop()
        image.pop("sentids", None)

    edit(own_cache.parent.parent / "data" / "dataset.json", drop)
    line = fails(main, "export-precomp", own_cache, "--out", tmp_path / "out")
    assert "images have 4 to 5 captions; " in line


def test_the_data_set_has_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    cache = open_cache(imported(layout(tmp_path / "in")))
    succeed(main, "check", cache.dataset_file)
    assert "without image files" in capsys.readouterr().out
    options = sets("weights=random", "model=squeezenet1_1", "layer=features.2")
    line = fails(extract, "cnn", "--dataset", cache.dataset_file, "--out", tmp_path / "y.h5", *options)
    assert "a data set without images" in line
