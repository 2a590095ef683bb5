"""Hostile files in place of embeddings and results: a one-line error with exit code 2, or a result; no other file is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.eval.evaluating import write_result
from tests.eval.protocols.test_evaluate import made
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
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import write_embeddings
from vse.eval.files.results import hash_file_content
from vse.eval.options import AllEvaluateOptions
from vse.eval.protocols.compare import compare_files
from vse.training.cli import report_main

SUITE = "hostile embeddings and results"

QUICK = ["--bootstrap", 0, "--no-cross-check", "--out"]
NAMES = ("image_ids", "caption_ids", "caption_image_ids", "images", "captions", "coco_ids")
Spoil = Callable[[h5py.File, str, Path], object]


def external(name: str, inside: str = "/{}") -> Spoil:
    return lambda file, array, folder: file.update({array: h5py.ExternalLink(str(folder / name), inside.format(array))})


def soft(place: str) -> Spoil:
    return lambda file, name, folder: file.update({name: h5py.SoftLink(place.format(name))})


def hole(*width: int, **options: Any) -> Spoil:
    return lambda file, name, folder: file.create_dataset(name, (10**12, *width), **options)


LINKS: dict[str, Spoil] = {
    "another file": external("o.h5"), "a pipe": external("pipe", "/x"), "the file itself": external("e.h5"),
    "a group": soft("/ids/x"), "itself": soft("/{}"), "nothing": soft("/nothing"),
    "raw bytes": lambda file, name, folder: file.create_dataset(
        name, (12,) if name.endswith("ids") else (12, 16), "f4", external=[("/etc/passwd", 0, 768)]
    ),
    "another file's rows": lambda file, name, folder: virtual(file, name, folder / "o.h5"),
    "rows of its own": lambda file, name, folder: virtual(file, name, Path()), "a hole": hole(dtype="i8"),
    "a hole in chunks": hole(16, dtype="f4", chunks=(999, 16)),
    "a compressed hole": hole(dtype="i8", chunks=(1000,), compression="gzip"),
}  # fmt: skip


def virtual(file: h5py.File, name: str, source: Path) -> None:
    shape = (12,) if name.endswith("ids") else (12, 16)
    layout = h5py.VirtualLayout(shape, "f4")
    layout[...] = h5py.VirtualSource(str(source), "image_ids", shape)
    file.create_virtual_dataset(name, layout)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    write_embeddings(tmp_path / "o.h5", made(n_images=12, n_each=3))
    return write_embeddings(tmp_path / "e.h5", made(n_images=12, n_each=3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", LINKS)
def test_nothing_is_read_from_elsewhere(name: str, kind: str, file: Path, tmp_path: Path) -> None:
    with h5py.File(file, "a") as content:
        if name in content:
            del content[name]
        LINKS[kind](content, name, tmp_path)
    error = refused(eval_main, file, *QUICK, tmp_path / "r.json")
    assert f"{file}: " in error
    assert name in error
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("kind", NOT_FILES)
def test_embeddings_that_are_no_file_are_refused(kind: str, file: Path, tmp_path: Path) -> None:
    NOT_FILES[kind](file)
    assert str(file) in refused(eval_main, file, *QUICK, tmp_path / "r.json")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "x" * 300, "a/" * 3000, "/proc/self/mem"])
def test_devices_and_paths_that_cannot_be_are_refused(path: str, tmp_path: Path) -> None:
    refused(eval_main, path, *QUICK, tmp_path / "r.json")
    refused(table_main, "summary", path, "--out", tmp_path / "t.csv")


ATTRIBUTES: dict[str, Any] = {
    "numbers": np.arange(4), "texts": ["a", "b"], "nothing": h5py.Empty("f4"), "compound": np.zeros((), [("a", "f4")]),
    "a large number": 2**63, "a fraction": 0.5, "no number": float("nan"), "infinity": float("inf"), "true": True,
    "bytes": np.bytes_(b"\xff\xfe"), "an escape sequence": "\x1b[2J\x1b]0;x\x07", "a long text": "x" * 60_000,
    "an empty text": "", "a complex number": 1j,
}  # fmt: skip


@pytest.mark.parametrize("name", ["dataset", "split", "similarity", "experiment", "seed", "provenance"])
@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_an_attribute_is_refused_or_read(name: str, kind: str, file: Path, tmp_path: Path) -> None:
    with h5py.File(file, "a") as content:
        content.attrs[name] = ATTRIBUTES[kind]
    refused_or_done(eval_main, file, *QUICK, tmp_path / "r.json")


@settings(max_examples=60)
@given(data=st.data())
def test_any_bytes_are_refused_or_read(data: st.DataObject, tmp_path: Path) -> None:
    content = write_embeddings(tmp_path / "e.h5", made(n_images=6, n_each=2)).read_bytes()
    (tmp_path / "e.h5").write_bytes(data.draw(changed_bytes(content)))
    refused_or_done(eval_main, tmp_path / "e.h5", *QUICK, tmp_path / "r.json")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a result and a comparison as text."""
    folder = tmp_path_factory.mktemp("results")
    files = [write_embeddings(folder / f"{k}.h5", made(n_images=12, n_each=3, noise=k, experiment=f"e{k}")) for k in range(2)]
    result = write_result(files[:1], folder / "r.json", options=AllEvaluateOptions(bootstrap=100, cross_check=False))
    comparison = compare_files(files, folder / "c.json", options=AllEvaluateOptions(bootstrap=20, cross_check=False))
    return {"result": result.read_text(), "comparison": comparison.read_text()}


COMMANDS = {"summary": "result", "vsepp_4": "result", "report": "result", "significance": "comparison"}


def shown(command: str, file: Path) -> str | None:
    if command == "report":
        return refused_or_done(report_main, file, "--out", file.with_suffix(".html"))
    return refused_or_done(table_main, command, file, "--out", file.with_suffix(".csv"))


@pytest.mark.parametrize("kind", NOT_JSON)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_result_that_is_no_json_is_refused(kind: str, command: str, tmp_path: Path) -> None:
    content = NOT_JSON[kind]
    (tmp_path / "r.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert str(tmp_path / "r.json") in str(shown(command, tmp_path / "r.json"))


TOP = ("dataset", "experiment", "split", "n_images", "n_captions", "seeds", "protocols", "provenance", "version", "a", "b")


@pytest.mark.parametrize("key", TOP)
@pytest.mark.parametrize("kind", WRONG_VALUES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_value_is_refused_or_shown(key: str, kind: str, command: str, results: dict[str, str], tmp_path: Path) -> None:
    content = json.loads(results[COMMANDS[command]]) | {key: WRONG_VALUES[kind]}
    (tmp_path / "r.json").write_text(json.dumps(content | {"sha256": hash_file_content(content)}))
    shown(command, tmp_path / "r.json")


@settings(max_examples=60)
@given(data=st.data(), value=any_json, command=st.sampled_from([*COMMANDS]))
def test_any_value_anywhere_is_refused_or_shown(
    data: st.DataObject, value: Any, command: str, results: dict[str, str], tmp_path: Path
) -> None:
    content = json.loads(results[COMMANDS[command]])
    (tmp_path / "r.json").write_text(json.dumps(content))
    keys = data.draw(st.sampled_from(list(places(content))))
    content = json.loads(spoilt_json(tmp_path / "r.json", keys, value).read_text())
    (tmp_path / "r.json").write_text(json.dumps(content | {"sha256": hash_file_content(content)}))
    shown(command, tmp_path / "r.json")
