"""Tables of results of phrases: the summary, the published table, and differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.eval.evaluating import Printed, succeeds, write_phrase_result
from tests.eval.some_phrases import some_phrases
from tests.eval.tables.test_summary import made
from vse.eval.cli import table_main
from vse.eval.files.phrase_scores import PhraseScores, write_phrase_scores
from vse.eval.options import AllEvaluateOptions
from vse.eval.protocols.compare import compare_files
from vse.eval.tables.published import PublishedTable, compare_published
from vse.eval.tables.significance import SignificanceTable, build_significance_table
from vse.eval.tables.summary import SummaryTable, build_printed_summary, build_summary
from vse.eval.tables.table import format_text_table
from vse.pipeline.files.writing import sha256_json

ROW = "twobranch 1.b4"
METRICS = ["phrase_r1", "phrase_r5", "phrase_r10", "phrase_bound", "phrase_mean_iou"]


def result(folder: Path, *runs: PhraseScores, **options: Any) -> Path:
    name = f"{runs[0].dataset}_{runs[0].experiment}"
    files = [write_phrase_scores(folder / "runs" / name / f"seed-{run.seed}" / "test.h5", run) for run in runs]
    return write_phrase_result(files, folder / "results" / f"{name}.json", bootstrap=100, **options)


def of_row(row: str = ROW, **changes: Any) -> PhraseScores:
    note = {"config": {"rows": [row], "title": "Embedding Network", "feature": "boxes", "caption_feature": "hglmm_phrases"}}
    return some_phrases(30, provenance=json.dumps(note), **changes)


def test_a_summary_has_the_metrics_of_phrases_and_nothing_of_retrieval(tmp_path: Path) -> None:
    file = result(tmp_path, some_phrases(30))
    table = build_summary([file])
    protocol = json.loads(file.read_text())["protocols"]["phrase"]
    (row,) = table.to_dict("records")
    assert {name: row[name] for name in METRICS} == {name: protocol["phrase"][name[7:]] for name in METRICS}
    assert (row["protocol"], row["iou"], row["n_phrases"], row["n_without_box"]) == ("phrase", 0.5, 180, 60)
    assert row["phrase_r1_low"], row["phrase_r1_high"] == protocol["ci95"]["phrase"]["r1"]
    assert row["type_clothing_r1"] == protocol["per_type"]["clothing"]["r1"]
    assert [row["type_clothing_r1_low"], row["type_clothing_r1_high"]] == protocol["ci95"]["per_type"]["clothing"]["r1"]
    assert not [name for name in table if name.startswith(("i2t", "t2i", "s2s", "rsum"))]


def test_people_see_the_metrics_of_all_phrases(tmp_path: Path) -> None:
    seeds = [some_phrases(30, seed=seed) for seed in (0, 1)]
    table = build_summary([result(tmp_path, *seeds), result(tmp_path, some_phrases(30, experiment="other"))])
    cells = build_printed_summary(table)
    assert cells.column_titles[-5:] == [
        ("phrase to region", name) for name in ("R@1", "R@5", "R@10", "upper bound", "mean IoU")
    ]
    assert cells.notes == ["dataset toy, split test, protocol phrase, iou 0.5, n_phrases 180, n_without_box 60"]
    assert "±" in format_text_table(cells)


def test_results_of_phrases_and_of_retrieval_share_a_summary(tmp_path: Path) -> None:
    table = build_summary([result(tmp_path, some_phrases(30)), made(tmp_path / "a.json", ["full"])])
    assert table["protocol"].tolist() == ["phrase", "full"]
    assert table["i2t_r1"].isna().tolist() == [True, False]
    assert table["phrase_r1"].isna().tolist() == [False, True]
    assert table["iou"].tolist() == [0.5, ""]
    read = pd.read_csv(SummaryTable("summary").write(table, tmp_path / "t.csv"))
    assert read["iou"].isna().tolist() == [False, True]


@pytest.fixture
def entities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of :func:`some_phrases` are the test split of Flickr30K Entities."""
    (tmp_path / "published").mkdir()
    sha256 = sha256_json((np.arange(30) + 10).tolist())
    (tmp_path / "published" / "splits.yaml").write_text(f"f30k_entities: {{entities: '{sha256}'}}\n")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))


