"""Invalid files from other programs: the evaluator prints one line, exits with code 2 and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.eval.evaluating import Fails, result_of, write_result
from tests.eval.protocols.test_evaluate import made
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import write_embeddings
from vse.eval.files.results import hash_file_content
from vse.eval.options import AllEvaluateOptions
from vse.eval.protocols.compare import compare_files
from vse.training.cli import report_main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_embeddings(tmp_path / "e.h5", made(n_images=12, n_each=3))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A result and a comparison, as texts."""
    folder = tmp_path_factory.mktemp("written")
    first, second = (
        write_embeddings(folder / f"{k}.h5", made(n_images=12, n_each=3, noise=k, experiment=f"e{k}")) for k in (1, 2)
    )
    comparison = compare_files([first, second], folder / "c.json", options=AllEvaluateOptions(bootstrap=20))
    result = write_result([first], folder / "r.json", options=AllEvaluateOptions(bootstrap=100))
    return {"result": result.read_text(), "comparison": comparison.read_text()}


def replaced(name: str, value: Any) -> Callable[[h5py.File], None]:
    def spoil(file: h5py.File) -> None:
        del file[name]
        file[name] = value

    return spoil


def attribute(name: str, value: Any) -> Callable[[h5py.File], None]:
    return lambda file: file.attrs.__setitem__(name, value)


def lacking(*names: str) -> Callable[[h5py.File], list[None]]:
    return lambda file: [(file.attrs if name in file.attrs else file).__delitem__(name) for name in names]


def changed(name: str, place: Any, value: Any) -> Callable[[h5py.File], None]:
    return lambda file: file[name].__setitem__(place, value)


