"""Downloads from a real HTTP server on loopback that fails as servers and networks do."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from tests.pipeline.conftest import Output, Patch, succeed
from tests.pipeline.entities_files import annotation, thing, write_photo
from tests.served import Server, served
from vse.cli import data_main as main
from vse.pipeline.dataset import downloads
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.downloads import download
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import MACHINE_ID
from vse.pipeline.presets.presets import list_preset_names, load_dataset_preset

CHUNK = 1 << 16
CONTENT = random.Random(0).randbytes(10 * CHUNK + 17)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(monkeypatch: Patch) -> Iterator[Server]:
    """Start a server with one file; retries do not wait."""
    with served(monkeypatch, {"file.zip": CONTENT}) as state:
        yield state


def fetched(server: Server, folder: Path) -> Path:
    return download(f"{server.url}file.zip", folder / "file.zip", SHA256, len(CONTENT))


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("length", [True, False])
def test_a_file_is_downloaded_once(server: Server, tmp_path: Path, ranges: bool, length: bool) -> None:
    server.ranges, server.length = ranges, length
    for _ in range(2):
        assert fetched(server, tmp_path / "new").read_bytes() == CONTENT
    assert server.asked == [("file.zip", None)]
    assert os.listdir(tmp_path / "new") == ["file.zip"]


def test_a_cut_connection_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.cuts = [2 * CHUNK, CHUNK, 1, CHUNK + 1, 3 * CHUNK]
    assert fetched(server, tmp_path).read_bytes() == CONTENT
    offsets = [0 if wanted is None else int(wanted[6:-1]) for _, wanted in server.asked]
    assert offsets == sorted(offsets)
    assert len(offsets) == 6
    assert server.sent < len(CONTENT) + 3 * CHUNK


REST = f"bytes={2 * CHUNK}-"


@pytest.mark.parametrize(
    ("faults", "ranges"),
    [
        ({"cuts": [2 * CHUNK], "length": False}, [None, REST]),
        ({"cuts": [2 * CHUNK], "ranges": False}, [None, REST]),  # starts afresh
        ({"cuts": [2 * CHUNK], "shift": 5}, [None, REST, None]),  # continues elsewhere
        ({"codes": [503, 429, 500]}, [None] * 4),
    ],
)
def test_after_a_fault_it_asks_again(
    faults: dict[str, object], ranges: list[str | None], server: Server, tmp_path: Path
) -> None:
    vars(server).update(faults)
    assert fetched(server, tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == ranges
    if not server.ranges:
        assert server.sent == len(CONTENT) + 2 * CHUNK


@pytest.mark.parametrize(
    ("name", "content", "ranges"),
    [
        ("file.zip.part", CONTENT + b"more", [f"bytes={len(CONTENT) + 4}-", None]),
        ("file.zip.part", CONTENT, []),
        ("file.zip", b"wrong", [None]),  # put there by hand
    ],
)
def test_files_that_are_already_there_are_used_or_replaced(
    name: str, content: bytes, ranges: list[str | None], server: Server, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert fetched(server, tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == ranges


def test_wrong_bytes_are_named_and_removed_and_an_old_file_stays(server: Server, tmp_path: Path) -> None:
    server.files["file.zip"] = wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    (tmp_path / "file.zip").write_bytes(b"old")
    message = f"{server.url}file.zip: .*expected {SHA256} but got {hashlib.sha256(wrong).hexdigest()}.*{tmp_path}/file.zip"
    with pytest.raises(UserError, match=message):
        fetched(server, tmp_path)
    assert os.listdir(tmp_path) == ["file.zip"]
    assert (tmp_path / "file.zip").read_bytes() == b"old"


def test_a_part_of_other_bytes_does_not_pass(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.zip.part").write_bytes(b"x" * CHUNK)
    with pytest.raises(UserError, match=f"expected {SHA256}"):
        fetched(server, tmp_path)
    assert fetched(server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"<html>Please log in</html>", CONTENT + b"more"])
def test_a_file_of_another_size_is_not_read(content: bytes, server: Server, tmp_path: Path) -> None:
    server.files["file.zip"] = content
    with pytest.raises(UserError, match=f"the file there has {len(content)} bytes instead of {len(CONTENT)}"):
        fetched(server, tmp_path)
    assert len(server.asked) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_is_always_cut_is_given_up(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.ranges, server.cuts = ranges, [2 * CHUNK, *[0 if ranges else CHUNK] * 50]
    with pytest.raises(UserError, match=f"of {len(CONTENT)} bytes have arrived.*Run the command again"):
        fetched(server, tmp_path)
    assert len(server.asked) == 1 + downloads.MAX_ATTEMPTS
    server.cuts = []
    assert fetched(server, tmp_path).read_bytes() == CONTENT


def test_a_missing_file_is_named_at_once(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{server.url}no.zip: the server answers 404 Not Found. .*{tmp_path}/no.zip"):
        download(f"{server.url}no.zip", tmp_path / "no.zip", SHA256, len(CONTENT))
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_named(server: Server, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        url = f"http://127.0.0.1:{closed.server_port}/file.zip"
    with pytest.raises(UserError, match=f"{url}: .*Connection refused"):
        download(url, tmp_path / "file.zip", SHA256, len(CONTENT))


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/file.zip", "/file.zip", "http:///file.zip", "http://[::1/file.zip"]
)
def test_an_address_of_another_kind_is_refused(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vse")
    with pytest.raises(UserError, match=re.escape(url)):
        download(url, tmp_path / "file.zip", SHA256, len(CONTENT))
    assert os.listdir(tmp_path) == []
    assert "trying again" not in caplog.text


def test_a_disk_that_is_full_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.zip.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match="cannot write .*file.zip.part: No space left on device"):
        fetched(server, tmp_path)
    assert os.listdir(tmp_path) == ["file.zip.part"]


SPLITS = {"train": "train2014", "restval": "val2014", "val": "val2014", "test": "val2014"}


def picture() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    return stream.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def known(content: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "max_bytes": 10**6}


def entry(k: int, split: str, folder: str) -> dict[str, object]:
    sentence = {"sentid": k, "imgid": k, "raw": "A cat.", "tokens": ["a", "cat"]}
    filename = f"COCO_{folder}_{k}.jpg"
    return {"imgid": k, "filepath": folder, "filename": filename, "split": split, "sentids": [k], "sentences": [sentence]}


@pytest.fixture
def coco(server: Server, tmp_path: Path, monkeypatch: Patch) -> Server:
    """Start a server with a COCO of four images, write presets with its checksums, and work in an empty folder."""
    entries = [entry(k, *item) for k, item in enumerate(SPLITS.items())]
    files: dict[str, dict[str, bytes]] = {"train2014.zip": {}, "val2014.zip": {}}
    for image in entries:
        files[f"{image['filepath']}.zip"][f"{image['filepath']}/{image['filename']}"] = picture()
    files["caption_datasets.zip"] = {
        "dataset_coco.json": json.dumps({"dataset": "coco", "images": entries}).encode(),
        "dataset_flickr8k.json": b"{}",
    }
    server.files = {name: zipped(members) for name, members in files.items()}
    padding = {"train2014/padding": random.Random(1).randbytes(5 * CHUNK)}
    server.files["train2014.zip"] = zipped(files["train2014.zip"] | padding)
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path / "presets"))
    write_presets(server)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return server


def write_presets(server: Server) -> None:
    folder = Path(os.environ["VSE_PRESETS"], "datasets")
    folder.mkdir(parents=True, exist_ok=True)

    def source(name: str, member: str, to: str) -> dict[str, object]:
        return {"url": f"http://published.invalid/zips/{name}", "member": member, "to": to, **known(server.files[name])}

    pictures = [source(f"{name}.zip", name, f"images/{name}") for name in ("train2014", "val2014")]
    for name, long, images in (("coco", "coco", pictures), ("f8k", "flickr8k", [])):
        split = f"dataset_{long}.json"
        files = [source("caption_datasets.zip", split, split), *images]
        preset = {"annotations": split, "files": files, "where": "By a form."}
        (folder / f"{name}.yaml").write_text(json.dumps(preset))


def test_a_data_set_is_fetched_and_prepared_once(coco: Server, capsys: Output) -> None:
    coco.cuts = [None, 2 * CHUNK]
    for _ in range(2):
        succeed(main, "fetch", "coco", "--base-url", coco.url)
        assert capsys.readouterr().out == "data/coco/dataset.json\n"
    assert [name for name, _ in coco.asked] == ["caption_datasets.zip", "train2014.zip", "train2014.zip", "val2014.zip"]
    dataset = load_dataset_file(Path("data/coco/dataset.json"))
    assert {split: len(images) for split, images in dataset.splits.items()} == dict.fromkeys(SPLITS, 1)
    assert all(dataset.image_path(image).read_bytes() == picture() for image in dataset.images)
    assert "dataset_flickr8k.json" not in os.listdir("data/coco")


def test_a_killed_download_goes_on_where_it_was(coco: Server) -> None:
    coco.hold, coco.cuts = threading.Event(), [None, 3 * CHUNK]
    part = Path("data/coco/train2014.zip.part")
    command = [sys.executable, "-c", "from vse.cli import data_main as main; main()", "fetch", "coco", "--base-url", coco.url]
    with subprocess.Popen(command) as child:
        while not coco.reached.wait(0.1) or not part.exists() or part.stat().st_size < 3 * CHUNK:
            assert child.poll() is None
        child.kill()
    coco.hold.set()
    assert sorted(os.listdir("data/coco")) == [".lock", "caption_datasets.zip", "dataset_coco.json", part.name]
    succeed(main, "fetch", "coco", "--base-url", coco.url)
    asked = [wanted for name, wanted in coco.asked if name == "train2014.zip"]
    assert asked == [None, f"bytes={3 * CHUNK}-"]
    assert coco.sent == sum(map(len, coco.files.values())), "no byte was sent twice"
    assert Path("data/coco/dataset.json").is_file()


def test_leftovers_of_killed_runs_are_cleared_by_the_next(coco: Server) -> None:
    """Clear half an unpacked archive and the temporary link and file of a preparation, even if nothing is left to do."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = Path("data/coco")
    for _ in range(2):
        (folder / "images" / ".train2014.unpacking" / "content").mkdir(parents=True)
        (folder / f".images.{MACHINE_ID}-{gone.pid}.link.tmp").symlink_to("images")
        (folder / f".dataset.json.{MACHINE_ID}-{gone.pid}.x.tmp").touch()
        (folder / ".lock").touch()
        succeed(main, "fetch", "coco", "--base-url", coco.url)
        left = {path.name for path in folder.rglob(".*")}
        assert left == set()


