"""Photographs that stay in their tar archives: every command reads the same bytes as from files."""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_FEATURE
from tests.pipeline.conftest import Fails, succeed
from tests.pipeline.import_files import photo_bytes, write_tar
from tests.pipeline.test_import_table import failures, imported
from tests.pipeline.test_import_webdataset import FAULTS, sample
from tests.served import served
from vse.cli import data_main as main
from vse.eval.report.pages import DatasetPhotos
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.shards import read_arrays, shard_path
from vse.features.cli import extract_main
from vse.features.extraction import extract_shards, merge_feature, verify_inputs
from vse.features.extractors.cnn import CnnExtractor
from vse.features.up_to_date import hash_changed_photos
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, UnreadableArchive, decode_image, read_image_bytes, read_image_size
from vse.pipeline.files.photo_archives import INDEX_NAME
from vse.training.data.images import PhotoCrops
from vse.training.serve.page import read_photo

IN_PLACE = ("--format", "webdataset-in-place")
N_ARCHIVES, N_EACH = 3, 4
KINDS = (("JPEG", "jpg"), ("PNG", "png"), ("JPEG", "jpeg"))
opened: list[str] = []


def note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith(".tar"):
        opened.append(Path(str(arguments[0])).name)


sys.addaudithook(note_opened)


