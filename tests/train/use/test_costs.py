"""What a run cost, in the files that are made with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import pytest

from tests.eval.evaluating import write_result
from tests.train.conftest import experiment
from vse.eval.files.embeddings import read_embeddings
from vse.eval.options import EvaluationOptions
from vse.eval.tables.ladder import build_ladder
from vse.features.cache.feature_cache import open_cache
from vse.train.options import TrainInputs
from vse.train.training import train
from vse.train.use.embed import embed_split


def cost_in(embeddings: Path) -> dict[str, Any]:
    with h5py.File(embeddings) as file:
        cost: dict[str, Any] = json.loads(file.attrs["provenance"])["cost"]
        return cost


def test_embeddings_say_what_extraction_training_and_embedding_cost(cache: Path, tfidf: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(), out=tmp_path / "run", inputs=TrainInputs(caption_features=tfidf))
    cost = cost_in(embed_split(run, tmp_path / "test.h5"))
    record = json.loads((run / "run.json").read_text())
    assert cost["extraction_s"] == {"tiny": open_cache(cache).seconds, "tfidf": open_cache(tfidf).seconds}
    assert cost["cache_mb"] == {
        "tiny": round(open_cache(cache).n_bytes / 1e6, 3),
        "tfidf": round(open_cache(tfidf).n_bytes / 1e6, 3),
    }
    assert cost["train_s"] == record["train_seconds"]
    assert cost["model_mb"] == round((run / "best.safetensors").stat().st_size / 1e6, 3)
    assert cost["embed_s"] > 0
    assert all(seconds > 0 for seconds in cost["extraction_s"].values())


def test_scores_of_all_pairs_say_it_too_when_they_are_written(positions: Path, tmp_path: Path) -> None:
    """And their file still is what its sum says."""
    run = train(positions, experiment("train.epochs=1", name="scan_t2i_avg"), out=tmp_path / "run")
    scores = embed_split(run, tmp_path / "test.h5")
    assert cost_in(scores)["embed_s"] > 0
    assert read_embeddings(scores).provenance == json.dumps(json.loads(read_embeddings(scores).provenance), sort_keys=True)


def test_a_cache_for_validation_counts_beside_that_for_training(bank: Path, cache: Path, tmp_path: Path) -> None:
    run = train(bank, experiment(), out=tmp_path / "run", inputs=TrainInputs(eval_features=cache))
    cost = cost_in(embed_split(run, tmp_path / "test.h5"))
    assert cost["extraction_s"] == {"bank": open_cache(bank).seconds, "tiny": open_cache(cache).seconds}


def test_a_training_cache_that_is_gone_costs_nobody_knows_what(own_cache: Path, bank: Path, tmp_path: Path) -> None:
    run = train(own_cache, experiment(), out=tmp_path / "run", inputs=TrainInputs(eval_features=bank))
    own_cache.unlink()
    cost = cost_in(embed_split(run, tmp_path / "test.h5"))
    assert cost["extraction_s"] == {"bank": open_cache(bank).seconds, "tiny": None}


def test_a_result_repeats_the_costs_of_every_seed_and_adds_its_own(run: Path, cache: Path, tmp_path: Path) -> None:
    other = train(cache, experiment(), seed=1, out=tmp_path / "other")
    files = [embed_split(each, tmp_path / f"{k}.h5") for k, each in enumerate((run, other))]
    result = write_result(files, tmp_path / "r.json", options=EvaluationOptions(bootstrap=0))
    said = json.loads(result.read_text())["provenance"]
    assert said["costs"] == [cost_in(file) for file in files]
    assert said["evaluation_s"] > 0
    (row,) = build_ladder([result]).to_dict("records")
    assert row["train_s"] == pytest.approx(sum(cost["train_s"] for cost in said["costs"]) / 2)
    assert row["best"] == "yes"
