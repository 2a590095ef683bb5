"""A model of the demo that was packed by one person and is used by another, who has neither data nor caches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torchvision
from huggingface_hub import constants

from tests.conftest import TINY_FEATURE
from tests.conftest import succeeds as done
from tests.training.conftest import experiment
from vse.cli import main
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings.captions import FittedCaptionSettings, TfidfConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.demo import create_demo
from vse.training.cli import embed_main
from vse.training.training import train

TEXT = "a red circle above a blue square"


class Travelled(NamedTuple):
    """A packed model with its network and one without, the network's file, and an album of photos.

    The run, its data set and its caches are deleted. ``names`` and ``scores`` are the results of the run for :data:`TEXT` in
    its own test split, the photos of the album, best first.
    """

    packed: Path
    light: Path
    weights: Path
    album: Path
    names: list[str]
    scores: np.ndarray


def write_weights(file: Path) -> Path:
    """Write weights of the tiny network, as a download would be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        torch.save(torchvision.models.squeezenet1_1(weights=None).state_dict(), file)
    return file


def extract(dataset: Path, out: Path, extractor: CnnExtractor | CaptionExtractor) -> Path:
    extract_shards(dataset, extractor, out, 1)
    return merge_feature(dataset, out, 1)


def fit_tfidf(dataset: Path, out: Path) -> Path:
    config: FittedCaptionSettings = TfidfConfig(name="tfidf", min_count=2)
    return extract(dataset, out, CaptionExtractor(config, fit_encoder(dataset, config, encoder_path(out))))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set, a cache, a run with embeddings, and the weights of the network, which were moved since. Read only."""
    home = tmp_path_factory.mktemp("home")
    dataset = create_demo(home / "data", n_images=66)
    weights = write_weights(home / "at first" / "squeezenet.pth")
    cnn = CnnExtractor(TINY_FEATURE.model_copy(update={"weights": str(weights)}))
    cache = extract(dataset, home / "features" / "demo_tiny.h5", cnn)
    done(embed_main, train(cache, experiment("train.learning_rate=2e-3"), out=home / "run"))
    (home / "at first").rename(home / "weights")
    return home


@pytest.fixture(scope="session")
def travelled(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Travelled:
    """Read only."""
    import vse

    folder = tmp_path_factory.mktemp("elsewhere")
    own = folder / "own"
    shutil.copytree(home, own)
    dataset = load_dataset_file(own / "data" / "dataset.json")
    for image in dataset.split("test"):
        (folder / "album").mkdir(exist_ok=True)
        shutil.copy(dataset.image_path(image), folder / "album")
    hits = vse.load(own / "run").search(TEXT, k=12).frame
    options = ("--weights-dir", own / "weights")
    done(main, "model", "pack", own / "run", folder / "packed", "--with-backbone", "--licence", "cc-by-4.0", *options)
    done(main, "model", "pack", own / "run", folder / "light", *options)
    weights = Path(shutil.move(own / "weights" / "squeezenet.pth", folder / "squeezenet.pth"))
    shutil.rmtree(own)
    names = [Path(file).name for file in hits["file"]]
    return Travelled(folder / "packed", folder / "light", weights, folder / "album", names, hits["score"].to_numpy())


@pytest.fixture(autouse=True)
def no_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of torch and Hugging Face are empty, and the hub cannot be reached."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("VSE_WEIGHTS_DIR", raising=False)
