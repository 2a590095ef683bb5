from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.conftest import Edit, Log, Patch, experiment, forget_captions
from tests.training.use.attending import scan
from vse.eval.search.top_k import SearchHit
from vse.features.cache.shards import shard_path
from vse.pipeline.dataset import dataset as dataset_module
from vse.pipeline.dataset.dataset import load_dataset_file, parquet_copy_path
from vse.pipeline.errors import UserError
from vse.pipeline.files import inputs as input_files
from vse.pipeline.files.images import decode_image
from vse.training.options import RunInputOptions
from vse.training.run.folder import RunFolder
from vse.training.solvers.encode import pool_embeddings
from vse.training.training import train
from vse.training.use import corpus as searched
from vse.training.use.corpus import embed_and_pool_items, encode_items
from vse.training.use.model import load_run
from vse.training.use.search import LastSearcherCache, RunSearchOptions, search_run
from vse.training.use.searcher import Searcher, SearcherOptions

TEXT = "a red square above a blue circle"
Search = Callable[..., list[SearchHit]]


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
    places = RunInputOptions(features=forget_captions(own_cache), captions=dataset)

    def run(query: str | Path, *, last: LastSearcherCache | None = None, **options: Any) -> list[SearchHit]:
        request = RunSearchOptions(**{"index": tmp_path / "x.faiss", **options})
        return search_run(own_run, query, request, places, "cpu", last)

    return run


@pytest.fixture
def settled(monkeypatch: Patch) -> None:
    """Every file counts as written long ago."""
    monkeypatch.setattr(input_files, "COARSEST_CLOCK_NS", 0)


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
    by_photo: bool, index: bool, search: Search, dataset: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    query = sorted((dataset.parent / "images").glob("*.jpg"))[0] if by_photo else TEXT
    options: dict[str, Any] = {"k": 7} if index else {"k": 7, "index": None}
    parsed = search(query, **options)
    assert not parquet_copy_path(dataset).exists()
    monkeypatch.setattr(dataset_module, "MIN_LARGE_JSON_BYTES", 0)
    load_dataset_file(dataset)
    assert parquet_copy_path(dataset).is_file()
    assert search(query, **options) == parsed
    assert all(hit.captions and hit.photo is not None and hit.photo.is_file() for hit in parsed)


@pytest.mark.parametrize("threshold", [0, 2**23])
def test_another_index_is_refused(threshold: int, search: Search, dataset: Path, edit: Edit, monkeypatch: Patch) -> None:
    monkeypatch.setattr(dataset_module, "MIN_LARGE_JSON_BYTES", threshold)
    search(TEXT)
    edit(dataset, swap_splits)
    with pytest.raises(UserError, match=r"was built from something else \(other ids\)"):
        search(TEXT)


@pytest.mark.usefixtures("settled")
def test_other_requests_and_changed_files_are_read_again(search: Search, tmp_path: Path, dataset: Path, edit: Edit) -> None:
    for _ in range(2):
        of_test = {hit.image_id for hit in search(TEXT, k=100)}
        of_val = {hit.image_id for hit in search(TEXT, k=100, split="val", index=tmp_path / "val.faiss")}
        assert (len(of_test), len(of_val)) == (12, 6)
        assert not of_test & of_val
    first = [search(TEXT) for _ in range(3)][-1]
    shutil.move(tmp_path / "x.faiss", tmp_path / "y.faiss")
    assert search(TEXT) == first
    assert (tmp_path / "x.faiss").is_file()
    for _ in range(2):
        assert all("something else" not in hit.captions for hit in search(TEXT))
    edit(dataset, say)
    assert all("something else" in hit.captions for hit in search(TEXT))


@pytest.mark.usefixtures("settled")
def test_files_that_break_between_two_queries_are_named(search: Search, own_run: Path, own_cache: Path) -> None:
    for _ in range(2):
        search(TEXT)
    weights = RunFolder(own_run).best_weights_file
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
def test_each_query_says_that_the_training_did_not_finish(search: Search, own_run: Path, edit: Edit, caplog: Log) -> None:
    edit(RunFolder(own_run).record_file, lambda record: record.update(state="running"))
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            search(TEXT)
    assert caplog.text.count("its training did not finish (state: running)") == 4


def test_a_file_that_was_just_written_is_looked_at_again(search: Search, dataset: Path, edit: Edit) -> None:
    for text in ("same length", "length same"):
        edit(dataset, partial(say, raw=text))
        assert {raw for hit in search(TEXT) for raw in hit.captions} == {text}


FORMS = {"cosine": [], "order": ["model.similarity=order", "train.epochs=1"], "scan": scan("i2t")}


@pytest.fixture(scope="module", params=FORMS)
def of_form(request: pytest.FixtureRequest, cache: Path, positions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    of = positions if request.param == "scan" else cache
    return train(of, experiment(*FORMS[request.param]), out=tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.sampled(1)
def test_each_of_many_queries_finds_what_it_finds_alone(of_form: Path, photo: Path) -> None:
    opened = load_run(of_form, "test", device="cpu")
    alone = {query: search_run(of_form, query, RunSearchOptions(k=5), device="cpu") for query in (TEXT, photo)}
    for many, held in ((False, 0), (False, 2**30), (True, 0), (True, 2**30)):
        options = SearcherOptions(n_reranked=60 if many else None, expects_many_queries=many, max_held_bytes=held)
        of_run = Searcher(opened, "test", options=options)
        for query in (TEXT, photo, TEXT, photo):
            asked = decode_image(query) if isinstance(query, Path) else query
            hits, expected = of_run.answer(not isinstance(asked, str), of_run.encode(asked), 5).hits, alone[query]
            assert [(hit.image_id, hit.caption_id) for hit in hits] == [(hit.image_id, hit.caption_id) for hit in expected]
            np.testing.assert_allclose([hit.score for hit in hits], [hit.score for hit in expected], atol=1e-5)
            assert hits[0].captions == expected[0].captions


@pytest.mark.parametrize("by_photo", [False, True])
def test_pooled_vectors_made_in_blocks_are_those_made_at_once(of_form: Path, by_photo: bool, monkeypatch: Patch) -> None:
    opened = load_run(of_form, "test", device="cpu")
    whole = encode_items(opened, by_photo)
    monkeypatch.setattr(searched, "_ROWS_PER_BLOCK", 5)
    vectors, kept = embed_and_pool_items(opened, by_photo, max_held_bytes=2**30)
    np.testing.assert_allclose(vectors, pool_embeddings(whole), atol=1e-5)
    np.testing.assert_allclose(kept.vectors, whole.vectors, atol=1e-5)
    assert (kept.lengths is None) == (whole.lengths is None)
    assert kept.lengths is None or kept.lengths.tolist() == whole.lengths.tolist()
    assert embed_and_pool_items(opened, by_photo, max_held_bytes=100)[1] is None
