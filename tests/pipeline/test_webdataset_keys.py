"""Names with several dots, and members that are not read: each is reported."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.import_files import photo_bytes, write_tar
from tests.pipeline.test_import_table import failures, imported
from vse.features.data_cli import main

Fails = Callable[..., str]
LAST = ("--key-until", "last-dot")


def pair(stem: str, shade: int) -> list[tuple[str, bytes]]:
    return [(f"{stem}.jpg", photo_bytes(shade)), (f"{stem}.txt", f"photo {stem}".encode())]


def test_samples_that_differ_after_the_first_dot_are_refused_with_both_names(tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "x.tar", [*pair("a.b", 1), *pair("a.c", 2), *pair("d", 3)])
    line = fails(main, "import", archive, "--out", tmp_path / "out")
    assert f"{archive}: a: members 'a.b.jpg' and 'a.c.jpg' have the key a, which ends at the first dot" in line
    assert "--key-until last-dot" in line
    assert [image.file for image in imported(archive, "--out", tmp_path / "out", "--skip-bad").images] == ["x/d.jpg"]
    assert [place for place, _ in failures(tmp_path / "out")] == [f"{archive}: a"]


@pytest.mark.parametrize("stem", ["a.b", "v1.0/a.b"])
def test_one_sample_with_a_second_dot_is_refused_as_well(stem: str, tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "x.tar", [*pair(stem, 1), *pair("d", 3)])
    line = fails(main, "import", archive, "--out", tmp_path / "out")
    assert f"member '{stem}.jpg' has the key {stem[:-2]}, which ends at the first dot" in line


def test_a_sample_and_one_with_its_key_are_refused(tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "x.tar", [*pair("a", 1), *pair("a.b", 2)])
    line = fails(main, "import", archive, "--out", tmp_path / "out")
    assert "members 'a.b.jpg' and 'a.jpg' have the key a" in line


def test_keys_that_end_at_the_last_dot_are_samples(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "x.tar", [*pair("a.b", 1), *pair("a.c", 2), *pair("a", 3), *pair("v1.0/a", 4)])
    dataset = imported(archive, "--out", tmp_path / "out", *LAST)
    assert {image.file: image.captions[0].raw for image in dataset.images} == {
        f"x/{stem}.jpg": f"photo {stem}" for stem in ("a.b", "a.c", "a", "v1.0/a")
    }
    assert dataset.image_path(dataset.images[1]).read_bytes() == photo_bytes(2)


def test_fields_that_are_not_read_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vse")
    members = [
        *pair("a", 1),
        ("a.seg.png", photo_bytes(2, "PNG")),
        ("a.cls", b"7"),
        *pair("b", 3),
        ("b.cls", b"7"),
        ("b.png", photo_bytes(4, "PNG")),
        ("c.cls", b"7"),
        ("README", b"by us"),
    ]
    archive = write_tar(tmp_path / "x.tar", members)
    dataset = imported(archive, "--out", tmp_path / "out")
    assert [image.file for image in dataset.images] == ["x/a.jpg", "x/b.jpg"]
    assert "6 members are not read: 3 *.cls, 1 *.seg.png, 1 *.png, 1 without a key" in caplog.text
    content = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert content["imported"]["members_not_read"] == 6


def test_the_hidden_files_of_a_mac_do_not_cut_a_sample(tmp_path: Path) -> None:
    members = [each for name, content in pair("a", 1) for each in ((f"./._{name}", b"Mac"), (f"./{name}", content))]
    archive = write_tar(tmp_path / "x.tar", members)
    for number, options in enumerate(((), LAST)):
        assert len(imported(archive, "--out", tmp_path / f"out-{number}", *options).images) == 1


def test_a_caption_in_a_longer_field_is_named(tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "x.tar", [("a.jpg", photo_bytes(1)), ("a.en.txt", b"a gull")])
    line = fails(main, "import", archive, "--out", tmp_path / "out")
    assert "a: no caption (txt, json); member 'a.en.txt' is the field 'en.txt' of this key" in line


def test_a_key_that_comes_again_is_refused_with_both_names(tmp_path: Path, fails: Fails) -> None:
    again = [("./a.png", photo_bytes(3, "PNG")), ("./a.txt", b"a tern")]
    archive = write_tar(tmp_path / "x.tar", [*pair("a", 1), *pair("b", 2), *again])
    line = fails(main, "import", archive, "--out", tmp_path / "out")
    assert "(members 'a.jpg' and './a.png')" in line


def test_endings_that_differ_in_case_alone_are_refused_with_both_names(tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "x.tar", [*pair("a", 1), ("a.JPG", photo_bytes(2))])
    line = fails(main, "import", archive, "--out", tmp_path / "out")
    assert "member 'a.JPG' has the same key and extension as member 'a.jpg'" in line


def test_one_path_in_two_archives_is_refused(tmp_path: Path, fails: Fails) -> None:
    folder = tmp_path / "shards"
    write_tar(folder / "a.tar", pair("b/c", 1))
    write_tar(folder / "a" / "b.tar", pair("c", 1))
    assert "(members 'c.jpg' and 'b/c.jpg')" in fails(main, "import", folder, "--out", tmp_path / "out")


def test_archives_with_dots_in_their_names_are_apart(tmp_path: Path) -> None:
    for number in range(2):
        write_tar(tmp_path / "shards" / f"train.{number}.tar", pair("a", number))
    dataset = imported(tmp_path / "shards", "--out", tmp_path / "out")
    assert {image.file: image.split for image in dataset.images} == {f"train.{n}/a.jpg": "train" for n in range(2)}


def test_another_key_ending_and_another_format_are_refused(tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "x.tar", pair("a", 1))
    line = fails(main, "import", archive, "--out", tmp_path / "out", "--key-until", "dot")
    assert "--key-until dot: unknown" in line
    line = fails(main, "import", archive, "--out", tmp_path / "out", "--format", "table", *LAST)
    assert "--key-until: the format table " in line