def test_existing_files_are_not_downloaded(coco: Server) -> None:
    Path("data/coco/images/val2014").mkdir(parents=True)
    with zipfile.ZipFile(io.BytesIO(coco.files["val2014.zip"])) as archive:
        archive.extractall("data/coco/images")
    succeed(main, "fetch", "coco", "--base-url", coco.url)
    assert [name for name, _ in coco.asked] == ["caption_datasets.zip", "train2014.zip"]


def test_the_command_tells_where_to_put_images_without_a_download(coco: Server, capsys: Output) -> None:
    succeed(main, "fetch", "f8k", "--base-url", coco.url)
    text = capsys.readouterr().out
    assert "Put them into the folder data/f8k/images, then run: vse-data prepare f8k --source data/f8k" in text
    assert "By a form." in text
    assert sorted(os.listdir("data/f8k")) == ["caption_datasets.zip", "dataset_flickr8k.json"]


def test_images_may_be_left_out_and_the_mirror_be_in_the_environment(coco: Server, monkeypatch: Patch, capsys: Output) -> None:
    monkeypatch.setenv("VSE_BASE_URL", coco.url)
    succeed(main, "fetch", "coco", "--no-images", "--out", "elsewhere")
    assert "Put them into the folder elsewhere/images" in capsys.readouterr().out
    assert [name for name, _ in coco.asked] == ["caption_datasets.zip"]


