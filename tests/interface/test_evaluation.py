"""The evaluation functions against the commands: the same files, the same metrics, and results as frames, JSON and HTML."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import vse
from tests.eval.evaluating import succeeds
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings


def arrays(n_images: int = 30, noise: float = 1.0) -> dict[str, np.ndarray]:
    """Return vectors of images, and of two captions for each image: the image's vector with noise."""
    rng, ids = np.random.default_rng(0), np.arange(n_images) * 3
    images = rng.normal(size=(n_images, 8))
    captions = np.repeat(images, 2, axis=0) + noise * rng.normal(size=(2 * n_images, 8))
    units = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (images, captions)]
    given = {"images": units[0], "captions": units[1], "image_of_caption": np.repeat(ids, 2)}
    return given | {"image_ids": ids, "caption_ids": np.arange(2 * n_images) + 100}


def slow_r1(given: dict[str, np.ndarray]) -> float:
    """Return R@1 from text to image, computed by loops."""
    right = 0
    for caption, image_id in zip(given["captions"], given["image_of_caption"], strict=True):
        scores = [float(np.float32(caption) @ np.float32(image)) for image in given["images"]]
        right += given["image_ids"][int(np.argmax(scores))] == image_id
    return 100 * right / len(given["captions"])


def written(path: Path, noise: float = 1.0, **attributes: object) -> Path:
    """Write an embeddings file of the arrays."""
    given = arrays(noise=noise)
    content = {"caption_image_ids" if name == "image_of_caption" else name: array for name, array in given.items()}
    content = {name: array.astype(np.float32) if array.ndim == 2 else array for name, array in content.items()}
    named = {"dataset": "arrays", "split": "test", "experiment": "arrays", **attributes}
    return write_embeddings(path, Embeddings(**content, **named))


def test_arrays_are_evaluated_as_a_file_of_them_is(tmp_path: Path) -> None:
    given = arrays()
    result = vse.evaluate(vse.embeddings(**given), k=[20])
    succeeds(eval_main, written(tmp_path / "e.h5"), "--out", tmp_path / "r.json", "--k", "20")
    assert result.json["protocols"] == json.loads((tmp_path / "r.json").read_text())["protocols"]
    assert result.metrics == result.json["protocols"]
    assert math.isclose(result.frame.loc[0, "t2i_r1"], slow_r1(given))
    assert result.frame.loc[0, "i2t_r1_low"] <= result.frame.loc[0, "i2t_r1"] <= result.frame.loc[0, "i2t_r1_high"]
    assert not list(tmp_path.glob("result*")), "an evaluation writes nothing"


def test_arrays_may_be_tensors_or_lists_and_scores_without_ids() -> None:
    given, of = arrays(), np.repeat(np.arange(30), 2)
    for kind in (torch.from_numpy, lambda values: values.tolist(), lambda values: torch.tensor(values).half()):
        vectors = {name: kind(given[name]) for name in ("images", "captions")}
        found = vse.evaluate(vse.embeddings(**{**given, **vectors}), bootstrap=0).frame.loc[0, "t2i_r1"]
        assert math.isclose(found, slow_r1(given), abs_tol=2)
    scores = vse.pair_scores(given["images"] @ given["captions"].T, of)
    assert (scores.images, scores.image_ids.tolist()) == (None, list(range(30)))
    assert math.isclose(vse.evaluate(scores, bootstrap=0).frame.loc[0, "t2i_r1"], slow_r1(given))


@pytest.mark.usefixtures("shapes_unchecked")
def test_arrays_that_do_not_fit_are_one_line() -> None:
    for change, message in (
        ({"captions": np.ones((60, 7))}, "captions: 7 and 8 dimensions"),
        ({"images": "e.h5"}, "images='e.h5' is a path, .* leave captions out"),
        ({"image_ids": np.zeros(30, int)}, "arrays: duplicate image id 0"),
        ({"image_of_caption": np.full(60, 7)}, "image_of_caption: a caption belongs to image 7"),
        ({"similarity": "cosin"}, "did you mean 'cosine'"),
    ):
        with pytest.raises(vse.UserError, match=message):
            vse.embeddings(**{**arrays(), **change})


