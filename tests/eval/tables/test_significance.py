from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.eval.evaluating import write_result
from tests.eval.protocols.test_evaluate import made
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import write_embeddings
from vse.eval.options import EvaluationOptions
from vse.eval.tables.significance import build_significance, compare_files
from vse.eval.tables.summary import build_summary


def compared(tmp_path: Path, *files: Path, protocol: str | Sequence[str] = "auto", samples: int = 400) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        compare_files(files, tmp_path / "c.json", protocol, options=EvaluationOptions(bootstrap=samples)).read_text()
    )
    return content


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Three seeds of a good model, then three of a worse one, on the same 60 images."""
    runs = [("vsepp", 1.0, seed) for seed in range(3)] + [("vse0", 1.6, seed) for seed in range(3)]
    return [
        write_embeddings(tmp_path / f"{name}-{seed}.h5", made(60, seed=seed, noise=noise, experiment=name))
        for name, noise, seed in runs
    ]


def test_the_better_model_is_told_from_the_worse(models: list[Path], tmp_path: Path) -> None:
    content = compared(tmp_path, models[0], models[3], protocol=["full", "sentence"])
    assert content["a"]["experiment"] == "vsepp"
    assert content["b"]["experiment"] == "vse0"
    full = content["comparisons"]["full"]
    for leaf in (full["rsum"], full["t2i"]["r1"]):
        assert leaf["p"] < 0.01
        assert 0 < leaf["ci95"][0] < leaf["difference"] < leaf["ci95"][1]
        assert leaf["difference"] == pytest.approx(leaf["a"] - leaf["b"])
    assert set(content["comparisons"]["sentence"]) == {"s2s"}


def test_the_figures_are_those_of_the_results(models: list[Path], tmp_path: Path) -> None:
    content = compared(tmp_path, *models)
    for side, files in (("a", models[:3]), ("b", models[3:])):
        result = json.loads(write_result(files, tmp_path / f"{side}.json", options=EvaluationOptions(bootstrap=0)).read_text())
        assert content[side]["seeds"] == [0, 1, 2]
        for way, name in (("i2t", "r1"), ("t2i", "medr"), ("t2i", "meanr")):
            mean = result["protocols"]["full"][way][name]["mean"]
            assert content["comparisons"]["full"][way][name][side] == pytest.approx(mean)


def test_exchanging_the_models_changes_signs_alone(models: list[Path], tmp_path: Path) -> None:
    one, other = compared(tmp_path, models[0], models[3]), compared(tmp_path, models[3], models[0])
    for way, name in (("i2t", "r5"), ("t2i", "r1")):
        a, b = one["comparisons"]["full"][way][name], other["comparisons"]["full"][way][name]
        assert a["difference"] == pytest.approx(-b["difference"])
        assert a["ci95"] == pytest.approx([-b["ci95"][1], -b["ci95"][0]])
        assert a["p"] == b["p"]


def test_the_table_marks_what_is_not_significant(models: list[Path], tmp_path: Path) -> None:
    compared(tmp_path, models[0], models[1])  # two seeds of one model
    alike = build_significance([tmp_path / "c.json"])
    compared(tmp_path, models[0], models[3])
    unlike = build_significance([tmp_path / "c.json"])
    for table in (alike, unlike):
        assert (table["significant"] == "yes").equals(table["p"] < 0.05)
        assert table["difference"].to_numpy() == pytest.approx((table["a_value"] - table["b_value"]).to_numpy())
    assert "no" in set(alike["significant"])
    assert unlike.set_index(["direction", "metric"]).loc[("t2i", "R@1"), "significant"] == "yes"
    assert len(unlike) == 18  # eight figures both ways, rsum and mean recall


def test_the_commands(models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        eval_main(["--compare", str(models[0]), str(models[3]), "--bootstrap", "2000"])
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert captured.out == "results/demo_vsepp_vs_vse0.json\n"
    assert "demo vsepp - vse0 full: i2t R@1 +" in captured.err
    for out in ("t.csv", "t.tex"):
        with pytest.raises(SystemExit) as stop:
            table_main(["significance", "results/demo_vsepp_vs_vse0.json", "--out", out])
        assert stop.value.code == 0
    assert pd.read_csv("t.csv").columns.tolist()[:5] == ["dataset", "split", "protocol", "a", "b"]
    text = Path("t.tex").read_text()
    table = pd.read_csv("t.csv")
    for _, row in table.iterrows():
        shown = f"{row['difference']:+.1f}".replace("-", "$-$")
        assert (shown if row["significant"] == "yes" else f"({shown})") in text
    assert "95\\% interval" in text
    assert ("$<$0.001" in text) == (table["p"] < 0.001).any()
    assert "a: vsepp & b: vse0 & a $-$ b" in text
    assert "% demo: paired bootstrap (interval) and randomisation test" in text


def test_without_a_file_to_write_the_table_is_printed(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [
        str(compare_files([models[0], models[k]], tmp_path / f"{k}.json", options=EvaluationOptions(bootstrap=100)))
        for k in (1, 3)
    ]
    for files, start in ((pairs[1:], "| protocol | direction | metric"), (pairs, "| models")):
        with pytest.raises(SystemExit) as stop:
            table_main(["significance", *files])
        assert stop.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(start)
        assert len([line for line in lines if line.startswith("| ")]) == 2 + 18 * len(files)
    assert any(line.startswith("| demo vsepp - vse0 ") for line in lines)


def test_two_seeds_of_a_model_are_told_apart_by_their_seeds(models: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    written = compare_files(models[:2], options=EvaluationOptions(bootstrap=100))
    assert written == Path("results/demo_vsepp-0_vs_vsepp-1.json")
    table = build_significance([written])
    assert set(zip(table["a"], table["b"], strict=True)) == {("vsepp seed 0", "vsepp seed 1")}


def test_two_runs_of_an_experiment_are_told_apart_by_their_settings(tmp_path: Path) -> None:
    changed = json.dumps({"config": {}, "changed_settings": ["loss.margin: 0.2 -> 0.1"]})
    files = [
        write_embeddings(tmp_path / f"{name}.h5", made(60, noise=noise, provenance=provenance))
        for name, noise, provenance in (("a", 1.0, "{}"), ("b", 1.2, changed), ("c", 1.2, "not JSON"))
    ]
    for other, shown in ((files[1], ("vsepp", "vsepp[margin=0.1]")), (files[2], ("vsepp A", "vsepp B"))):
        table = build_significance(
            [compare_files([files[0], other], tmp_path / "c.json", options=EvaluationOptions(bootstrap=100))]
        )
        assert set(zip(table["a"], table["b"], strict=True)) == {shown}


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


def test_comparisons_among_results_are_left_out_of_their_tables(models: list[Path], tmp_path: Path) -> None:
    result = write_result([models[0]], tmp_path / "r.json", options=EvaluationOptions(bootstrap=0))
    comparison = compare_files([models[0], models[3]], tmp_path / "c.json", options=EvaluationOptions(bootstrap=100))
    assert build_summary([result, comparison]).equals(build_summary([result]))


def test_several_pairs_make_no_one_latex_table(models: list[Path], tmp_path: Path, fails: Callable[..., str]) -> None:
    pairs = [
        compare_files([models[0], models[k]], tmp_path / f"{k}.json", options=EvaluationOptions(bootstrap=100)) for k in (1, 3)
    ]
    assert "a single pair of models" in fails(table_main, "significance", *pairs, "--out", tmp_path / "t.tex")
    assert len(build_significance(pairs)) == 36


def test_what_cannot_be_compared_is_named(models: list[Path], tmp_path: Path, fails: Callable[..., str]) -> None:
    out = tmp_path / "r.json"
    other = write_embeddings(tmp_path / "other.h5", made(61))
    result = write_result([models[0]], tmp_path / "result.json")
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
    assert "result.json: not a comparison of vse-eval --compare" in fails(
        table_main, "significance", result, "--out", out.with_suffix(".csv")
    )
    comparison = compare_files(models[:1] + models[3:4], tmp_path / "c.json", options=EvaluationOptions(bootstrap=10))
    assert "no result among the files" in fails(table_main, "summary", comparison, "--out", tmp_path / "t.csv")
    comparison.write_text(comparison.read_text().replace('"vsepp"', '"vse++"'))
    assert "was edited after vse-eval wrote it" in fails(table_main, "significance", comparison, "--out", tmp_path / "t.csv")
