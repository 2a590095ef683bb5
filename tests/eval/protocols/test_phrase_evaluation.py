"""From files of phrase scores to results and comparisons, by the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.eval.evaluating import Fails, Printed, succeeds, write_phrase_result
from tests.eval.protocols.test_evaluate import made
from tests.eval.some_phrases import some_phrases
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import write_embeddings
from vse.eval.files.phrase_scores import PhraseScores, write_phrase_scores
from vse.eval.files.results import read_comparison, read_result
from vse.eval.options import AllEvaluateOptions
from vse.eval.protocols.compare import compare_files
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_json

METRICS = ["r1", "r5", "r10", "bound", "mean_iou"]


def evaluated(tmp_path: Path, *runs: PhraseScores, iou: float | None = None, **settings: Any) -> dict[str, Any]:
    files = [write_phrase_scores(tmp_path / f"{k}.h5", run) for k, run in enumerate(runs)]
    result: dict[str, Any] = json.loads(write_phrase_result(files, tmp_path / "r.json", iou, **settings).read_text())
    return result


def by_hand() -> PhraseScores:
    """Four phrases of two images: right at rank 1, right at rank 2 by a tie, without a box, without a candidate."""
    return some_phrases(
        phrase_ids=np.arange(4),
        image_ids=np.array([1, 1, 1, 2]),
        caption_ids=np.array([5, 5, 6, 7]),
        offsets=np.array([0, 2, 4, 6, 6]),
        scores=np.array([2, 1, 1, 1, 5, 5], np.float32),
        boxes=np.array([[0, 0, 10, 10], [50, 50, 60, 60]] * 3, np.float32),
        truth=np.array([[0, 0, 10, 8], [50, 50, 60, 60], [np.nan] * 4, [0, 0, 5, 5]], np.float32),
        types=np.array(["people", "people/animals", "scene", "animals"]),
    )


def test_a_result_by_hand(tmp_path: Path) -> None:
    result = evaluated(tmp_path, by_hand(), bootstrap=0)
    third = 100 / 3
    assert result["protocols"] == {
        "phrase": {
            "phrase": dict(zip(METRICS, map(pytest.approx, [third, 2 * third, 2 * third, 2 * third, 80 / 3]), strict=True)),
            "per_type": {
                "people": {**dict(zip(METRICS, map(pytest.approx, [50, 100, 100, 100, 40]), strict=True)), "n_phrases": 2},
                "animals": {**dict(zip(METRICS, [0, 50, 50, 50, 0], strict=True)), "n_phrases": 2},
            },
            "iou": 0.5,
            "n_phrases": 3,
            "n_without_box": 1,
            "n_without_candidate": 1,
        }
    }
    assert (result["n_images"], result["n_captions"], result["seeds"]) == (2, 3, [0])
    strict, loose = (evaluated(tmp_path, by_hand(), iou=iou)["protocols"]["phrase"] for iou in (0.81, 0.8))
    assert (strict["iou"], strict["phrase"]["r1"]) == (0.81, 0)
    assert (loose["iou"], loose["phrase"]["r1"]) == (0.8, pytest.approx(third))
    assert result["split_identity"] == {"ids": "image_ids", "sha256": sha256_json([1, 2]), "name": None}


def test_several_seeds_have_means_and_deviations_and_one_interval_each(tmp_path: Path) -> None:
    runs = [some_phrases(n_images=30, seed=seed, skill=1.0) for seed in range(3)]
    alone = [evaluated(tmp_path, run)["protocols"]["phrase"] for run in runs]
    result = evaluated(tmp_path, *runs)
    together = result["protocols"]["phrase"]
    assert result["seeds"] == [0, 1, 2]
    for name in METRICS:
        values = [one["phrase"][name] for one in alone]
        mean, std = np.mean(values), np.std(values, ddof=1)
        assert together["phrase"][name] == {"mean": pytest.approx(mean), "std": pytest.approx(std)}
        low, high = together["ci95"]["phrase"][name]
        assert low <= np.mean(values) <= high
    of_type = together["per_type"]["clothing"]
    assert of_type["r1"]["mean"] == pytest.approx(np.mean([one["per_type"]["clothing"]["r1"] for one in alone]))
    assert of_type["n_phrases"] == alone[0]["per_type"]["clothing"]["n_phrases"] == 60
    assert (together["n_phrases"], together["n_without_box"], together["iou"]) == (180, 60, 0.5)


def test_intervals_are_over_images(tmp_path: Path) -> None:
    """Of images whose phrases are all right or all wrong the interval is that of as many coins as there are images."""
    run = some_phrases(n_images=8, n_each=4, skill=1e6)
    outside = run.boxes.copy()
    outside[np.repeat(run.image_ids % 2 == 0, 9)] = [500, 500, 510, 510]
    protocol = evaluated(tmp_path, some_phrases(n_images=8, n_each=4, scores=run.scores, boxes=outside))["protocols"]["phrase"]
    assert (protocol["phrase"]["r1"], protocol["ci95"]["phrase"]["r1"]) == (50, [12.5, 87.5])


def test_a_type_of_one_image_has_an_interval(tmp_path: Path) -> None:
    types = np.array(["people"] * 47 + ["instruments"])
    truth = some_phrases().truth.copy()
    truth[47] = [0, 0, 20, 20]
    result = evaluated(tmp_path, some_phrases(types=types, truth=truth))
    of_type = result["protocols"]["phrase"]["ci95"]["per_type"]["instruments"]
    assert of_type["r1"] in ([0.0, 0.0], [100.0, 100.0])
    assert read_result(tmp_path / "r.json").protocols["phrase"].type_interval("instruments", "r1") is not None


@pytest.mark.parametrize("name", ["phrase", "n_phrases", "__class__", "日本"])
def test_types_of_any_name_are_types(name: str, tmp_path: Path) -> None:
    runs = [some_phrases(types=np.array([name] * 48), seed=seed) for seed in (0, 1)]
    protocol = evaluated(tmp_path, *runs)["protocols"]["phrase"]
    assert list(protocol["per_type"]) == [name]
    assert protocol["per_type"][name]["r1"] == protocol["phrase"]["r1"]


def test_a_comparison_is_paired_over_images(tmp_path: Path) -> None:
    files = [
        write_phrase_scores(tmp_path / f"{name}{seed}.h5", some_phrases(30, seed=seed, skill=skill, experiment=name))
        for name, skill in (("good", 4.0), ("poor", 0.5))
        for seed in (0, 1)
    ]
    comparison = read_comparison(compare_files(files, tmp_path / "c.json", options=AllEvaluateOptions(bootstrap=400)))
    assert (comparison.a.experiment, comparison.b.experiment) == ("good", "poor")
    alone = [evaluated(tmp_path, *[some_phrases(30, seed=s, skill=skill) for s in (0, 1)]) for skill in (4.0, 0.5)]
    means = [one["protocols"]["phrase"]["phrase"]["r1"]["mean"] for one in alone]
    difference = comparison.comparisons["phrase"]["phrase"]["r1"]
    assert (difference.a, difference.b) == (pytest.approx(means[0]), pytest.approx(means[1]))
    assert difference.difference == pytest.approx(means[0] - means[1])
    assert difference.ci95[0] > 0
    assert difference.p < 0.05
    assert comparison.comparisons["phrase"]["phrase"]["bound"].difference == 0
    assert set(comparison.comparisons["phrase"]["per_type"]) == {"people", "clothing", "other"}


def test_the_command_prints_and_writes(tmp_path: Path, capsys: Printed) -> None:
    file = write_phrase_scores(tmp_path / "p.h5", by_hand())
    succeeds(eval_main, file, "--bootstrap", 0)
    line = "toy phrases phrase: R@1/5/10 at IoU 0.5 33.3 / 66.7 / 66.7, upper bound 66.7, mean IoU 26.7; "
    line += "3 phrases (without a candidate: 1); not counted, because they have no box: 1\n"
    assert capsys.readouterr().out == line
    succeeds(eval_main, file, "--iou", 0.9, "--protocol", "phrase", "--out", tmp_path / "r.json")
    assert capsys.readouterr().out == f"{tmp_path / 'r.json'}\n"
    assert read_result(tmp_path / "r.json").protocols["phrase"].iou == 0.9


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--iou", 0], "--iou 0:"),
        (["--iou", "nan"], "--iou nan:"),
        (["--protocol", "full"], "p.h5: holds phrase scores, and the protocol full"),
        (["--index", "Flat"], "p.h5: --index does not apply to phrase scores"),
        (["--rerank", 5], "p.h5: --rerank does not apply to phrase scores"),
        (["--ensemble"], "p.h5: --ensemble does not apply to phrase scores"),
    ],
)
def test_what_does_not_go_with_phrases_is_refused(options: list[Any], reason: str, tmp_path: Path, fails: Fails) -> None:
    phrases, images = write_phrase_scores(tmp_path / "p.h5", some_phrases()), write_embeddings(tmp_path / "e.h5", made())
    assert reason in fails(eval_main, phrases, *options)
    assert f"{phrases} holds phrase scores, and {images} does not" in fails(eval_main, images, phrases)
    assert f"--iou applies to phrase scores, and {images} holds none" in fails(eval_main, images, "--iou", 0.5)
    assert f"{images}: holds no phrase scores" in fails(eval_main, images, "--protocol", "phrase")


def test_seeds_that_are_none_are_refused(tmp_path: Path) -> None:
    def changed(**changes: Any) -> Path:
        return write_phrase_scores(tmp_path / f"{next(iter(changes))}.h5", some_phrases(seed=1, **changes))

    file = write_phrase_scores(tmp_path / "p.h5", some_phrases())
    same_seed = write_phrase_scores(tmp_path / "q.h5", some_phrases(skill=2))
    other = write_phrase_scores(tmp_path / "o.h5", some_phrases(seed=1, truth=some_phrases().truth + 1))
    boxless = write_phrase_scores(tmp_path / "b.h5", some_phrases(truth=np.full((48, 4), np.nan, np.float32)))
    for files, reason in (
        ([file, file], "is given twice"),
        ([file, same_seed], "the same seed 0"),
        ([file, other], "differ in truth"),
        ([file, changed(split="val")], "split 'val'"),
        ([file, changed(experiment="cca")], "experiment 'cca'"),
        ([file, changed(phrase_ids=np.arange(48))], "differ in phrase_ids"),
        ([file, changed(types=np.array(["people"] * 48))], "differ in types"),
        ([boxless], "none of its 48 phrases has a box"),
    ):
        with pytest.raises(UserError, match=reason):
            write_phrase_result(files, tmp_path / "r.json")
    with pytest.raises(UserError, match="p.h5"):
        write_phrase_result([file], file)


def test_an_unfinished_run_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    run = some_phrases(provenance='{"unfinished": "interrupted"}')
    with pytest.raises(UserError, match="did not finish"):
        evaluated(tmp_path, run)
    assert evaluated(tmp_path, run, allow_unfinished=True)["unfinished"] == [{"file": "0.h5", "state": "interrupted"}]
