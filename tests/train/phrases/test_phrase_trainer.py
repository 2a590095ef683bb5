"""Trainings on regions and phrases: what they learn, that they resume to the bit, and what they refuse."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import assert_same, state, table, weights
from tests.train.phrases.some_regions import LINEAR, SMALL, Caches, make_caches, small, write_phrases
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.dataset.dataset import load_dataset_file, phrase_texts
from vse.pipeline.errors import Interrupted, UserError
from vse.train.cli import train_main
from vse.train.experiment import load_experiment
from vse.train.options import TrainInputs
from vse.train.phrases.regions import BoxFeatures
from vse.train.phrases.trainer import PhraseTrainer
from vse.train.run.folder import RunFolder
from vse.train.run.resume import Existing
from vse.train.training import train

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


def train_with_stops(caches: Caches, name: str, sets: list[str], out: Path, stops: list[int]) -> None:
    """Train, with a SIGTERM in each of these steps, counted over all; resume after each."""
    with pytest.MonkeyPatch.context() as patch:
        real, done = PhraseTrainer.step, iter(range(10**6))

        def step(self: PhraseTrainer, *arguments: Any) -> Any:
            if next(done) in stops:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, *arguments)

        patch.setattr(PhraseTrainer, "step", step)
        for _ in stops:
            with suppress(Interrupted):
                train(caches.candidates, small(*sets, name=name), out=out, existing=Existing(resume=True))
    train(caches.candidates, small(*sets, name=name), out=out, existing=Existing(resume=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_stopped_at_random_steps(name: str, caches: Caches, tmp_path: Path) -> None:
    preset, sets = OPTIONS[name]
    train(caches.candidates, small(*sets, name=preset), out=tmp_path / "whole")
    steps = int(state(tmp_path / "whole")["optimizer"]["state"][0]["step"])
    stops = sorted(random.Random(name).sample(range(steps), 2))
    train_with_stops(caches, preset, sets, tmp_path / "cut", stops)
    assert_same(state(tmp_path / "whole"), state(tmp_path / "cut"))
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    assert whole.best_file.read_bytes() == cut.best_file.read_bytes()


@pytest.mark.parametrize(("name", "sets"), [("phrase_embedding", []), ("phrase_network", ["model.similarity.widths=[8]"])])
def test_a_network_learns_where_phrases_are(name: str, sets: list[str], caches: Caches, tmp_path: Path) -> None:
    fast = ["train.epochs=30", "train.learning_rate=1e-2", "solver.positive_iou=0.5"]
    rows = table(train(caches.candidates, small(*fast, *sets, name=name), out=tmp_path / "run"))
    assert float(rows[-1]["loss"]) < 0.7 * float(rows[0]["loss"])
    for row in rows:
        three = sum(float(row[f"phrase_r{k}"]) for k in (1, 5, 10))
        assert float(row["rsum"]) == pytest.approx(three)


def test_cca_finds_phrases_at_once(caches: Caches, tmp_path: Path) -> None:
    """The made-up vectors of regions and of phrases have linear maps onto each other."""
    run = train(caches.candidates, small(*LINEAR, name="phrase_cca"), out=tmp_path / "run")
    rows = table(run)
    assert [float(row["regularization"]) for row in rows] == [0.01, 0.03, 0.1, 0.3, 0.5, 1.0]
    assert RunFolder(run).record()["best_rsum"] == max(float(row["rsum"]) for row in rows)


def test_cca_is_fitted_to_the_positive_pairs(caches: Caches, tmp_path: Path) -> None:
    one, more = (
        weights(
            train(
                caches.candidates,
                small(*LINEAR, f"solver.positives={positives}", "solver.positive_iou=0.4", name="phrase_cca"),
                out=tmp_path / positives,
            )
        )
        for positives in ("truth", "augmented")
    )
    assert any(not np.allclose(one[name], more[name]) for name in one)


def test_the_record_names_all_three_caches(phrase_run: Path, caches: Caches) -> None:
    record = RunFolder(phrase_run).record()
    for name, file in (
        ("features", caches.candidates),
        ("truth_features", caches.truths),
        ("caption_features", caches.phrases),
    ):
        assert (phrase_run / record[name]["path"]).resolve() == file.resolve()
    assert record["truth_feature_key"] == open_cache(caches.truths).key
    assert record["n_train_pairs"] > 0


def test_constraints_start_from_the_run_without_them(caches: Caches, tmp_path: Path) -> None:
    base = train(caches.candidates, small(name="phrase_embedding_sampling"), out=tmp_path / "base")
    found = small("train.learning_rate=1e-12", name="phrase_embedding_constraints")
    run = train(caches.candidates, found, out=tmp_path / "run", inputs=TrainInputs(start_from=base))
    before, after = weights(base), weights(run)
    learned = [name for name in before if "linears" in name]
    assert all(np.allclose(before[name], after[name], atol=1e-6) for name in learned)


def test_coordinates_alone_read_no_vector(caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoxFeatures, "vectors", lambda *_: pytest.fail("a vector was read"))
    run = train(caches.candidates, small("solver.coordinates=alone"), out=tmp_path / "run")
    assert weights(run)["image_encoder.linears.0.weight"].shape[1] == 5


REFUSED = {
    "loss.lambda3=0.1": "loss.lambda3 and lambda4 require neighbours in a batch: --set solver.neighbours=true",
    "loss=logistic solver.neighbours=true": "neighbourhood sampling adds triplets, .* loss logistic",
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
def test_what_does_not_fit_is_one_line(settings: str, caches: Caches, tmp_path: Path, fails: Callable[..., str]) -> None:
    sets = [argument for setting in [*SMALL, *settings.split()] for argument in ("--set", setting)]
    line = fails(
        train_main, "--features", caches.candidates, "--experiment", "phrase_embedding", "--out", tmp_path / "run", *sets
    )
    assert re.search(REFUSED[settings], line), line


def test_a_cache_of_captions_is_one_line(few: Path, tmp_path: Path) -> None:
    caches = make_caches(few, tmp_path)
    dataset = load_dataset_file(few)
    other = write_phrases(tmp_path / "captions.h5", dataset, phrase_texts(dataset), of="captions")
    with pytest.raises(UserError, match=r"captions.h5 holds .*; features of phrases are needed"):
        train(caches.candidates, small(), out=tmp_path / "run", inputs=TrainInputs(caption_features=other))


def test_the_best_epoch_is_that_with_the_highest_recalls(phrase_run: Path) -> None:
    rows = table(phrase_run)
    record = RunFolder(phrase_run).record()
    assert record["best_rsum"] == max(float(row["rsum"]) for row in rows)
    assert load_experiment("phrase_embedding").train.epochs == 8
