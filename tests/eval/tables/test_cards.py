"""Cards state what a run read and how it was trained; a comparison lists what differs between its models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from tests.eval.evaluating import Printed, result_of, succeeds
from tests.eval.protocols.test_evaluate import made
from vse.eval.cli import eval_main, table_main
from vse.eval.files.cards import build_training_card, list_differing_facts
from vse.eval.files.embeddings import write_embeddings

PROVENANCE: dict[str, Any] = {
    "features": {"effnet": "0123456789abcdef"},
    "config": {"name": "vsepp", "train": {"epochs": 12, "validate_images": None, "workers": 2}, "loss": {"margin": 0.2}},
    "best_epoch": 9,
    "training": {"processor": "Test 9000", "precision": "fp32"},
    "cost": {"train_s": 61.5},
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**PROVENANCE, **changes}


def facts(a: dict[str, Any], b: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {(fact.name, fact.a, fact.b) for fact in list_differing_facts(a, b)}


def test_every_setting_feature_and_processor_that_differs_is_listed() -> None:
    config = {**PROVENANCE["config"], "name": "vse0", "train": {"epochs": 6}, "loss": {"margin": 0.1, "k": 3}}
    other = changed(config=config, features={"effnet": "f" * 64}, training={"processor": "Test 1", "precision": "fp32"})
    assert facts(PROVENANCE, other) == {
        ("train.epochs", "12", "6"),
        ("train.validate_images", "unknown", "-"),
        ("train.workers", "2", "-"),
        ("loss.margin", "0.2", "0.1"),
        ("loss.k", "-", "3"),
        ("features.effnet", "01234567", "ffffffff"),
        ("processor", "Test 9000", "Test 1"),
    }
    assert facts(PROVENANCE, PROVENANCE) == set()


def test_names_and_settings_of_speed_do_not_count() -> None:
    quick = {**PROVENANCE["config"]["train"], "memory_gb": 3, "save_minutes": 1}
    assert facts(PROVENANCE, changed(config={**PROVENANCE["config"], "name": "x", "seeds": [1], "train": quick})) == set()


def test_vectors_of_another_program_have_unknown_settings() -> None:
    assert facts({}, {}) == set()
    assert ("settings", "unknown", "-") in facts({}, PROVENANCE)


def test_the_table_and_the_comparison_name_the_facts(tmp_path: Path, monkeypatch: Any, capsys: Printed) -> None:
    monkeypatch.chdir(tmp_path)
    longer = changed(config={**PROVENANCE["config"], "train": {**PROVENANCE["config"]["train"], "epochs": 30}})
    for name, said in (("a", PROVENANCE), ("b", longer)):
        write_embeddings(Path(f"{name}.h5"), made(60, provenance=json.dumps(said), experiment=name))
        result_of([Path(f"{name}.h5")])
    succeeds(table_main, "cards", "a.json", "b.json", "--out", "cards.csv")
    cards = pd.read_csv("cards.csv")
    assert cards["epochs"].tolist() == ["12; the best is 9", "30; the best is 9"]
    assert build_training_card({**PROVENANCE, "training": {"epochs": None}})["epochs"] == "closed form"
    assert cards["processor"].tolist() == ["Test 9000"] * 2
    assert cards["features"].tolist() == ["effnet 01234567"] * 2
    succeeds(eval_main, "--compare", "a.h5", "b.h5", "--bootstrap", "100", "--out", "c.json")
    assert "a - b differ in: train.epochs: 12 | 30" in capsys.readouterr().err.splitlines()
    succeeds(table_main, "significance", "c.json", "--out", "c.csv")
    table = pd.read_csv("c.csv")
    assert set(table["differing"]) == {"train.epochs: 12 | 30"}
    assert set(table["comparison"]) == {"c"}
    assert set(table["a_files"]) == {"a.h5"}
