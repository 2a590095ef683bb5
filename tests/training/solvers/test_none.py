from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.eval.slow_ranks import slow_ranks
from tests.features.tiny_text import add_tiny_clip, tiny_bert
from tests.training.conftest import Capture, Fails, Log, done, experiment, printed, table
from vse.eval.cli import eval_main, table_main
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import ExtractorInput
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.cnn import CnnExtractor
from vse.features.extractors.text import TextExtractor
from vse.features.settings.captions import TextConfig
from vse.features.settings.images import CnnConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.training.cli import embed_main, report_main, train_main
from vse.training.experiment import ExperimentConfig
from vse.training.options import TrainInputs
from vse.training.run.folder import RunFolder
from vse.training.training import train

Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny OpenCLIP model, which the library knows by this name."""
    return add_tiny_clip(tmp_path_factory.mktemp("clip"), "tiny-clip-of-none")


@pytest.fixture(scope="module")
def images(demo: Path, clip: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's images by the tiny model."""
    out = tmp_path_factory.mktemp("features") / "demo_clip.h5"
    config = CnnConfig(name="clip", model=clip, weights="random", layer="output", resize=32, crop=32, normalize=False)
    extract_shards(demo, CnnExtractor(config), out, 2)
    return merge_feature(demo, out, 2)


@pytest.fixture(scope="module")
def captions(demo: Path, clip: str, images: Path) -> Path:
    """The demo's captions by the other tower of the tiny model."""
    out = images.with_name("demo_clip_text.h5")
    extract_shards(demo, TextExtractor(TextConfig(name="clip_text", model=clip, weights="random", normalize=False)), out, 2)
    return merge_feature(demo, out, 2)


def zero_shot(*sets: str) -> ExperimentConfig:
    return experiment(*sets, name="clip_zeroshot")


