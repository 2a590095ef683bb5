from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.eval.evaluating import Fails, Printed, result_of, succeeds
from tests.eval.protocols.test_evaluate import made
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import write_embeddings
from vse.eval.options import AllEvaluateOptions as Options
from vse.eval.protocols.compare import compare_files
from vse.eval.tables.significance import build_significance_table
from vse.eval.tables.summary import build_summary


def compared(tmp_path: Path, *files: Path, protocol: str | Sequence[str] = "auto", samples: int = 400) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        compare_files(files, tmp_path / "c.json", protocol, options=Options(bootstrap=samples)).read_text()
    )
    return content


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three seeds of a good model, then three of a worse one, on the same 60 images."""
    runs = [("vsepp", 1.0, seed) for seed in range(3)] + [("vse0", 1.6, seed) for seed in range(3)]
    folder = tmp_path_factory.mktemp("models")
    return [
        write_embeddings(folder / f"{name}-{seed}.h5", made(60, seed=seed, noise=noise, experiment=name))
        for name, noise, seed in runs
    ]


def test_the_better_model_is_told_from_the_worse_whichever_comes_first(models: list[Path], tmp_path: Path) -> None:
    content = compared(tmp_path, models[0], models[3], protocol=["full", "sentence"])
    assert [content[side]["experiment"] for side in "ab"] == ["vsepp", "vse0"]
    full = content["comparisons"]["full"]
    other = compared(tmp_path, models[3], models[0])["comparisons"]["full"]
    for leaf, back in ((full["rsum"], other["rsum"]), (full["t2i"]["r1"], other["t2i"]["r1"])):
        assert leaf["p"] == back["p"] < 0.01
        assert 0 < leaf["ci95"][0] < leaf["difference"] < leaf["ci95"][1]
        assert leaf["difference"] == pytest.approx(leaf["a"] - leaf["b"]) == pytest.approx(-back["difference"])
        assert leaf["ci95"] == pytest.approx([-back["ci95"][1], -back["ci95"][0]])
    assert set(content["comparisons"]["sentence"]) == {"s2s"}


def test_the_metrics_are_those_of_the_results(models: list[Path], tmp_path: Path) -> None:
    content = compared(tmp_path, *models)
    for side, files in (("a", models[:3]), ("b", models[3:])):
        full = result_of(files)["protocols"]["full"]
        assert content[side]["seeds"] == [0, 1, 2]
        for direction, name in (("i2t", "r1"), ("t2i", "medr"), ("t2i", "meanr")):
            leaf = content["comparisons"]["full"][direction][name]
            assert leaf[side] == pytest.approx(full[direction][name]["mean"])


def test_the_table_marks_what_is_not_significant(models: list[Path], tmp_path: Path, capsys: Printed, fails: Fails) -> None:
    pairs = [compare_files([models[0], models[k]], tmp_path / f"{k}.json", options=Options(bootstrap=400)) for k in (1, 3)]
    alike, unlike = (build_significance_table([pair]) for pair in pairs)  # two seeds of one model, two models
    for table in (alike, unlike):
        assert (table["significant"] == "yes").equals(table["p"] < 0.05)
        assert table["difference"].to_numpy() == pytest.approx((table["a_value"] - table["b_value"]).to_numpy())
    assert "no" in set(alike["significant"])
    assert unlike.set_index(["direction", "metric"]).loc[("t2i", "R@1"), "significant"] == "yes"
    assert len(unlike) == 18  # eight metrics of both directions, rsum and mean recall
    for files, start in ((pairs[1:], "| protocol | direction | metric"), (pairs, "| models")):
        succeeds(table_main, "significance", *files)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(start)
        assert len([line for line in lines if line.startswith("| ")]) == 2 + 18 * len(files)
    assert "a single pair of models" in fails(table_main, "significance", *pairs, "--out", tmp_path / "t.tex")
    result_of([models[0]])
    result = models[0].with_suffix(".json")
    assert build_summary([result, *pairs]).equals(build_summary([result])), "comparisons are left out"


def test_the_commands(models: list[Path], tmp_path: Path, capsys: Printed, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    succeeds(eval_main, "--compare", models[0], models[3], "--bootstrap", "2000")
    captured = capsys.readouterr()
    assert captured.out == "results/demo_vsepp_vs_vse0.json\n"
    assert "demo vsepp - vse0 full: i2t R@1 +" in captured.err
    for out in ("t.csv", "t.tex"):
        succeeds(table_main, "significance", "results/demo_vsepp_vs_vse0.json", "--out", out)
    table, text = pd.read_csv("t.csv"), Path("t.tex").read_text()
    assert table.columns.tolist()[:5] == ["dataset", "split", "protocol", "a", "b"]
    for _, row in table.iterrows():
        shown = f"{row['difference']:+.1f}".replace("-", "$-$")
        assert (shown if row["significant"] == "yes" else f"({shown})") in text
    assert ("$<$0.001" in text) == (table["p"] < 0.001).any()
    assert "a: vsepp & b: vse0 & a $-$ b" in text


def test_two_runs_of_an_experiment_are_told_apart_by_seeds_or_settings(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    changed = json.dumps({"config": {}, "changed_settings": ["loss.margin: 0.2 -> 0.1"]})
    first, other = made(60, noise=1.0), made(60, noise=1.2)
    for name, run, shown in (
        ("b", replace(other, provenance=changed), ("vsepp", "vsepp[margin=0.1]")),
        ("c", replace(other, provenance="not JSON"), ("vsepp A", "vsepp B")),
        ("d", replace(other, seed=1), ("vsepp seed 0", "vsepp seed 1")),
    ):
        files = [write_embeddings(Path("a.h5"), first), write_embeddings(Path(f"{name}.h5"), run)]
        written = compare_files(files, options=Options(bootstrap=100))
        table = build_significance_table([written])
        assert set(zip(table["a"], table["b"], strict=True)) == {shown}
    assert written == Path("results/demo_vsepp-0_vs_vsepp-1.json")


def test_seeds_of_one_experiment_with_two_settings_are_two_models(tmp_path: Path) -> None:
    files = []
    for margin, noise in (("0.2", 1.0), ("0.1", 1.6)):
        changed = [] if margin == "0.2" else [f"loss.margin: 0.2 -> {margin}"]
        said = json.dumps({"changed_settings": changed})
        files += [
            write_embeddings(tmp_path / f"{margin}-{seed}.h5", made(60, seed=seed, noise=noise, provenance=said))
            for seed in range(2)
        ]
    content = compared(tmp_path, *files)
    assert [content[side]["name"] for side in "ab"] == ["vsepp", "vsepp[margin=0.1]"]
    assert [content[side]["seeds"] for side in "ab"] == [[0, 1], [0, 1]]
    assert content["comparisons"]["full"]["rsum"]["difference"] > 0


def test_what_cannot_be_compared_is_named(models: list[Path], tmp_path: Path, fails: Fails) -> None:
    out = tmp_path / "r.json"
    other = write_embeddings(tmp_path / "other.h5", made(61))
    result_of([models[0]])
    result = models[0].with_suffix(".json")
    for arguments, reason in (
        ([models[0]], "--compare needs the files of two models"),
        ([models[0], models[0]], "is given twice"),
        (models[:5], "there are 3 of vsepp, 2 of vse0"),
        (models[:3], "there are 3 of vsepp"),
        ([models[0], other], "differ in image_ids"),
        ([models[0], models[3], "--ensemble"], "--compare and --ensemble"),
        ([models[0], models[3], "--bootstrap", "0"], "a comparison needs samples"),
    ):
        assert reason in fails(eval_main, "--compare", *arguments, "--out", out)
    assert not out.exists()
    assert "vsepp-0.json: not a comparison of vse-eval --compare" in fails(
        table_main, "significance", result, "--out", out.with_suffix(".csv")
    )
    comparison = compare_files(models[:1] + models[3:4], tmp_path / "c.json", options=Options(bootstrap=10))
    assert "no result among the files" in fails(table_main, "summary", comparison, "--out", tmp_path / "t.csv")
    comparison.write_text(comparison.read_text().replace('"vsepp"', '"vse++"'))
    assert "was edited after vse-eval wrote it" in fails(table_main, "significance", comparison, "--out", tmp_path / "t.csv")
