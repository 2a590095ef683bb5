"""Wrong calls of the Python interface: each is a ``vse.UserError`` of one line that names the argument."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vse
from tests.faults.suite import StartSuite
from vse.arguments import find_allowed_values
from vse.pipeline.options import Options

# Wrong calls, each behind the argument that its error must name. ``data``, ``cache`` and ``run`` are paths, ``trained()`` is
# that run, loaded, and ``embedded`` and ``scored`` take what differs from arrays that fit.
CALLS = r"""
path: open_dataset(None) | open_dataset("") | open_dataset("a\0b") | open_dataset("nowhere.json") | open_dataset(data.parent)
path: open_dataset(cache) | open_dataset(file=data)
split: open_dataset(data).image_ids(3) | open_dataset(data).image_ids("tset")
image_id: open_dataset(data).photo("dog")

path: open_features(3.5) | open_features("nowhere.h5") | open_features(data)
ids: open_features(cache)["dog"] | open_features(cache)[2.5] | open_features(cache)[[[0], [1, 2]]]
ids: open_features(cache).tensor(np.array([np.nan]))

out: draw_demo(7) | draw_demo()
images: draw_demo("d", images="many") | draw_demo("d", images=-3)
seed: draw_demo("d", images=6, seed=float("nan")) | draw_demo("d", images=6, seed=2**64)
sources: import_data(5, "d") | import_data("nowhere", "d")
columns: import_data(data.parent, "d", columns=["file"]) | import_data(data.parent, "d", columns={"file": 3})
splits: import_data(data.parent, "d", splits=0.1)
val: SplitShares(val="0.1") | SplitShares(val=float("nan"))
test: SplitShares(test=-0.1)
format: ImportOptions(format=1)
skip_bad: ImportOptions(skip_bad="no")
tokeniser: ImportOptions(tokeniser=len)

feature: extract(data, 7)
sets: extract(data, "fc7", sets=3)
shards: extract(data, "fc7", shards=2.0)
device: ExtractOptions(device=0)
threads: ExtractOptions(threads=0)
like: extract(data, like=["a.h5"])
dataset: extract("nowhere.json", "fc7")
options: extract(data, "fc7", options=TrainOptions())
skip_bad: extract(data, "fc7", skip_bad=True)

features: train() | train(None) | train("nowhere.h5") | train(cache.parent)
experiment: train(cache, 5)
sets: train(cache, sets=[("a", 1)])
seed: train(cache, seed="0")
log_negatives: TrainOptions(log_negatives=-1)
resume: TrainOptions(resume="yes")
name: train(cache, name=7)
out: train(cache, out=7)
captions: TrainInputs(captions={"a": 1}) | train(cache, inputs=TrainInputs(captions="nowhere.json"))
takes: train(cache, "vsepp", 3)
inputs: train(cache, inputs={"captions": "d.json"})
device: train(cache, device="cpu")

run: load(3) | load("nowhere")
features: load(run, features="nowhere.h5").embed()
split: trained().embed(3) | trained().embed("tset", out="e.h5")
sentences: trained().embed(sentences=1)
images: trained().encode_images(np.eye(3))
captions: trained().encode_captions(3) | trained().encode_captions([])
prefix: trained().embed_as_features(None)
files: embeddings_as_features([3], "f") | embeddings_as_features(run, "f")
query: trained().search(["a dog"]) | trained().search(Path("nowhere.jpg"))
k: trained().search("a dog", k=2.5)
index: trained().search("a dog", index=3)
parameters: SearchIndex("i", parameters={"nprobe": 3})
rerank: trained().search("a dog", rerank=0)
phrase: trained().find_phrase(3, "a.jpg")
direction: trained().embed(out="e.h5").scores(1)

images: embedded(images="e.h5") | embedded(images=np.array([["a", "b", "c"]] * 4)) | embedded(images=[[1.0, 2.0], [1.0]])
images: embedded(images=torch.ones(4, 3, dtype=torch.complex64)) | embedded(images=np.ones((4, 3, 2)))
images: embedded(images=np.full((4, 3), np.nan)) | embedded(images=np.empty((0, 3)))
images: embeddings("nowhere.h5") | embeddings(data)
captions: embedded(captions=np.ones((8, 2))) | embedded(captions=None)
scores: scored(scores=np.ones((4, 7))) | scored(scores=np.where(np.eye(4, 8), np.inf, 0.0))
image_ids: embedded(image_ids=np.arange(3)) | embedded(image_ids=np.arange(4) * 0.5)
caption_ids: embedded(caption_ids=np.arange(16).reshape(8, 2))
image_of_caption: embedded(image_of_caption=[None] * 8) | embedded(image_of_caption=np.arange(8))
similarity: embedded(similarity=np.dot)
split: embedded(split="test")
dataset: SplitName(dataset=3)
path: embedded().save(3)

