from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.eval.evaluating import succeeds
from vse.eval.cli import table_main
from vse.eval.tables.summary import SummaryTable, build_summary
from vse.eval.tables.table import write_table

NAMES = ("r1", "r5", "r10", "medr", "meanr")
S2S = [f"s2s_{name}" for name in NAMES]
CROSS = [*(f"{direction}_{name}" for direction in ("i2t", "t2i") for name in NAMES), "rsum"]


def direction(first: float, n_seeds: int) -> dict[str, Any]:
    figures = dict(zip(NAMES, (first, 50.0, 75.0, 3.0, 9.5), strict=True))
    return dict(figures) if n_seeds == 1 else {name: {"mean": figure, "std": 0.5} for name, figure in figures.items()}


def made(path: Path, protocols: list[str], n_images: int = 2000, n_seeds: int = 1) -> Path:
    """A result file: R@1 is 10 in the protocol 1k, 20 in full, and 30 of captions that query captions."""
    found: dict[str, Any] = {}
    for name in protocols:
        if name.startswith("sentence"):
            r1 = {"sentence": 30.0, "sentence-1k": 40.0}[name]
            found[name] = {"s2s": direction(r1, n_seeds), "n_queries": 5 * n_images}
        else:
            r1 = {"1k": 10.0, "full": 20.0}[name]
            found[name] = {
                "i2t": direction(r1, n_seeds),
                "t2i": direction(r1, n_seeds),
                "rsum": direction(290.0, n_seeds)["r1"],
            }
    result = {"version": 1, "dataset": "demo", "experiment": path.stem, "split": "test", "n_images": n_images}
    result |= {"n_captions": 5 * n_images, "seeds": list(range(n_seeds)), "protocols": found}
    path.write_text(json.dumps(result))
    return path


def test_sentence_figures_stand_in_the_row_of_the_full_split(tmp_path: Path) -> None:
    table = build_summary([made(tmp_path / "a.json", ["1k", "full", "sentence"])])
    assert list(table["protocol"]) == ["1k", "full"]
    assert list(table.columns[-11:]) == [*CROSS[-6:], *S2S]
    assert table[S2S].loc[0].isna().all()
    assert table[S2S].loc[1].tolist() == [30.0, 50.0, 75.0, 3.0, 9.5]
    assert table["i2t_r1"].tolist() == [10.0, 20.0]


def test_sentence_metrics_of_folds_stand_in_the_row_of_the_folds(tmp_path: Path) -> None:
    table = build_summary([made(tmp_path / "a.json", ["1k", "full", "sentence", "sentence-1k"])])
    assert list(table["protocol"]) == ["1k", "full"]
    assert table["s2s_r1"].tolist() == [40.0, 30.0]
    alone = build_summary([made(tmp_path / "b.json", ["full", "sentence-1k"])])
    assert list(alone["protocol"]) == ["full", "sentence-1k"]
    one_fold = build_summary([made(tmp_path / "c.json", ["1k", "full", "sentence", "sentence-1k"], n_images=1000)])
    assert (list(one_fold["protocol"]), one_fold["s2s_r1"].tolist()) == (["full"], [30.0])


def trained(path: Path, **provenance: Any) -> Path:
    """A result of a run of ``vsepp``, in a folder of results, whose embeddings lie in the folder of the run."""
    result = json.loads(made(path, ["full"]).read_text()) | {"experiment": "vsepp"}
    config = provenance.pop("config", {})
    if isinstance(config, dict):
        config = {"feature": "fc7", "caption_feature": None, "rows": [], **config}
    embeddings = [{"file": "../runs/demo_vsepp/seed-0/test.h5", "sha256": ""}]
    result["provenance"] = {"config": config, "features": {"fc7": "key"}, "embeddings": embeddings, **provenance}
    path.write_text(json.dumps(result))
    return path


CHANGED = ["feature: fc7 -> mine", "loss.margin: 0.2 -> 0.1"]


