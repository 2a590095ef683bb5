"""``vse-eval --correct``: a bank of queries lowers the scores of hubs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.eval.evaluating import Fails, result_of, succeeds, write_result
from tests.eval.protocols.test_evaluate import made
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.options import AllEvaluateOptions
from vse.eval.protocols.correction import PARAMETER_CHOICES
from vse.eval.report.report import write_report
from vse.pipeline.errors import UserError

SIZES = {"train": 200, "val": 60, "test": 50}


def with_hubs(split: str, seed: int = 0) -> Embeddings:
    """Embeddings in which some images and captions are near all queries: they have a part of the others' mean direction."""
    run = made(n_images=SIZES[split], n_each=2, seed=list(SIZES).index(split) + 10 * seed, noise=0.8)
    rng = np.random.default_rng(0)
    common = rng.standard_normal(run.images.shape[1]).astype(np.float32)
    sides = []
    for rows in (run.images, run.captions):
        shifted = rows + 0.5 * common / np.linalg.norm(common) + (rng.random((len(rows), 1)) < 0.1) * 0.6 * common
        sides.append((shifted / np.linalg.norm(shifted, axis=1, keepdims=True)).astype(np.float32))
    first = 1000 * list(SIZES).index(split)
    return replace(
        run,
        images=sides[0],
        captions=sides[1],
        split=split,
        seed=seed,
        image_ids=run.image_ids + first,
        caption_ids=run.caption_ids + first,
        caption_image_ids=run.caption_image_ids + first,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in SIZES:
        write_embeddings(tmp_path / f"{split}.h5", with_hubs(split))
    return tmp_path


def rsum(result: dict[str, Any]) -> float:
    return float(result["protocols"]["full"]["rsum"])


@pytest.mark.parametrize("method", PARAMETER_CHOICES)
def test_a_correction_helps_where_there_are_hubs(folder: Path, method: str) -> None:
    plain, corrected = result_of([folder / "test.h5"]), result_of([folder / "test.h5"], correct=method)
    assert rsum(corrected) > rsum(plain)
    assert corrected["hubness"]["t2i"]["skewness"] < plain["hubness"]["t2i"]["skewness"]
    assert corrected["hubness"]["mean_cosine"] == plain["hubness"]["mean_cosine"]
    record = corrected["correction"]
    assert (record["method"], record["bank"], record["bank_images"], record["transductive"]) == (method, "train", 200, False)
    assert set(record["parameters"]) == set(PARAMETER_CHOICES[method])


@pytest.mark.parametrize("method", ["csls:k=5", "qb-norm:beta=10", "mean"])
def test_the_metrics_are_those_of_corrected_scores(folder: Path, method: str) -> None:
    """Each score is corrected in a loop, with a bank that is another file."""
    found = result_of([folder / "test.h5"], correct=method, bank=str(folder / "train.h5"))
    run, bank = with_hubs("test"), with_hubs("train")
    for direction in ("i2t", "t2i"):
        queries, candidates, of_bank = (
            (run.images, run.captions, bank.images) if direction == "i2t" else (run.captions, run.images, bank.captions)
        )
        near = candidates @ of_bank.T
        own = run.image_of_caption()
        activated = set((of_bank @ candidates.T).argmax(1).tolist())
        hits = []
        for number, query in enumerate(queries):
            scores = candidates @ query
            if method.startswith("csls"):
                scores = scores - np.sort(near, axis=1)[:, -5:].mean(1) / 2
            elif method == "mean":
                scores = scores - near.mean(1)
            elif int(scores.argmax()) in activated:
                scores = scores - np.log(np.exp(10 * near).sum(1)) / 10
            best = int(scores.argmax())
            hits.append(own[best] == number if direction == "i2t" else own[number] == best)
        assert found["protocols"]["full"][direction]["r1"] == pytest.approx(100 * np.mean(hits)), direction


def test_parameters_are_selected_on_the_validation_split(folder: Path) -> None:
    record = result_of([folder / "test.h5"], correct="csls")["correction"]
    tried = {float(text.removeprefix("k=")): value for text, value in record["rsum_val"].items()}
    assert set(tried) == set(PARAMETER_CHOICES["csls"]["k"])
    assert tried[record["parameters"]["k"]] == max(tried.values())
    fixed = result_of([folder / "val.h5"], correct=f"csls:k={record['parameters']['k']:g}", bank=str(folder / "train.h5"))
    assert rsum(fixed) == pytest.approx(max(tried.values()))


def test_a_bank_of_test_queries_is_marked_and_kept_out_of_tables(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = AllEvaluateOptions(bootstrap=0)
    plain = write_result([folder / "test.h5"], folder / "plain.json", "full", options)
    corrected = options.model_copy(update={"correct": "csls", "bank": "test"})
    result = write_result([folder / "test.h5"], folder / "corrected.json", "full", corrected)
    assert json.loads(result.read_text())["correction"]["transductive"] is True
    succeeds(table_main, "summary", plain, result)
    assert "csls" not in capsys.readouterr().out
    assert "corrected.json is left out: its bank is the test split itself" in caplog.text
    succeeds(table_main, "summary", plain, result, "--transductive")
    assert "+ csls (bank test, transductive)" in capsys.readouterr().out


def test_tables_and_reports_repeat_the_correction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write_result([folder / "test.h5"], folder / "plain.json", "full", AllEvaluateOptions(bootstrap=0))
    result = write_result(
        [folder / "test.h5"], folder / "corrected.json", "full", AllEvaluateOptions(bootstrap=0, correct="nnn")
    )
    succeeds(table_main, "compare", plain, result)
    best = next(line for line in capsys.readouterr().out.splitlines() if "**" in line)
    assert f"{json.loads(result.read_text())['protocols']['full']['rsum']:.1f}" in best
    assert write_report([result], folder / "report.html").is_file()
    write_embeddings(folder / "train.h5", replace(with_hubs("train", seed=1), seed=0))
    with pytest.raises(UserError, match="the bank train has changed since the evaluation"):
        write_report([result], folder / "report.html")


def write_scores_of_pairs(folder: Path, directions: bool = False) -> Path:
    """Write the scores of the validation and test split, also with the bank. They are those of the vectors in the fixture."""
    train = with_hubs("train")
    for split in ("val", "test"):
        run = with_hubs(split)
        i2t = run.images @ run.captions.T
        scores = {"scores_i2t": i2t, "scores_t2i": i2t} if directions else {"scores": i2t}
        banks = {"bank_scores_images": run.images @ train.captions.T, "bank_scores_captions": run.captions @ train.images.T}
        write_embeddings(folder / f"{split}.h5", replace(run, images=None, captions=None, **scores, **banks))
    return folder / "test.h5"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("bank", ["train", "test"])
@pytest.mark.parametrize("method", PARAMETER_CHOICES)
@pytest.mark.parametrize("directions", [False, True])
def test_scores_of_pairs_are_corrected_like_those_of_vectors(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, method: str, bank: str, directions: bool
) -> None:
    expected = result_of([folder / "test.h5"], correct=method, bank=bank)
    found = result_of([write_scores_of_pairs(tmp_path_factory.mktemp("scores"), directions)], correct=method, bank=bank)
    for key in ("parameters", "bank", "bank_images", "bank_captions", "transductive"):
        assert found["correction"][key] == expected["correction"][key], key
    assert found["protocols"]["full"]["i2t"]["r5"] == pytest.approx(expected["protocols"]["full"]["i2t"]["r5"])
    assert rsum(found) == pytest.approx(rsum(expected))


def test_scores_of_pairs_need_scores_with_a_bank(folder: Path, fails: Fails) -> None:
    run = with_hubs("test")
    scores = replace(run, images=None, captions=None, scores=run.images @ run.captions.T)
    file = write_embeddings(folder / "scores.h5", scores)
    assert "--split test --bank-images 1000" in fails(eval_main, file, "--correct", "csls:k=5")
    assert "their bank is train" in fails(eval_main, file, "--correct", "csls:k=5", "--bank", folder / "train.h5")
    write_embeddings(folder / "order.h5", replace(run, similarity="order"))
    assert "needs inner products of vectors, or scores of pairs" in fails(eval_main, folder / "order.h5", "--correct", "mean")


def test_a_folder_with_the_name_of_a_split_is_not_the_bank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train").mkdir()
    monkeypatch.chdir(folder)
    assert result_of([folder / "test.h5"], correct="mean")["correction"]["bank_images"] == SIZES["train"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--correct", "cls"), "no method 'cls' (did you mean 'csls'?"),
        (("--correct", "csls:m=3"), "the parameters of csls are positive numbers: k"),
        (("--correct", "csls:k"), "k is not NAME=NUMBER"),
        (("--correct", "csls", "--bank", "restval"), "restval.h5: no such file, but it is the bank; write it with vse-embed"),
        (("--bank", "train"), "--bank is the bank of a correction: name it with --correct"),
        (("--correct", "csls", "--ensemble"), "--correct applies to one model"),
        (("--correct", "mean", "--bank", "{folder}/empty.h5"), "empty.h5: no images or no captions"),
        (("--correct", "mean", "--bank", "{folder}/short.h5"), "has vectors of another length"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, fails: Fails, options: tuple[str, ...], message: str) -> None:
    train = with_hubs("train")
    write_embeddings(folder / "short.h5", replace(train, images=train.images[:, :3], captions=train.captions[:, :3]))
    write_embeddings(folder / "empty.h5", train.select(np.arange(1), np.arange(0)))
    assert message in fails(eval_main, folder / "test.h5", *(option.format(folder=folder) for option in options))
