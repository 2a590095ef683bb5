"""Bundles that are fetched: byte by byte from a folder, an archive and a server, or not at all."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.features.conftest import Fails, succeed
from tests.features.test_bundles import files_in
from tests.features.test_cache import make
from tests.served import Server, served
from vse.cli import data_main as main
from vse.features.cache.feature_cache import merge_shards, open_cache, verify_cache
from vse.features.cache.rows import CacheIdentity
from vse.features.cache.shards import shards_folder
from vse.features.exchange import bundle_fetch
from vse.features.exchange.bundle_fetch import check_bundle, fetch_features
from vse.features.exchange.bundles import pack_bundle
from vse.features.extraction import verify_inputs
from vse.pipeline.errors import UserError

SHARD = "demo_tiny.shards/shard-00001-of-00003.h5"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    cache = make(tmp_path / "made")
    pack_bundle([cache], tmp_path / "bundle")
    with tarfile.open(tmp_path / "bundle.tar", "w") as archive:
        archive.add(tmp_path / "bundle", "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def server(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    files = {f"there/{path}": content for path, content in files_in(source).items()}
    with served(monkeypatch, {**files, "there/bundle.tar": source.with_suffix(".tar").read_bytes()}) as state:
        yield state


@pytest.fixture(params=["folder", "archive", "address", "address of an archive"])
def where(request: pytest.FixtureRequest, source: Path, server: Server) -> str:
    """Each place at which the bundle can be read."""
    archive, url = str(source.with_suffix(".tar")), f"{server.url}there/"
    return {"folder": str(source), "archive": archive, "address": url}.get(request.param, f"{url}bundle.tar")


def test_a_check_writes_nothing_and_a_fetched_cache_is_byte_equal(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = files_in(tmp_path), tmp_path / "new" / "features"
    succeed(main, "fetch-features", where, "--check", "--out", out)
    assert f"{where}: tiny of demo: 8 files" in capsys.readouterr().out
    assert files_in(tmp_path) == before
    fetched = fetch_features(where, out)
    assert fetched == [out / "demo_tiny.h5"]
    assert files_in(out) == files_in(tmp_path / "made")
    assert verify_cache(fetched[0]).key == open_cache(tmp_path / "made" / "demo_tiny.h5").key
    assert fetch_features(where, out) == fetched, "again"


def damage(how: str, path: str, files: dict[str, bytes]) -> None:
    content = files[path]
    if how == "flipped":
        files[path] = content[:-1] + bytes([content[-1] ^ 1])
    elif how == "cut":
        files[path] = content[:-1]
    elif how == "renamed":
        files[path.replace("00001", "00009")] = files.pop(path)
    elif how == "swapped":
        other = path.replace("00001", "00000")
        files[path], files[other] = files[other], files[path]


def written_again(files: dict[str, bytes], source: Path, server: Server) -> None:
    shutil.rmtree(source)
    for path, content in files.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(content)
    with tarfile.open(source.with_suffix(".tar"), "w") as archive:
        archive.add(source, "bundle")
    server.files = {f"there/{path}": content for path, content in files.items()}
    server.files["there/bundle.tar"] = source.with_suffix(".tar").read_bytes()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", ["flipped", "cut", "renamed", "swapped"])
def test_a_damaged_piece_makes_no_cache(
    how: str, where: str, source: Path, server: Server, tmp_path: Path, fails: Fails
) -> None:
    sound, files, out = files_in(source), files_in(source), tmp_path / "new"
    damage(how, SHARD, files)
    written_again(files, source, server)
    assert "shard-0000" in fails(main, "fetch-features", where, "--out", out)
    assert not list(out.glob("*.h5")), "what is not whole has no name of a cache"
    assert not (out / "demo_tiny.shards").exists()
    assert "shard-0000" in fails(main, "fetch-features", where, "--check")
    written_again(sound, source, server)
    fetch_features(where, out)
    assert files_in(out) == files_in(tmp_path / "made"), "mended, it is fetched by the next call"


CHUNK = 1 << 16  # of a download, which are kept


@pytest.fixture
def large(source: Path, server: Server, tmp_path: Path) -> Path:
    """A folder of a cache whose shards are several chunks long; the server has its bundle in the other's place."""
    shutil.rmtree(tmp_path / "made")
    cache = make(tmp_path / "made", n_rows=9000)
    shutil.rmtree(source)
    pack_bundle([cache], source)
    written_again(files_in(source), source, server)
    return tmp_path / "made"


def test_pieces_that_arrived_are_not_requested_again(large: Path, server: Server, tmp_path: Path) -> None:
    """The server sends the list, two files and a part of the third, and breaks off until the client gives up."""
    out = tmp_path / "new"
    server.cuts = [None, None, None, None, CHUNK, *(0 for _ in range(5))]
    with pytest.raises(UserError, match=r"bytes have arrived"):
        fetch_features(f"{server.url}there", out)
    assert not list(out.glob("*.h5"))
    asked = [name for name, _ in server.asked]
    server.asked.clear()
    fetch_features(f"{server.url}there", out)
    assert files_in(out) == files_in(large)
    assert not {name for name, _ in server.asked} & set(asked[2:4])
    assert server.asked[2] == (asked[4], f"bytes={CHUNK}-")