@pytest.mark.parametrize(
    ("provenance", "experiment", "method", "feature", "settings"),
    [
        ({}, "vsepp", "VSE++ (1C)", "fc7", ""),
        (
            {"changed_settings": CHANGED, "config": {"feature": "mine"}},
            "vsepp[margin=0.1]",
            "VSE++ (1C)[margin=0.1]",
            "mine",
            "; ".join(CHANGED),
        ),
        (
            {"changed_settings": ["model.a.dropout: 0.5 -> 0", "model.b.dropout: 0.5 -> 0.1"]},
            "vsepp[model.a.dropout=0, model.b.dropout=0.1]",
            "VSE++ (1C)[model.a.dropout=0, model.b.dropout=0.1]",
            "fc7",
            "model.a.dropout: 0.5 -> 0; model.b.dropout: 0.5 -> 0.1",
        ),
        ({"changed_settings": CHANGED[1:], "config": {"label": "ours"}}, "ours", "ours", "fc7", CHANGED[1]),
        ({"config": {"title": "Mine", "caption_feature": "hglmm"}}, "vsepp", "Mine", "fc7 + hglmm", ""),
        ({"config": "of another program", "changed_settings": 3}, "vsepp", "VSE++ (1C)", "fc7", ""),
    ],
)
def test_a_changed_setting_changes_the_name(
    provenance: dict[str, Any], experiment: str, method: str, feature: str, settings: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    path = trained(Path("results/a.json"), **provenance)
    table = build_summary([path])
    assert list(table.columns[7:11]) == ["method", "feature", "run", "settings"]
    (row,) = table.to_dict("records")
    assert (row["experiment"], row["method"], row["feature"], row["settings"]) == (experiment, method, feature, settings)
    assert row["run"] == "runs/demo_vsepp/seed-0"
    assert f"{method.replace('_', chr(92) + '_')} & " in SummaryTable("summary").write(table, tmp_path / "t.tex").read_text()


def test_two_runs_of_one_experiment_are_told_apart(tmp_path: Path) -> None:
    files = [trained(tmp_path / "a.json"), trained(tmp_path / "b.json", changed_settings=CHANGED)]
    assert list(build_summary(files)["experiment"]) == ["vsepp", "vsepp[margin=0.1]"]
    text = SummaryTable("summary").write(build_summary(files), tmp_path / "t.tex").read_text()
    assert "method & R@1" in text
    assert "VSE++ (1C)[margin=0.1] & 20.0" in text


def test_there_are_sentence_columns_only_if_a_result_has_the_protocol(tmp_path: Path) -> None:
    without, having = made(tmp_path / "a.json", ["full"]), made(tmp_path / "b.json", ["full", "sentence"])
    assert not [column for column in build_summary([without]) if column.startswith("s2s")]
    table = build_summary([without, having])
    assert list(table.columns[-6:]) == ["rsum", *S2S]
    assert table[S2S].loc[0].isna().all()
    assert table["s2s_r1"][1] == 30.0


def test_without_the_full_split_sentence_figures_have_a_row_of_their_own(tmp_path: Path) -> None:
    table = build_summary([made(tmp_path / "a.json", ["sentence"])])
    assert list(table["protocol"]) == ["sentence"]
    assert list(table.columns[-16:]) == [*CROSS, *S2S]
    assert table[CROSS].loc[0].isna().all()
    assert table[S2S].loc[0].tolist() == [30.0, 50.0, 75.0, 3.0, 9.5]
    both = build_summary([made(tmp_path / "b.json", ["1k", "sentence"], n_images=1000)])
    assert list(both["protocol"]) == ["1k", "sentence"]
    assert both["i2t_r1"].isna().tolist() == both["rsum"].isna().tolist() == [False, True]
    assert both["s2s_r1"].isna().tolist() == [True, False]


def test_a_test_set_of_one_fold_has_one_row_with_sentence_figures(tmp_path: Path) -> None:
    table = build_summary([made(tmp_path / "a.json", ["1k", "full", "sentence"], n_images=1000)])
    assert list(table["protocol"]) == ["full"]
    assert table["s2s_r1"].tolist() == [30.0]


def test_sentence_figures_of_several_seeds_have_deviations(tmp_path: Path) -> None:
    table = build_summary([made(tmp_path / "a.json", ["full", "sentence"], n_seeds=3)])
    for name in (*CROSS, *S2S):
        assert table[f"{name}_std"].tolist() == [0.5]
    assert table["s2s_r1"].tolist() == [30.0]
    assert "s2s_n_queries" not in table


def test_cells_without_figures_are_blank(tmp_path: Path) -> None:
    files = [made(tmp_path / f"{k}.json", protocols) for k, protocols in enumerate((["full"], ["sentence"]))]
    lines = write_table(build_summary(files), tmp_path / "t.csv").read_text().splitlines()
    assert lines[1].endswith(",290.00,,,,,")
    assert lines[2] == "demo,1,test,sentence,2000,10000,1,1" + 15 * "," + "30.00,50.00,75.00,3.00,9.50"
    assert pd.read_csv(tmp_path / "t.csv")["protocol"].tolist() == ["full", "sentence"]
    text = SummaryTable("summary").write(build_summary(files), tmp_path / "t.tex").read_text()
    assert "\\multicolumn{4}{c}{sentence to sentence}" in text
    assert " & 290.0 &  &  &  &  \\\\" in text
    assert "nan" not in text.lower()


def test_without_a_file_to_write_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [trained(tmp_path / "a.json"), trained(tmp_path / "b.json", changed_settings=CHANGED)]
    succeeds(table_main, "summary", *files)
    header, rule, first, second, blank, note = capsys.readouterr().out.splitlines()
    assert header.startswith("| method                 | i2t R@1 | i2t R@5 |")
    assert rule.startswith("| ---------------------- | ------: |")
    assert first.startswith("| VSE++ (1C)             |    20.0 |    50.0 |")
    assert second.startswith("| VSE++ (1C)[margin=0.1] |    20.0 |    50.0 |")
    assert len(header) == len(rule) == len(first) == len(second)
    assert (blank, note) == ("", "dataset demo, split test, protocol full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_the_command_writes_sentence_columns(tmp_path: Path) -> None:
    result = made(tmp_path / "a.json", ["full", "sentence"], n_seeds=2)
    succeeds(table_main, "summary", result, "--out", tmp_path / "t.tex")
    text = (tmp_path / "t.tex").read_text()
    assert "\\multicolumn{4}{c}{sentence to sentence}" in text
    assert "30.0 $\\pm$ 0.5" in text


def test_a_model_on_the_embeddings_of_another_names_its_backbone_for_its_features(tmp_path: Path) -> None:
    path = made(tmp_path / "todnet.json", ["full"])
    result = json.loads(path.read_text())
    result["provenance"] = {"config": {"backbone": "vsepp", "feature": "fc7"}, "features": {"vsepp-0_images": "ab"}}
    path.write_text(json.dumps(result))
    assert build_summary([path])["feature"].tolist() == ["vsepp"]