bootstrap: evaluate(embedded(), bootstrap=-5)
options: evaluate(embedded(), options={"cross_check": False})
cross_check: EvaluateOptions(cross_check="no")
cross_checked: EvaluateOptions(cross_checked=0.5)
iou: EvaluateOptions(iou="0.5") | evaluate(embedded(), bootstrap=0, options=EvaluateOptions(iou=0.5))
k: evaluate(embedded(), bootstrap=0, k=5) | evaluate(embedded(), bootstrap=0, k=[0])
protocol: evaluate(embedded(), bootstrap=0, protocol=1)
per_query: evaluate(embedded(), bootstrap=0, per_query="q.csv")
embeddings: evaluate([]) | evaluate("nowhere.h5") | evaluate(data)
members: Ensemble(3)
alpha: Ensemble(["e.h5"], alpha=2)
path: evaluation().save(None) | evaluation().per_query("q.txt")
folder: evaluation().to_trec(3)
depth: evaluation().to_trec("t", depth=True)
index: evaluation().with_index(3)
candidates: evaluation().with_rerank(7)
other: evaluation().compare("b.h5")
bootstrap: evaluation().compare(evaluation(), bootstrap=0)

results: report(3, "r.html") | report("nowhere.json", "r.html") | table("summary", [3]) | table("summary", ["nowhere.json"])
out: report("r.json", None)
queries: report("r.json", "r.html", queries=-1)
embeddings: report("r.json", "r.html", embeddings=5)
name: table(5)
cost: table("ladder", cost=5)

vse.load: vse.embed(run) | vse.search(run, "a dog") | vse.Run(run)
compare: vse.compare(["a.h5", "b.h5"])
scores: evaluate(scores=np.ones((4, 8)))
to_trec: evaluate("e.h5", trec="t")
"""


def arrays(**change: Any) -> dict[str, Any]:
    """Return arguments of ``vse.embeddings``: four images, eight captions, and a change."""
    rng = np.random.default_rng(0)
    given = {"images": rng.normal(size=(4, 3)), "captions": rng.normal(size=(8, 3)), "image_of_caption": np.arange(8) // 2}
    return {name: value for name, value in {**given, **change}.items() if value is not None}


@pytest.mark.usefixtures("shapes_unchecked")
def test_wrong_calls_are_refused_with_the_name_of_the_argument(
    demo: Path, cache: Path, run: Path, tmp_path: Path, suite_of_faults: StartSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = {name: getattr(vse, name) for name in vse.__all__}
    known |= {"vse": vse, "np": np, "torch": torch, "Path": Path, "data": demo, "cache": cache, "run": run}
    known |= {"embedded": lambda **change: vse.embeddings(**arrays(**change)), "trained": lambda: vse.load(run)}
    known["scored"] = lambda scores: vse.pair_scores(scores, np.arange(8) // 2)
    known["evaluation"] = lambda: vse.evaluate(vse.embeddings(**arrays()), bootstrap=0)
    lines = [line.partition(": ") for line in CALLS.splitlines() if line]
    calls = [(argument, call) for argument, _, of_argument in lines for call in of_argument.split(" | ")]
    suite = suite_of_faults("wrong arguments of Python functions", len(calls))
    for argument, call in calls:
        try:
            eval(call, known)
        except vse.UserError as error:
            named = re.search(rf"(?<!\w){argument}(?!\w)", str(error)) and "\n" not in str(error)
            suite.record("refused" if named else "wrong", f"{call}: {error}")
        except Exception as error:
            suite.record("wrong", f"{call}: {type(error).__name__}: {error}")
        else:
            suite.record("silent", call)
    assert {path.name for path in tmp_path.iterdir()} <= {"e.h5"}, "nothing else is written"


@pytest.mark.parametrize("name", sorted(set(vse.__all__) - {"__version__", "UserError", "Interrupted"}))
def test_every_argument_has_allowed_values(name: str) -> None:
    part = getattr(vse, name)
    functions = [part]
    if inspect.isclass(part):
        if issubclass(part, Options):
            assert {*find_allowed_values(part)} == {*part.model_fields}
        methods = {key: code for key, code in inspect.getmembers(part, inspect.isfunction) if not key.startswith("_")}
        functions = [code for code in methods.values() if code.__module__.startswith("vse.") and not issubclass(part, Options)]
    for function in functions:
        assert {"self", *find_allowed_values(function)} == {"self", *inspect.signature(function).parameters}


def test_numbers_and_flags_of_numpy_are_taken(tmp_path: Path) -> None:
    data = vse.draw_demo(tmp_path / "d", images=np.int64(6), seed=np.uint8(1))
    assert len(data) == 6
    assert data.photo(np.int32(data.image_ids()[0])).is_file()
    vectors = vse.embeddings(**arrays(images=torch.eye(4, 3, dtype=torch.bfloat16)))
    options = vse.EvaluateOptions(cross_check=np.True_)  # type: ignore[arg-type]
    assert "t2i_r2" in vse.evaluate(vectors, k=np.array([2]), bootstrap=0, options=options).frame  # type: ignore[arg-type]
