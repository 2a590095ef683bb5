from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.training.conftest import (
    COMMAND,
    Fails,
    assert_same,
    done,
    experiment,
    forget_captions,
    state,
    train_with_stops,
    weights,
)
from tests.training.data.caches import drop_checksums
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.shards import shards_folder
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.cnn import CnnExtractor
from vse.pipeline.errors import UserError
from vse.training.cli import embed_main, train_main
from vse.training.options import TrainInputs
from vse.training.run.folder import RunFolder
from vse.training.training import train


def test_missing_or_not_finite_features_are_named(own_cache: Path, own_demo: Path, tmp_path: Path, fails: Fails) -> None:
    text = own_demo.read_text().replace('"imgid": 7,', '"imgid": 7007,')
    own_demo.write_text(text)
    line = fails(train_main, "--features", forget_captions(own_cache), "--captions", own_demo, "--out", tmp_path / "run")
    assert "1 of 48 images have no features, the first is id 7007" in line
    assert not (tmp_path / "run").exists()
    shard = sorted(shards_folder(drop_checksums(own_cache)).glob("*.h5"))[0]
    with h5py.File(shard, "r+") as file:
        file["features"][4, 1] = np.nan
    line = fails(train_main, "--features", own_cache, "--out", tmp_path / "run", *COMMAND)
    assert "the features of id 4 are not finite" in line


@pytest.mark.parametrize("kind", ["positions", "regions"])
def test_sets_for_a_model_of_vectors_are_named(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, fails: Fails
) -> None:
    arguments = ["--features", request.getfixturevalue(kind), "--out", tmp_path / "run"]
    line = fails(train_main, *arguments)
    assert "'cosine' requires one vector per image, but the image encoder 'linear' computes several vectors from" in line
    assert f"the feature '{kind}'" in line
    line = fails(train_main, *arguments, "--set", "model.image_encoder=branch")
    assert f"the image encoder 'branch' reads vectors, not the sets of the feature '{kind}'" in line
    assert not (tmp_path / "run").exists()


def test_restval_is_trained_on_when_asked_for(cache: Path, own_cache: Path, tmp_path: Path, fails: Fails) -> None:
    line = fails(train_main, "--features", cache, "--out", tmp_path / "r", *COMMAND, "--set", "train.restval=true")
    assert "no images in split 'restval', which train.restval requires; --set train.restval=false" in line
    data = own_cache.parent.parent / "data" / "dataset.json"
    data.write_text(data.read_text().replace('"split": "test"', '"split": "restval"'))
    plain = train(own_cache, experiment("train.epochs=1"), out=tmp_path / "plain")
    more = train(own_cache, experiment("train.epochs=1", "train.restval=true"), out=tmp_path / "more")
    assert RunFolder(plain).read_record()["n_train_pairs"] == 240
    assert RunFolder(more).read_record()["n_train_pairs"] == 300