def noise(seed: int, kind: str) -> bytes:
    pixels, stream = np.random.default_rng(seed).integers(0, 255, (40, 50, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Archives with photos of three kinds, and captions in texts and in JSON."""
    for number, split in enumerate(("train-0000", "train-0001", "test-0000")):
        members: list[tuple[str, bytes]] = []
        for k in range(N_EACH):
            kind, suffix = KINDS[k % len(KINDS)]
            members.append((f"deep/{k:03d}.{suffix}", noise(N_EACH * number + k, kind)))
            captions = (f"a bird number {k}", f"{k} of many birds")
            text = json.dumps({"captions": captions}) if k % 2 else "\n".join(captions)
            members.append((f"deep/{k:03d}.{'json' if k % 2 else 'txt'}", text.encode()))
        write_tar(tmp_path / "tars" / f"{split}.tar", members)
    return tmp_path / "tars"


@pytest.fixture
def kept(tars: Path) -> Path:
    """``dataset.json`` of photos that stay in the archives."""
    return imported(tars, "--out", tars.parent / "data" / "kept", "--name", "birds", *IN_PLACE).path


def extract(dataset: Path, name: str) -> Path:
    out = dataset.parents[2] / "features" / f"{name}.h5"
    extract_shards(dataset, CnnExtractor(TINY_FEATURE), out, N_ARCHIVES)
    return merge_feature(dataset, out, N_ARCHIVES)


def query_index(dataset: Path, *statements: str) -> list[Any]:
    with sqlite3.connect(dataset.parent / "images" / INDEX_NAME) as index:
        rows = [index.execute(statement).fetchall() for statement in statements][-1]
    index.close()
    return rows


@pytest.fixture(params=["path", "file", "memory", "http"])
def place(request: pytest.FixtureRequest, tars: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The archives by path or URL. A server has no list of its files, so that the URL is that of one archive."""
    if request.param == "http":
        with served(monkeypatch, {path.name: path.read_bytes() for path in tars.iterdir()}) as server:
            yield server.url
    elif request.param == "memory":
        memory = fsspec.filesystem("memory")
        for path in tars.iterdir():
            memory.pipe(f"/{tars.parent.name}/{path.name}", path.read_bytes())
        yield f"memory://{tars.parent.name}"
        memory.rm(f"/{tars.parent.name}", recursive=True)
    else:
        yield str(tars) if request.param == "path" else tars.as_uri()


@pytest.mark.sampled(2)
def test_features_are_those_of_loose_files_bit_for_bit(place: str, tars: Path) -> None:
    names = sorted(path.name for path in tars.iterdir())
    sources = [f"{place}{name}" for name in names] if place.startswith("http") else [place]
    where = tars.parent / "data"
    kept = imported(*sources, "--out", where / "kept", "--name", "birds", *IN_PLACE)
    loose = imported(tars, "--out", where / "loose", "--name", "birds")
    assert kept.path.read_bytes() == loose.path.read_bytes()
    assert [path.name for path in (where / "kept" / "images").iterdir()] == [INDEX_NAME]
    caches = [open_cache(extract(dataset.path, dataset.path.parent.name)) for dataset in (kept, loose)]
    assert caches[0].key == caches[1].key
    for shard in range(N_ARCHIVES):
        one, other = (read_arrays(shard_path(c.path, shard, N_ARCHIVES), "ids", "features", "sources") for c in caches)
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert verify_inputs(caches[0]) == "unchanged"


def test_a_shard_opens_only_the_archives_of_its_images_from_front_to_back(kept: Path, tars: Path) -> None:
    offsets = [row[0] for row in query_index(kept, "SELECT offset FROM photos WHERE archive = 1 ORDER BY file")]
    assert offsets == sorted(offsets)
    images = load_dataset_file(kept).images
    for shard in range(N_ARCHIVES):
        opened.clear()
        extract_shards(kept, CnnExtractor(TINY_FEATURE), kept.parent / "x.h5", N_ARCHIVES, shard)
        own = images[shard * N_EACH : (shard + 1) * N_EACH]
        assert set(opened) == {f"{image.file.partition('/')[0]}.tar" for image in own}


def test_every_reader_of_photos_reads_those_in_archives(kept: Path, tars: Path, fails: Fails) -> None:
    loose = imported(tars, "--out", tars.parent / "data" / "loose", "--name", "birds")
    dataset = load_dataset_file(kept)
    for image, other in zip(dataset.images, loose.images, strict=True):
        path, file = dataset.image_path(image), loose.image_path(other)
        assert not path.exists()
        assert read_image_bytes(path) == file.read_bytes()
        assert read_image_size(path) == (50, 40)
        assert np.array_equal(read_photo(path), decode_image(file))
        photo = DatasetPhotos(dataset).find_photo(image.imgid)
        assert photo.source == DatasetPhotos(loose).find_photo(image.imgid).source is not None
    crops = [
        PhotoCrops(CnnExtractor(TINY_FEATURE), [d.image_path(i) for i in d.images], np.arange(len(d.images)))
        for d in (dataset, loose)
    ]
    every = np.arange(len(dataset.images))
    assert np.array_equal(*(one.read_images(every)[0] for one in crops))


def test_audit_and_check_read_archives(kept: Path, tars: Path, capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    loose = imported(tars, "--out", tars.parent / "data" / "loose", "--name", "other")
    succeed(main, "audit", kept, "--against", loose.path)
    assert f"{N_ARCHIVES * N_EACH} images of {kept} are in {loose.path}, too" in capsys.readouterr().out
    (tars / "train-0001.tar").unlink()
    line = fails(main, "check", kept)
    assert f"{N_EACH} of {N_ARCHIVES * N_EACH} image files are missing, the first is" in line
    assert f"{tars / 'train-0001.tar'}: no such archive" in line


def test_a_plan_opens_no_archive_until_one_is_newer_than_its_shard(kept: Path, tars: Path) -> None:
    cache = extract(kept, "birds")
    shards = [shard_path(cache, shard, N_ARCHIVES) for shard in range(N_ARCHIVES)]

    def plan() -> tuple[list[bool], list[str]]:
        opened.clear()
        changes = [bool(hash_changed_photos(kept, cache, shard, N_ARCHIVES)) for shard in range(N_ARCHIVES)]
        return changes, sorted(set(opened))

    for archive in tars.iterdir():
        os.utime(archive, ns=(1, 1))  # an archive with another time is opened again
    for shard in shards:
        os.utime(shard, ns=(later := shard.stat().st_mtime_ns + 10**9, later))
    assert plan() == ([False] * 3, [])
    for shard in shards:
        os.utime(shard, ns=(0, 0))
    for archive in tars.iterdir():
        os.utime(archive)
    assert plan() == ([False] * 3, sorted(path.name for path in tars.iterdir())), "they are hashed once"
    assert plan() == ([False] * 3, [])
    archive = tars / "train-0000.tar"
    content = archive.read_bytes().replace(noise(0, "JPEG"), noise(0, "JPEG")[:-3] + b"abc")
    archive.write_bytes(content)
    assert plan() == ([False, True, False], [archive.name]), "the images of train-0000 are the second third"


def test_a_plan_asks_no_server(kept: Path) -> None:
    cache = extract(kept, "birds")
    query_index(kept, "UPDATE archives SET location = 'http://127.0.0.1:1/a.tar'")
    assert [hash_changed_photos(kept, cache, shard, N_ARCHIVES) for shard in range(N_ARCHIVES)] == [""] * 3


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda archive: archive.unlink(), "no such archive"),
    "cut": (lambda archive: os.truncate(archive, 3000), "has changed since the import (3000 bytes instead of"),
    "moved": (
        lambda archive: archive.write_bytes(archive.read_bytes()[512:] + bytes(512)),
        "member 'deep/000.jpg' is not at byte 512",
    ),
    "renamed": (
        lambda archive: archive.write_bytes(b"deep/001" + archive.read_bytes()[8:]),
        "member 'deep/000.jpg' is not at byte 512",
    ),
    "folder": (lambda archive: (archive.unlink(), archive.mkdir()), "has changed since the import"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_an_archive_that_is_missing_or_changed_stops_an_extraction(
    change: Callable[[Path], object], message: str, kept: Path, tars: Path, fails: Fails
) -> None:
    change(tars / "train-0000.tar")
    options = ["--feature", "fc7", "--set", "model=squeezenet1_1", "--set", "layer=features.2", "--set", "weights=random"]
    arguments = ["cnn", "--dataset", kept, *options, "--skip-bad", "--out", kept.parent / "x.h5"]
    assert message in fails(extract_main, *arguments)
    with pytest.raises(UnreadableArchive, match=r"train-0000\.tar"):
        read_image_bytes(kept.parent / "images" / "train-0000" / "deep" / "000.jpg")


INDEXES: dict[str, tuple[str, str]] = {
    "beyond the end": ("UPDATE photos SET offset = 99999999", "outside the archive"),
    "before the start": ("UPDATE photos SET offset = -512", "outside the archive"),
    "giant": ("UPDATE photos SET size = 9000000000000000000", "outside the archive"),
    "a text as a number": ("UPDATE photos SET size = 'x'", "is damaged"),
    "a file that is no archive": ("UPDATE archives SET location = '/etc/passwd'", "has changed since the import"),
    "a device": ("UPDATE archives SET location = '/dev/zero', size = 0", "outside the archive"),
    "a chain of protocols": ("UPDATE archives SET location = 'simplecache::file:///etc/passwd'", "cannot be read"),
    "another protocol": ("UPDATE archives SET location = 'ssh://me@there/a.tar'", "ssh:// cannot be read"),
    "a view": ("CREATE VIEW v AS SELECT 1", "has views or triggers"),
    "another version": ("PRAGMA user_version = 9", "an index of version 9"),
    "no table": ("DROP TABLE photos", "not a readable index"),
}


@pytest.mark.parametrize(("statement", "message"), INDEXES.values(), ids=INDEXES)
def test_a_hostile_index_is_one_error(statement: str, message: str, kept: Path) -> None:
    query_index(kept, statement)
    with pytest.raises(BadImage) as error:
        read_image_bytes(kept.parent / "images" / "train-0000" / "deep" / "000.jpg")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_index_of_other_bytes_is_one_error(kept: Path) -> None:
    (kept.parent / "images" / INDEX_NAME).write_bytes(b"no database" * 100)
    with pytest.raises(BadImage, match="not a readable index"):
        read_image_bytes(kept.parent / "images" / "train-0000" / "deep" / "000.jpg")


def test_photos_keep_their_places_when_the_archives_move(kept: Path, tars: Path) -> None:
    before = [read_image_bytes(load_dataset_file(kept).image_path(image)) for image in load_dataset_file(kept).images]
    shutil.move(tars, tars.with_name("moved"))
    query_index(kept, f"UPDATE archives SET location = replace(location, '{tars}/', '{tars.with_name('moved')}/')")
    assert [read_image_bytes(load_dataset_file(kept).image_path(i)) for i in load_dataset_file(kept).images] == before


def test_bad_samples_are_those_of_an_import_that_unpacks(tmp_path: Path, fails: Fails) -> None:
    archive = write_tar(tmp_path / "in" / "x.tar", [member for _, members, _ in FAULTS for member in members])
    line = fails(main, "import", archive, "--out", tmp_path / "kept", *IN_PLACE)
    assert f"{archive}: alone: no caption (txt, json)" in line
    assert not list((tmp_path / "kept").rglob("*.*"))
    kept = imported(archive, "--out", tmp_path / "kept", "--name", "x", "--skip-bad", *IN_PLACE)
    loose = imported(archive, "--out", tmp_path / "loose", "--name", "x", "--skip-bad")
    assert kept.path.read_bytes() == loose.path.read_bytes()
    assert failures(tmp_path / "kept") == failures(tmp_path / "loose")
    assert read_image_bytes(kept.image_path(kept.images[0])) == photo_bytes(1)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_members_that_are_no_files_are_refused(kind: bytes, tmp_path: Path, fails: Fails) -> None:
    special = tarfile.TarInfo("a.jpg")
    special.type, special.linkname = kind, "/etc/passwd"
    write_tar(tmp_path / "x.tar", [("a.txt", b"a gull")])
    with tarfile.open(tmp_path / "x.tar", "a") as archive:
        archive.addfile(special)
    line = fails(main, "import", tmp_path / "x.tar", "--out", tmp_path / "out", *IN_PLACE)
    assert "member 'a.jpg' is neither a plain file nor a folder" in line


def test_long_and_foreign_names_of_members_are_found(tmp_path: Path) -> None:
    keys = ["a" * 150, "möwe", "./b", "d" * 90 + "/" + "e" * 90]
    archive = write_tar(tmp_path / "x.tar", [member for n, key in enumerate(keys) for member in sample(key, n)])
    kept = imported(archive, "--out", tmp_path / "out", *IN_PLACE)
    assert [read_image_bytes(kept.image_path(image)) for image in kept.images] == list(map(photo_bytes, range(len(keys))))


def test_archives_that_cannot_be_read_in_place_are_refused(tars: Path, tmp_path: Path, fails: Fails) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tars / "test-0000.tar", "a.jpg")
    assert "compressed" in fails(main, "import", tmp_path / "a.tar.gz", "--out", tmp_path / "out", *IN_PLACE)
    assert "s3" in fails(main, "import", "ftp://there/a.tar", "--out", tmp_path / "out")
    assert "in place" in fails(main, "import", "memory://none/a.tar", "--format", "webdataset", "--out", tmp_path / "out")
    assert "no such file" in fails(main, "import", "memory://none/a.tar", "--out", tmp_path / "out")
    imported(tars, "--out", tmp_path / "out")
    assert "has unpacked photos" in fails(main, "import", tars, "--out", tmp_path / "out", *IN_PLACE)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "remote]" in fails(main, "import", "s3://bucket/a.tar", "--out", tmp_path / "out")


def test_a_server_that_changes_an_archive_or_sends_no_ranges_is_refused(
    tars: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    out = tars.parent / "data" / "kept"
    content = (tars / "test-0000.tar").read_bytes()
    with served(monkeypatch, {"a.tar": content, "b.tar": content}) as server:
        server.ranges = False
        assert f"{server.url}b.tar" in fails(main, "import", f"{server.url}b.tar", "--out", out)
        server.ranges = True
        kept = imported(f"{server.url}a.tar", "--out", out)
        query_index(kept.path, "UPDATE archives SET version = 'another'")
        with pytest.raises(UnreadableArchive, match="another size, entity tag or time"):
            read_image_bytes(kept.image_path(kept.images[0]))


def test_the_python_interface_names_the_archive_of_a_photo(kept: Path) -> None:
    import vse

    with pytest.raises(UserError, match=r"it is member 'deep/000.jpg' of .*test-0000\.tar"):
        vse.open_dataset(kept).photo(0)