def test_an_archive_that_arrived_in_part_is_continued_by_the_next_call(large: Path, server: Server, tmp_path: Path) -> None:
    where, out = f"{server.url}there/bundle.tar", tmp_path / "new"
    server.cuts = [None, 3 * CHUNK, *(0 for _ in range(5))]
    with pytest.raises(UserError, match=r"bytes have arrived"):
        fetch_features(where, out)
    server.asked.clear()
    fetch_features(where, out)
    assert files_in(out) == files_in(large)
    assert [wanted for _, wanted in server.asked] == [None, f"bytes={3 * CHUNK}-"]


def test_several_caches_of_one_data_set_are_one_bundle(tmp_path: Path) -> None:
    caches = [make(tmp_path / "made")]
    other = make(tmp_path / "x", n_shards=2, identity=CacheIdentity("demo", "wide", "image", {}))
    caches.append(tmp_path / "made" / "demo_wide.h5")
    shutil.copytree(shards_folder(other), shards_folder(caches[1]))
    merge_shards(caches[1], 2, other.parent / "dataset.json", open_cache(other).ids)
    listed = pack_bundle(caches, tmp_path / "both.tar")
    assert [cache.feature for cache in listed.caches] == ["tiny", "wide"]
    fetched = fetch_features(str(tmp_path / "both.tar"), tmp_path / "new")
    assert fetched == sorted((tmp_path / "new").glob("*.h5"))
    assert [open_cache(path).feature for path in fetched] == ["tiny", "wide"]


def test_the_data_set_and_the_notes_have_their_places(own_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "licence.txt").write_text("CC BY 4.0")
    pack_bundle([own_cache], tmp_path / "b", with_dataset=True, notes=tmp_path / "licence.txt")
    (fetched,) = fetch_features(str(tmp_path / "b"), tmp_path / "new" / "features")
    data = tmp_path / "new" / "data" / "demo" / "dataset.json"
    assert data.read_bytes() == open_cache(own_cache).dataset_file.read_bytes()
    assert (tmp_path / "new/features/demo_NOTES.txt").read_text() == "CC BY 4.0"
    (other,) = fetch_features(str(tmp_path / "b"), tmp_path / "other" / "features", tmp_path / "other" / "data")
    assert (tmp_path / "other" / "data" / "dataset.json").read_bytes() == data.read_bytes()
    assert files_in(fetched.with_suffix(".shards")) == files_in(own_cache.with_suffix(".shards"))
    assert verify_inputs(verify_cache(own_cache)) == "unchanged"
    assert "all images of" in verify_inputs(verify_cache(other)), "no image is in a bundle"


def test_another_file_is_never_replaced(source: Path, tmp_path: Path, fails: Fails) -> None:
    out = tmp_path / "new"
    fetch_features(str(source), out)
    (out / SHARD).write_bytes(b"mine")
    before = files_in(out)
    line = fails(main, "fetch-features", source, "--out", out)
    assert "shard-00001-of-00003.h5: exists and is another file than the bundle's" in line
    assert files_in(out) == before


def test_the_sum_of_the_list_pins_a_bundle(source: Path, tmp_path: Path, fails: Fails) -> None:
    listed = check_bundle(str(source))
    assert check_bundle(str(source), listed.sha256.upper()) == listed
    line = fails(main, "fetch-features", source, "--sha256", 64 * "0", "--out", tmp_path / "new")
    assert f"bundle: another bundle, its list has the sha256 {listed.sha256}" in line
    assert not (tmp_path / "new").exists()


def test_an_archive_that_leads_elsewhere_unpacks_nothing(source: Path, tmp_path: Path, fails: Fails) -> None:
    out, evil, link = tmp_path / "new", tmp_path / "evil.tar", tarfile.TarInfo("bundle/evil")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    members = {
        "leads out": tarfile.TarInfo("bundle/../../evil"),
        "neither a plain file nor a folder": link,
        "is a duplicate": tarfile.TarInfo("bundle/demo_tiny.h5"),
    }
    for what, member in members.items():
        shutil.copy(source.with_suffix(".tar"), evil)
        with tarfile.open(evil, "a") as archive:
            archive.addfile(member, io.BytesIO())
        assert what in fails(main, "fetch-features", evil, "--out", out)
        assert not out.exists()
        assert not (tmp_path / "evil").exists()


def test_a_place_without_a_bundle_is_named(
    server: Server, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    (tmp_path / "text.tar").write_text("text")
    cases = {
        str(tmp_path / "none"): "none: No such file",
        str(tmp_path / "empty"): "bundle.json: No such file",
        str(tmp_path / "empty.tar"): "has no bundle/bundle.json",
        str(tmp_path / "text.tar"): "a damaged archive, or not a zip or tar",
        f"{server.url}nowhere": "bundle.json: the server answers 404",
        "ftp://host/bundle": "neither a folder, a .tar archive nor an http",
        "http://127.0.0.1:9/there": "Connection refused",
    }
    monkeypatch.setattr(bundle_fetch, "_MAX_LIST_BYTES", 100)
    cases[f"{server.url}there"] = "at most 100 "
    for where, message in cases.items():
        assert message in fails(main, "fetch-features", where, "--out", tmp_path / "new")
        assert not (tmp_path / "new").exists()
    server.length = False
    assert "does not report the size" in fails(main, "fetch-features", f"{server.url}there/bundle.tar", "--check")
