"""Many queries of one run: what each finds alone, in an index in memory, and from sets that are kept or encoded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.train.conftest import experiment
from tests.train.use.attending import scan
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import decode_image
from vse.train.solvers.encode import pooled
from vse.train.training import train
from vse.train.use import corpus as searched
from vse.train.use.corpus import encode_side, pool_side
from vse.train.use.model import load_run
from vse.train.use.search import SearchRequest, search_run
from vse.train.use.searcher import Searcher, SearchOptions

FORMS = {"cosine": [], "order": ["model.similarity=order", "train.epochs=1"], "scan": scan("i2t")}


@pytest.fixture(scope="module", params=FORMS)
def run(request: pytest.FixtureRequest, cache: Path, positions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    of = positions if request.param == "scan" else cache
    return train(of, experiment(*FORMS[request.param]), out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def photo(demo: Path) -> Path:
    dataset = load_dataset_file(demo)
    return dataset.image_path(dataset.split("test")[2])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("held", [0, 2**30])
def test_each_of_many_queries_finds_what_it_finds_alone(run: Path, photo: Path, many: bool, held: int) -> None:
    opened = load_run(run, "test", device="cpu")
    options = SearchOptions(rerank=60 if many else None, many=many, held_bytes=held)
    of_run = Searcher(opened, "test", options=options)
    for query in ("a red square", photo, "a circle above a star", photo):
        expected = search_run(run, query, SearchRequest(5), device="cpu")
        asked = decode_image(query) if isinstance(query, Path) else query
        answer = of_run.answer(asked, of_run.read(asked), 5)
        assert [(hit.image_id, hit.caption_id) for hit in answer.hits] == [(hit.image_id, hit.caption_id) for hit in expected]
        np.testing.assert_allclose([hit.score for hit in answer.hits], [hit.score for hit in expected], atol=1e-5)
        assert answer.hits[0].captions == expected[0].captions


@pytest.mark.parametrize("by_photo", [False, True])
def test_pooled_vectors_made_in_blocks_are_those_made_at_once(
    run: Path, by_photo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = load_run(run, "test", device="cpu")
    whole = encode_side(opened, by_photo)
    monkeypatch.setattr(searched, "_BLOCK", 5)
    vectors, kept = pool_side(opened, by_photo, held_bytes=2**30)
    np.testing.assert_allclose(vectors, pooled(whole), atol=1e-5)
    np.testing.assert_allclose(kept.vectors, whole.vectors, atol=1e-5)
    assert (kept.lengths is None) == (whole.lengths is None)
    assert kept.lengths is None or kept.lengths.tolist() == whole.lengths.tolist()
    assert pool_side(opened, by_photo, held_bytes=100)[1] is None


def test_a_model_that_does_not_attend_looks_nowhere(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run")
    of_run = Searcher(load_run(run, "test", device="cpu"), "test")
    with pytest.raises(UserError, match="its model does not attend"):
        of_run.attention("a disc", of_run.read("a disc"), [0])