@pytest.mark.parametrize(("name", "content"), [("val2014/../../../evil", b"x"), ("val2014/bomb", b"\0" * 10**6)])
def test_an_archive_that_is_not_sound_is_refused(name: str, content: bytes, coco: Server, fails: Callable[..., str]) -> None:
    coco.files["val2014.zip"] = zipped({"val2014/a.jpg": picture(), name: content})
    write_presets(coco)
    line = fails(main, "fetch", "coco", "--base-url", coco.url)
    assert f"data/coco/val2014.zip: member {name!r}" in line
    assert "nothing was unpacked" in line
    assert os.listdir("data/coco/images") == ["train2014"]
    assert not list(Path("..").rglob("evil"))


def test_a_data_set_without_downloads_is_refused(coco: Server, fails: Callable[..., str]) -> None:
    assert "draw it with: vse-data demo --out data/demo" in fails(main, "fetch", "demo")
    Path("mine.yaml").write_text("annotations: mine.json\n")
    assert "'mine': its preset names no files to download" in fails(main, "fetch", "mine.yaml", "--base-url", coco.url)


def test_a_preset_downloads_its_split_file() -> None:
    for config in map(load_dataset_preset, list_preset_names("datasets")):
        assert not (config.files and config.annotations) or config.annotations in [file.to for file in config.files]


def test_flickr30k_entities_is_an_archive_and_lists(coco: Server, capsys: Output) -> None:
    """The archive is downloaded once, although two of its folders are needed; other files are stored as they are."""
    captions, xml = b"[/EN#7/people Two dogs] run .", annotation([thing("7", (1, 1, 4, 4))], (8, 8)).encode()
    lists = {"train.txt": b"11111\n", "val.txt": b"22222\n", "test.txt": b"33333\n"}
    numbers = [content.decode().strip() for content in lists.values()]
    archive = {f"Sentences/{number}.txt": captions for number in numbers}
    coco.files = {"annotations.zip": zipped(archive | {f"Annotations/{number}.xml": xml for number in numbers}), **lists}
    members = [("annotations.zip", "Annotations"), ("annotations.zip", "Sentences"), *((name, None) for name in lists)]
    files = []
    for name, member in members:
        where = {"url": f"http://published.invalid/{name}", "member": member, "to": member or name}
        files.append(where | known(coco.files[name]))
    Path("mine.yaml").write_text(json.dumps({"entities": ".", "images": "photos", "files": files, "where": "By a form."}))
    succeed(main, "fetch", "mine.yaml", "--out", "data", "--base-url", coco.url)
    assert "Put them into the folder data/photos" in capsys.readouterr().out
    for number in numbers:
        write_photo(Path("data", "photos", f"{number}.jpg"), (8, 8))
    succeed(main, "fetch", "mine.yaml", "--out", "data", "--base-url", coco.url)
    assert [name for name, _ in coco.asked] == ["annotations.zip", *lists]
    dataset = load_dataset_file(Path("data/dataset.json"))
    assert [(image.imgid, image.split) for image in dataset.images] == [(11111, "train"), (22222, "val"), (33333, "test")]
    assert dataset.images[2].captions[0].phrases[0].boxes == ((0.0, 0.0, 4.0, 4.0),)