NUMBERS, SCORES = np.arange(12), np.zeros((12, 36))
SPOILT: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "no captions": (lacking("captions"), "lacks captions"),
    "no data set": (lacking("dataset"), "lacks the attribute dataset"),
    "ids with fractions": (replaced("image_ids", NUMBERS + 0.5), "image_ids must be a 1-D integer array"),
    "no ids": (replaced("caption_ids", h5py.Empty("i8")), "caption_ids must be a 1-D integer array"),
    "ids beyond int64": (replaced("image_ids", NUMBERS.astype(np.uint64) + 2**63), "image_ids must be a 1-D integer array"),
    "ids that are text": (replaced("image_ids", [str(n) for n in NUMBERS]), "image_ids must be a 1-D integer array"),
    "COCO ids that are text": (lambda file: file.update({"coco_ids": ["a"] * 12}), "coco_ids must be a 1-D integer array"),
    "an id twice": (changed("image_ids", 1, 0), "duplicate image id 0"),
    "a caption without its image": (changed("caption_image_ids", 3, 77), "belongs to image 77"),
    "compound images": (replaced("images", np.zeros((12, 4), [("a", "f4")])), "images holds no numbers"),
    "one axis": (replaced("images", np.zeros(12)), "images has shape (12,)"),
    "no dimensions": (replaced("captions", np.zeros((36, 0))), "captions has shape (36, 0), expected (36, dim)"),
    "NaN": (changed("images", (4, 2), np.nan), "images row 4 is not finite"),
    "NaN next to scores": (lambda file: (file.update(scores=SCORES), changed("captions", 9, np.nan)(file)), "captions row 9"),
    "scores of another size": (lambda file: file.update({"scores": SCORES[:, 1:]}), "scores has shape (12, 35)"),
    "scores and those of one direction": (lambda file: file.update(scores=SCORES, scores_t2i=SCORES), "holds both scores and"),
    "scores of one direction alone": (lambda file: file.update({"scores_i2t": SCORES}), "it lacks scores_t2i"),
    "an unknown similarity": (attribute("similarity", "ordr"), "unknown similarity 'ordr' (did you mean 'order'?"),
    "many similarities": (attribute("similarity", np.array([1.0, 2.0])), "the attribute similarity is"),
    "a seed that is text": (attribute("seed", "first"), "the attribute seed is 'first', not an integer"),
    "many seeds": (attribute("seed", [0, 1]), "the attribute seed is array([0, 1]), not an integer"),
    "a data set that is a number": (attribute("dataset", 3), "the attribute dataset is 3, not a text"),
    "text that is not UTF-8": (attribute("split", np.bytes_(b"\xff\xfe")), "the attribute split is"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_malformed_embeddings_are_refused_in_one_line(kind: str, file: Path, tmp_path: Path, fails: Fails) -> None:
    spoil, reason = SPOILT[kind]
    with h5py.File(file, "a") as content:
        del content.attrs["content_sha256"]  # another program writes none
        spoil(content)
    error = fails(eval_main, file, "--out", tmp_path / "r.json")
    assert f"{file}: " in error
    assert reason in error
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("note", ['{"a": NaN}', "[1, 2]", "not JSON", "[" * 60_000])
def test_whatever_a_writer_noted_is_no_obstacle(note: str, file: Path) -> None:
    with h5py.File(file, "a") as content:
        del content.attrs["content_sha256"]
        content.attrs["provenance"] = note
    assert result_of([file])["provenance"]["features"] == {}


@pytest.mark.parametrize(("wrong", "right"), [(1 - 2e-12, 1 - 1e-12), (np.float32(1e38), np.float32(2e38))])
def test_scores_that_float32_or_its_sums_cannot_tell_apart_are_ranked(wrong: Any, right: Any, tmp_path: Path) -> None:
    scores = np.full((12, 36), wrong)
    scores[np.repeat(np.arange(12), 3), np.arange(36)] = right
    run = made(n_images=12, n_each=3, images=None, captions=None, scores=scores, similarity="network")
    assert result_of([write_embeddings(tmp_path / "s.h5", run)])["protocols"]["full"]["rsum"] == 600


def test_files_that_are_no_seeds_of_one_model_are_named(tmp_path: Path, fails: Fails, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed, changes in (
        ("0", 0, {}), ("1", 1, {}), ("twin", 1, {}), ("vse0", 2, {"experiment": "vse0"}), ("order", 2, {"similarity": "order"})
    ):  # fmt: skip
        write_embeddings(Path(f"{name}.h5"), made(n_images=12, n_each=3, seed=seed, **changes))
    for arguments, reason in (
        (["0.h5", "1.h5", "twin.h5"], "the same seed 1"),
        (["0.h5", "1.h5", "./1.h5"], "1.h5 is given twice"),
        (["0.h5", tmp_path / "0.h5", "--ensemble"], "a file is given twice"),
        (["0.h5", tmp_path / "0.h5", "--compare"], "is given twice"),
        (["0.h5", "vse0.h5"], "has experiment 'vse0'"),
        (["0.h5", "order.h5"], "has similarity 'order'"),
        (["none.h5"], "no such file"),
        (["0.h5", "--protocol", "1k"], "needs 1000 images"),
        (["0.h5", "--bootstrap", 3], "--bootstrap 3"),
    ):
        assert reason in fails(eval_main, *arguments, "--out", "r.json")


@pytest.mark.parametrize("experiment", ["../../elsewhere", "a/b", ".hidden"])
def test_a_comparison_is_written_into_results_whatever_its_models_are_called(
    experiment: str, file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    other = write_embeddings(tmp_path / "o.h5", made(n_images=12, n_each=3, noise=2, experiment=experiment))
    monkeypatch.chdir(tmp_path)
    written = compare_files([file, other], options=AllEvaluateOptions(bootstrap=20))
    assert written.parent == Path("results")
    assert [path.name for path in (tmp_path / "results").iterdir()] == [written.name]


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no data set": lambda content: content.pop("dataset"),
    "a protocol of nothing": lambda content: content["protocols"].__setitem__("full", None),
    "a direction that is a list": lambda content: content["protocols"]["full"].__setitem__("i2t", [1]),
    "an interval upside down": lambda content: content["protocols"]["full"]["ci95"].__setitem__("rsum", [2, 1]),
    "a mean alone": lambda content: content["protocols"]["full"].__setitem__("rsum", {"mean": 1}),
    "no seeds": lambda content: content.__setitem__("seeds", []),
    "a provenance of nothing": lambda content: content.__setitem__("provenance", None),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_result_that_is_none_is_refused(kind: str, written: dict[str, str], tmp_path: Path, fails: Fails) -> None:
    content = json.loads(written["result"])
    FORGED[kind](content)
    (tmp_path / "r.json").write_text(json.dumps({**content, "sha256": hash_file_content(content)}))
    for command in ((table_main, "summary"), (table_main, "vsepp_4"), (report_main,)):
        error = fails(*command, tmp_path / "r.json", "--out", tmp_path / "out.csv")
        assert "r.json: not a result file of vse-eval: " in error
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("lost", ["a", "dataset", "comparisons"])
def test_a_comparison_that_is_none_is_refused(lost: str, written: dict[str, str], tmp_path: Path, fails: Fails) -> None:
    content = json.loads(written["comparison"])
    del content[lost]
    (tmp_path / "c.json").write_text(json.dumps({**content, "sha256": hash_file_content(content)}))
    error = fails(table_main, "significance", tmp_path / "c.json", "--out", tmp_path / "t.csv")
    assert "c.json: not a comparison of vse-eval --compare" in error
