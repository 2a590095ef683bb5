from __future__ import annotations

import json
import logging
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.import_files import photo_bytes, write_tar
from tests.pipeline.test_import_table import failures, imported
from vse.cli import data_main as main
from vse.pipeline.files.writing import MACHINE_ID

Fails = Callable[..., str]
LAST = ("--key-until", "last-dot")


def sample(key: str, shade: int, caption: str = "a gull") -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", photo_bytes(shade)), (f"{key}.txt", caption.encode())]


def test_a_sample_is_an_image_with_the_lines_of_its_text(tmp_path: Path) -> None:
    members = [*sample("0001", 1, "Eine Möwe\n\nzwei Möwen\n"), ("0002.png", photo_bytes(2, "PNG")), ("0002.txt", b"a tern")]
    archive = write_tar(tmp_path / "0000.tar", members)
    dataset = imported(archive, "--out", tmp_path / "out", "--val", 0, "--test", 0)
    assert [(i.imgid, i.file, [c.raw for c in i.captions]) for i in dataset.images] == [
        (0, "0000/0001.jpg", ["Eine Möwe", "zwei Möwen"]),
        (1, "0000/0002.png", ["a tern"]),
    ]
    assert dataset.images[0].captions[0].tokens == ("eine", "möwe")
    assert dataset.image_path(dataset.images[1]).read_bytes() == photo_bytes(2, "PNG")


def test_json_has_captions_in_an_object_a_list_or_a_text(tmp_path: Path) -> None:
    both = ["a gull", "it flies"]
    contents = {"a": {"captions": both, "url": "x", "key": "k"}, "b": both, "c": "a gull", "d": {"caption": "a gull"}}
    members = {name: photo for key in contents for name, photo in ((f"{key}.jpg", photo_bytes()), (f"{key}.json", b""))}
    members |= {f"{key}.json": json.dumps(content).encode() for key, content in contents.items()}
    dataset = imported(write_tar(tmp_path / "x.tar", members), "--out", tmp_path / "out")
    assert [[c.raw for c in image.captions] for image in dataset.images] == [both, both, both[:1], both[:1]]


def test_ids_and_split_of_json_are_read_next_to_a_text(tmp_path: Path) -> None:
    metadata = {"imgid": 77, "split": "validation", "cocoid": 42, "caption": "of the json", "sentid": 5}
    key = "COCO_val2014_000000000042"
    members = [*sample(key, 1, "of the text"), (f"{key}.json", json.dumps(metadata).encode())]
    (image,) = imported(write_tar(tmp_path / "x.tar", members), "--out", tmp_path / "out").images
    assert (image.imgid, image.split, image.cocoid, image.captions[0].sentid) == (77, "val", 42, 5)
    assert (image.captions[0].raw, image.file) == ("of the text", f"x/{key}.jpg")


def test_archives_of_a_folder_give_their_splits_by_name(tmp_path: Path) -> None:
    for number, name in enumerate(("train.0.tar", "train.1.tar", "train-0001.tar", "test/0.tar", "val/0.tar")):
        write_tar(tmp_path / "shards" / name, sample("0001", number))
    dataset = imported(tmp_path / "shards", "--out", tmp_path / "out")
    assert {image.file: image.split for image in dataset.images} == {
        "test/0/0001.jpg": "test",
        "train.0/0001.jpg": "train",
        "train.1/0001.jpg": "train",
        "train-0001/0001.jpg": "train",
        "val/0/0001.jpg": "val",
    }


def test_two_archives_of_one_name_are_refused_unless_their_folder_is_given(tmp_path: Path, fails: Fails) -> None:
    archives = [write_tar(tmp_path / "shards" / folder / "0.tar", sample("0001", 1)) for folder in ("a", "b")]
    assert "two archives have the same name" in fails(main, "import", *archives, "--out", tmp_path / "out")
    assert len(imported(tmp_path / "shards", "--out", tmp_path / "out").images) == 2


FAULTS: list[tuple[str, list[tuple[str, bytes]], str | None]] = [
    ("good", sample("good", 1), None),
    ("alone", [("alone.jpg", photo_bytes(2))], "no caption (txt, json)"),
    ("words", [("words.txt", b"a gull")], "no photo (jpg, jpeg, png, webp)"),
    ("empty", [("empty.jpg", photo_bytes(3)), ("empty.txt", b" \n")], "no caption (txt, json)"),
    ("null", [("null.jpg", photo_bytes(3)), ("null.json", b'{"caption": null}')], "the caption is empty"),
    ("bad", [("bad.jpg", photo_bytes(3)), ("bad.json", b"{")], "not valid JSON"),
    ("latin", [("latin.jpg", photo_bytes(3)), ("latin.txt", b"m\xf6we")], "its text is not UTF-8"),
    ("cut", [("cut.jpg", photo_bytes(4)[:20]), ("cut.txt", b"a gull")], "not a readable image"),
    ("gif", [("gif.jpg", b"GIF89a"), ("gif.txt", b"a gull")], "not a readable image"),
    ("../up", sample("../up", 5), "leads out of the archive"),
    ("good", sample("good", 6), "an earlier sample also has the key good"),
    ("twin", [*sample("twin", 6), ("twin.jpg", photo_bytes(7))], "member 'twin.jpg' "),
    ("long", [("long.jpg", photo_bytes(8)), ("long.txt", b"x" * 1_000_001)], "has 1000001 bytes, more than 1000000"),
    ("last", sample("last", 9), None),
]