def test_saved_arrays_are_an_embeddings_file() -> None:
    embedded = vse.embeddings(**arrays(), name="mine", split=vse.SplitName("birds", "val"))
    assert embedded.save("mine.h5") is embedded
    other = vse.embeddings("mine.h5")
    assert (other.name, other.dataset, other.split) == ("mine", "birds", "val")
    assert np.array_equal(other.captions, embedded.captions)
    assert vse.evaluate(embedded).json["protocols"] == vse.evaluate(vse.embeddings(**arrays())).json["protocols"]
    with pytest.raises(vse.UserError, match="output is also an input"):
        other.save("mine.h5")


def test_a_saved_evaluation_of_arrays_is_a_result_as_any_other() -> None:
    embedded = vse.embeddings(**arrays(), name="<script>")
    result = vse.evaluate(embedded, bootstrap=0)
    with pytest.raises(vse.UserError, match=r'Evaluation was not saved to a file; call its method save\("PATH"\) first'):
        vse.table("summary", result)
    with pytest.raises(vse.UserError, match="SplitEmbeddings was not saved to a file"):
        vse.embeddings_as_features(embedded, "features/x")
    with pytest.raises(vse.UserError, match="iou: only files of phrase scores"):
        vse.evaluate(embedded, options=vse.EvaluateOptions(iou=0.5))
    table = vse.table("summary", [result.save("mine.json")], out="mine.csv")
    pd.testing.assert_frame_equal(table.frame, result.frame)
    assert "\\toprule" in table.latex
    assert Path("mine.csv").is_file()
    assert table.json[0]["rsum"] == result.frame.loc[0, "rsum"]
    assert "no ranks, no gallery" in vse.report(result, "mine.html").html
    for displayed in (embedded, result):
        assert "<script>" not in displayed._repr_html_()


def test_a_saved_result_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = written(tmp_path / "runs/e.h5", seed=0), written(tmp_path / "runs/f.h5", 0.9, seed=1)
    result = vse.evaluate(["runs/e.h5", "runs/f.h5"])
    monkeypatch.chdir(tmp_path / "runs")
    result.save("../results/here/function.json")
    succeeds(eval_main, file, other, "--out", tmp_path / "results/here/command.json")
    ours, theirs = (json.loads((tmp_path / f"results/here/{name}.json").read_text()) for name in ("function", "command"))
    assert ours.keys() == theirs.keys()
    assert ours["provenance"]["embeddings"] == theirs["provenance"]["embeddings"]
    for content in (ours, theirs):
        del content["provenance"], content["sha256"]
    assert ours == theirs
    with pytest.raises(vse.UserError, match="output is also an input"):
        result.save(file, force=True)
    mixed = [vse.embeddings(**arrays(), name="arrays"), other]
    assert vse.evaluate(mixed, bootstrap=0).metrics["full"]["rsum"] == result.metrics["full"]["rsum"]


def test_the_results_of_queries_are_a_frame_and_a_file(tmp_path: Path) -> None:
    file = written(tmp_path / "e.h5")
    succeeds(eval_main, file, "--out", "r.json", "--per-query", "command.csv", "--trec", "command", "--trec-depth", 7)
    for embedded in (file, vse.embeddings(**arrays())):
        result = vse.evaluate(embedded)
        frame = result.per_query("function.csv")
        assert Path("function.csv").read_text() == Path("command.csv").read_text()
        pd.testing.assert_frame_equal(frame, result.per_query())
        assert len(frame) == 30 + 60
        assert frame["rank"].dtype == frame["query_id"].dtype == np.int64
        assert math.isclose(100 * (frame[frame["direction"] == "t2i"]["rank"] < 1).mean(), slow_r1(arrays()))
        assert result.to_trec("function", 7) == Path("function")
        for name in ("i2t.run", "t2i.run", "i2t.qrels", "t2i.qrels"):
            assert Path("function", name).read_text() == Path("command", name).read_text()


