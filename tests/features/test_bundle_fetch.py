"""Bundles that are fetched: byte by byte from a folder, an archive and a server, or not at all."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.features.test_bundles import files_in
from tests.features.test_cache import make
from tests.served import Server, served
from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cache.rows import Identity
from vse.features.data_cli import main
from vse.features.exchange.bundle_fetch import DamagedBundle, check_bundle, fetch_features
from vse.features.exchange.bundles import pack
from vse.features.extraction import verify_sources
from vse.pipeline.errors import UserError

SHARD = "demo_tiny.shards/shard-00001-of-00003.h5"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A bundle of one cache as a folder; beside it lies the same as an archive."""
    cache = make(tmp_path / "made")
    pack([cache], tmp_path / "bundle")
    with tarfile.open(tmp_path / "bundle.tar", "w") as archive:
        archive.add(tmp_path / "bundle", "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def server(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that has both."""
    files = {f"there/{path}": content for path, content in files_in(source).items()}
    with served(monkeypatch, {**files, "there/bundle.tar": source.with_suffix(".tar").read_bytes()}) as state:
        yield state


PLACES = ["folder", "archive", "address", "address of an archive"]


def place(kind: str, source: Path, server: Server) -> str:
    """Where the bundle is read."""
    return {
        "folder": str(source),
        "archive": str(source.with_suffix(".tar")),
        "address": f"{server.url}there/",
        "address of an archive": f"{server.url}there/bundle.tar",
    }[kind]


@pytest.mark.parametrize("kind", PLACES)
def test_a_fetched_cache_is_byte_equal_and_opens(kind: str, source: Path, server: Server, tmp_path: Path) -> None:
    out = tmp_path / "new" / "features"
    fetched = fetch_features(place(kind, source, server), out)
    assert fetched == [out / "demo_tiny.h5"]
    assert files_in(out) == files_in(tmp_path / "made")
    assert verify_cache(fetched[0]).key == open_cache(tmp_path / "made" / "demo_tiny.h5").key
    again = fetch_features(place(kind, source, server), out)
    assert again == fetched


@pytest.mark.parametrize("kind", PLACES)
def test_a_check_reads_everything_and_writes_nothing(
    kind: str, source: Path, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_in(tmp_path)
    where = place(kind, source, server)
    with pytest.raises(SystemExit) as stop:
        main(["fetch-features", where, "--check", "--out", str(tmp_path / "new")])
    assert not stop.value.code
    assert f"{where}: tiny of demo: 8 files" in capsys.readouterr().out
    assert files_in(tmp_path) == before


def damage(how: str, path: str, files: dict[str, bytes]) -> None:
    """Do to a file of a bundle what disks, networks and people do."""
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
    """The bundle with these files in all of its places."""
    shutil.rmtree(source)
    for path, content in files.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(content)
    with tarfile.open(source.with_suffix(".tar"), "w") as archive:
        archive.add(source, "bundle")
    server.files = {f"there/{path}": content for path, content in files.items()}
    server.files["there/bundle.tar"] = source.with_suffix(".tar").read_bytes()


@pytest.mark.parametrize("how", ["flipped", "cut", "renamed", "swapped"])
@pytest.mark.parametrize("kind", PLACES)
def test_a_damaged_piece_is_one_line_and_no_cache(
    how: str, kind: str, source: Path, server: Server, tmp_path: Path, fails: Callable[..., str]
) -> None:
    files = files_in(source)
    damage(how, SHARD, files)
    written_again(files, source, server)
    where, out = place(kind, source, server), tmp_path / "new"
    line = fails(main, "fetch-features", where, "--out", out)
    assert "shard-0000" in line
    assert not list(out.glob("*.h5")), "what is not whole has no name of a cache"
    assert not (out / "demo_tiny.shards").exists()
    assert "shard-0000" in fails(main, "fetch-features", where, "--check")


@pytest.mark.parametrize("kind", PLACES)
def test_what_was_mended_is_fetched_by_the_next_call(kind: str, source: Path, server: Server, tmp_path: Path) -> None:
    sound, files = files_in(source), files_in(source)
    damage("flipped", SHARD, files)
    written_again(files, source, server)
    with pytest.raises(UserError):
        fetch_features(place(kind, source, server), tmp_path / "new")
    written_again(sound, source, server)
    fetch_features(place(kind, source, server), tmp_path / "new")
    assert files_in(tmp_path / "new") == files_in(tmp_path / "made")


CHUNK = 1 << 16  # of a download, which are kept


@pytest.fixture
def large(source: Path, server: Server, tmp_path: Path) -> Path:
    """A folder of a cache whose shards are several chunks long; the server has its bundle in the other's place."""
    shutil.rmtree(tmp_path / "made")
    cache = make(tmp_path / "made", n_rows=9000)
    shutil.rmtree(source)
    pack([cache], source)
    written_again(files_in(source), source, server)
    return tmp_path / "made"


def test_a_cut_connection_goes_on_where_it_was(large: Path, server: Server, tmp_path: Path) -> None:
    server.cuts = [None, None, CHUNK, CHUNK, None, CHUNK + 1]
    fetch_features(f"{server.url}there", tmp_path / "new")
    assert files_in(tmp_path / "new") == files_in(large)
    assert [wanted for _, wanted in server.asked if wanted] == [f"bytes={n}-" for n in (CHUNK, 2 * CHUNK, CHUNK + 1)]


def test_pieces_that_arrived_before_a_fetch_was_given_up_are_not_asked_for_again(
    large: Path, server: Server, tmp_path: Path
) -> None:
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


def test_an_interruption_between_two_files_is_no_loss(source: Path, tmp_path: Path) -> None:
    """As if a call had been killed after it gave some files their names, and while another one was written."""
    out = tmp_path / "new"
    (out / "demo_tiny.shards").mkdir(parents=True)
    shutil.copy(source / SHARD, out / SHARD)
    (out / ".demo_tiny.h5.lock").touch()
    fetch_features(str(source), out)
    (out / ".demo_tiny.h5.lock").unlink(missing_ok=True)
    assert files_in(out) == files_in(tmp_path / "made")


def test_several_caches_of_one_data_set_are_one_bundle(tmp_path: Path) -> None:
    caches = [make(tmp_path / "made")]
    other = make(tmp_path / "x", n_shards=2, identity=Identity("demo", "wide", "image", {}))
    with tarfile.open(tmp_path / "notes.tar", "w"):
        pass
    listed = pack([*caches, renamed(other, tmp_path / "made")], tmp_path / "both.tar")
    assert [cache.feature for cache in listed.caches] == ["tiny", "wide"]
    assert [path.name for path in fetch_features(str(tmp_path / "both.tar"), tmp_path / "new")] == [
        "demo_tiny.h5",
        "demo_wide.h5",
    ]
    assert [open_cache(path).feature for path in sorted((tmp_path / "new").glob("*.h5"))] == ["tiny", "wide"]


def renamed(cache: Path, folder: Path) -> Path:
    """A cache made again under the name of its feature."""
    from vse.features.cache.feature_cache import merge_shards
    from vse.features.cache.shards import shards_folder

    out = folder / "demo_wide.h5"
    shutil.copytree(shards_folder(cache), shards_folder(out))
    return merge_shards(out, 2, cache.parent / "dataset.json", open_cache(cache).ids)


def test_the_data_set_and_the_notes_have_their_places(own_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "licence.txt").write_text("CC BY 4.0")
    pack([own_cache], tmp_path / "b", with_dataset=True, notes=tmp_path / "licence.txt")
    (fetched,) = fetch_features(str(tmp_path / "b"), tmp_path / "new" / "features")
    data = tmp_path / "new" / "data" / "demo" / "dataset.json"
    assert data.read_bytes() == open_cache(own_cache).captions.read_bytes()
    assert (tmp_path / "new/features/demo_NOTES.txt").read_text() == "CC BY 4.0"
    fetch_features(str(tmp_path / "b"), tmp_path / "other", tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "dataset.json").read_bytes() == data.read_bytes()
    assert files_in(fetched.with_suffix(".shards")) == files_in(own_cache.with_suffix(".shards"))


def test_a_fetched_cache_is_verified_without_the_images_that_it_was_made_from(own_cache: Path, tmp_path: Path) -> None:
    pack([own_cache], tmp_path / "b", with_dataset=True)
    (fetched,) = fetch_features(str(tmp_path / "b"), tmp_path / "new" / "features", tmp_path / "new" / "data")
    assert verify_sources(verify_cache(own_cache)) == "unchanged"
    assert "all images of" in verify_sources(verify_cache(fetched))


def test_what_is_there_and_is_something_else_is_never_replaced(
    source: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    out = tmp_path / "new"
    fetch_features(str(source), out)
    (out / SHARD).write_bytes(b"mine")
    before = files_in(out)
    line = fails(main, "fetch-features", source, "--out", out)
    assert "shard-00001-of-00003.h5: exists and is another file than the bundle's" in line
    assert files_in(out) == before


def test_the_sum_of_the_list_pins_a_bundle(source: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    listed = check_bundle(str(source))
    assert check_bundle(str(source), listed.sha256.upper()) == listed
    line = fails(main, "fetch-features", source, "--sha256", 64 * "0", "--out", tmp_path / "new")
    assert f"bundle: another bundle, its list has the sha256 {listed.sha256}" in line
    assert not (tmp_path / "new").exists()


def hostile(folder: Path, name: str, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """The archive of a bundle with other members behind those that it has."""
    path = shutil.copy(folder.with_suffix(".tar"), folder.with_name(name))
    with tarfile.open(path, "a") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return Path(path)


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


def test_an_archive_that_leads_elsewhere_unpacks_nothing(source: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    out = tmp_path / "new"
    members = {
        "leads out": (tarfile.TarInfo("bundle/../../evil"), b"x"),
        "neither a plain file nor a folder": (link("bundle/evil", "/etc/passwd"), b""),
        "is a duplicate": (tarfile.TarInfo("bundle/demo_tiny.h5"), b"x"),
    }
    for what, member in members.items():
        path = hostile(source, "evil.tar", member)
        assert what in fails(main, "fetch-features", path, "--out", out)
        assert not out.exists()
        assert not (tmp_path / "evil").exists()


def test_a_compressed_archive_that_grows_is_refused(source: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    grown = hostile(source, "grown.tar", (tarfile.TarInfo("bundle/more"), bytes(50_000_000)))
    packed = tmp_path / "packed.tar"
    packed.write_bytes(gzip.compress(grown.read_bytes()))
    assert "packed.tar: member" in fails(main, "fetch-features", packed, "--out", tmp_path / "new")


def test_a_place_without_a_bundle_is_one_line(source: Path, server: Server, tmp_path: Path, fails: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    (tmp_path / "text.tar").write_text("text")
    cut = tmp_path / "cut.tar"
    cut.write_bytes(source.with_suffix(".tar").read_bytes()[:6000])
    cases = {
        str(tmp_path / "none"): "none: No such file",
        str(tmp_path / "empty"): "bundle.json: No such file",
        str(tmp_path / "empty.tar"): "has no bundle/bundle.json",
        str(tmp_path / "text.tar"): "a damaged archive, or not a zip or tar",
        str(cut): "cut.tar",
        f"{server.url}nowhere": "bundle.json: the server answers 404",
        f"{server.url}nowhere.tar": "nowhere.tar: the server answers 404",
        "ftp://host/bundle": "neither a folder, a .tar archive nor an http",
        "http://127.0.0.1:9/there": "Connection refused",
    }
    for where, message in cases.items():
        assert message in fails(main, "fetch-features", where, "--out", tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_a_server_that_says_no_length_is_not_trusted_with_an_archive(server: Server, tmp_path: Path) -> None:
    server.length = False
    with pytest.raises(UserError, match="does not report the size"):
        fetch_features(f"{server.url}there/bundle.tar", tmp_path / "new")


def test_a_list_of_gigabytes_is_not_read(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vse.features.exchange import bundle_fetch

    monkeypatch.setattr(bundle_fetch, "_MAX_LIST_BYTES", 100)
    with pytest.raises(UserError, match="at most 100 "):
        fetch_features(f"{server.url}there", tmp_path / "new")


def test_a_damaged_bundle_is_a_user_s_error() -> None:
    assert issubclass(DamagedBundle, UserError)
