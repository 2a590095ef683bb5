"""An index in a file: what is read, and what is refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from tests.hostile import WRONG_VALUES, spoilt_json
from vse.eval.search.index import (
    IndexSource,
    build_index,
    has_index_to_read,
    hash_ids,
    metadata_file,
    read_index,
    search_index,
    write_index,
)
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file

Edit = Callable[[Path, Callable[[Any], None]], Path]
CORPUS = np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32)
INDEXED = IndexSource(500, 8, "cosine", hash_ids(np.arange(500)), {"side": "images", "split": "test", "weights": 64 * "a"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_index(tmp_path / "x.faiss", build_index(CORPUS, "IVF4,Flat"), INDEXED)


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "HNSW8", "PCA4,IVF4,SQ8"])
def test_what_is_read_finds_what_was_written(factory: str, tmp_path: Path) -> None:
    built = build_index(CORPUS, factory)
    path = write_index(tmp_path / "made" / "x.faiss", built, INDEXED)
    for asked in (None, factory):
        found = read_index(path, INDEXED, asked)
        assert (found.factory, found.n_training_rows) == (factory, built.n_training_rows)
        for here, there in zip(search_index(found.index, CORPUS, 5), search_index(built.index, CORPUS, 5), strict=True):
            np.testing.assert_array_equal(here, there)
    assert sorted(p.name for p in path.parent.iterdir()) == ["x.faiss", "x.faiss.json"]
    assert faiss.read_index(str(path)).ntotal == 500, "any program can read it"
    note = json.loads(metadata_file(path).read_text())
    assert (note["factory"], note["count"], note["dim"], note["similarity"]) == (factory, 500, 8, "cosine")
    assert note["sha256"] == sha256_file(path)


@pytest.mark.parametrize(
    ("properties", "changes", "reason"),
    [
        ({"side": "captions"}, {}, "side: images there, captions here"),
        ({"weights": 64 * "b"}, {}, r"\(other weights\)"),
        ({"corpus": "new"}, {}, "corpus: none there, new here"),
        ({}, {"ids_sha256": hash_ids(np.arange(500)[::-1])}, r"\(other ids\)"),
        ({}, {"similarity": "order"}, "similarity: cosine there, order here"),
        ({}, {"dim": 9}, "dim: 8 there, 9 here"),
    ],
)
def test_an_index_of_something_else_is_refused_with_what_differs(
    properties: dict[str, str], changes: dict[str, Any], reason: str, file: Path
) -> None:
    other = replace(INDEXED, **{"properties": {**INDEXED.properties, **properties}, **changes})
    with pytest.raises(UserError, match=f"x.faiss: was built from something else .*{reason}.*; delete it"):
        read_index(file, other)
    with pytest.raises(UserError, match="an index of type IVF4,Flat, not HNSW32; delete it"):
        read_index(file, INDEXED, "HNSW32")


@pytest.mark.parametrize("keep", [0, 3, 200])
def test_what_faiss_cannot_read_is_one_line_even_with_a_note_that_fits(keep: int, file: Path, edit: Edit) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    edit(metadata_file(file), lambda note: note.update(sha256=sha256_file(file)))
    with pytest.raises(UserError, match="FAISS cannot read it .*; delete it") as caught:
        read_index(file, INDEXED)
    assert "/project/" not in str(caught.value)


def test_a_note_of_another_index_is_refused(file: Path, edit: Edit) -> None:
    other = write_index(file.with_name("y.faiss"), build_index(CORPUS[:499]), replace(INDEXED, count=499))
    file.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match="has changed since"):
        read_index(file, INDEXED)
    edit(metadata_file(file), lambda note: note.update(sha256=sha256_file(file)))
    with pytest.raises(UserError, match="has 499 rows of 8 dimensions"):
        read_index(file, INDEXED)


def test_a_foreign_file_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.faiss: no such index file"):
        read_index(tmp_path / "none.faiss", INDEXED)
    with pytest.raises(UserError, match="no such index file"):
        read_index(tmp_path, INDEXED)
    metadata_file(file).unlink()
    with pytest.raises(UserError, match="there is no x.faiss.json next to it; name another file"):
        read_index(file, INDEXED)


NOTED = ["format", "version", "factory", "trained_on", "count", "dim", "similarity", "ids_sha256", "of"]


@pytest.mark.parametrize("key", NOTED)
def test_a_note_with_a_wrong_value_is_refused(key: str, file: Path) -> None:
    note, written = metadata_file(file), metadata_file(file).read_bytes()
    for kind, value in WRONG_VALUES.items():
        if (key, kind) != ("trained_on", "a number"):
            spoilt_json(note, (key,), value)
            with pytest.raises(UserError, match=re.escape(str(file))):
                read_index(file, INDEXED)
            note.write_bytes(written)
    for text, message in (("[]", "not the metadata of an index"), ("{", "not valid JSON")):
        note.write_text(text)
        with pytest.raises(UserError, match=f"x.faiss.json: .*{message}"):
            read_index(file, INDEXED)


def test_a_failed_or_killed_write_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    path, built = tmp_path / "x.faiss", build_index(CORPUS)
    (path / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot write"):
        write_index(path, built, INDEXED)
    assert [path.name for path in tmp_path.iterdir()] == ["x.faiss"]
    (path / "inside").rmdir()
    path.rmdir()
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_index(path, built, INDEXED)
    monkeypatch.undo()
    assert not path.exists()
    assert not has_index_to_read(path, INDEXED)
    write_index(path, built, INDEXED)
    assert read_index(path, INDEXED).index.ntotal == 500


def test_an_index_without_metadata_is_absent_if_it_may_be_ours(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Build an index again if its metadata are missing, as after a kill; refuse any other file without metadata."""
    assert has_index_to_read(file, INDEXED)
    metadata_file(file).unlink()
    assert not has_index_to_read(file, INDEXED)
    assert "the index is built again" in caplog.text
    assert has_index_to_read(file, replace(INDEXED, count=499)), "somebody else's"
    file.write_bytes(b"a diary")
    assert has_index_to_read(file, INDEXED)
    assert not has_index_to_read(file.with_name("none"), INDEXED)
