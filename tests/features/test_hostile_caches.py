"""Whatever lies where a cache, its shards and their records should: one line and exit 2, or a sound cache."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hostile import (
    NOT_FILES,
    NOT_JSON,
    WRONG_VALUES,
    any_json,
    changed_bytes,
    places,
    refused,
    refused_or_done,
    spoilt_json,
)
from vse.features.cli import extract_main as main
from vse.features.extractors.proposals import read_boxes
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import write_json

SUITE = "hostile caches"

MANIFEST: list[tuple[str | int, ...]] = [("key",), ("shard_key",), ("shards",), ("shards", 0)]
MANIFEST += [("shards", 0, name) for name in ("file", "sha256", "bytes", "rows")]
RECORD = [(name,) for name in ("file", "sha256", "bytes", "rows", "identity", "skipped", "counts", "notes")]
RECORD += [("identity", name) for name in ("dataset", "feature", "kind", "content")]


Spoil = Callable[[h5py.File, Path], None]


def replaced(name: str, *values: Any, **how: Any) -> Spoil:
    """Put another array, or one of a shape that is not written, in the place of an array."""

    def spoil(file: h5py.File, folder: Path) -> None:
        if name in file:
            del file[name]
        file.create_dataset(name, *values, **how)

    return spoil


def linked(name: str, link: Callable[[Path], Any]) -> Spoil:
    def spoil(file: h5py.File, folder: Path) -> None:
        del file[name]
        file[name] = link(folder)

    return spoil


def elsewhere(name: str, is_virtual: bool = False) -> Spoil:
    """Take the values of an array from another file, as external storage or a virtual view."""

    def spoil(file: h5py.File, folder: Path) -> None:
        shape = file[name].shape
        del file[name]
        if is_virtual:
            layout = h5py.VirtualLayout(shape, "i8")
            layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "x", shape)
            file.create_virtual_dataset(name, layout)
        else:
            file.create_dataset(name, shape, "i8", external=[("/etc/passwd", 0, 8 * int(np.prod(shape)))])

    return spoil


def put(name: str, values: Any) -> Spoil:
    return replaced(name, data=values)


SPOILT: dict[str, Spoil] = {
    "no ids": lambda file, _: file.__delitem__("ids"), "no features": lambda file, _: file.__delitem__("features"),
    "no sources": lambda file, _: file.__delitem__("sources"), "ids that are fractions": put("ids", np.arange(66) + 0.5),
    "ids that are texts": put("ids", ["a"] * 66), "ids in a square": put("ids", np.zeros((6, 11), int)),
    "one id": put("ids", 3), "empty ids": put("ids", h5py.Empty("i8")), "duplicate ids": put("ids", np.zeros(66, int)),
    "10^12 ids": replaced("ids", (10**12,), "i8"), "10^12 ids in chunks": replaced("ids", (10**12,), "i8", chunks=(1000,)),
    "10^12 compressed ids": replaced("ids", (10**12,), "i8", chunks=(1000,), compression="gzip"),
    "10^12 rows": replaced("features", (10**12, 4), "i8"), "rows of integers": put("features", np.zeros((66, 4), int)),
    "rows in a line": put("features", np.zeros(66, np.float32)), "a number for rows": put("features", 3.0),
    "a group for rows": lambda file, _: (file.__delitem__("features"), file.create_group("features"), None)[2],
    "offsets that descend": put("offsets", np.arange(67)[::-1].copy()),
    "offsets before the first": put("offsets", np.arange(67) - 5), "offsets that are texts": put("offsets", ["a"] * 67),
    "no offset": put("offsets", np.zeros(0, int)), "one offset": put("offsets", 0),
    "ids of another file": linked("ids", lambda folder: h5py.ExternalLink(str(folder / "other.h5"), "/x")),
    "ids of a pipe": linked("ids", lambda folder: h5py.ExternalLink(str(folder / "pipe"), "/x")),
    "a soft link": linked("ids", lambda _: h5py.SoftLink("/sources")),
    "a link to itself": linked("ids", lambda _: h5py.SoftLink("/ids")),
    "a link to nothing": linked("ids", lambda _: h5py.SoftLink("/nothing")),
    "features of another file": linked("features", lambda folder: h5py.ExternalLink(str(folder / "other.h5"), "/x")),
    "external storage": elsewhere("ids"), "virtual ids": elsewhere("ids", is_virtual=True),
    "external skipped ids": elsewhere("skipped_ids"),
}  # fmt: skip
ATTRIBUTES = ("format", "version", "dataset", "feature", "kind", "key", "captions", "provenance")
WRONG_ATTRIBUTES: dict[str, Any] = {
    "a number": 3, "numbers": np.arange(3), "an empty text": "", "a long text": "x" * 5000, "a path": "../../x",
    "bytes": np.bytes_(b"\xff\xfe"), "nothing": h5py.Empty("f4"), "JSON of a list": "[1]",
    "JSON of settings that are a list": '{"config": [1], "counts": 3}', "deep JSON": "[" * 50_000,
    "an escape sequence": "\x1b[2J",
}  # fmt: skip


@pytest.fixture
def other(own_cache: Path) -> Path:
    folder = own_cache.parent
    with h5py.File(folder / "other.h5", "w") as file:
        file["x"] = np.arange(66)
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("kind", SPOILT)
def test_a_cache_that_is_none_is_refused(kind: str, own_cache: Path, other: Path) -> None:
    with h5py.File(own_cache, "a") as file:
        SPOILT[kind](file, other)
    assert str(own_cache) in refused(main, "verify", own_cache)


@pytest.mark.parametrize("kind", [kind for kind in SPOILT if "skipped" not in kind and kind != "duplicate ids"])
def test_a_shard_that_is_none_is_refused(kind: str, own_cache: Path, other: Path) -> None:
    shard = sorted(own_cache.with_suffix(".shards").glob("*.h5"))[0]
    with h5py.File(shard, "a") as file:
        SPOILT[kind](file, other)
    manifest = own_cache.with_suffix(".shards") / "manifest.json"
    spoilt_json(manifest, ("shards", 0, "bytes"), shard.stat().st_size)
    refused(main, "verify", own_cache)


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize("kind", ["missing", *WRONG_ATTRIBUTES])
def test_a_wrong_attribute_is_refused_or_read(name: str, kind: str, own_cache: Path) -> None:
    with h5py.File(own_cache, "a") as file:
        if kind == "missing":
            del file.attrs[name]
        else:
            file.attrs[name] = WRONG_ATTRIBUTES[kind]
    error = refused_or_done(main, "verify", own_cache, "--no-sources")
    is_name = name in ("dataset", "feature") and kind.startswith("JSON")
    assert error is not None or (kind != "missing" and (is_name or name == "captions"))
    assert kind != "missing" or str(own_cache) in str(error)


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("which", ["cache", "manifest", "shard", "record"])
def test_what_is_no_file_is_refused(which: str, kind: str, own_cache: Path, tmp_path: Path) -> None:
    folder = own_cache.with_suffix(".shards")
    shard = sorted(folder.glob("*.h5"))[0]
    files = {"cache": own_cache, "manifest": folder / "manifest.json", "shard": shard, "record": shard.with_suffix(".json")}
    file = files[which]
    NOT_FILES[kind](file)
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    if which == "record":
        refused(main, "merge", "--dataset", dataset, "--out", own_cache, "--shards", 3)
    else:
        assert str(file) in refused(main, "verify", own_cache)


@pytest.mark.parametrize("kind", NOT_JSON)
def test_a_manifest_that_is_no_json_is_refused(kind: str, own_cache: Path) -> None:
    manifest, content = own_cache.with_suffix(".shards") / "manifest.json", NOT_JSON[kind]
    manifest.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert str(manifest) in refused(main, "verify", own_cache)


@pytest.mark.parametrize("keys", MANIFEST, ids=str)
@pytest.mark.parametrize("kind", ["missing", *WRONG_VALUES])
def test_a_manifest_with_a_wrong_value_is_refused(keys: tuple[str | int, ...], kind: str, own_cache: Path) -> None:
    manifest = own_cache.with_suffix(".shards") / "manifest.json"
    refused(main, "verify", spoilt_json(manifest, keys, WRONG_VALUES.get(kind, ...)).parent.with_suffix(".h5"))


@pytest.mark.parametrize("keys", RECORD, ids=str)
@pytest.mark.parametrize("kind", ["missing", *WRONG_VALUES])
def test_a_record_with_a_wrong_value_is_refused_or_read(keys: tuple[str | int, ...], kind: str, own_cache: Path) -> None:
    spoilt_json(next(own_cache.with_suffix(".shards").glob("shard-00000*.json")), keys, WRONG_VALUES.get(kind, ...))
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    refused_or_done(main, "merge", "--dataset", dataset, "--out", own_cache, "--shards", 3)


@given(data=st.data(), value=any_json)
def test_any_value_in_a_record_is_refused_or_read(data: st.DataObject, value: Any, demo: Path, own_cache: Path) -> None:
    record = next(own_cache.with_suffix(".shards").glob("shard-00000*.json"))
    whole = record.read_bytes()
    spoilt_json(record, data.draw(st.sampled_from(list(places(json.loads(whole))))), value)
    refused_or_done(main, "merge", "--dataset", demo, "--out", own_cache, "--shards", 3)
    record.write_bytes(whole)


@settings(max_examples=30)
@given(data=st.data(), which=st.sampled_from(["cache", "shard", "manifest"]))
def test_any_bytes_are_refused_or_read(data: st.DataObject, which: str, own_cache: Path) -> None:
    folder = own_cache.with_suffix(".shards")
    spoilt = {"cache": own_cache, "shard": next(folder.glob("shard-00001*.h5"))}.get(which, folder / "manifest.json")
    whole = spoilt.read_bytes()
    spoilt.write_bytes(data.draw(changed_bytes(whole)))
    refused_or_done(main, "verify", own_cache)
    spoilt.write_bytes(whole)


BOXES = {
    "a list": "[1]", "texts": '{"0": ["a"]}', "ids that are texts": '{"x": []}',
    "ids of 5,000 digits": f'{{"{"9" * 5000}": []}}', "ragged boxes": '{"0": [[1, 2], [3]]}',
    "deep boxes": '{"0": ' + "[" * 500 + "]" * 500 + "}", "null": '{"0": null}', "objects": '{"0": {"a": 1}}',
    "numbers beyond float32": '{"0": [[0, 0, 1e39, 1e39]]}',
    **{kind: content for kind, content in NOT_JSON.items() if isinstance(content, str)},
}  # fmt: skip


@pytest.mark.parametrize("kind", BOXES)
def test_boxes_that_are_none_are_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(BOXES[kind])
    with pytest.raises(UserError, match="b.json: "):
        read_boxes(tmp_path / "b.json")


BOX_ARRAYS: dict[str, Callable[[h5py.File, str, tuple[int, ...]], object]] = {
    "missing": lambda file, name, shape: None,
    "text": lambda file, name, shape: file.create_dataset(name, data=["a", "b"]),
    "scalar": lambda file, name, shape: file.create_dataset(name, data=3),
    "empty": lambda file, name, shape: file.create_dataset(name, data=h5py.Empty("f4")),
    "huge": lambda file, name, shape: file.create_dataset(name, (10**12, 4), "f4", chunks=(1000, 4)),
    "external": lambda file, name, shape: file.__setitem__(name, h5py.ExternalLink("other.h5", "/x")),
    "soft": lambda file, name, shape: file.__setitem__(name, h5py.SoftLink(f"/{name}")),
    "storage": lambda file, name, shape: file.create_dataset(name, shape, "i8", external=[("/etc/passwd", 0, 100)]),
    "descending": lambda file, name, shape: file.create_dataset(name, data=np.asarray([5, 1, 0])),
    "group": lambda file, name, shape: file.create_group(name),
}


@pytest.mark.parametrize("name", ["ids", "offsets", "boxes"])
@pytest.mark.parametrize("spoil", BOX_ARRAYS)
def test_boxes_in_hdf5_that_are_none_are_refused(name: str, spoil: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["ids"], file["offsets"], file["boxes"] = np.arange(2), np.asarray([0, 1, 2]), np.zeros((2, 4))
        shape = file[name].shape
        del file[name]
        BOX_ARRAYS[spoil](file, name, shape)
    with pytest.raises(UserError, match="b.h5: "):
        read_boxes(tmp_path / "b.h5")


def test_a_manifest_cannot_name_a_file_elsewhere(own_cache: Path) -> None:
    manifest = own_cache.with_suffix(".shards") / "manifest.json"
    content = json.loads(manifest.read_text())
    shard = own_cache.with_suffix(".shards") / content["shards"][0]["file"]
    shutil.copy(shard, own_cache.parent.parent / "elsewhere.h5")
    content["shards"][0]["file"] = "../../elsewhere.h5"
    write_json(manifest, content)
    assert "not the manifest" in refused(main, "verify", own_cache)


@pytest.mark.parametrize("skipped", [[{}], [{"id": "x"}], [{"id": None}], [{"id": 0.5}], [{"id": [1]}]], ids=str)
def test_images_left_out_that_have_no_id_are_refused(skipped: Any, own_cache: Path) -> None:
    spoilt_json(next(own_cache.with_suffix(".shards").glob("shard-00000*.json")), ("skipped",), skipped)
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    refused(main, "merge", "--dataset", dataset, "--out", own_cache, "--shards", 3)
