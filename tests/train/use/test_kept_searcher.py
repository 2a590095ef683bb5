"""Searches in one process: of data sets with and without columns beside them, and of what changes between two queries."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import forget_captions
from vse.eval.search.top_k import SearchHit
from vse.features.cache.shards import shard_path
from vse.pipeline.dataset import dataset as dataset_module
from vse.pipeline.dataset.columns import columns_file
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files import inputs as input_files
from vse.train.options import RunFiles
from vse.train.run.folder import RunFolder
from vse.train.use import search as search_module
from vse.train.use.search import search_split

TEXT = "a red square above a blue circle"
Search = Callable[..., list[SearchHit]]
Edit = Callable[[Path, Callable[[Any], None]], Path]


@pytest.fixture
def dataset(own_cache: Path, edit: Edit) -> Path:
    """A ``dataset.json`` that a test may spoil, whose captions have no phrases."""

    def strip(content: dict[str, Any]) -> None:
        for image in content["images"]:
            for sentence in image["sentences"]:
                sentence.pop("phrases", None)

    return edit(own_cache.parent.parent / "data" / "dataset.json", strip)


@pytest.fixture
def search(own_run: Path, own_cache: Path, dataset: Path, tmp_path: Path) -> Search:
    """A search of that data set, with an index."""
    places = RunFiles(features=forget_captions(own_cache), captions=dataset)
    return partial(search_split, own_run, places=places, device="cpu", index=tmp_path / "x.faiss")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ``dataset.json`` counts as a large one, of which columns are kept."""
    monkeypatch.setattr(dataset_module, "_LARGE", 0)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file counts as written long ago."""
    monkeypatch.setattr(input_files, "COARSEST_CLOCK", 0)


def say(content: dict[str, Any], raw: str = "something else") -> None:
    for image in content["images"]:
        for sentence in image["sentences"]:
            sentence["raw"] = raw


def swap_splits(content: dict[str, Any]) -> None:
    """Give one image of the test split and one of the validation split the other's split."""
    first = {split: next(image for image in content["images"] if image["split"] == split) for split in ("val", "test")}
    first["val"]["split"], first["test"]["split"] = "test", "val"


@pytest.mark.parametrize("by_photo", [False, True])
@pytest.mark.parametrize("index", [False, True])
def test_columns_give_what_parsing_gives(
    by_photo: bool, index: bool, search: Search, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = sorted((dataset.parent / "images").glob("*.jpg"))[0] if by_photo else TEXT
    options: dict[str, Any] = {"k": 7} if index else {"k": 7, "index": None}
    parsed = search(query, **options)
    assert not columns_file(dataset).exists()
    monkeypatch.setattr(dataset_module, "_LARGE", 0)
    load_dataset_file(dataset)
    assert columns_file(dataset).is_file()
    assert search(query, **options) == parsed
    assert all(hit.captions and hit.photo is not None and hit.photo.is_file() for hit in parsed)


@pytest.mark.usefixtures("large")
def test_captions_of_an_older_data_set_are_not_shown(search: Search, dataset: Path, edit: Edit) -> None:
    first = search(TEXT)
    older = columns_file(dataset).read_bytes()
    edit(dataset, say)
    load_dataset_file(dataset)
    columns_file(dataset).write_bytes(older)
    again = search(TEXT)
    assert [hit.image_id for hit in again] == [hit.image_id for hit in first]
    assert {text for hit in again for text in hit.captions} == {"something else"}


@pytest.mark.usefixtures("large")
def test_columns_that_are_spoilt_change_no_result(search: Search, dataset: Path) -> None:
    first, content = search(TEXT), bytearray(columns_file(dataset).read_bytes())
    content[len(content) // 2] ^= 0xFF
    columns_file(dataset).write_bytes(content)
    assert search(TEXT) == first


@pytest.mark.parametrize("threshold", [0, 2**23])
def test_an_index_of_other_ids_is_refused(
    threshold: int, search: Search, dataset: Path, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_LARGE", threshold)
    search(TEXT)
    edit(dataset, swap_splits)
    with pytest.raises(UserError, match=r"was built from something else \(other ids\)"):
        search(TEXT)


@pytest.mark.usefixtures("settled")
def test_the_next_query_opens_nothing(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = [TEXT, "a green star", "two circles"]
    expected = [search(query, index=None) for query in queries]
    search(TEXT)  # writes the index
    search(TEXT)
    monkeypatch.setattr(search_module, "load_run", None)
    for query, hits in zip(queries, expected, strict=True):
        found = search(query)
        assert [hit.image_id for hit in found] == [hit.image_id for hit in hits]
        assert [hit.score for hit in found] == pytest.approx([hit.score for hit in hits], abs=1e-6)


@pytest.mark.usefixtures("settled")
def test_another_request_is_not_answered_by_what_is_kept(search: Search, tmp_path: Path) -> None:
    for _ in range(2):
        of_test = {hit.image_id for hit in search(TEXT, k=100)}
        of_val = {hit.image_id for hit in search(TEXT, k=100, split="val", index=tmp_path / "val.faiss")}
        assert (len(of_test), len(of_val)) == (12, 6)
        assert not of_test & of_val


@pytest.mark.usefixtures("settled")
def test_captions_that_change_between_two_queries_are_shown(search: Search, dataset: Path, edit: Edit) -> None:
    for _ in range(2):
        assert all("something else" not in hit.captions for hit in search(TEXT))
    edit(dataset, say)
    assert all("something else" in hit.captions for hit in search(TEXT))


@pytest.mark.usefixtures("settled")
def test_files_that_break_between_two_queries_are_named(search: Search, own_run: Path, own_cache: Path) -> None:
    for _ in range(2):
        search(TEXT)
    weights = RunFolder(own_run).best_file
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="not what the training wrote"):
        search(TEXT)
    weights.write_bytes(content)
    for _ in range(2):
        search(TEXT)
    shard_path(own_cache, 1, 3).unlink()
    with pytest.raises(UserError, match=r"shard-00001-of-00003.h5"):
        search(TEXT)


@pytest.mark.usefixtures("settled")
def test_an_index_that_goes_between_two_queries_is_built_again(search: Search, tmp_path: Path) -> None:
    first = [search(TEXT) for _ in range(3)][-1]
    shutil.move(tmp_path / "x.faiss", tmp_path / "y.faiss")
    assert search(TEXT) == first
    assert (tmp_path / "x.faiss").is_file()


@pytest.mark.usefixtures("settled")
def test_each_query_says_that_the_training_did_not_finish(
    search: Search, own_run: Path, edit: Edit, caplog: pytest.LogCaptureFixture
) -> None:
    edit(RunFolder(own_run).record_file, lambda record: record.update(state="running"))
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            search(TEXT)
    assert caplog.text.count("its training did not finish (state: running)") == 4


def test_a_file_that_was_just_written_is_looked_at_again(search: Search, dataset: Path, edit: Edit) -> None:
    """A clock may be too coarse to tell two writes apart."""
    for text in ("same length", "length same"):
        edit(dataset, partial(say, raw=text))
        assert {raw for hit in search(TEXT) for raw in hit.captions} == {text}
