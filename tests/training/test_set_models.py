from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.eval.slow_ranks import slow_ranks
from tests.training.adversaries.conftest import SCAN
from tests.training.conftest import assert_same, experiment, losses, state, train_with_stops, weights, write_regions
from tests.training.models.similarities.test_scan import slow_score
from vse.eval.files.embeddings import read_embeddings
from vse.features.cache.feature_cache import open_cache
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.cnn import CnnExtractor
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.demo import create_demo
from vse.training.models.similarities.scan import ScanSettings
from vse.training.options import TrainInputs
from vse.training.run.folder import RunFolder
from vse.training.solvers.encode import encode_split
from vse.training.training import train
from vse.training.use.embed import embed_split
from vse.training.use.model import load_run
from vse.training.use.search import RunSearchOptions, search_run

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
    return merge_feature(demo, out, 1)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dataset.json`` of a demo of 33 images, 24 of them train, for what is slow. Read only."""
    return create_demo(tmp_path_factory.mktemp("half") / "data", n_images=33)


@pytest.fixture(scope="module")
def small(half: Path) -> Path:
    """3 x 3 positions. Read only."""
    return a_map(half, "map", 64)


@pytest.fixture(scope="module")
def large(half: Path) -> Path:
    """5 x 5 positions. Read only."""
    return a_map(half, "large_map", 96)


def test_it_trains_on_maps_and_is_validated_on_larger_ones(small: Path, large: Path, half: Path, tmp_path: Path) -> None:
    assert [open_cache(cache).row_shape for cache in (small, large)] == [(9, 512), (25, 512)]
    run = train(small, experiment(*MODEL), out=tmp_path / "run", inputs=TrainInputs(eval_features=large))
    assert state(run)["rows"][-1]["loss"] < state(run)["rows"][0]["loss"]
    assert load_run(run, "test").image_cache.path.samefile(large)
    dataset = load_dataset_file(half)
    (first, *_) = search_run(run, dataset.image_path(dataset.split("test")[3]), RunSearchOptions(k=5))
    assert first.image_id is not None
    assert len(search_run(run, "a red circle", RunSearchOptions(k=3))) == 3


def test_photos_through_the_frozen_cnn_are_read_as_maps(small: Path, tmp_path: Path) -> None:
    run = train(small, experiment(*MODEL, "images.source=pictures", "train.epochs=1"), out=tmp_path / "run")
    assert not any(name.startswith("cnn.") for name in weights(run))


@pytest.mark.nightly
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
        assert written["images"].shape == (6, 16)


@pytest.mark.slow
def test_a_trained_cnn_is_validated_on_the_evaluation_feature(small: Path, large: Path, tmp_path: Path) -> None:
    config = experiment(*MODEL, *TRAINED_CNN, "train.epochs=1", "train.batch_size=120")
    run = train(small, config, out=tmp_path / "run", inputs=TrainInputs(eval_features=large))
    written = read_embeddings(embed_split(run, tmp_path / "val.h5", "val"))
    scores = torch.as_tensor(written.images) @ torch.as_tensor(written.captions).T
    found = scores.argmax(0) == torch.as_tensor(written.image_of_caption())
    assert state(run)["rows"][-1]["t2i_r1"] == pytest.approx(100 * found.float().mean().item())


@pytest.mark.nightly
@pytest.mark.slow
def test_a_training_with_its_cnn_is_resumed_bit_for_bit(small: Path, large: Path, tmp_path: Path) -> None:
    waits = ["train.frozen={cnn: 1, caption_encoder: 1}", "train.learning_rates={cnn: 1e-3}", "train.epochs=2"]
    config = experiment(*MODEL, *TRAINED_CNN, *waits)
    inputs = TrainInputs(eval_features=large)
    whole = train(small, config, out=tmp_path / "whole", inputs=inputs)
    cut = train_with_stops(small, config, tmp_path / "cut", [2, 6], inputs=inputs)
    assert_same(state(whole), state(cut))
    assert_same(weights(whole), weights(cut))


T2I = ["model.similarity={name: scan, aggregation: lse}", SCAN[1]]


@pytest.fixture(scope="module")
def some_empty(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Regions of the demo, of which every fifth image has none. Read only."""
    numbers = np.arange(len(load_dataset_file(demo).images))
    counts = np.where(numbers % 5 == 0, 0, 1 + numbers % 4)
    features = np.random.default_rng(0).normal(size=(int(counts.sum()), 16))
    return write_regions(demo, tmp_path_factory.mktemp("empty") / "features.h5", counts, features)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sets", [T2I, SCAN], ids=["t2i", "i2t"])
@pytest.mark.parametrize("features", ["positions", "some_empty"])
def test_files_have_scores_of_each_pair(
    features: str, sets: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run = train(request.getfixturevalue(features), experiment(*sets, "train.epochs=1"), out=tmp_path / "run")
    found = load_run(run, "val", device="cpu")
    settings = found.experiment.model.similarity
    assert isinstance(settings, ScanSettings)
    images, captions = encode_split(found.model, found.split, found.device)
    regions, words = (
        [side.unpack(torch.tensor([row]))[0][0].double() for row in range(len(side))] for side in (images, captions)
    )
    slow = np.asarray([[slow_score(image, caption, settings).item() for caption in words] for image in regions])
    with h5py.File(embed_split(run, tmp_path / "val.h5", "val")) as file:
        np.testing.assert_allclose(file["scores"], slow, atol=2e-6)
    i2t, t2i = slow_ranks(slow.round(6), found.split.pairs.image_indices.tolist())
    rsum = sum(100 * np.mean(np.asarray(ranks) < k) for ranks in (i2t, t2i) for k in (1, 5, 10))
    assert RunFolder(run).read_record()["best_rsum"] == pytest.approx(rsum, abs=2)


WORDS = "{name: gru, states: pooled, bidirectional: true, size_augmentation: 0.2}"
TOKENS = "{name: bert, model: tiny, pooling: gpo, size_augmentation: 0.2}"
TRAINED = ["train.optimizer=adamw", "train.weight_decay=1e-4", "train.undecayed=[]", "warmup.epochs=1", "train.epochs=2"]


def of_captions(captions: str) -> list[str]:
    return ["model.image_encoder=gpo", f"model.caption_encoder={captions}", *TRAINED]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("captions", "features"), [(WORDS, "regions"), (TOKENS, "positions")], ids=["words, regions", "tokens, positions"]
)
def test_a_resume_ends_with_the_same_bits(
    captions: str, features: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cache = request.getfixturevalue(features)
    config = experiment(*of_captions(captions), "train.batch_size=80")
    train(cache, config, out=tmp_path / "whole")
    train_with_stops(cache, config, tmp_path / "cut", [1, 4])
    assert_same(state(tmp_path / "whole"), state(tmp_path / "cut"))


@pytest.mark.slow
def test_it_learns_and_its_embeddings_are_unit_vectors_that_do_not_change(regions: Path, tmp_path: Path) -> None:
    longer = ["train.epochs=4", "train.decay_after=4", "train.learning_rate=2e-2", "loss.name=sum"]
    run = train(regions, experiment(*of_captions(WORDS), *longer), out=tmp_path / "run")
    assert losses(run)[-1] < 0.7 * losses(run)[0]
    first, again = (read_embeddings(embed_split(run, tmp_path / f"{k}.h5", device="cpu")).vectors for k in range(2))
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one, other)
        np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, rtol=1e-3)