def test_an_index_and_a_rerank_are_added_to_the_result(tmp_path: Path) -> None:
    file = written(tmp_path / "e.h5", similarity="order")
    succeeds(eval_main, file, "--out", "r.json", "--index", "Flat", "--rerank", 3, "--rerank", 5)
    result = vse.evaluate(file).with_index("Flat").with_rerank([3, 5])
    expected = json.loads(Path("r.json").read_text())
    assert result.metrics == expected["protocols"]
    assert result.json["index"]["i2t"]["recall_at_10"] == expected["index"]["i2t"]["recall_at_10"] == 100
    assert [entry["rsum"] for entry in result.json["rerank"]] == [entry["rsum"] for entry in expected["rerank"]]
    assert "re-ranked" in repr(result)


def test_an_ensemble_averages_files_or_arrays(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{name}.h5", noise, experiment=name) for name, noise in (("a", 1.0), ("b", 0.5))]
    succeeds(eval_main, "--ensemble", *files, "--out", "command.json", "--save", "command.h5")
    expected = json.loads(Path("command.json").read_text())
    result = vse.evaluate(vse.Ensemble(files))
    assert (result.json["protocols"], result.json["ensemble"]) == (expected["protocols"], expected["ensemble"])
    assert result.save_ensemble("function.h5") == Path("function.h5")
    assert vse.evaluate("function.h5").metrics == vse.evaluate("command.h5").metrics
    members = [vse.embeddings(**arrays(noise=noise), name=name) for name, noise in (("a", 1.0), ("b", 0.5))]
    with pytest.raises(vse.UserError, match="ensemble"):
        vse.evaluate(vse.Ensemble(members[:1]))
    from_arrays = vse.evaluate(vse.Ensemble(members))
    assert from_arrays.metrics == result.metrics
    assert from_arrays.json["provenance"]["embeddings"] == []
    compared = from_arrays.compare(vse.evaluate(files[0]), bootstrap=100)
    assert compared.json["a"]["embeddings"] == []
    with pytest.raises(vse.UserError, match="vse.Ensemble"):
        vse.evaluate(files[0]).save_ensemble("x.h5")


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_comparison_is_that_of_the_command(in_memory: bool, tmp_path: Path) -> None:
    files = [written(tmp_path / f"{name}.h5", noise, experiment=name) for name, noise in (("a", 1.0), ("b", 0.5))]
    succeeds(eval_main, "--compare", *files, "--bootstrap", 1000, "--out", "command.json")
    expected = json.loads(Path("command.json").read_text())
    models = [vse.embeddings(**arrays(noise=n), name=name) for name, n in (("a", 1.0), ("b", 0.5))] if in_memory else files
    one, two = (vse.evaluate(model) for model in models)
    compared = one.compare(two, bootstrap=1000)
    assert compared.json["comparisons"] == expected["comparisons"]
    compared.save("results/function.json")
    references = [reference["file"] for side in "ab" for reference in compared.json[side]["embeddings"]]
    assert references == ([] if in_memory else ["../a.h5", "../b.h5"])
    succeeds(table_main, "significance", "results/function.json", "--out", "s.csv")
    assert np.allclose(compared.frame["difference"], pd.read_csv("s.csv")["difference"], atol=0.006)
    assert compared._repr_html_().count("<tr") > 5
    assert len(vse.table("significance", compared).frame) == len(compared.frame)


def test_models_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    one = vse.evaluate(vse.embeddings(**arrays(), name="mine"), bootstrap=0)
    other = vse.evaluate(vse.embeddings(**arrays(29), name="theirs"), bootstrap=0)
    with pytest.raises(vse.UserError, match="^theirs and mine differ in image_ids"):
        one.compare(other)
    with pytest.raises(vse.UserError, match="other: evaluated by the protocol 'full', and this result by 'auto'"):
        one.compare(vse.evaluate(written(tmp_path / "e.h5"), "full", bootstrap=0))


def test_the_evaluation_of_an_unfinished_run_names_its_file(tmp_path: Path) -> None:
    run = replace(read_embeddings(written(tmp_path / "e.h5")), provenance=json.dumps({"unfinished": "running"}))
    write_embeddings(tmp_path / "e.h5", run)
    with pytest.raises(vse.UserError, match="did not finish .* evaluate it with allow_unfinished"):
        vse.evaluate("e.h5")
    result = vse.evaluate("e.h5", options=vse.EvaluateOptions(allow_unfinished=True)).save("results/r.json")
    assert result.json["unfinished"] == [{"file": "../e.h5", "state": "running"}]