@pytest.fixture(scope="module")
def base(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained head of the demo, to start from."""
    out = tmp_path_factory.mktemp("runs") / "demo_base" / "seed-0"
    return train(cache, experiment("train.learning_rate=0.01", "train.epochs=6", "warmup.epochs=6"), out=out)


FINETUNE = ["images.source=pictures", "images.finetune=true", "train.learning_rate=1e-3"]


def test_fine_tuning_starts_from_a_trained_head(base: Path, cache: Path, tmp_path: Path) -> None:
    of_base, fixed = TrainInputs(start_from=base), experiment(*FINETUNE[:2], "train.epochs=1", "train.learning_rate=1e-12")
    still = train(cache, fixed, out=tmp_path / "still", inputs=of_base)
    best = max(row["rsum"] for row in state(base)["rows"])
    assert state(still)["rows"][0]["rsum"] == pytest.approx(best, abs=4), "nothing moved, and pictures give what was cached"
    run = train(cache, experiment(*FINETUNE, "train.epochs=1"), out=tmp_path / "run", inputs=of_base)
    assert (run / RunFolder(run).read_record()["start_from"]).samefile(base)
    weights = RunFolder(run).read_best_weights()
    moved = {name for name, value in weights.items() if name.startswith("cnn.")}
    first = RunFolder(still).read_best_weights()
    assert moved
    assert all(not torch.equal(weights[name], first[name]) for name in moved if "running" not in name)


def test_training_on_pictures_needs_no_features_of_training_images(demo: Path, cache: Path, tmp_path: Path) -> None:
    config, out = TINY_FEATURE.model_copy(update={"splits": ["val", "test"]}), tmp_path / "demo_some.h5"
    extract_shards(demo, CnnExtractor(config), out, 1)
    some = merge_feature(demo, out, 1)
    settings = experiment(*FINETUNE, "train.epochs=1")
    runs = [train(features, settings, out=tmp_path / features.stem) for features in (cache, some)]
    assert state(runs[0])["rows"][0]["rsum"] == state(runs[1])["rows"][0]["rsum"]
    for run in runs:
        done(embed_main, run, "--as-features", run / "features")
    for side in ("images", "captions"):
        first, second = (open_cache(run / f"features_{side}.h5") for run in runs)
        np.testing.assert_array_equal(*(FeatureReader(one).read_rows(np.arange(66)) for one in (first, second)))
    with pytest.raises(UserError, match="48 of 48 images have no features"):
        train(some, experiment("train.epochs=1"), out=tmp_path / "cached")


def test_a_run_starts_from_a_run_that_fits(base: Path, cache: Path, tmp_path: Path, fails: Fails) -> None:
    arguments = ["--features", cache, "--out", tmp_path / "runs" / "demo_x" / "seed-0", *COMMAND]
    assert "no trained run to start from" in fails(train_main, *arguments, "--set", "start_from=vsepp_rc")
    line = fails(train_main, *arguments, "--start-from", base, "--set", "model.dim=8")
    assert "weights of another model" in line
    assert "finetune needs source: pictures" in fails(train_main, *arguments, "--set", "images.finetune=true")
    arguments = ["--features", cache, "--out", tmp_path / "run", "--start-from", base, *COMMAND]
    line = fails(train_main, *arguments, "--set", "start_from=vsepp", "--set", "freeze=true")
    assert "freeze: no part of the model is left to train" in line
    line = fails(train_main, *arguments, "--set", "start_from=vsepp", "--set", "start_parts=[encoder]")
    assert "start_parts: 'encoder' is not one of image_encoder, caption_encoder, similarity, cnn" in line
    assert "start_parts and freeze require start_from" in fails(train_main, *arguments, "--set", "start_parts=[image_encoder]")
    assert not (tmp_path / "run").exists()


FROZEN = ["start_parts=[image_encoder]", "freeze=true", "train.epochs=2", "train.weight_decay=0.01"]


def test_parts_of_a_run_are_taken_and_frozen_and_the_rest_moves(base: Path, cache: Path, tmp_path: Path) -> None:
    of_base = TrainInputs(start_from=base)
    frozen = train(cache, experiment(*FROZEN, "start_from=vsepp"), out=tmp_path / "frozen", inputs=of_base)
    before, after = weights(base), weights(frozen)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == name.startswith("image_encoder."), name
    fixed = experiment(*FROZEN[:3], "freeze=false", "start_from=vsepp", "train.learning_rate=1e-12")
    still = train(cache, fixed, out=tmp_path / "still", inputs=of_base)
    fresh = train(cache, experiment("train.epochs=2", "train.learning_rate=1e-12"), out=tmp_path / "fresh")
    for name, weight in weights(still).items():
        source = before if name.startswith("image_encoder.") else weights(fresh)
        torch.testing.assert_close(weight, source[name], msg=f"{name} starts as it should")
    moved = train(cache, experiment("start_parts=[image_encoder]", "start_from=vsepp"), out=tmp_path / "moved", inputs=of_base)
    assert not torch.equal(weights(moved)["image_encoder.linear.weight"], before["image_encoder.linear.weight"])


def test_a_frozen_run_keeps_its_statistics_and_is_resumed_bit_for_bit(cache: Path, tmp_path: Path, base: Path) -> None:
    branch = "model.image_encoder={name: branch, widths: [12, 16]}"
    start = train(cache, experiment(branch, "train.epochs=1"), out=tmp_path / "start")
    config = experiment(*FROZEN, branch, "start_from=vsepp")
    run = train(cache, config, out=tmp_path / "run", inputs=TrainInputs(start_from=start))
    assert "image_encoder.batch_norm.running_mean" in weights(run)
    for name, weight in weights(run).items():
        assert torch.equal(weight, weights(start)[name]) == name.startswith("image_encoder."), name
    config, inputs = experiment(*FROZEN, "start_from=vsepp"), TrainInputs(start_from=base)
    whole = train(cache, config, out=tmp_path / "whole", inputs=inputs)
    assert_same(state(whole), state(train_with_stops(cache, config, tmp_path / "cut", [11], inputs=inputs)))
