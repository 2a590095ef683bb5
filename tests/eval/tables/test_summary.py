from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.eval.evaluating import Printed, succeeds
from vse.eval.cli import table_main
from vse.eval.tables.summary import SummaryTable, build_summary
from vse.eval.tables.table import write_csv_table

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
        one = direction({"1k": 10.0, "full": 20.0, "sentence": 30.0, "sentence-1k": 40.0}[name], n_seeds)
        if name.startswith("sentence"):
            found[name] = {"s2s": one, "n_queries": 5 * n_images}
        else:
            found[name] = {"i2t": one, "t2i": one, "rsum": direction(290.0, n_seeds)["r1"]}
    result = {"version": 1, "dataset": "demo", "experiment": path.stem, "split": "test", "n_images": n_images}
    result |= {"n_captions": 5 * n_images, "seeds": list(range(n_seeds)), "protocols": found}
    path.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize(
    ("protocols", "n_images", "rows"),
    [
        ("full", 2000, {"full": (20.0, None)}),
        ("1k full sentence", 2000, {"1k": (10.0, None), "full": (20.0, 30.0)}),
        ("1k full sentence", 1000, {"full": (20.0, 30.0)}),  # one fold is the full split
        ("1k full sentence sentence-1k", 2000, {"1k": (10.0, 40.0), "full": (20.0, 30.0)}),
        ("1k full sentence sentence-1k", 1000, {"full": (20.0, 30.0)}),
        ("full sentence-1k", 2000, {"full": (20.0, None), "sentence-1k": (None, 40.0)}),
        ("sentence", 2000, {"sentence": (None, 30.0)}),
        ("1k sentence", 1000, {"1k": (10.0, None), "sentence": (None, 30.0)}),
    ],
)
def test_sentence_metrics_stand_in_the_row_of_the_same_captions_or_alone(
    protocols: str, n_images: int, rows: dict[str, tuple[float | None, float | None]], tmp_path: Path
) -> None:
    table = build_summary([made(tmp_path / "a.json", protocols.split(), n_images)]).astype(object)
    found = table.where(table.notna(), None)
    if "sentence" not in protocols:
        assert not [column for column in table if column.startswith("s2s")]
        found["s2s_r1"] = None
    else:
        assert list(table.columns[-5:]) == S2S
    assert dict(zip(found["protocol"], zip(found["i2t_r1"], found["s2s_r1"], strict=True), strict=True)) == rows
    for _, row in found.iterrows():
        assert {row[name] is None for name in CROSS} == {row["i2t_r1"] is None}


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


MINE = {"feature": "mine"}
CHANGED = ["feature: fc7 -> mine", "loss.margin: 0.2 -> 0.1"]
DROPOUTS = ["model.a.dropout: 0.5 -> 0", "model.b.dropout: 0.5 -> 0.1"]


@pytest.mark.parametrize(
    ("provenance", "added", "method", "feature", "settings"),
    [
        ({}, "", "VSE++ (1C)", "fc7", ""),
        ({"changed_settings": CHANGED, "config": MINE}, "[margin=0.1]", "VSE++ (1C)", "mine", "; ".join(CHANGED)),
        ({"changed_settings": DROPOUTS}, "[model.a.dropout=0, model.b.dropout=0.1]", "VSE++ (1C)", "fc7", "; ".join(DROPOUTS)),
        ({"config": {"title": "Mine", "caption_feature": "hglmm"}}, "", "Mine", "fc7 + hglmm", ""),
        ({"config": "of another program", "changed_settings": 3}, "", "VSE++ (1C)", "fc7", ""),
    ],
)
def test_a_changed_setting_changes_the_name(
    provenance: dict[str, Any], added: str, method: str, feature: str, settings: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    table = build_summary([trained(Path("results/a.json"), **provenance)])
    assert list(table.columns[7:11]) == ["method", "feature", "run", "settings"]
    (row,) = table.to_dict("records")
    assert (row["experiment"], row["method"]) == (f"vsepp{added}", f"{method}{added}")
    assert (row["feature"], row["settings"], row["run"]) == (feature, settings, "runs/demo_vsepp/seed-0")
    assert f"{method}{added} & " in SummaryTable("summary").write(table, tmp_path / "t.tex").read_text()
    labelled = trained(Path("results/b.json"), changed_settings=CHANGED[1:], config={"label": "ours"})
    (row,) = build_summary([labelled]).to_dict("records")
    assert (row["experiment"], row["method"], row["settings"]) == ("ours", "ours", CHANGED[1])


def test_metrics_of_several_seeds_have_deviations(tmp_path: Path) -> None:
    table = build_summary([made(tmp_path / "a.json", ["full", "sentence"], n_seeds=3)])
    assert {tuple(table[f"{name}_std"]) for name in (*CROSS, *S2S)} == {(0.5,)}
    assert table["s2s_r1"].tolist() == [30.0]
    assert "s2s_n_queries" not in table
    text = SummaryTable("summary").write(table, tmp_path / "t.tex").read_text()
    assert "\\multicolumn{4}{c}{sentence to sentence}" in text
    assert "30.0 $\\pm$ 0.5" in text


def test_cells_without_figures_are_blank(tmp_path: Path) -> None:
    files = [made(tmp_path / f"{k}.json", protocols) for k, protocols in enumerate((["full"], ["sentence"]))]
    lines = write_csv_table(build_summary(files), tmp_path / "t.csv").read_text().splitlines()
    assert lines[1].endswith(",290.0000,,,,,")
    assert lines[2] == "demo,1,test,sentence,2000,10000,1,1" + 15 * "," + "30.0000,50.0000,75.0000,3.0000,9.5000"
    assert pd.read_csv(tmp_path / "t.csv")["protocol"].tolist() == ["full", "sentence"]
    text = SummaryTable("summary").write(build_summary(files), tmp_path / "t.tex").read_text()
    assert " & 290.0 &  &  &  &  \\\\" in text
    assert "nan" not in text.lower()


def test_without_a_file_to_write_the_table_is_printed(tmp_path: Path, capsys: Printed) -> None:
    files = [trained(tmp_path / "a.json"), trained(tmp_path / "b.json", changed_settings=CHANGED)]
    succeeds(table_main, "summary", *files)
    header, rule, first, second, blank, note = capsys.readouterr().out.splitlines()
    assert header.startswith("| method                 | i2t R@1 | i2t R@5 |")
    assert first.startswith("| VSE++ (1C)             |    20.0 |    50.0 |")
    assert second.startswith("| VSE++ (1C)[margin=0.1] |    20.0 |    50.0 |")
    assert len(header) == len(rule) == len(first) == len(second)
    assert (blank, note) == ("", "dataset demo, split test, protocol full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_a_model_on_the_embeddings_of_another_names_its_backbone_for_its_features(tmp_path: Path) -> None:
    path = made(tmp_path / "todnet.json", ["full"])
    result = json.loads(path.read_text())
    result["provenance"] = {"config": {"backbone": "vsepp", "feature": "fc7"}, "features": {"vsepp-0_images": "ab"}}
    path.write_text(json.dumps(result))
    assert build_summary([path])["feature"].tolist() == ["vsepp"]
