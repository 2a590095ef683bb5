"""``vse-table compare``: a row per pair of systems, and letters for those that do not differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.eval.evaluating import Fails, succeeds, write_result
from tests.eval.protocols.test_evaluate import made
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import write_embeddings


def result(folder: Path, name: str, noise: float, n_seeds: int = 2, n_images: int = 60) -> Path:
    """The result of a system whose captions have this noise; systems with as many images have the same images."""
    files = []
    for seed in range(n_seeds):
        run = replace(made(n_images=n_images, seed=seed, noise=noise), experiment=name, seed=seed)
        files.append(write_embeddings(folder / f"{name}-{seed}.h5", run))
    return write_result(files, folder / f"{name}.json", "full")


@pytest.fixture
def results(tmp_path: Path) -> list[Path]:
    return [result(tmp_path, name, noise) for name, noise in (("bad", 3.0), ("good", 1.0), ("same", 1.01))]


def test_the_csv_file_has_a_row_per_pair(results: list[Path], tmp_path: Path) -> None:
    succeeds(table_main, "compare", *results, "--out", tmp_path / "compared.csv")
    table = pd.read_csv(tmp_path / "compared.csv")
    assert list(zip(table["a"], table["b"], strict=True)) == [("bad", "good"), ("bad", "same"), ("good", "same")]
    assert table["significant"].tolist() == ["yes", "yes", "no"]
    assert table["b_letters"].tolist() == ["a", "a", "a"]
    assert table["a_letters"].tolist() == ["b", "b", "a"]
    assert (table["family"] == "holm").all()
    assert (table["comparisons"] == 3).all()
    assert (table["difference"] - (table["a_value"] - table["b_value"])).abs().max() < 0.011
    assert (table["p_corrected"] >= table["p"]).all()


def test_the_printed_table_begins_with_the_best_and_says_what_can_be_seen(
    results: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    succeeds(table_main, "compare", *results, "--family", "bonferroni", "--metric", "i2t_r1")
    header, _, best, second, last, *notes = capsys.readouterr().out.splitlines()
    assert "R@1" in header
    assert "**" in best
    assert "**" in second
    assert "bad" in last
    assert "**" not in last
    assert any("3 comparisons: bonferroni" in note for note in notes)
    assert any("direction i2t" in note for note in notes)
    assert any("differences below about" in note for note in notes)


def test_the_best_group_is_bold_in_latex(results: list[Path], tmp_path: Path) -> None:
    succeeds(table_main, "compare", *results, "--out", tmp_path / "compared.tex")
    text = (tmp_path / "compared.tex").read_text()
    assert text.count("\\textbf{") == 2
    assert "**" not in text


def test_a_mistake_is_one_line(results: list[Path], tmp_path: Path, fails: Fails) -> None:
    bad, good, _ = results
    assert "needs at least two results" in fails(table_main, "compare", bad)
    assert "no metric 'i2t_r7'" in fails(table_main, "compare", bad, good, "--metric", "i2t_r7")
    assert "--family: the table cards has no such option" in fails(table_main, "cards", bad, "--family", "holm")
    other = write_embeddings(tmp_path / "other.h5", replace(made(n_images=50), experiment="other"))
    assert "differ in image_ids" in fails(table_main, "compare", bad, write_result([other], tmp_path / "other.json", "full"))
    both = tmp_path / "both.json"
    succeeds(eval_main, tmp_path / "bad-0.h5", tmp_path / "good-0.h5", "--ensemble", "--out", both)
    assert "is an ensemble" in fails(table_main, "compare", good, both)
    (tmp_path / "bad-0.h5").unlink()
    assert "bad-0.h5" in fails(table_main, "compare", bad, good)


def test_a_summary_with_a_family_has_the_letters_of_the_comparison(
    results: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    succeeds(table_main, "compare", *results, "--family", "bonferroni", "--out", tmp_path / "compare.csv")
    pairs = pd.read_csv(tmp_path / "compare.csv")
    letters = {row[side]: row[f"{side}_letters"] for row in pairs.to_dict("records") for side in ("a", "b")}
    succeeds(table_main, "summary", *results, "--family", "bonferroni", "--out", tmp_path / "summary.csv")
    summary = pd.read_csv(tmp_path / "summary.csv", keep_default_na=False)
    whole = summary[summary["protocol"] == "full"]
    assert dict(zip(whole["method"], whole["group"], strict=True)) == letters
    assert (summary[summary["protocol"] != "full"]["group"] == "").all()
    capsys.readouterr()
    succeeds(table_main, "summary", *results, "--family", "holm")
    printed = capsys.readouterr().out
    assert "comparisons, p-values corrected by holm" in printed
    assert "**" in printed
    succeeds(table_main, "summary", *results, "--family", "holm", "--out", tmp_path / "summary.tex")
    assert "\\textbf{" in (tmp_path / "summary.tex").read_text()
    succeeds(table_main, "summary", *results, "--out", tmp_path / "plain.csv")
    assert "group" not in pd.read_csv(tmp_path / "plain.csv")


def test_a_ladder_with_a_family_has_the_letters_of_the_summary(results: list[Path], tmp_path: Path) -> None:
    tables = {}
    for name in ("summary", "ladder"):
        succeeds(table_main, name, *results, "--family", "holm", "--out", tmp_path / f"{name}.csv")
        rows = pd.read_csv(tmp_path / f"{name}.csv", keep_default_na=False)
        rows = rows[rows["protocol"] == "full"].set_index("method")
        tables[name] = rows[["group", "in_best_group"]].sort_index()
    pd.testing.assert_frame_equal(tables["summary"], tables["ladder"])
    assert tables["ladder"]["in_best_group"].to_dict() == {"bad": "", "good": "yes", "same": "yes"}
    succeeds(table_main, "ladder", *results, "--family", "holm", "--out", tmp_path / "ladder.tex")
    latex = (tmp_path / "ladder.tex").read_text()
    assert latex.count("\\textbf{") == 2
    assert "3 comparisons, p-values corrected by holm" in latex


def test_results_on_other_images_have_a_family_of_their_own(results: list[Path], tmp_path: Path) -> None:
    others = [result(tmp_path, name, noise, n_images=50) for name, noise in (("bad50", 3.0), ("good50", 1.0))]
    summary = build_summary_with_holm(tmp_path, [*results, *others])
    assert summary["group"].to_dict() == {"bad": "b", "good": "a", "same": "a", "bad50": "b", "good50": "a"}
    assert build_summary_with_holm(tmp_path, results)["group"].to_dict() == {"bad": "b", "good": "a", "same": "a"}
    assert build_summary_with_holm(tmp_path, [*results, others[0]])["group"]["bad50"] == ""


def build_summary_with_holm(folder: Path, results: list[Path]) -> pd.DataFrame:
    succeeds(table_main, "summary", *results, "--family", "holm", "--out", folder / "s.csv")
    rows = pd.read_csv(folder / "s.csv", keep_default_na=False)
    return rows[rows["protocol"] == "full"].set_index("method")


def test_a_family_of_one_result_is_refused(results: list[Path], fails: Fails) -> None:
    for table in ("summary", "ladder"):
        assert "no two such results" in fails(table_main, table, results[0], "--family", "holm")