def test_each_bad_sample_is_named_and_nothing_is_written_outside(tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "in" / "x.tar", [member for _, members, _ in FAULTS for member in members])
    out = tmp_path / "out"
    n_bad = sum(fault is not None for _, _, fault in FAULTS)
    line = fails(main, "import", archive, "--out", out)
    assert f"{archive}: alone: no caption (txt, json) ({n_bad} of {len(FAULTS)} rows cannot be imported" in line
    assert not (out / "dataset.json").exists()
    dataset = imported(archive, "--out", out, "--skip-bad")
    assert [image.file for image in dataset.images] == ["x/good.jpg", "x/last.jpg"]
    assert dataset.image_path(dataset.images[0]).read_bytes() == photo_bytes(1)
    listed = failures(out)
    assert [place for place, _ in listed] == [f"{archive}: {key}" for key, _, fault in FAULTS if fault]
    assert all(fault in reason for (_, reason), fault in zip(listed, [f for _, _, f in FAULTS if f], strict=True))
    assert sorted(path.name for path in tmp_path.rglob("*.jpg")) == ["good.jpg", "last.jpg"]


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path, fails: Fails) -> None:
    link = tarfile.TarInfo("a.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    write_tar(tmp_path / "x.tar", [("a.txt", b"a gull")])
    with tarfile.open(tmp_path / "x.tar", "a") as archive:
        archive.addfile(link)
    line = fails(main, "import", tmp_path / "x.tar", "--out", tmp_path / "out")
    assert "member 'a.jpg' is neither a plain file nor a folder" in line


def test_a_damaged_archive_is_a_bad_row_and_the_others_stay(tmp_path: Path, fails: Fails) -> None:
    folder = tmp_path / "shards"
    write_tar(folder / "0.tar", sample("a", 1))
    whole = write_tar(folder / "1.tar", [*sample("b", 2), *sample("c", 3)]).read_bytes()
    (folder / "1.tar").write_bytes(whole[: 2560 + 512 + 100])  # in the photo of c
    (folder / "2.tar").write_bytes(b"no archive")
    (folder / "3.tar").write_bytes(whole[:2560])  # after the text of b
    line = fails(main, "import", folder, "--out", tmp_path / "out")
    assert f"{folder / '1.tar'}: a damaged archive, or not one" in line
    dataset = imported(folder, "--out", tmp_path / "out", "--skip-bad")
    assert [image.file for image in dataset.images] == ["0/a.jpg", "1/b.jpg", "3/b.jpg"]
    assert [place for place, _ in failures(tmp_path / "out")] == [str(folder / f"{number}.tar") for number in (1, 2, 3)]


def test_an_import_that_was_stopped_continues(tmp_path: Path, fails: Fails) -> None:
    archive, out = write_tar(tmp_path / "x.tar", [*sample("a", 1), *sample("b", 2)]), tmp_path / "out"
    before = imported(archive, "--out", out)
    (out / "dataset.json").unlink()
    kept, lost = (before.image_path(image) for image in before.images)
    stamp = kept.stat().st_mtime_ns
    lost.unlink()
    assert imported(archive, "--out", out).sha256 == before.sha256
    assert kept.stat().st_mtime_ns == stamp
    assert lost.read_bytes() == photo_bytes(2)
    kept.write_bytes(b"something else")
    assert f"{kept} already exists" in fails(main, "import", archive, "--out", out)


def test_partial_photos_of_a_killed_import_are_removed_by_the_next(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    partial = tmp_path / "out" / "images" / "x" / "deep" / f".a.jpg.{MACHINE_ID}-{gone.pid}.0.tmp"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(photo_bytes(1)[:9])
    imported(write_tar(tmp_path / "x.tar", sample("a", 1)), "--out", tmp_path / "out")
    assert not partial.exists()


def test_photos_are_not_written_through_a_link(tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "images").symlink_to(tmp_path / "mine")
    archive = write_tar(tmp_path / "x.tar", sample("a", 1))
    assert f"{tmp_path / 'out' / 'images'} is a link" in fails(main, "import", archive, "--out", tmp_path / "out")
    assert not list((tmp_path / "mine").iterdir())


def test_a_hundred_samples_with_faults_among_them(tmp_path: Path) -> None:
    bad = set(random.Random(0).sample(range(100), 10))
    for shard in range(4):
        members: list[tuple[str, bytes]] = []
        for number in range(shard * 25, (shard + 1) * 25):
            members += sample(f"{number:06d}", number, "" if number in bad else f"photo number {number}")
        write_tar(tmp_path / "shards" / f"{shard:05d}.tar", members)
    dataset = imported(tmp_path / "shards", "--out", tmp_path / "out", "--skip-bad")
    wanted = [number for number in range(100) if number not in bad]
    assert [image.file for image in dataset.images] == [f"{n // 25:05d}/{n:06d}.jpg" for n in wanted]
    assert len(failures(tmp_path / "out")) == 10
    assert set(dataset.splits) == {"train", "val", "test"}
    for image, number in zip(dataset.images, wanted, strict=True):
        assert dataset.image_path(image).read_bytes() == photo_bytes(number)


def test_samples_that_differ_after_the_first_dot_are_refused_with_both_names(tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "x.tar", [*sample("a.b", 1), *sample("a.c", 2), *sample("d", 3)])
    line = fails(main, "import", archive, "--out", tmp_path / "out")
    assert f"{archive}: a: members 'a.b.jpg' and 'a.c.jpg' have the key a, which ends at the first dot" in line
    assert "--key-until last-dot" in line
    assert [image.file for image in imported(archive, "--out", tmp_path / "out", "--skip-bad").images] == ["x/d.jpg"]
    assert [place for place, _ in failures(tmp_path / "out")] == [f"{archive}: a"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([*sample("a.b", 1), *sample("d", 3)], "member 'a.b.jpg' has the key a, which ends at the first dot"),
        (sample("v1.0/a.b", 1), "member 'v1.0/a.b.jpg' has the key v1.0/a, which ends at the first dot"),
        ([*sample("a", 1), *sample("a.b", 2)], "members 'a.b.jpg' and 'a.jpg' have the key a"),
        (
            [("a.jpg", photo_bytes(1)), ("a.en.txt", b"x")],
            "no caption (txt, json); member 'a.en.txt' is the field 'en.txt' of",
        ),
        ([*sample("a", 1), *sample("b", 2), ("./a.png", photo_bytes(3, "PNG"))], "(members 'a.jpg' and './a.png')"),
        ([*sample("a", 1), ("a.JPG", photo_bytes(2))], "'a.JPG' has the same key and extension as member 'a.jpg'"),
    ],
)
def test_names_that_leave_open_which_sample_they_belong_to_are_refused(
    members: list[tuple[str, bytes]], message: str, tmp_path: Path, fails: Fails
) -> None:
    assert message in fails(main, "import", write_tar(tmp_path / "x.tar", members), "--out", tmp_path / "out")


def test_keys_that_end_at_the_last_dot_are_samples(tmp_path: Path) -> None:
    stems = ("a.b", "a.c", "a", "v1.0/a")
    members = [each for number, stem in enumerate(stems) for each in sample(stem, number, f"photo {stem}")]
    dataset = imported(write_tar(tmp_path / "x.tar", members), "--out", tmp_path / "out", *LAST)
    assert {image.file: image.captions[0].raw for image in dataset.images} == {f"x/{s}.jpg": f"photo {s}" for s in stems}
    assert dataset.image_path(dataset.images[1]).read_bytes() == photo_bytes(1)


def test_fields_that_are_not_read_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vse")
    members = [
        *(*sample("a", 1), ("a.seg.png", photo_bytes(2, "PNG")), ("a.cls", b"7")),
        *(*sample("b", 3), ("b.cls", b"7"), ("b.png", photo_bytes(4, "PNG")), ("c.cls", b"7"), ("README", b"by us")),
    ]
    archive = write_tar(tmp_path / "x.tar", members)
    dataset = imported(archive, "--out", tmp_path / "out")
    assert [image.file for image in dataset.images] == ["x/a.jpg", "x/b.jpg"]
    assert "6 members are not read: 3 *.cls, 1 *.seg.png, 1 *.png, 1 without a key" in caplog.text
    content = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert content["imported"]["members_not_read"] == 6


def test_the_hidden_files_of_a_mac_do_not_cut_a_sample(tmp_path: Path) -> None:
    members = [each for name, content in sample("a", 1) for each in ((f"./._{name}", b"Mac"), (f"./{name}", content))]
    archive = write_tar(tmp_path / "x.tar", members)
    for number, options in enumerate(((), LAST)):
        assert len(imported(archive, "--out", tmp_path / f"out-{number}", *options).images) == 1


def test_one_path_in_two_archives_is_refused(tmp_path: Path, fails: Fails) -> None:
    folder = tmp_path / "shards"
    write_tar(folder / "a.tar", sample("b/c", 1))
    write_tar(folder / "a" / "b.tar", sample("c", 1))
    assert "(members 'c.jpg' and 'b/c.jpg')" in fails(main, "import", folder, "--out", tmp_path / "out")


def test_another_key_ending_and_another_format_are_refused(tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "x.tar", sample("a", 1))
    line = fails(main, "import", archive, "--out", tmp_path / "out", "--key-until", "dot")
    assert "--key-until dot: unknown" in line
    line = fails(main, "import", archive, "--out", tmp_path / "out", "--format", "table", *LAST)
    assert "--key-until: the format table " in line
