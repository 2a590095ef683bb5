"""Wrong calls of the Python interface: each is a ``vse.UserError`` of one line that names the argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import vse
from tests.faults.suite import Suite
from tests.train.conftest import run as run
from vse.arguments import allowed_arguments

FUNCTIONS = [name for name in vse.__all__ if name.islower() and not name.startswith("__")]


class World(NamedTuple):
    """Files that a call can take."""

    data: Path
    cache: Path
    run: Path


Call = tuple[str, Callable[[World], object]]


def arrays(**change: Any) -> dict[str, Any]:
    """Arguments of ``vse.evaluate``: four images, eight captions, and a change."""
    rng = np.random.default_rng(0)
    given = {"images": rng.normal(size=(4, 3)), "captions": rng.normal(size=(8, 3)), "caption_image_ids": np.arange(8) // 2}
    return {name: value for name, value in {**given, "bootstrap": 0, **change}.items() if value is not None}


def evaluated(argument: str, **change: Any) -> Call:
    return argument, lambda world: vse.evaluate(**arrays(**change))


BAD_SCORES = np.where(np.eye(4, 8), np.inf, 0.0)

# Each call, with the argument that its error must name.
CALLS: list[Call] = [
    # data sets
    ("path", lambda world: vse.open_dataset(None)),  # type: ignore[arg-type]
    ("path", lambda world: vse.open_dataset(3)),  # type: ignore[arg-type]
    ("path", lambda world: vse.open_dataset("")),
    ("path", lambda world: vse.open_dataset("a\0b")),
    ("path", lambda world: vse.open_dataset(b"dataset.json")),  # type: ignore[arg-type]
    ("path", lambda world: vse.open_dataset("nowhere.json")),
    ("path", lambda world: vse.open_dataset(world.data.parent)),
    ("path", lambda world: vse.open_dataset(world.cache)),
    ("path", lambda world: vse.open_dataset(file=world.data)),  # type: ignore[call-arg]
    ("path", lambda world: vse.OpenDataset(["dataset.json"])),  # type: ignore[arg-type]
    ("split", lambda world: vse.open_dataset(world.data).image_ids(3)),  # type: ignore[arg-type]
    ("split", lambda world: vse.open_dataset(world.data).caption_ids(["test"])),  # type: ignore[arg-type]
    ("split", lambda world: vse.open_dataset(world.data).image_ids("tset")),
    ("image_id", lambda world: vse.open_dataset(world.data).photo("dog")),  # type: ignore[arg-type]
    ("image_id", lambda world: vse.open_dataset(world.data).photo(1.5)),  # type: ignore[arg-type]
    ("image_id", lambda world: vse.open_dataset(world.data).photo(None)),  # type: ignore[arg-type]
    # features
    ("path", lambda world: vse.open_features(3.5)),  # type: ignore[arg-type]
    ("path", lambda world: vse.open_features("nowhere.h5")),
    ("path", lambda world: vse.open_features(world.cache.parent)),
    ("path", lambda world: vse.open_features(world.data)),
    ("ids", lambda world: vse.open_features(world.cache)["dog"]),  # type: ignore[index]
    ("ids", lambda world: vse.open_features(world.cache)[None]),  # type: ignore[index]
    ("ids", lambda world: vse.open_features(world.cache)[2.5]),  # type: ignore[index]
    ("ids", lambda world: vse.open_features(world.cache)[[[0], [1, 2]]]),  # type: ignore[list-item]
    ("ids", lambda world: vse.open_features(world.cache)[["dog"]]),  # type: ignore[list-item]
    ("ids", lambda world: vse.open_features(world.cache).tensor(np.array([np.nan]))),
    ("ids", lambda world: vse.open_features(world.cache).tensor(2.5)),  # type: ignore[arg-type]
    # the demo and imports
    ("out", lambda world: vse.draw_demo(7)),  # type: ignore[arg-type]
    ("out", lambda world: vse.draw_demo()),  # type: ignore[call-arg]
    ("images", lambda world: vse.draw_demo("d", images="many")),  # type: ignore[arg-type]
    ("images", lambda world: vse.draw_demo("d", images=12.5)),  # type: ignore[arg-type]
    ("images", lambda world: vse.draw_demo("d", images=-3)),
    ("seed", lambda world: vse.draw_demo("d", images=6, seed=float("nan"))),  # type: ignore[arg-type]
    ("seed", lambda world: vse.draw_demo("d", images=6, seed=2**64)),
    ("sources", lambda world: vse.import_data(5, "d")),  # type: ignore[arg-type]
    ("sources", lambda world: vse.import_data([1, 2], "d")),  # type: ignore[list-item]
    ("sources", lambda world: vse.import_data("nowhere", "d")),
    ("columns", lambda world: vse.import_data(world.data.parent, "d", columns=["file"])),  # type: ignore[arg-type]
    ("columns", lambda world: vse.import_data(world.data.parent, "d", columns={"file": 3})),  # type: ignore[dict-item]
    ("columns", lambda world: vse.import_data(world.data.parent, "d", columns={3: "file"})),  # type: ignore[dict-item]
    ("val", lambda world: vse.import_data(world.data.parent, "d", val="0.1")),  # type: ignore[arg-type]
    ("val", lambda world: vse.import_data(world.data.parent, "d", val=float("nan"))),
    ("test", lambda world: vse.import_data(world.data.parent, "d", test=-0.1)),
    ("format", lambda world: vse.import_data(world.data.parent, "d", format=1)),  # type: ignore[arg-type]
    ("skip_bad", lambda world: vse.import_data(world.data.parent, "d", skip_bad="no")),  # type: ignore[arg-type]
    ("tokeniser", lambda world: vse.import_data(world.data.parent, "d", tokeniser=len)),  # type: ignore[arg-type]
    # extraction
    ("feature", lambda world: vse.extract(world.data, 7)),  # type: ignore[arg-type]
    ("sets", lambda world: vse.extract(world.data, "fc7", sets=3)),  # type: ignore[arg-type]
    ("shards", lambda world: vse.extract(world.data, "fc7", shards=2.0)),  # type: ignore[arg-type]
    ("device", lambda world: vse.extract(world.data, "fc7", device=0)),  # type: ignore[arg-type]
    ("threads", lambda world: vse.extract(world.data, "fc7", threads=0)),
    ("like", lambda world: vse.extract(world.data, like=["a.h5"])),  # type: ignore[arg-type]
    ("dataset", lambda world: vse.extract("nowhere.json", "fc7")),
    # training
    ("features", lambda world: vse.train()),  # type: ignore[call-arg]
    ("features", lambda world: vse.train(None)),
    ("features", lambda world: vse.train(np.eye(3))),
    ("features", lambda world: vse.train("nowhere.h5")),
    ("features", lambda world: vse.train(world.cache.parent)),
    ("experiment", lambda world: vse.train(world.cache, 5)),
    ("sets", lambda world: vse.train(world.cache, sets={3: 4})),
    ("sets", lambda world: vse.train(world.cache, sets=[("a", 1)])),
    ("epochs", lambda world: vse.train(world.cache, epochs=3)),
    ("seed", lambda world: vse.train(world.cache, seed="0")),
    ("seed", lambda world: vse.train(world.cache, seed=[0])),
    ("log_negatives", lambda world: vse.train(world.cache, log_negatives=-1)),
    ("resume", lambda world: vse.train(world.cache, resume="yes")),
    ("name", lambda world: vse.train(world.cache, name=7)),
    ("out", lambda world: vse.train(world.cache, out=7)),
    ("captions", lambda world: vse.train(world.cache, captions={"a": 1})),
    ("takes", lambda world: vse.train(world.cache, "vsepp", 3)),
    # embedding and searching
    ("run", lambda world: vse.embed(3)),  # type: ignore[call-overload]
    ("run", lambda world: vse.embed([world.run, 3])),  # type: ignore[list-item]
    ("run", lambda world: vse.embed({"a": 1})),  # type: ignore[call-overload]
    ("run", lambda world: vse.embed("nowhere")),
    ("split", lambda world: vse.embed(world.run, 3)),  # type: ignore[call-overload]
    ("split", lambda world: vse.embed(world.run, "tset", out="e.h5")),
    ("sentences", lambda world: vse.embed(world.run, sentences=1)),  # type: ignore[call-overload]
    ("query", lambda world: vse.search(world.run, 5)),  # type: ignore[arg-type]
    ("query", lambda world: vse.search(world.run, None)),  # type: ignore[arg-type]
    ("query", lambda world: vse.search(world.run, ["a dog"])),  # type: ignore[arg-type]
    ("query", lambda world: vse.search(world.run, Path("nowhere.jpg"))),
    ("k", lambda world: vse.search(world.run, "a dog", k="3")),  # type: ignore[arg-type]
    ("k", lambda world: vse.search(world.run, "a dog", k=2.5)),  # type: ignore[arg-type]
    ("index_parameters", lambda world: vse.search(world.run, "a dog", index_parameters={"nprobe": 3})),  # type: ignore[arg-type]
    ("rerank", lambda world: vse.search(world.run, "a dog", rerank=0)),
    ("direction", lambda world: vse.embed(world.run, out="e.h5").scores(1)),  # type: ignore[arg-type]
    # arrays
    evaluated("images", images="e.h5"),
    evaluated("images", images=np.array([["a", "b", "c"]] * 4)),
    evaluated("images", images=[[1.0, 2.0], [1.0]]),
    evaluated("images", images=np.ones((4, 3), complex)),
    evaluated("images", images=torch.ones(4, 3, dtype=torch.complex64)),
    evaluated("images", images=np.ones((4, 3, 2))),
    evaluated("images", images=np.full((4, 3), np.nan)),
    evaluated("images", images=np.empty((0, 3))),
    evaluated("images", images={"a": 1}),
    evaluated("captions", captions=np.ones((8, 2))),
    evaluated("captions", captions=None),
    evaluated("captions", captions=object()),
    evaluated("scores", images=None, captions=None, scores=np.ones((4, 7))),
    evaluated("scores", images=None, captions=None, scores=BAD_SCORES),
    evaluated("image_ids", image_ids=np.arange(3)),
    evaluated("image_ids", image_ids=np.arange(4) * 0.5),
    evaluated("image_ids", image_ids=["a", "b", "c", "d"]),
    evaluated("caption_ids", caption_ids=np.arange(16).reshape(8, 2)),
    evaluated("caption_image_ids", caption_image_ids=[None] * 8),
    evaluated("caption_image_ids", caption_image_ids=np.arange(3)),
    evaluated("similarity", similarity=np.dot),
    evaluated("bootstrap", bootstrap=-5),
    evaluated("cross_check", cross_check="no"),
    evaluated("cross_checked", cross_checked=0.5),
    evaluated("k", k=5),
    evaluated("k", k=[0]),
    evaluated("k", k=["5"]),
    evaluated("rerank", rerank=7),
    evaluated("protocol", protocol=1),
    evaluated("trec_depth", trec_depth=True),
    # files of results
    ("files", lambda world: vse.evaluate(3)),  # type: ignore[arg-type]
    ("files", lambda world: vse.evaluate("nowhere.h5")),
    ("files", lambda world: vse.evaluate(world.data)),
    ("iou", lambda world: vse.evaluate("e.h5", iou="0.5")),  # type: ignore[arg-type]
    ("alpha", lambda world: vse.evaluate(["e.h5"], ensemble=True, alpha=2)),
    ("files", lambda world: vse.compare(7)),  # type: ignore[arg-type]
    ("files", lambda world: vse.compare([None, None])),  # type: ignore[list-item]
    ("files", lambda world: vse.compare(["a.h5", "b.h5"])),
    ("results", lambda world: vse.report(3, "r.html")),  # type: ignore[arg-type]
    ("results", lambda world: vse.report("nowhere.json", "r.html")),
    ("out", lambda world: vse.report("r.json", None)),  # type: ignore[arg-type]
    ("queries", lambda world: vse.report("r.json", "r.html", queries=-1)),
    ("embeddings", lambda world: vse.report("r.json", "r.html", embeddings=5)),  # type: ignore[arg-type]
    ("name", lambda world: vse.table(5)),  # type: ignore[arg-type]
    ("results", lambda world: vse.table("summary", [3])),  # type: ignore[list-item]
    ("results", lambda world: vse.table("summary", ["nowhere.json"])),
    ("cost", lambda world: vse.table("ladder", cost=5)),  # type: ignore[arg-type]
    ("path", lambda world: vse.Run(5)),  # type: ignore[arg-type]
    ("path", lambda world: vse.EmbeddedSplit(None)),  # type: ignore[arg-type]
]


@pytest.mark.usefixtures("shapes_unchecked")
def test_wrong_calls_are_refused_with_the_name_of_the_argument(
    demo: Path,
    cache: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suite_of_faults: Callable[[str, int], Suite],
) -> None:
    monkeypatch.chdir(tmp_path)
    suite = suite_of_faults("wrong calls from Python", len(CALLS))
    for number, (argument, call) in enumerate(CALLS):
        detail = f"call {number}, of {argument}"
        try:
            call(World(demo, cache, run))
        except vse.UserError as error:
            line = str(error)
            named = re.search(rf"(?<!\w){argument}(?!\w)", line) and "\n" not in line
            suite.record("refused" if named else "wrong", f"{detail}: {line}")
        except Exception as error:
            suite.record("wrong", f"{detail}: {type(error).__name__}: {error}")
        else:
            suite.record("silent", detail)
    assert {path.name for path in tmp_path.iterdir()} <= {"e.h5"}, "nothing else is written"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_says_what_it_may_be(name: str) -> None:
    function = getattr(vse, name)
    function = function._function if inspect.ismodule(function) else function
    assert allowed_arguments(function).keys() == inspect.signature(function).parameters.keys()


def test_numbers_and_flags_of_numpy_are_taken(tmp_path: Path) -> None:
    data = vse.draw_demo(tmp_path / "d", images=np.int64(6), seed=np.uint8(1))
    assert len(data) == 6
    assert data.photo(np.int32(data.image_ids()[0])).is_file()
    result = vse.evaluate(**arrays(cross_check=np.True_, k=np.array([2]), images=torch.eye(4, 3, dtype=torch.bfloat16)))
    assert "t2i_r2" in result.frame
