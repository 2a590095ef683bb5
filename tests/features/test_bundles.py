"""Bundles that are pack: what is in them, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.features.conftest import Fails, succeed
from tests.features.test_cache import make
from vse.cli import data_main as main
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.rows import CacheIdentity
from vse.features.cli import extract_main as extract
from vse.features.exchange import bundles
from vse.features.exchange.bundle_fetch import fetch_features
from vse.features.exchange.bundles import BundleList, pack_bundle, parse_bundle_list
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def made_cache(tmp_path: Path) -> Path:
    return make(tmp_path / "features")


def test_a_bundle_has_every_file_of_the_cache_byte_by_byte_and_its_sum(made_cache: Path, tmp_path: Path) -> None:
    listed = pack_bundle([made_cache], tmp_path / "bundle")
    packed = files_in(tmp_path / "bundle")
    content = json.loads(packed.pop("bundle.json"))
    assert content["made"].keys() == {"date", "code"}, "names of folders are nobody's business"
    assert content.pop("sha256") == listed.sha256
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == listed.sha256, "of all else in the list"
    assert packed == files_in(made_cache.parent)
    sums = {file.path: (file.bytes, file.sha256) for file in listed.files}
    assert sums == {path: (len(content), hashlib.sha256(content).hexdigest()) for path, content in packed.items()}
    (cache,) = listed.caches
    assert (cache.file, cache.feature, cache.key) == ("demo_tiny.h5", "tiny", open_cache(made_cache).key)
    opened = open_cache(tmp_path / "bundle" / "demo_tiny.h5")
    assert (len(opened.ids), opened.extraction_seconds) == (10, None), "a bundle can be used as it lies there; nobody timed it"


def test_an_archive_has_the_same_files_in_a_folder_of_its_own(made_cache: Path, tmp_path: Path) -> None:
    pack_bundle([made_cache], tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        assert {(member.mtime, member.uid, member.uname) for member in archive.getmembers()} == {(0, 0, "")}
    assert next(iter(members)) == "bundle/bundle.json"
    del members["bundle/bundle.json"]
    assert members == {f"bundle/{path}": content for path, content in files_in(made_cache.parent).items()}


def test_a_fitted_encoder_the_data_set_notes_and_seconds_come_along(few: Path, tmp_path: Path) -> None:
    out = tmp_path / "features" / "demo_tfidf.h5"
    succeed(extract, "tfidf", "--dataset", few, "--set", "min_count=1", "--out", out, "--shards", "2")
    cache, folder = open_cache(out), out.with_suffix(".shards")
    shards = [json.loads(path.read_text())["seconds"] for path in folder.glob("shard-*.json")]
    fitted = json.loads(out.with_name("demo_tfidf.encoder.json").read_text())["seconds"]
    assert len(shards) == 2
    assert cache.extraction_seconds == pytest.approx(sum(shards) + fitted)
    assert cache.n_bytes == sum(path.stat().st_size for path in [out, *folder.glob("*.h5")])
    (tmp_path / "licence.txt").write_text("CC BY 4.0")
    succeed(main, "pack", out, "--out", tmp_path / "b", "--with-dataset", "--notes", tmp_path / "licence.txt")
    packed = files_in(tmp_path / "b")
    assert {"demo_tfidf.encoder.safetensors", "demo_tfidf.encoder.json", "dataset.json", "NOTES.txt"} <= packed.keys()
    assert packed["NOTES.txt"] == b"CC BY 4.0"
    assert packed["dataset.json"] == cache.dataset_file.read_bytes()


def test_a_data_set_in_a_parquet_file_comes_along(few: Path, tmp_path: Path) -> None:
    dataset, cache = tmp_path / "data" / "dataset.parquet", tmp_path / "features" / "demo_words.h5"
    content = json.loads(few.read_text())
    for image in content["images"]:
        image["sentences"] = [{name: value for name, value in one.items() if name != "phrases"} for one in image["sentences"]]
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    succeed(main, "convert", tmp_path / "dataset.json", "--out", dataset.parent)
    succeed(extract, "tfidf", "--dataset", dataset, "--set", "min_count=1", "--out", cache)
    pack_bundle([cache], tmp_path / "bundle.tar", with_dataset=True)
    fetch_features(str(tmp_path / "bundle.tar"), tmp_path / "other", tmp_path / "other_data")
    fetched = load_dataset_file(tmp_path / "other_data" / "dataset.parquet")
    assert fetched.name == "demo"
    assert list(fetched.images) == list(load_dataset_file(dataset).images)


def test_what_cannot_be_packed_leaves_nothing(made_cache: Path, tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "there").mkdir()
    other, birds = make(tmp_path / "other"), make(tmp_path / "x", identity=CacheIdentity("birds", "tiny", "image", {}))
    shard = sorted(other.with_suffix(".shards").glob("*.h5"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = sorted(path.name for path in tmp_path.iterdir())
    new = tmp_path / "new"
    cases: list[tuple[list[object], str]] = [
        ([made_cache, "--out", tmp_path / "there"], "there: exists already; "),
        ([other, "--out", new], "shard-00001-of-00003.h5: its bytes changed"),
        ([made_cache, made_cache, "--out", new], "give each cache once"),
        ([made_cache, "--out", new, "--with-dataset"], "dataset.json: No such file"),
        ([made_cache, "--out", new, "--notes", tmp_path / "none.txt"], "none.txt: No such file"),
        ([tmp_path / "none.h5", "--out", new], "none.h5: no such feature cache"),
        ([made_cache, birds, "--out", new], "; a bundle "),
    ]
    for arguments, message in cases:
        assert message in fails(main, "pack", *arguments)
        assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["bundle", "bundle.tar"])
def test_a_bundle_that_is_there_is_kept_if_it_is_of_the_same_files(name: str, made_cache: Path, tmp_path: Path) -> None:
    first = pack_bundle([made_cache], tmp_path / name)
    before = files_in(tmp_path)
    assert pack_bundle([made_cache], tmp_path / name) == first
    assert files_in(tmp_path) == before
    (tmp_path / "notes.txt").write_text("more")
    with pytest.raises(UserError, match="exists already; "):
        pack_bundle([made_cache], tmp_path / name, notes=tmp_path / "notes.txt")


def test_a_kill_while_packing_hinders_no_later_packing(made_cache: Path, tmp_path: Path) -> None:
    left = tmp_path / ".bundle.packing"
    left.mkdir()
    (left / "half").write_text("x")
    pack_bundle([made_cache], tmp_path / "bundle")
    assert "half" not in files_in(tmp_path / "bundle")
    assert not left.exists()


def changed(content: dict[str, Any], **values: Any) -> bytes:
    said = {**content, **values}
    said.pop("sha256")
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return json.dumps({**said, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def entry(path: str) -> dict[str, Any]:
    return {"path": path, "bytes": 0, "sha256": 64 * "0"}


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/x", "demo_tiny.shards/../x", "demo_tiny.shards/.x", "demo_tiny.shards/a/b", "", ".", "other.h5", ".lock",
     "demo_tiny.shards", "demo_tiny.shards/", "C:\\x", "demo_tiny.h5\0"],
)  # fmt: skip
def test_a_list_that_leads_elsewhere_is_refused(path: str, made_cache: Path, tmp_path: Path) -> None:
    pack_bundle([made_cache], tmp_path / "bundle")
    content = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    with pytest.raises(UserError, match="x.json: not the list of a bundle: .* is not a file of its caches"):
        parse_bundle_list("x.json", changed(content, files=[*content["files"], entry(path)]))


def test_a_list_that_is_none_is_refused(made_cache: Path, tmp_path: Path) -> None:
    listed = pack_bundle([made_cache], tmp_path / "bundle")
    text = (tmp_path / "bundle" / "bundle.json").read_bytes()
    content = json.loads(text)
    assert isinstance(parse_bundle_list("x.json", text), BundleList)
    assert parse_bundle_list("x.json", text) == listed
    cases = {
        b"[]": "not the list of a bundle of version 1",
        b"no json": "not valid JSON",
        text.replace(b'"version": 1', b'"version": 2'): "not the list of a bundle of version 1",
        text.replace(b'"rows"', b'"rowz"').replace(b'"tiny"', b'"tinz"'): "was changed after the bundle was packed",
        changed(content, caches=[]): "caches: List should have at least 1 item",
        changed(content, files=[*content["files"], content["files"][0]]): "is listed twice",
        changed(content, files=content["files"][:-1]): "'demo_tiny.h5' is not listed",
        changed(content, dataset="../x"): "'../x' is not a valid name",
        changed(content, files=[{**content["files"][0], "bytes": -1}]): "files.0.bytes",
    }
    for spoilt, message in cases.items():
        with pytest.raises(UserError, match="x.json: ") as error:
            parse_bundle_list("x.json", spoilt)
        assert message in str(error.value)


def test_a_file_that_changes_meanwhile_is_noticed(made_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = sorted(made_cache.with_suffix(".shards").glob("*.h5"))[0]
    progress, whole = bundles.progress_bar, shard.read_bytes()

    def touched(*arguments: Any, **options: Any) -> Any:
        if options["desc"].startswith("pack"):
            shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        return progress(*arguments, **options)

    monkeypatch.setattr(bundles, "progress_bar", touched)
    for name in ("bundle", "bundle.tar"):
        with pytest.raises(UserError, match="shard-00000-of-00003.h5: was written to while it was packed"):
            pack_bundle([made_cache], tmp_path / name)
        assert not [path for path in os.listdir(tmp_path) if "bundle" in path]
        shard.write_bytes(whole)
