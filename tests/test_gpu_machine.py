"""What a real GPU computes is what the processor does, to rounding. Only ``pytest -m gpu`` runs and sees one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.training.conftest import experiment, table, weights
from vse.eval.search.gpu import choose_faiss_device
from vse.eval.search.top_k import search_exactly
from vse.features.cache.rows import list_extractor_inputs
from vse.features.extractors.boxes import BoxesExtractor
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings.images import BoxesConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.options import TrainOptions
from vse.training.run.folder import RunFolder
from vse.training.training import train
from vse.training.use.embed import embed_split

pytestmark = pytest.mark.gpu
GPU = "cuda"


def test_features_are_those_of_the_processor(few: Path) -> None:
    items = list_extractor_inputs(load_dataset_file(few), "image")
    config = TINY_FEATURE.model_copy(update={"dtype": "float32"})
    on_gpu, on_cpu = (CnnExtractor(config, device=device).extract(items) for device in (GPU, "cpu"))
    np.testing.assert_allclose(on_gpu.features, on_cpu.features, rtol=1e-3, atol=1e-4)


def test_proposed_boxes_have_vectors(few: Path) -> None:
    config = BoxesConfig(
        name="tiny", model="squeezenet1_1", weights="random", map="features.1", layer="features.2", pool=8, grid=2, shorter=32,
        longer=48, dtype="float32", n_boxes=6, boxes="rpn", proposer_weights="random",
    )  # fmt: skip
    on_gpu, on_cpu = (BoxesExtractor(config, device=device) for device in (GPU, "cpu"))
    assert on_gpu.extra_hashes == on_cpu.extra_hashes
    rows = on_gpu.extract(list_extractor_inputs(load_dataset_file(few), "image"))
    assert rows.boxes is not None
    assert len(rows.boxes) == len(rows.features) > 0


def test_a_training_learns_the_same(cache: Path, tmp_path: Path) -> None:
    losses = []
    for name, device in (("gpu", GPU), ("cpu", "cpu")):
        run = train(cache, experiment(), out=tmp_path / name, options=TrainOptions(device=device))
        losses.append([float(row["loss"]) for row in table(run)])
        embed_split(run, run / "test.h5", device=device)
        assert RunFolder(run).read_record()["device"].startswith(device)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_deterministic_trainings_have_the_same_bits(cache: Path, tmp_path: Path) -> None:
    one, two = (
        weights(train(cache, experiment("train.deterministic=true"), out=tmp_path / name, options=TrainOptions(device=GPU)))
        for name in ("one", "two")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_bf16_trains(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment("train.precision=bf16"), out=tmp_path / "run", options=TrainOptions(device=GPU))
    assert np.isfinite([float(row["loss"]) for row in table(run)]).all()


def test_negatives_from_the_whole_training_set_are_sampled_on_a_gpu(cache: Path, tmp_path: Path) -> None:
    sets = ["adversary={name: ace, samples: 2, baseline: self_critical, entropy_weight: 0.1}", "train.epochs=1"]
    run = train(cache, experiment(*sets), out=tmp_path / "run", options=TrainOptions(device=GPU))
    assert np.isfinite([float(row["adversary_loss"]) for row in table(run)]).all()


def test_faiss_finds_what_it_finds_on_the_processor() -> None:
    rng = np.random.default_rng(0)
    corpus, queries = (rng.normal(size=(n, 32)).astype(np.float32) for n in (1000, 50))
    found = []
    for device in (GPU, "cpu"):
        choose_faiss_device(device)
        found.append(search_exactly(corpus, queries, 10).rows)
    np.testing.assert_array_equal(*found)
