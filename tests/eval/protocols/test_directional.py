"""Files whose scores depend on which side queries, and files that name neither experiment nor seed, through the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.eval.evaluating import Fails, result_of, succeeds
from tests.eval.protocols.test_evaluate import made
from tests.eval.slow_ranks import slow_metrics_of_lists, slow_ranks
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import write_embeddings
from vse.eval.ranking.metrics import compute_direction_metrics
from vse.training.cli import report_main

RNG = np.random.default_rng(0)
RUN = made(n_images=12, n_each=3)
POSITIVE = 1.5 * (RUN.caption_image_ids[None] == RUN.image_ids[:, None])
I2T, T2I, OTHER = (POSITIVE + RNG.normal(size=(3, 12, 36))).astype(np.float32)


def slow_metrics(i2t: np.ndarray, t2i: np.ndarray) -> dict[str, dict[str, float]]:
    image_of_caption = RUN.image_of_caption().tolist()
    ranks = {"i2t": slow_ranks(i2t, image_of_caption)[0], "t2i": slow_ranks(t2i, image_of_caption)[1]}
    of_lists = slow_metrics_of_lists(i2t, t2i, image_of_caption)
    return {name: compute_direction_metrics(np.array(of_direction)) | of_lists[name] for name, of_direction in ranks.items()}


NONE = {"images": None, "captions": None, "similarity": "tod"}
UNNAMED = {"experiment": None, "seed": None}


def directional(path: Path, i2t: np.ndarray = I2T, t2i: np.ndarray = T2I, **changes: Any) -> Path:
    return write_embeddings(path, made(n_images=12, n_each=3, **NONE, scores_i2t=i2t, scores_t2i=t2i, **changes))


def full(result: Path) -> dict[str, Any]:
    protocol: dict[str, Any] = json.loads(result.read_text())["protocols"]["full"]
    return protocol


def check(result: Path, i2t: np.ndarray, t2i: np.ndarray) -> None:
    for direction, metrics in slow_metrics(i2t, t2i).items():
        assert full(result)[direction] == pytest.approx(metrics), direction


def test_each_direction_is_evaluated_by_its_own_scores(tmp_path: Path) -> None:
    assert slow_metrics(I2T, I2T) != slow_metrics(I2T, T2I) != slow_metrics(T2I, T2I)
    out = tmp_path / "r.json"
    succeeds(eval_main, directional(tmp_path / "e.h5"), "--bootstrap", 100, "--out", out)
    check(out, I2T, T2I)
    low, high = full(out)["ci95"]["t2i"]["r1"]
    assert low < full(out)["t2i"]["r1"] < high


def test_an_ensemble_averages_each_direction_even_with_a_member_that_has_one_matrix(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    one = write_embeddings(tmp_path / "one.h5", made(n_images=12, n_each=3, **NONE, scores=OTHER))
    succeeds(eval_main, directional(tmp_path / "e.h5"), one, "--ensemble", "--bootstrap", 0, "--out", out)
    check(out, (I2T + OTHER) / 2, (T2I + OTHER) / 2)


def test_a_directional_model_is_compared_and_reported(tmp_path: Path, fails: Fails) -> None:
    first = directional(tmp_path / "a.h5", experiment="a")
    second = directional(tmp_path / "b.h5", OTHER, OTHER, experiment="b")
    succeeds(eval_main, first, second, "--compare", "--bootstrap", 100, "--out", tmp_path / "c.json")
    succeeds(table_main, "significance", tmp_path / "c.json", "--out", tmp_path / "c.csv")
    table = pd.read_csv(tmp_path / "c.csv").set_index(["direction", "metric"])
    a, b = slow_metrics(I2T, T2I), slow_metrics(OTHER, OTHER)
    for direction in ("i2t", "t2i"):
        difference = a[direction]["r1"] - b[direction]["r1"]
        assert table.loc[(direction, "R@1"), "difference"] == pytest.approx(difference, abs=0.01)
    succeeds(eval_main, first, "--bootstrap", 0, "--out", tmp_path / "r.json")
    succeeds(table_main, "summary", tmp_path / "r.json", "--out", tmp_path / "t.csv")
    assert pd.read_csv(tmp_path / "t.csv")["t2i_r5"][0] == pytest.approx(a["t2i"]["r5"], abs=0.01)
    succeeds(report_main, tmp_path / "r.json", "--out", tmp_path / "r.html")
    assert "scores of each direction" in (tmp_path / "r.html").read_text()
    assert "FAISS indexes embeddings" in fails(eval_main, first, "--index", "Flat", "--out", tmp_path / "i.json")


def test_folds_of_a_directional_file_are_ranked_by_their_own_scores(tmp_path: Path) -> None:
    n = 2000
    scores = np.zeros((n, n), np.float32)
    scores[np.arange(n), np.arange(n)] = 1
    shifted = np.roll(scores, 1000, axis=1)  # right only across folds, where nothing is asked
    file = write_embeddings(tmp_path / "e.h5", made(n_images=n, n_each=1, **NONE, scores_i2t=scores, scores_t2i=shifted))
    succeeds(eval_main, file, "--protocol", "1k", "--bootstrap", 0, "--out", tmp_path / "r.json")
    protocol = json.loads((tmp_path / "r.json").read_text())["protocols"]["1k"]
    assert (protocol["folds"], protocol["i2t"]["r10"], protocol["t2i"]["r10"]) == (2, 100.0, 0.0)


def test_a_file_without_experiment_and_seed_is_called_by_its_name(tmp_path: Path) -> None:
    out, table, page = tmp_path / "mine.json", tmp_path / "t.csv", tmp_path / "r.html"
    result = result_of([directional(tmp_path / "mine.h5", **UNNAMED)])
    assert (result["experiment"], result["seeds"]) == ("mine", [None])
    succeeds(table_main, "summary", out, "--out", table)
    assert list(pd.read_csv(table)[["experiment", "seeds"]].iloc[0]) == ["mine", 1]
    succeeds(report_main, out, "--out", page)
    assert "<title>demo mine</title>" in page.read_text()
    assert "None" not in page.read_text()


def test_unnamed_files_can_be_seeds_members_and_rivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [directional(Path(f"{k}.h5"), scores, scores, **UNNAMED) for k, scores in enumerate((I2T, OTHER))]
    result = result_of(files)
    assert (result["experiment"], result["seeds"]) == ("0", [None, None])
    mean = np.mean([slow_metrics(scores, scores)["i2t"]["r1"] for scores in (I2T, OTHER)])
    assert result["protocols"]["full"]["i2t"]["r1"]["mean"] == pytest.approx(mean)
    result = result_of(files, ensemble=True)
    assert result["experiment"] == "ensemble of 2 (0, 1)"
    assert result["ensemble"] == [{"experiment": "0", "seed": None}, {"experiment": "1", "seed": None}]
    succeeds(report_main, "0.json", "--out", "r.html")
    succeeds(eval_main, *files, "--compare", "--bootstrap", 100, "--out", "c.json")
    assert [json.loads(Path("c.json").read_text())[side]["experiment"] for side in "ab"] == ["0", "1"]
    twin = directional(Path("other/0.h5"), OTHER, OTHER, **UNNAMED)
    succeeds(eval_main, files[0], twin, "--compare", "--bootstrap", 100)
    assert Path("results/demo_0-a_vs_0-b.json").is_file()
    result = result_of([files[0], directional(Path("y.h5"), OTHER, OTHER, seed=4)])
    assert (result["experiment"], result["seeds"]) == ("vsepp", [None, 4]), "a named seed lends its name"
