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
from tests.faults.suite import StartSuite
from vse.arguments import allowed_arguments
from vse.pipeline.options import Options


class World(NamedTuple):
    data: Path
    cache: Path
    run: Path


Call = tuple[str, Callable[[World], object]]


def arrays(**change: Any) -> dict[str, Any]:
    """Return arguments of ``vse.embeddings``: four images, eight captions, and a change."""
    rng = np.random.default_rng(0)
    given = {"images": rng.normal(size=(4, 3)), "captions": rng.normal(size=(8, 3)), "image_of_caption": np.arange(8) // 2}
    return {name: value for name, value in {**given, **change}.items() if value is not None}


def embedded(argument: str, **change: Any) -> Call:
    return argument, lambda world: vse.embeddings(**arrays(**change))


def scored(argument: str, **change: Any) -> Call:
    given = {"scores": np.ones((4, 8)), "image_of_caption": np.arange(8) // 2, **change}
    return argument, lambda world: vse.pair_scores(**given)


def evaluated(argument: str, **change: Any) -> Call:
    return argument, lambda world: vse.evaluate(vse.embeddings(**arrays()), **{"bootstrap": 0, **change})


def evaluation() -> vse.Evaluation:
    return vse.evaluate(vse.embeddings(**arrays()), bootstrap=0)


BAD_SCORES = np.where(np.eye(4, 8), np.inf, 0.0)

# Each call, with the argument that its error must name.
CALLS: list[Call] = [
    # data sets
    ("path", lambda world: vse.open_dataset(None)),  # type: ignore[arg-type]
    ("path", lambda world: vse.open_dataset("")),
    ("path", lambda world: vse.open_dataset("a\0b")),
    ("path", lambda world: vse.open_dataset("nowhere.json")),
    ("path", lambda world: vse.open_dataset(world.data.parent)),
    ("path", lambda world: vse.open_dataset(world.cache)),
    ("path", lambda world: vse.open_dataset(file=world.data)),  # type: ignore[call-arg]
    ("split", lambda world: vse.open_dataset(world.data).image_ids(3)),  # type: ignore[arg-type]
    ("split", lambda world: vse.open_dataset(world.data).image_ids("tset")),
    ("image_id", lambda world: vse.open_dataset(world.data).photo("dog")),  # type: ignore[arg-type]
    # features
    ("path", lambda world: vse.open_features(3.5)),  # type: ignore[arg-type]
    ("path", lambda world: vse.open_features("nowhere.h5")),
    ("path", lambda world: vse.open_features(world.data)),
    ("ids", lambda world: vse.open_features(world.cache)["dog"]),  # type: ignore[index]
    ("ids", lambda world: vse.open_features(world.cache)[2.5]),  # type: ignore[index]
    ("ids", lambda world: vse.open_features(world.cache)[[[0], [1, 2]]]),  # type: ignore[list-item]
    ("ids", lambda world: vse.open_features(world.cache).tensor(np.array([np.nan]))),
    # the demo and imports
    ("out", lambda world: vse.draw_demo(7)),  # type: ignore[arg-type]
    ("out", lambda world: vse.draw_demo()),  # type: ignore[call-arg]
    ("images", lambda world: vse.draw_demo("d", images="many")),  # type: ignore[arg-type]
    ("images", lambda world: vse.draw_demo("d", images=-3)),
    ("seed", lambda world: vse.draw_demo("d", images=6, seed=float("nan"))),  # type: ignore[arg-type]
    ("seed", lambda world: vse.draw_demo("d", images=6, seed=2**64)),
    ("sources", lambda world: vse.import_data(5, "d")),  # type: ignore[arg-type]
    ("sources", lambda world: vse.import_data("nowhere", "d")),
    ("columns", lambda world: vse.import_data(world.data.parent, "d", columns=["file"])),  # type: ignore[arg-type]
    ("columns", lambda world: vse.import_data(world.data.parent, "d", columns={"file": 3})),  # type: ignore[dict-item]
    ("splits", lambda world: vse.import_data(world.data.parent, "d", splits=0.1)),  # type: ignore[arg-type]
    ("val", lambda world: vse.SplitShares(val="0.1")),  # type: ignore[arg-type]
    ("val", lambda world: vse.SplitShares(val=float("nan"))),
    ("test", lambda world: vse.SplitShares(test=-0.1)),
    ("format", lambda world: vse.ImportOptions(format=1)),  # type: ignore[arg-type]
    ("skip_bad", lambda world: vse.ImportOptions(skip_bad="no")),  # type: ignore[arg-type]
    ("tokeniser", lambda world: vse.ImportOptions(tokeniser=len)),  # type: ignore[arg-type]
    # extraction
    ("feature", lambda world: vse.extract(world.data, 7)),  # type: ignore[arg-type]
    ("sets", lambda world: vse.extract(world.data, "fc7", sets=3)),  # type: ignore[arg-type]
    ("shards", lambda world: vse.extract(world.data, "fc7", shards=2.0)),  # type: ignore[arg-type]
    ("device", lambda world: vse.ExtractOptions(device=0)),  # type: ignore[arg-type]
    ("threads", lambda world: vse.ExtractOptions(threads=0)),
    ("like", lambda world: vse.extract(world.data, like=["a.h5"])),  # type: ignore[arg-type]
    ("dataset", lambda world: vse.extract("nowhere.json", "fc7")),
    ("options", lambda world: vse.extract(world.data, "fc7", options=vse.TrainOptions())),  # type: ignore[arg-type]
    ("skip_bad", lambda world: vse.extract(world.data, "fc7", skip_bad=True)),  # type: ignore[call-arg]
    # training
    ("features", lambda world: vse.train()),  # type: ignore[call-arg]
    ("features", lambda world: vse.train(None)),
    ("features", lambda world: vse.train("nowhere.h5")),
    ("features", lambda world: vse.train(world.cache.parent)),
    ("experiment", lambda world: vse.train(world.cache, 5)),
    ("sets", lambda world: vse.train(world.cache, sets=[("a", 1)])),
    ("seed", lambda world: vse.train(world.cache, seed="0")),
    ("log_negatives", lambda world: vse.TrainOptions(log_negatives=-1)),
    ("resume", lambda world: vse.TrainOptions(resume="yes")),
    ("name", lambda world: vse.train(world.cache, name=7)),
    ("out", lambda world: vse.train(world.cache, out=7)),
    ("captions", lambda world: vse.TrainInputs(captions={"a": 1})),
    ("takes", lambda world: vse.train(world.cache, "vsepp", 3)),
    ("inputs", lambda world: vse.train(world.cache, inputs={"captions": "d.json"})),
    ("captions", lambda world: vse.train(world.cache, inputs=vse.TrainInputs(captions="nowhere.json"))),
    ("device", lambda world: vse.train(world.cache, device="cpu")),
    # trained models
    ("run", lambda world: vse.load(3)),  # type: ignore[arg-type]
    ("run", lambda world: vse.load("nowhere")),
    ("features", lambda world: vse.load(world.run, features="nowhere.h5").embed()),
    ("split", lambda world: vse.load(world.run).embed(3)),  # type: ignore[arg-type]
    ("split", lambda world: vse.load(world.run).embed("tset", out="e.h5")),
    ("sentences", lambda world: vse.load(world.run).embed(sentences=1)),  # type: ignore[arg-type]
    ("images", lambda world: vse.load(world.run).encode_images(np.eye(3))),  # type: ignore[arg-type]
    ("images", lambda world: vse.load(world.run).encode_images("nowhere.jpg")),
    ("captions", lambda world: vse.load(world.run).encode_captions(3)),  # type: ignore[arg-type]
    ("captions", lambda world: vse.load(world.run).encode_captions([])),
    ("prefix", lambda world: vse.load(world.run).embed_as_features(None)),  # type: ignore[arg-type]
    ("files", lambda world: vse.embeddings_as_features([3], "f")),  # type: ignore[list-item]
    ("files", lambda world: vse.embeddings_as_features(world.run, "f")),
    ("query", lambda world: vse.load(world.run).search(["a dog"])),  # type: ignore[arg-type]
    ("query", lambda world: vse.load(world.run).search(Path("nowhere.jpg"))),
    ("k", lambda world: vse.load(world.run).search("a dog", k=2.5)),  # type: ignore[arg-type]
    ("index", lambda world: vse.load(world.run).search("a dog", index=3)),  # type: ignore[arg-type]
    ("parameters", lambda world: vse.SearchIndex("i", parameters={"nprobe": 3})),  # type: ignore[arg-type]
    ("rerank", lambda world: vse.load(world.run).search("a dog", rerank=0)),
    ("phrase", lambda world: vse.load(world.run).find_phrase(3, "a.jpg")),  # type: ignore[arg-type]
    ("direction", lambda world: vse.load(world.run).embed(out="e.h5").scores(1)),  # type: ignore[arg-type]
    # arrays
    embedded("images", images="e.h5"),
    embedded("images", images=np.array([["a", "b", "c"]] * 4)),
    embedded("images", images=[[1.0, 2.0], [1.0]]),
    embedded("images", images=torch.ones(4, 3, dtype=torch.complex64)),
    embedded("images", images=np.ones((4, 3, 2))),
    embedded("images", images=np.full((4, 3), np.nan)),
    embedded("images", images=np.empty((0, 3))),
    ("images", lambda world: vse.embeddings("nowhere.h5")),
    ("images", lambda world: vse.embeddings(world.data)),
    embedded("captions", captions=np.ones((8, 2))),
    embedded("captions", captions=None),
    scored("scores", scores=np.ones((4, 7))),
    scored("scores", scores=BAD_SCORES),
    embedded("image_ids", image_ids=np.arange(3)),
    embedded("image_ids", image_ids=np.arange(4) * 0.5),
    embedded("caption_ids", caption_ids=np.arange(16).reshape(8, 2)),
    embedded("image_of_caption", image_of_caption=[None] * 8),
    embedded("image_of_caption", image_of_caption=np.arange(8)),
    embedded("similarity", similarity=np.dot),
    embedded("split", split="test"),
    ("dataset", lambda world: vse.SplitName(dataset=3)),  # type: ignore[arg-type]
    ("path", lambda world: vse.embeddings(**arrays()).save(3)),  # type: ignore[arg-type]
    # evaluations
    evaluated("bootstrap", bootstrap=-5),
    evaluated("options", options={"cross_check": False}),
    ("cross_check", lambda world: vse.EvaluateOptions(cross_check="no")),  # type: ignore[arg-type]
    ("cross_checked", lambda world: vse.EvaluateOptions(cross_checked=0.5)),  # type: ignore[arg-type]
    ("iou", lambda world: vse.EvaluateOptions(iou="0.5")),  # type: ignore[arg-type]
    evaluated("iou", options=vse.EvaluateOptions(iou=0.5)),
    evaluated("k", k=5),
    evaluated("k", k=[0]),
    evaluated("protocol", protocol=1),
    evaluated("per_query", per_query="q.csv"),
    ("embeddings", lambda world: vse.evaluate([])),
    ("embeddings", lambda world: vse.evaluate("nowhere.h5")),
    ("embeddings", lambda world: vse.evaluate(world.data)),
    ("members", lambda world: vse.Ensemble(3)),  # type: ignore[arg-type]
    ("alpha", lambda world: vse.Ensemble(["e.h5"], alpha=2)),
    ("path", lambda world: evaluation().save(None)),  # type: ignore[arg-type]
    ("path", lambda world: evaluation().per_query("q.txt")),
    ("folder", lambda world: evaluation().to_trec(3)),  # type: ignore[arg-type]
    ("depth", lambda world: evaluation().to_trec("t", depth=True)),
    ("index", lambda world: evaluation().with_index(3)),  # type: ignore[arg-type]
    ("candidates", lambda world: evaluation().with_rerank(7)),  # type: ignore[arg-type]
    ("other", lambda world: evaluation().compare("b.h5")),  # type: ignore[arg-type]
    ("bootstrap", lambda world: evaluation().compare(evaluation(), bootstrap=0)),
    # files of results
    ("results", lambda world: vse.report(3, "r.html")),  # type: ignore[arg-type]
    ("results", lambda world: vse.report("nowhere.json", "r.html")),
    ("out", lambda world: vse.report("r.json", None)),  # type: ignore[arg-type]
    ("queries", lambda world: vse.report("r.json", "r.html", queries=-1)),
    ("embeddings", lambda world: vse.report("r.json", "r.html", embeddings=5)),  # type: ignore[arg-type]
    ("name", lambda world: vse.table(5)),  # type: ignore[arg-type]
    ("results", lambda world: vse.table("summary", [3])),  # type: ignore[list-item]
    ("results", lambda world: vse.table("summary", ["nowhere.json"])),
    ("cost", lambda world: vse.table("ladder", cost=5)),  # type: ignore[arg-type]
    # calls of earlier versions
    ("vse.load", lambda world: vse.embed(world.run)),
    ("vse.load", lambda world: vse.search(world.run, "a dog")),
    ("compare", lambda world: vse.compare(["a.h5", "b.h5"])),
    ("vse.load", lambda world: vse.Run(world.run)),
    ("scores", lambda world: vse.evaluate(scores=np.ones((4, 8)))),  # type: ignore[call-arg]
    ("to_trec", lambda world: vse.evaluate("e.h5", trec="t")),  # type: ignore[call-arg]
]


@pytest.mark.usefixtures("shapes_unchecked")
def test_wrong_calls_are_refused_with_the_name_of_the_argument(
    demo: Path, cache: Path, run: Path, tmp_path: Path, suite_of_faults: StartSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    suite = suite_of_faults("wrong arguments of Python functions", len(CALLS))
    for number, (argument, call) in enumerate(CALLS):
        detail = f"call {number}, of {argument}"
        try:
            call(World(demo, cache, run))
        except vse.UserError as error:
            named = re.search(rf"(?<!\w){argument}(?!\w)", str(error)) and "\n" not in str(error)
            suite.record("refused" if named else "wrong", f"{detail}: {error}")
        except Exception as error:
            suite.record("wrong", f"{detail}: {type(error).__name__}: {error}")
        else:
            suite.record("silent", detail)
    assert {path.name for path in tmp_path.iterdir()} <= {"e.h5"}, "nothing else is written"


@pytest.mark.parametrize("name", sorted(set(vse.__all__) - {"__version__", "UserError", "Interrupted"}))
def test_every_argument_has_allowed_values(name: str) -> None:
    part = getattr(vse, name)
    functions = [part]
    if inspect.isclass(part):
        if issubclass(part, Options):
            assert {*allowed_arguments(part)} == {*part.model_fields}
        methods = {key: code for key, code in inspect.getmembers(part, inspect.isfunction) if not key.startswith("_")}
        functions = [code for code in methods.values() if code.__module__.startswith("vse.") and not issubclass(part, Options)]
    for function in functions:
        assert {"self", *allowed_arguments(function)} == {"self", *inspect.signature(function).parameters}


def test_numbers_and_flags_of_numpy_are_taken(tmp_path: Path) -> None:
    data = vse.draw_demo(tmp_path / "d", images=np.int64(6), seed=np.uint8(1))
    assert len(data) == 6
    assert data.photo(np.int32(data.image_ids()[0])).is_file()
    vectors = vse.embeddings(**arrays(images=torch.eye(4, 3, dtype=torch.bfloat16)))
    options = vse.EvaluateOptions(cross_check=np.True_)  # type: ignore[arg-type]
    assert "t2i_r2" in vse.evaluate(vectors, k=np.array([2]), bootstrap=0, options=options).frame  # type: ignore[arg-type]
