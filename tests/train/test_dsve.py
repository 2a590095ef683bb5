"""DSVE-loc from end to end: WELDON pooling of cached maps or of a CNN that is trained, and SRUs for words."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import h5py
import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.train.conftest import assert_same, experiment, state, weights
from vse.eval.files.embeddings import read_embeddings
from vse.features.cache.feature_cache import open_cache
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.cnn import CnnExtractor
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import Interrupted
from vse.train.options import TrainInputs
from vse.train.run.resume import Existing
from vse.train.solvers import adam
from vse.train.training import train
from vse.train.use.embed import embed_split
from vse.train.use.model import load_run
from vse.train.use.search import search_split

MODEL = [
    "model.image_encoder={name: weldon, channels: 10, k_max: 3, k_min: 2}",
    "model.caption_encoder={name: sru, layers: 2}",
    "loss.mirrored_positive=true",
]
TRAINED_CNN = ["images.source=pictures", "images.finetune=true", "images.random_crop=resized", "images.workers=0"]


def a_map(demo: Path, name: str, side: int) -> Path:
    """A cache of all positions of a layer, of images of ``side`` pixels."""
    out = demo.parent.parent / "features" / f"demo_{name}.h5"
    changes = {"name": name, "positions": True, "grid": "all", "layer": "features.12", "resize": side, "crop": side}
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update={**changes, "normalize": False})), out, 1)
    return merge(demo, out, 1)


@pytest.fixture(scope="session")
def small(demo: Path) -> Path:
    """3 x 3 positions. Read only."""
    return a_map(demo, "map", 64)


@pytest.fixture(scope="session")
def large(demo: Path) -> Path:
    """5 x 5 positions. Read only."""
    return a_map(demo, "large_map", 96)


def test_a_map_keeps_its_own_resolution(small: Path, large: Path) -> None:
    assert open_cache(small).row_shape == (9, 512)
    assert open_cache(large).row_shape == (25, 512)


def test_it_trains_and_searches_on_cached_maps_and_is_validated_on_larger_ones(
    small: Path, large: Path, demo: Path, tmp_path: Path
) -> None:
    run = train(small, experiment(*MODEL), out=tmp_path / "run", inputs=TrainInputs(eval_features=large))
    assert state(run)["rows"][-1]["loss"] < state(run)["rows"][0]["loss"]
    assert load_run(run, "test").cache.path.samefile(large)
    dataset = load_dataset_file(demo)
    (first, *_) = search_split(run, dataset.image_path(dataset.split("test")[3]), 5)
    assert first.image_id is not None
    assert len(search_split(run, "a red circle", 3)) == 3


def test_photos_through_the_frozen_cnn_are_read_as_maps(small: Path, tmp_path: Path) -> None:
    run = train(small, experiment(*MODEL, "images.source=pictures", "train.epochs=1"), out=tmp_path / "run")
    assert not any(name.startswith("cnn.") for name in weights(run))


@pytest.mark.slow
def test_the_cnn_is_trained_through_the_pooling_once_its_epochs_come(small: Path, large: Path, tmp_path: Path) -> None:
    waits = "train.frozen={cnn: 1, cnn.network.model.features.0: always}"
    config = experiment(*MODEL, *TRAINED_CNN, waits, "train.learning_rate=1e-3", "train.epochs=2")
    inputs = TrainInputs(eval_features=large)
    one = train(small, config.model_copy(update={"train": config.train.model_copy(update={"epochs": 1})}), out=tmp_path / "1")
    two = train(small, config, out=tmp_path / "2", inputs=inputs)
    fresh = CnnExtractor(TINY_FEATURE).network.state_dict()
    moved = set()
    for name, weight in state(two)["model"].items():
        if name.startswith("cnn."):
            assert torch.equal(state(one)["model"][name], fresh[name.removeprefix("cnn.network.")]), name
            if not torch.equal(weight, state(one)["model"][name]):
                moved.add(name.removeprefix("cnn.network.model.").rpartition(".")[0])
    assert "features.0" not in moved
    assert "features.3.squeeze" in moved
    with h5py.File(embed_split(two, tmp_path / "test.h5")) as written:
        assert written["images"].shape == (12, 16)


@pytest.mark.slow
def test_validation_of_a_trained_cnn_is_on_the_photos_of_the_evaluation_feature(
    small: Path, large: Path, tmp_path: Path
) -> None:
    """As what is embedded later: the last epoch's validation is what an evaluation of its embeddings finds."""
    config = experiment(*MODEL, *TRAINED_CNN, "train.epochs=1", "train.batch_size=240")
    run = train(small, config, out=tmp_path / "run", inputs=TrainInputs(eval_features=large))
    written = read_embeddings(embed_split(run, tmp_path / "val.h5", "val"))
    scores = torch.as_tensor(written.images) @ torch.as_tensor(written.captions).T
    found = scores.argmax(0) == torch.as_tensor(written.image_of_caption())
    assert state(run)["rows"][-1]["t2i_r1"] == pytest.approx(100 * found.float().mean().item())


@pytest.mark.slow
def test_a_training_with_its_cnn_is_resumed_bit_for_bit(
    small: Path, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = experiment(*MODEL, *TRAINED_CNN, "train.frozen={cnn: 1, caption_encoder: 1}", "train.learning_rates={cnn: 1e-3}")
    inputs = TrainInputs(eval_features=large)
    whole = train(small, config, out=tmp_path / "whole", inputs=inputs)
    with monkeypatch.context() as patch:
        real, steps = adam.Trainer.step, iter(range(99))

        def step(self: adam.Trainer, *arguments: object) -> object:
            if next(steps) in (5, 13):
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, *arguments)  # type: ignore[arg-type]

        patch.setattr(adam.Trainer, "step", step)
        for _ in range(2):
            with pytest.raises(Interrupted):
                train(small, config, out=tmp_path / "cut", inputs=inputs, existing=Existing(resume=True))
    cut = train(small, config, out=tmp_path / "cut", inputs=inputs, existing=Existing(resume=True))
    assert_same(state(whole), state(cut))
    assert_same(weights(whole), weights(cut))
