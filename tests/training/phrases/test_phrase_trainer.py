from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.conftest import Fails, Patch, assert_same, options, state, table, train_with_stops, weights
from tests.training.phrases.some_regions import LINEAR, SMALL, Caches, make_caches, small, write_phrases
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.dataset.dataset import list_phrase_texts, load_dataset_file
from vse.pipeline.errors import UserError
from vse.training.cli import train_main
from vse.training.options import TrainInputs
from vse.training.phrases.arrays import RegionFeatures
from vse.training.phrases.solvers import PhraseTrainer
from vse.training.run.folder import RunFolder
from vse.training.training import train

OPTIONS: dict[str, tuple[str, list[str]]] = {
    "embedding": ("phrase_embedding", []),
    "embedding, constraints": (
        "phrase_embedding_sampling",
        ["loss.lambda3=0.1", "loss.lambda4=0.1", "solver.candidates=2", "train.features_in_memory=false"],
    ),
    "embedding, one direction, linear": ("phrase_embedding_linear_truth_single", LINEAR),
    "network": ("phrase_network", ["model.similarity.widths=[5]", "solver.coordinates=appended"]),
    "network in bf16": ("phrase_network_truth", ["model.similarity.widths=[]", "train.precision=bf16"]),
    "by image, dropout": ("phrase_embedding", ["train.sampling=by_image", "model.image_encoder.dropout=0.3"]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_stopped_at_random_steps(name: str, caches: Caches, tmp_path: Path) -> None:
    preset, sets = OPTIONS[name]
    config = small(*sets, name=preset)
    train(caches.candidates, config, out=tmp_path / "whole")
    steps = int(state(tmp_path / "whole")["optimizer"]["state"][0]["step"])
    stops = sorted(random.Random(name).sample(range(steps), 2))
    train_with_stops(caches.candidates, config, tmp_path / "cut", stops, of=PhraseTrainer)
    assert_same(state(tmp_path / "whole"), state(tmp_path / "cut"))
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    assert whole.best_weights_file.read_bytes() == cut.best_weights_file.read_bytes()


def test_a_network_learns_where_phrases_are(caches: Caches, tmp_path: Path) -> None:
    fast = ["train.epochs=20", "train.learning_rate=1e-2", "solver.positive_iou=0.5"]
    rows = table(train(caches.candidates, small(*fast), out=tmp_path / "run"))
    assert float(rows[-1]["loss"]) < 0.7 * float(rows[0]["loss"])
    for row in rows:
        three = sum(float(row[f"phrase_r{k}"]) for k in (1, 5, 10))
        assert float(row["rsum"]) == pytest.approx(three)


def test_cca_finds_phrases_at_once_from_the_positive_pairs(caches: Caches, tmp_path: Path) -> None:
    run = train(caches.candidates, small(*LINEAR, name="phrase_cca"), out=tmp_path / "run")
    rows = table(run)
    assert [float(row["regularization"]) for row in rows] == [0.01, 0.03, 0.1, 0.3, 0.5, 1.0]
    assert RunFolder(run).read_record()["best_rsum"] == max(float(row["rsum"]) for row in rows)

    def fitted(positives: str) -> dict[str, Any]:
        config = small(*LINEAR, f"solver.positives={positives}", "solver.positive_iou=0.4", name="phrase_cca")
        return weights(train(caches.candidates, config, out=tmp_path / positives))

    one, more = fitted("truth"), fitted("augmented")
    assert any(not np.allclose(one[name], more[name]) for name in one)


def test_the_record_names_all_three_caches(phrase_run: Path, caches: Caches) -> None:
    record = RunFolder(phrase_run).read_record()
    files = {"features": caches.candidates, "truth_features": caches.truths, "caption_features": caches.phrases}
    for name, file in files.items():
        assert (phrase_run / record[name]["path"]).resolve() == file.resolve()
    assert record["truth_feature_key"] == open_cache(caches.truths).key
    assert record["n_train_pairs"] > 0
    assert record["best_rsum"] == max(float(row["rsum"]) for row in table(phrase_run))


def test_constraints_start_from_the_run_without_them(caches: Caches, tmp_path: Path) -> None:
    base = train(caches.candidates, small(name="phrase_embedding_sampling"), out=tmp_path / "base")
    found = small("train.learning_rate=1e-12", name="phrase_embedding_constraints")
    run = train(caches.candidates, found, out=tmp_path / "run", inputs=TrainInputs(start_from=base))
    before, after = weights(base), weights(run)
    learned = [name for name in before if "linears" in name]
    assert all(np.allclose(before[name], after[name], atol=1e-6) for name in learned)


def test_coordinates_alone_read_no_vector(caches: Caches, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(RegionFeatures, "read_region_vectors", lambda *_: pytest.fail("a vector was read"))
    run = train(caches.candidates, small("solver.coordinates=alone"), out=tmp_path / "run")
    assert weights(run)["image_encoder.linears.0.weight"].shape[1] == 5


REFUSED = {
    "loss.lambda3=0.1": "loss.lambda3 and lambda4 require neighbours in a batch: --set solver.neighbours=true",
    "loss=logistic solver.neighbours=true": "solver.neighbours adds triplets, but the loss logistic",
    "train.validate_fold=5": "train.validate_fold: ",
    "truth_feature=null": r"name their feature \(--set truth_feature=boxes_truth\)",
    "truth_feature=other": "trained on 'other': extract it, or name its cache with --truth-features",
    "caption_feature=null": "solver: phrases reads captions as vectors",
    "solver=gradient": "truth_feature is for training on phrases; the solver gradient",
    "solver=gradient truth_feature=null": "holds .* phrase rows .* features of captions are needed",
    "images.source=pictures": "solver: phrases reads cached regions",
    "model.caption_encoder=gru": "the caption encoder 'gru' reads words, not the vectors",
    "solver.positives=some": "positives",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_does_not_fit_is_one_line(settings: str, caches: Caches, tmp_path: Path, fails: Fails) -> None:
    where = ["--features", caches.candidates, "--experiment", "phrase_embedding", "--out", tmp_path / "run"]
    line = fails(train_main, *where, *options(*SMALL, *settings.split()))
    assert re.search(REFUSED[settings], line), line


def test_ground_truth_regions_of_other_settings_are_one_line(few: Path, tmp_path: Path) -> None:
    caches = make_caches(few, tmp_path, boxes="phrases", shorter=40)
    with pytest.raises(UserError, match=r"truths.h5 and .*candidates.h5 differ in shorter, so the same box has different"):
        train(caches.candidates, small(), out=tmp_path / "run")


def test_a_cache_of_captions_is_one_line(few: Path, tmp_path: Path) -> None:
    caches = make_caches(few, tmp_path)
    dataset = load_dataset_file(few)
    other = write_phrases(tmp_path / "captions.h5", dataset, list_phrase_texts(dataset), of="captions")
    with pytest.raises(UserError, match=r"captions.h5 holds .*; features of phrases are needed"):
        train(caches.candidates, small(), out=tmp_path / "run", inputs=TrainInputs(caption_features=other))
