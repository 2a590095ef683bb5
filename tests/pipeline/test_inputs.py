"""Test that the SHA-256 of an input is that of the bytes that were read, even if the file is replaced meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.pipeline.conftest import Patch, succeed
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.protocols import evaluate
from vse.features.cache import shards
from vse.features.exchange.arrays import import_arrays
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, read_and_hash

RNG = np.random.default_rng(0)


def embeddings(path: Path, rng: np.random.Generator) -> Path:
    ids = np.arange(40)
    images, captions = rng.normal(size=(2, 40, 8)).astype(np.float32)
    return write_embeddings(path, Embeddings(ids, ids, ids, "demo", "test", images, captions, seed=0))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_what_is_read_by_name_is_the_file_that_is_hashed_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    assert read_and_hash(path, Path.read_bytes) == (b"old", sha256(b"old"))

    def replaced(file: Path) -> bytes:
        (tmp_path / "y").write_bytes(b"new")
        os.replace(tmp_path / "y", file)
        return file.read_bytes()

    with pytest.raises(UserError, match="x: was replaced or written to while it was read"):
        read_and_hash(path, replaced)


def test_what_is_no_plain_file_is_one_line_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    plain = "only plain files are read"
    messages = {"missing": "No such file", ".": plain, "fifo": plain, "/dev/null": plain, "x\0y": "null (byte|character)"}
    for name, message in messages.items():
        with pytest.raises(UserError, match=message):
            InputFile(tmp_path / name)


@pytest.mark.parametrize("how", ["one", "ensemble", "compare"])
def test_an_evaluation_notes_the_hash_of_what_it_read(how: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Another file is renamed over the first one as soon as it has been read."""
    file, twin = embeddings(tmp_path / "a.h5", RNG), embeddings(tmp_path / "b.h5", RNG)
    other = embeddings(tmp_path / "other.h5", RNG)
    before, out = file.read_bytes(), tmp_path / "result.json"
    options = {"one": [file], "ensemble": [file, twin, "--ensemble"], "compare": [file, twin, "--compare"]}
    real, swapped = evaluate.select_protocols, []

    def swap(*arguments: object) -> list[str]:
        if not swapped:
            os.replace(other, file)
            swapped.append(file)
        return real(*arguments)  # type: ignore[arg-type]

    for module in ("vse.eval.protocols.evaluate", "vse.eval.protocols.compare"):
        monkeypatch.setattr(f"{module}.select_protocols", swap)
    succeed(eval_main, *options[how], "--bootstrap", 100, "--out", out)
    assert swapped
    result = json.loads(out.read_text())
    references = result["a"]["embeddings"] if how == "compare" else result["provenance"]["embeddings"]
    assert references[0] == {"file": "a.h5", "sha256": sha256(before)}
    assert file.read_bytes() != before


def test_imported_features_that_change_meanwhile_are_refused(demo: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """The rows are read by path, the SHA-256 from the open file: no shard may have those of two different files."""
    ids = [image.imgid for image in load_dataset_file(demo).images]
    for name in ("x.npy", "y.npy"):
        np.save(tmp_path / name, RNG.normal(size=(len(ids), 4)).astype(np.float32))
    (tmp_path / "ids.txt").write_text("\n".join(map(str, ids)))
    real: Callable[..., object] = shards.read_intact_shard_record

    def swap(*arguments: object) -> object:
        os.replace(tmp_path / "y.npy", tmp_path / "x.npy")
        return real(*arguments)

    monkeypatch.setattr(shards, "read_intact_shard_record", swap)
    with pytest.raises(UserError, match=r"x\.npy: was replaced or written to while it was read"):
        import_arrays(tmp_path / "x.npy", tmp_path / "ids.txt", demo, tmp_path / "demo_x.h5")
    assert not list(tmp_path.rglob("*.shards"))