@pytest.fixture(scope="module")
def run(images: Path, captions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without training. Read only."""
    return train(images, zero_shot(), out=tmp_path_factory.mktemp("runs") / "zero")


def vectors(cache: Path, ids: list[int]) -> Floats:
    """Rows of a cache, by their ids, of unit length."""
    reader = FeatureReader(open_cache(cache))
    rows = reader.read_rows(reader.find_rows(ids)).astype(np.float64)
    found: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def slow_recalls(scores: Floats, image_indices: list[int]) -> dict[str, float]:
    """Recalls by a loop over queries."""
    ranks = dict(zip(("i2t", "t2i"), slow_ranks(scores, image_indices), strict=True))
    return {f"{way}_r{k}": 100 * float(np.mean(np.asarray(ranks[way]) < k)) for way in ranks for k in (1, 5, 10)}


def of_split(demo: Path, split: str, images: Path, captions: Path) -> tuple[Floats, Floats, list[int]]:
    found = load_dataset_file(demo).split(split)
    image_indices = [k for k, image in enumerate(found) for _ in image.captions]
    sentids = [caption.sentid for image in found for caption in image.captions]
    return vectors(images, [image.imgid for image in found]), vectors(captions, sentids), image_indices


def test_the_only_epoch_has_the_recalls_of_the_cached_vectors(run: Path, demo: Path, images: Path, captions: Path) -> None:
    x, y, image_indices = of_split(demo, "val", images, captions)
    expected = slow_recalls(x @ y.T, image_indices)
    (row,) = table(run)
    for name, recall in expected.items():
        assert float(row[name]) == pytest.approx(recall, abs=1e-4)
    assert float(row["rsum"]) == pytest.approx(sum(expected.values()), abs=1e-3)
    assert "loss" not in row


def test_the_run_is_one_like_any_other(run: Path, demo: Path, images: Path, captions: Path, tmp_path: Path) -> None:
    record = RunFolder(run).read_record()
    assert (record["state"], record["epochs"], record["best_epoch"]) == ("finished", 1, 1)
    assert RunFolder(run).read_best_weights() == {}
    x, y, image_indices = of_split(demo, "test", images, captions)
    done(embed_main, run, "--out", tmp_path / "test.h5")
    with h5py.File(tmp_path / "test.h5") as file:
        np.testing.assert_allclose(file["images"][:], x, atol=1e-6)
        np.testing.assert_allclose(file["captions"][:], y, atol=1e-6)
    done(eval_main, tmp_path / "test.h5", "--bootstrap", 100, "--out", tmp_path / "r.json")
    full = json.loads((tmp_path / "r.json").read_text())["protocols"]["full"]
    for name, recall in slow_recalls(x @ y.T, image_indices).items():
        direction, _, measure = name.partition("_")
        assert full[direction][measure] == pytest.approx(recall, abs=1e-4)
    done(table_main, "summary", tmp_path / "r.json", "--out", tmp_path / "t.csv")
    assert "CLIP ViT-B/32 (zero-shot)" in (tmp_path / "t.csv").read_text()
    done(report_main, tmp_path / "r.json", "--out", tmp_path / "page.html", "--queries", 2)
    assert "clip_zeroshot" in (tmp_path / "page.html").read_text()


def test_a_text_finds_images(run: Path, demo: Path, images: Path, clip: str, capsys: Capture) -> None:
    lines, _ = printed(capsys, run, "A red CIRCLE, on grass!", "-k", 4)
    found = load_dataset_file(demo).split("test")
    asked = TextExtractor(TextConfig(name="x", model=clip, weights="random"))
    query = asked.encode_inputs([ExtractorInput(0, raw="A red CIRCLE, on grass!")])[0].numpy()[0]
    scores = vectors(images, [image.imgid for image in found]) @ query
    best = np.argsort(-scores)[:4]
    assert [Path(line[2]).name for line in lines] == [Path(found[k].file).name for k in best]
    np.testing.assert_allclose([float(line[1]) for line in lines], scores[best], atol=1e-3)


def test_two_models_are_a_warning(images: Path, demo: Path, tmp_path: Path, fails: Fails, clip: str, caplog: Log) -> None:
    folder, out = tiny_bert(tmp_path / "bert"), tmp_path / "demo_bert.h5"
    extract_shards(demo, TextExtractor(TextConfig(name="bert", model="a/b", weights=str(folder))), out, 1)
    merge_feature(demo, out, 1)
    start = [train_main, "--features", images, "--experiment", "clip_zeroshot", "--out", tmp_path / "run"]
    line = fails(*start, "--caption-features", out)
    assert f"{images} has 16 numbers per vector, {out} 32; both caches must be of one model" in line
    name = add_tiny_clip(tmp_path, "tiny-clip-of-others")
    out = tmp_path / "demo_others.h5"
    extract_shards(demo, TextExtractor(TextConfig(name="others", model=name, weights="random")), out, 1)
    merge_feature(demo, out, 1)
    train(images, zero_shot(), out=tmp_path / "run", inputs=TrainInputs(caption_features=out))
    assert f"images by {clip} (random), captions by {name} (random)" in caplog.text


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("model.image_encoder=linear", "the image encoder has weights to learn: --set model.image_encoder=identity"),
        ("model.caption_encoder=null", "the caption encoder has weights to learn: --set model.caption_encoder=identity"),
        ("caption_feature=null", "solver: none reads captions as vectors"),
    ],
)
def test_weights_and_words_are_refused(sets: str, message: str, images: Path, captions: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(images, zero_shot(sets, "model.dim=16"), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["loss=infonce"], "solver: none trains nothing; remove the loss infonce"),
        (["adversary=ace"], "solver: none takes no gradient steps, so it cannot have an adversary"),
        (["start_from=vsepp"], "solver: none reads cached features only and cannot start from a run"),
        (["images.source=pictures"], "solver: none reads cached features only and cannot start from a run"),
    ],
    ids=str,
)
def test_settings_of_a_training_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        zero_shot(*sets)
