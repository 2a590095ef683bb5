from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.eval.evaluating import write_result
from tests.eval.protocols.test_evaluate import made, made_order
from tests.eval.slow_ranks import slow_metrics_of_lists, slow_order_scores, slow_ranks
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.files.results import read_result
from vse.eval.options import EvaluationOptions
from vse.eval.protocols.ensemble import build_ensemble, members_by_seed
from vse.eval.ranking.metrics import metrics
from vse.eval.ranking.ranks import Ranks
from vse.eval.tables.summary import build_summary


def average(files: list[Path]) -> Embeddings:
    [members] = members_by_seed(files)
    return build_ensemble(members)


def dense_scores(run: Embeddings) -> np.ndarray:
    if run.scores is not None:
        return np.asarray(run.scores[:])
    if run.similarity == "order":
        return slow_order_scores(run.images, run.captions)
    return run.images.astype(np.float64) @ run.captions.T.astype(np.float64)


@pytest.mark.parametrize("make", [made, made_order])
@pytest.mark.parametrize("n_members", [2, 3])
def test_an_ensemble_ranks_by_the_mean_of_the_score_matrices(
    make: Callable[..., Embeddings], n_members: int, tmp_path: Path
) -> None:
    # The members see the same split, and one has an embedding of another size.
    members = [make(seed=k, noise=2.0) for k in range(n_members)]
    assert members[0].images is not None
    assert members[0].captions is not None
    members[0] = replace(members[0], images=members[0].images[:, :12], captions=members[0].captions[:, :12])
    files = [write_embeddings(tmp_path / f"{k}.h5", member) for k, member in enumerate(members)]
    mean = np.mean([dense_scores(member) for member in members], axis=0)
    image_of_caption = members[0].image_of_caption().tolist()
    i2t, t2i = slow_ranks(mean, image_of_caption)
    found = json.loads(write_result(files, tmp_path / "r.json", options=EvaluationOptions(ensemble=True)).read_text())
    slow = metrics(Ranks(np.array(i2t), np.array(t2i)))
    for direction, of_lists in slow_metrics_of_lists(mean, mean, image_of_caption).items():
        assert found["protocols"]["full"][direction] == pytest.approx(slow[direction] | of_lists)
    np.testing.assert_allclose(dense_scores(average(files)), mean, atol=1e-6)