@pytest.mark.usefixtures("entities")
def test_the_published_table_has_ours_beside_the_printed_metrics(tmp_path: Path) -> None:
    seeds = [of_row(dataset="f30k_entities", seed=seed) for seed in (0, 1)]
    file = result(tmp_path, *seeds)
    table = compare_published("twobranch_1", [file]).set_index("row")
    line, metrics = table.loc[ROW], json.loads(file.read_text())["protocols"]["phrase"]["phrase"]
    assert (line["phrase_r1_published"], line["phrase_r1_ours"]) == (49.09, metrics["r1"]["mean"])
    assert line["phrase_r1_std"] == metrics["r1"]["std"]
    assert line["phrase_r1_difference"] == pytest.approx(metrics["r1"]["mean"] - 49.09)
    assert (line["seeds"], line["our_split"], line["phrase_r1_significant"]) == ("0 1", "entities", "yes")
    assert pd.isna(line["our_images"])
    assert table["phrase_r1_ours"].notna().sum() == 1
    csv = PublishedTable("published").write(table.reset_index(), tmp_path / "t.csv").read_text()
    assert "51.03" in csv
    latex = PublishedTable("published").write(table.reset_index(), tmp_path / "t.tex").read_text()
    assert "ours: Embedding Network" in latex
    assert "images" not in latex.split("ours: Embedding Network")[1].split("\\\\")[0]


def test_a_table_of_differences_names_phrases_and_types(tmp_path: Path) -> None:
    files = [
        write_phrase_scores(tmp_path / f"{name}.h5", some_phrases(30, skill=skill, experiment=name))
        for name, skill in (("good", 4.0), ("poor", 0.0))
    ]
    table = build_significance_table(
        [compare_files(files, tmp_path / "c.json", options=AllEvaluateOptions(bootstrap=200, iou=0.4))]
    )
    assert set(table["direction"]) == {"phrase"}
    named = table.set_index("metric")
    assert set(named.index) == {
        *("R@1", "R@5", "R@10", "upper bound", "mean IoU"),
        *("R@1 of people", "R@1 of clothing", "R@1 of other"),
    }
    assert (named.loc["R@1", "significant"], named.loc["upper bound", "significant"]) == ("yes", "no")
    assert json.loads((tmp_path / "c.json").read_text())["iou"] == 0.4
    assert "R@1 of clothing" in SignificanceTable("significance").write(table, tmp_path / "t.tex").read_text()


def test_names_of_types_stay_texts(tmp_path: Path, capsys: Printed) -> None:
    run = some_phrases(types=np.array(["=1+1", "a\\input{x}&%", "\x1b[31m", "p"] * 12))
    other = some_phrases(types=run.types, experiment="other", seed=1)
    file = result(tmp_path, run)
    files = [write_phrase_scores(tmp_path / f"{k}.h5", each) for k, each in enumerate((run, other))]
    comparison = compare_files(files, tmp_path / "c.json", options=AllEvaluateOptions(bootstrap=100))
    for name, path in (("summary", file), ("significance", comparison)):
        for out in (["--out", str(tmp_path / f"{name}.csv")], ["--out", str(tmp_path / f"{name}.tex")], []):
            succeeds(table_main, name, path, *out)
        assert "\\input" not in (tmp_path / f"{name}.tex").read_text()
        cells = (tmp_path / f"{name}.csv").read_text().split(",")
        assert not [cell for cell in cells if cell.startswith("=")]
    assert "\x1b" not in capsys.readouterr().out
