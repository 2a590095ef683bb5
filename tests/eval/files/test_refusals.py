"""Invalid files from other programs: the evaluator prints one line, exits with code 2 and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.eval.evaluating import write_result
from tests.eval.protocols.test_evaluate import made
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import write_embeddings
from vse.eval.files.results import content_sha256
from vse.eval.options import EvaluationOptions
from vse.eval.tables.significance import compare_files
from vse.train.cli import report_main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_embeddings(tmp_path / "e.h5", made(n_images=12, n_each=3))


def replaced(name: str, value: Any) -> Callable[[h5py.File], None]:
    def spoil(file: h5py.File) -> None:
        del file[name]
        file[name] = value

    return spoil


def attribute(name: str, value: Any) -> Callable[[h5py.File], None]:
    return lambda file: file.attrs.__setitem__(name, value)


NUMBERS = np.arange(12)
SPOILT = {
    "ids with fractions": (replaced("image_ids", NUMBERS + 0.5), "image_ids must be a 1-D integer array"),
    "ids in a column": (replaced("image_ids", NUMBERS[:, None]), "image_ids must be a 1-D integer array"),
    "one id": (replaced("caption_ids", 3), "caption_ids must be a 1-D integer array"),
    "no ids": (replaced("caption_ids", h5py.Empty("i8")), "caption_ids must be a 1-D integer array"),
    "ids beyond int64": (replaced("image_ids", NUMBERS.astype(np.uint64) + 2**63), "image_ids must be a 1-D integer array"),
    "ids that are text": (replaced("image_ids", [str(n) for n in NUMBERS]), "image_ids must be a 1-D integer array"),
    "numbers of COCO that are text": (
        lambda file: file.__setitem__("coco_ids", ["a"] * 12),
        "coco_ids must be a 1-D integer array",
    ),
    "complex images": (replaced("images", np.ones((12, 4), complex)), "images holds no numbers"),
    "compound images": (replaced("images", np.zeros((12, 4), [("a", "f4")])), "images holds no numbers"),
    "no images at all": (replaced("images", h5py.Empty("f4")), "images holds no numbers"),
    "a seed that is text": (attribute("seed", "first"), "the attribute seed is 'first', not an integer"),
    "half a seed": (attribute("seed", 1.5), "the attribute seed is 1.5, not an integer"),
    "many seeds": (attribute("seed", [0, 1]), "the attribute seed is array([0, 1]), not an integer"),
    "a data set that is a number": (attribute("dataset", 3), "the attribute dataset is 3, not a text"),
    "many similarities": (attribute("similarity", np.array([1.0, 2.0])), "the attribute similarity is"),
    "scores and scores of one direction": (
        lambda file: file.update({"scores": np.zeros((12, 36)), "scores_t2i": np.zeros((12, 36))}),
        "holds both scores and scores_t2i",
    ),
    "scores of one direction alone": (
        lambda file: file.__setitem__("scores_i2t", np.zeros((12, 36))),
        "not a complete embeddings file, it lacks scores_t2i",
    ),
    "text that is not UTF-8": (attribute("split", np.bytes_(b"\xff\xfe")), "the attribute split is"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_malformed_embeddings_are_refused_in_one_line(
    kind: str, file: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    spoil, reason = SPOILT[kind]
    with h5py.File(file, "a") as content:
        spoil(content)
    error = fails(eval_main, file, "--out", tmp_path / "r.json")
    assert f"{file}: " in error
    assert reason in error
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("said", ['{"a": NaN}', "[1, 2]", "not JSON", "[" * 100_000])
def test_whatever_a_writer_noted_is_no_obstacle(said: str, file: Path, tmp_path: Path) -> None:
    with h5py.File(file, "a") as content:
        del content.attrs["provenance"], content.attrs["content_sha256"]
        content.attrs["provenance"] = said[:60_000]  # HDF5 has room for 64 KB
    write_result([file], tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["provenance"]["features"] == {}


def test_scores_keep_their_precision(tmp_path: Path) -> None:
    scores = np.full((12, 36), 1 - 2e-12)
    scores[np.repeat(np.arange(12), 3), np.arange(36)] = 1 - 1e-12  # in float32 all would tie
    run = made(n_images=12, n_each=3, images=None, captions=None, scores=scores, similarity="network")
    result = write_result([write_embeddings(tmp_path / "s.h5", run)], tmp_path / "r.json")
    assert json.loads(result.read_text())["protocols"]["full"]["rsum"] == 600


def test_large_scores_whose_sum_overflows_are_ranked(tmp_path: Path) -> None:
    scores = np.full((12, 36), 1e38, np.float32)
    scores[np.repeat(np.arange(12), 3), np.arange(36)] = 2e38
    run = made(n_images=12, n_each=3, images=None, captions=None, scores=scores, similarity="network")
    result = write_result([write_embeddings(tmp_path / "s.h5", run)], tmp_path / "r.json")
    assert json.loads(result.read_text())["protocols"]["full"]["rsum"] == 600


def test_no_input_is_overwritten(file: Path, tmp_path: Path, fails: Callable[..., str], monkeypatch: Any) -> None:
    other = write_embeddings(tmp_path / "o.h5", made(n_images=12, n_each=3, noise=2, experiment="vse0"))
    result = write_result([file], tmp_path / "r.json", options=EvaluationOptions(bootstrap=100))
    comparison = compare_files([file, other], tmp_path / "c.json", options=EvaluationOptions(bootstrap=20))
    before = {path: path.read_bytes() for path in (file, other, result, comparison)}
    monkeypatch.chdir(tmp_path)
    for command, *arguments in (
        (eval_main, file, "--out", file),
        (eval_main, file, "--out", "./e.h5"),
        (eval_main, file, other, "--compare", "--out", other),
        (report_main, result, "--out", result),
        (table_main, "summary", result, "--out", result),
        (table_main, "significance", comparison, "--out", comparison),
    ):
        assert "output is also an input" in fails(command, *arguments)
    assert "it is a folder" in fails(eval_main, file, "--out", tmp_path)
    assert {path: path.read_bytes() for path in before} == before


def test_a_seed_or_a_file_that_comes_twice_is_named(tmp_path: Path, fails: Callable[..., str], monkeypatch: Any) -> None:
    files = [write_embeddings(tmp_path / f"{seed}.h5", made(n_images=12, n_each=3, seed=seed)) for seed in (0, 1)]
    again = write_embeddings(tmp_path / "again.h5", made(n_images=12, n_each=3, seed=1))
    out = tmp_path / "r.json"
    monkeypatch.chdir(tmp_path)
    assert "the same seed 1" in fails(eval_main, *files, again, "--out", out)
    assert "1.h5 is given twice" in fails(eval_main, *files, files[1], "--out", out)
    assert "a file is given twice" in fails(eval_main, files[0], "0.h5", "--ensemble", "--out", out)
    assert "is given twice" in fails(eval_main, files[0], "0.h5", "--compare", "--out", out)


@pytest.mark.parametrize("experiment", ["../../elsewhere", "a/b", ".hidden"])
def test_a_comparison_is_written_into_results_whatever_its_models_are_called(
    experiment: str, file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    other = write_embeddings(tmp_path / "o.h5", made(n_images=12, n_each=3, noise=2, experiment=experiment))
    monkeypatch.chdir(tmp_path)
    written = compare_files([file, other], options=EvaluationOptions(bootstrap=20))
    assert written.parent == Path("results")
    assert [path.name for path in (tmp_path / "results").iterdir()] == [written.name]


def test_too_few_samples_for_an_interval_are_refused(file: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "--bootstrap 3" in fails(eval_main, file, "--bootstrap", 3, "--out", tmp_path / "r.json")


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no data set": lambda content: content.pop("dataset"),
    "a protocol of nothing": lambda content: content["protocols"].__setitem__("full", None),
    "a direction that is a list": lambda content: content["protocols"]["full"].__setitem__("i2t", [1]),
    "an interval with one end": lambda content: content["protocols"]["full"]["ci95"].__setitem__("rsum", [1]),
    "an interval upside down": lambda content: content["protocols"]["full"]["ci95"].__setitem__("rsum", [2, 1]),
    "a mean alone": lambda content: content["protocols"]["full"].__setitem__("rsum", {"mean": 1}),
    "seeds that are a number": lambda content: content.__setitem__("seeds", 3),
    "no seeds": lambda content: content.__setitem__("seeds", []),
    "a provenance of nothing": lambda content: content.__setitem__("provenance", None),
}


@pytest.mark.parametrize("kind", FORGED)
@pytest.mark.parametrize("command", ["summary", "vsepp_4", "report"])
def test_a_result_that_is_none_is_refused(
    kind: str, command: str, file: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    result, out = write_result([file], tmp_path / "r.json", options=EvaluationOptions(bootstrap=100)), tmp_path / "out.csv"
    content = json.loads(result.read_text())
    FORGED[kind](content)
    result.write_text(json.dumps({**content, "sha256": content_sha256(content)}))
    arguments = (report_main,) if command == "report" else (table_main, command)
    assert "r.json: not a result file of vse-eval: " in fails(*arguments, result, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("lost", ["a", "dataset", "comparisons"])
def test_a_comparison_that_is_none_is_refused(lost: str, file: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    other = write_embeddings(tmp_path / "o.h5", made(n_images=12, n_each=3, noise=2, experiment="vse0"))
    comparison = compare_files([file, other], tmp_path / "c.json", options=EvaluationOptions(bootstrap=20))
    content = json.loads(comparison.read_text())
    del content[lost]
    comparison.write_text(json.dumps({**content, "sha256": content_sha256(content)}))
    error = fails(table_main, "significance", comparison, "--out", tmp_path / "t.csv")
    assert "c.json: not a comparison of vse-eval --compare" in error