def test_matrices_of_scores_are_averaged(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrices = [rng.normal(size=(30, 150)).astype(np.float32) for _ in range(3)]
    files = [
        write_embeddings(tmp_path / f"{k}.h5", made(images=None, captions=None, scores=matrix, similarity="network"))
        for k, matrix in enumerate(matrices)
    ]
    found = average(files)
    np.testing.assert_allclose(found.scores[:], np.mean(matrices, axis=0), atol=1e-6)


def test_an_ensemble_is_no_row_of_its_members(tmp_path: Path) -> None:
    files = [write_embeddings(tmp_path / f"{k}.h5", made(seed=k, experiment=name)) for k, name in enumerate(("vsepp", "vse0"))]
    result = json.loads(write_result(files, tmp_path / "r.json", options=EvaluationOptions(ensemble=True)).read_text())
    assert result["experiment"] == "ensemble of 2 (vsepp, vse0)"
    assert [noted["file"] for noted in result["provenance"]["embeddings"]] == ["0.h5", "1.h5"]
    assert result["provenance"]["config"] == {}


def test_tables_call_an_ensemble_by_the_names_that_its_members_were_given(tmp_path: Path) -> None:
    names = [json.dumps({"config": {"label": label}}) for label in ("t-i AVG", "i-t LSE")]
    files = [
        write_embeddings(tmp_path / f"{k}.h5", made(seed=k, experiment="scan", provenance=said))
        for k, said in enumerate(names)
    ]
    result = write_result(files, tmp_path / "r.json", options=EvaluationOptions(ensemble=True))
    assert build_summary([result])["method"].unique().tolist() == ["t-i AVG + i-t LSE"]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file of an experiment and a seed; the preset ``duo`` is an ensemble of ``vsepp`` and ``vse0``.

    ``twice`` is one of two seeds of ``vsepp``.
    """
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "duo.yaml").write_text("title: Both\nseeds: [0, 1]\nensemble_of: [vsepp, vse0]\n")
    (tmp_path / "experiments" / "twice.yaml").write_text("seeds: [0, 1]\nensemble_of: [vsepp]\n")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))

    def write(experiment: str, seed: int | None, name: str = "", **changes: Any) -> Path:
        run = made(seed=10 * (seed or 0) + len(experiment), noise=2.0, **changes)
        path = tmp_path / f"{name or experiment}-{seed}.h5"
        return write_embeddings(path, replace(run, experiment=experiment, seed=seed))

    return write


@pytest.mark.parametrize("preset", [[], ["--experiment", "duo"]])
def test_seed_s_of_an_ensemble_is_made_of_seed_s_of_every_member(
    preset: list[str], write: Callable[..., Path], tmp_path: Path
) -> None:
    files = {seed: [write(experiment, seed) for experiment in ("vsepp", "vse0")] for seed in (3, 1)}
    alone = [
        json.loads(write_result(members, tmp_path / f"{seed}.json", options=EvaluationOptions(ensemble=True)).read_text())
        for seed, members in files.items()
    ]
    shuffled = [files[3][1], files[3][0], files[1][0], files[1][1]]
    with pytest.raises(SystemExit) as stop:
        eval_main([*map(str, shuffled), "--ensemble", *preset, "--out", str(tmp_path / "r.json")])
    assert stop.value.code == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["seeds"] == [3, 1]
    for direction in ("i2t", "t2i"):
        for name, metric in result["protocols"]["full"][direction].items():
            each = [one["protocols"]["full"][direction][name] for one in alone]
            assert metric == {"mean": pytest.approx(np.mean(each)), "std": pytest.approx(np.std(each, ddof=1))}
    order = ["vsepp", "vse0"] if preset else ["vse0", "vsepp"]
    members = [(experiment, seed) for seed in (3, 1) for experiment in order]
    assert [(member["experiment"], member["seed"]) for member in result["ensemble"]] == members
    assert [file["file"] for file in result["provenance"]["embeddings"]] == [f"{name}-{seed}.h5" for name, seed in members]


def test_a_preset_names_the_ensemble_and_its_title_and_what_was_changed_in_a_member(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    noted = {"features": {"fc7": "aa"}, "changed_settings": ["loss.margin: 0.2 -> 0.1"], "config": {"label": "mine"}}
    files = [write("vsepp", 0, provenance=json.dumps(noted)), write("vse0", 0, provenance='{"features": {"effnet": "bb"}}')]
    path = write_result(files, tmp_path / "r.json", options=EvaluationOptions(ensemble=True, experiment="duo"))
    result = read_result(path)
    assert (result.experiment, result.seeds) == ("duo", [0])
    assert result.provenance["config"]["ensemble_of"] == ["vsepp", "vse0"]
    assert result.provenance["features"] == {"fc7": "aa", "effnet": "bb"}
    row = build_summary([path]).iloc[0]
    assert (row["experiment"], row["method"]) == ("duo[margin=0.1]", "Both[margin=0.1]")
    assert (row["feature"], row["settings"]) == ("fc7 + effnet", "vsepp.loss.margin: 0.2 -> 0.1")


def test_seeds_of_one_experiment_are_members_and_so_are_single_files_of_any_seed(write: Callable[..., Path]) -> None:
    of_one = [write("vsepp", seed) for seed in (0, 1, 2)]
    assert [[path for path, _ in members] for members in members_by_seed(of_one)] == [of_one]
    mixed = [write("vsepp", 0), write("vse0", 5), write("order0", None)]
    assert [[path for path, _ in members] for members in members_by_seed(mixed)] == [mixed]


def test_a_preset_of_one_experiment_averages_its_seeds(write: Callable[..., Path], tmp_path: Path) -> None:
    files = [write("vsepp", seed) for seed in (0, 1)]
    result = read_result(
        write_result(files, tmp_path / "r.json", options=EvaluationOptions(ensemble=True, experiment="twice"))
    )
    assert (result.experiment, [(member.experiment, member.seed) for member in result.ensemble]) == (
        "twice",
        [("vsepp", 0), ("vsepp", 1)],
    )
    unnamed = read_result(write_result(files, tmp_path / "unnamed.json", options=EvaluationOptions(ensemble=True)))
    assert result.protocols == unnamed.protocols


def test_what_is_no_ensemble_of_a_preset_or_lacks_a_seed_is_named(
    write: Callable[..., Path], tmp_path: Path, fails: Callable[..., str]
) -> None:
    out = tmp_path / "r.json"
    a, b = ([write(experiment, seed) for seed in (0, 1)] for experiment in ("vsepp", "vse0"))
    other, twin = write("order0", 0), write("vse0", 1, name="again")
    for files, preset, reason in (
        ([*a, b[0]], None, "no file of vse0 seed 1"),
        ([*a, *b, other], None, "no file of order0 seed 1"),
        ([*a, *b, twin], None, "again-1.h5 and .*vse0-1.h5 are both vse0 seed 1"),
        ([write("vsepp", None), *b], None, "no file of vse0 without a seed"),
        (a, "duo", "no file of vse0 seed 0"),
        ([a[0], b[1]], "duo", "no file of vse0 seed 0"),
        ([a[0], other], "duo", "order0-0.h5: .* order0 .* duo, which has vsepp and vse0"),
        ([a[0], b[0]], "vsepp", "the experiment vsepp is not an ensemble"),
        ([a[0], b[0]], "dou", r"unknown experiment 'dou' \(did you mean 'duo'"),
    ):
        options = ["--experiment", preset] if preset else []
        line = fails(eval_main, *files, "--ensemble", *options, "--out", out)
        assert re.search(reason, line), line
    assert "needs --ensemble" in fails(eval_main, *a, "--experiment", "duo", "--out", out)
    assert not out.exists()


def test_seeds_of_an_ensemble_are_of_one_split(write: Callable[..., Path], tmp_path: Path, fails: Callable[..., str]) -> None:
    files = [write(experiment, 0) for experiment in ("vsepp", "vse0")]
    others = [write(experiment, 1, dataset="f8k") for experiment in ("vsepp", "vse0")]
    assert "vsepp-1.h5 has dataset 'f8k'" in fails(eval_main, *files, *others, "--ensemble", "--out", tmp_path / "r.json")


def test_what_cannot_be_averaged_is_named(tmp_path: Path, fails: Callable[..., str]) -> None:
    out = tmp_path / "r.json"
    one = write_embeddings(tmp_path / "one.h5", made())
    order = write_embeddings(tmp_path / "order.h5", made_order(seed=1))
    scores = np.zeros((30, 150), np.float32)
    pairs = write_embeddings(tmp_path / "pairs.h5", made(images=None, captions=None, scores=scores))
    other = write_embeddings(tmp_path / "other.h5", made(n_images=31))
    for files, reason in (
        ([one], "at least two members"),
        ([one, one], "counts every member once"),
        ([one, order], "order.h5 has similarity 'order', "),
        ([one, pairs], "cannot be averaged: one holds scores, the other embeddings"),
        ([one, other], "differ in image_ids"),
    ):
        assert reason in fails(eval_main, *files, "--ensemble", "--out", out)
    assert not out.exists()
