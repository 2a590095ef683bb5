"""Caches of other kinds than :func:`tests.conftest.cache`, and what the tests of a training compare."""

from __future__ import annotations

import csv
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

from tests.conftest import TINY_FEATURE
from tests.conftest import succeeds as done
from tests.training.phrases.some_regions import Caches, World, make_caches, small, world_of
from vse.features.cache.feature_cache import merge_shards
from vse.features.cache.rows import CacheIdentity, FeatureRows
from vse.features.cache.shards import shard_path, write_shard
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings.captions import TfidfConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import Interrupted
from vse.training.cli import search_main
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.options import TrainOptions
from vse.training.run.folder import RunFolder
from vse.training.solvers import retrieval
from vse.training.training import train

# The learning rate and the end of the warm-up are those of the paper: the demo's preset, which commands read, has others.
SETS = ["model.dim=16", "model.word_dim=8", "train.epochs=3", "train.decay_after=2", "train.batch_size=32"]
SETS += ["train.min_count=1", "train.learning_rate=2e-4", "warmup.epochs=0"]


def experiment(*sets: str, name: str = "vsepp") -> ExperimentConfig:
    """A preset, small: 8 batches an epoch on the demo of 66 images."""
    return load_experiment(name, sets=[*SETS, *sets])


def options(*sets: str) -> list[str]:
    """The ``--set`` options of some settings."""
    return [part for setting in sets for part in ("--set", setting)]


COMMAND = options(*SETS)

# Types of fixtures: an exit with one line of error, an edit of a JSON file, and those of pytest.
Fails, Edit = Callable[..., str], Callable[[Path, Callable[[Any], None]], Path]
Capture, Log, Patch = pytest.CaptureFixture[str], pytest.LogCaptureFixture, pytest.MonkeyPatch


def _extracted(demo: Path, name: str, **changes: object) -> Path:
    """A cache of the demo by the tiny network with these changes, in two shards."""
    out = demo.parent.parent / "features" / f"demo_{name}.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update={"name": name, **changes})), out, 2)
    return merge_feature(demo, out, 2)


@pytest.fixture(scope="session")
def bank(demo: Path) -> Path:
    """A cache of three random crops per image of the demo. Read only."""
    return _extracted(demo, "bank", crops="rc_bank", n_random=3)


@pytest.fixture(scope="session")
def positions(demo: Path) -> Path:
    """A cache of four vectors per image of the demo, one for each position of a CNN's grid. Read only."""
    return _extracted(demo, "positions", positions=True)


@pytest.fixture(scope="session")
def regions(demo: Path) -> Path:
    """A made-up cache of one to five regions per image of the demo, of vectors that know the image. Read only."""
    out, rng = demo.parent.parent / "features" / "demo_regions.h5", np.random.default_rng(0)
    n_images = len(load_dataset_file(demo).images)
    counts = rng.integers(1, 6, n_images)
    features = rng.normal(size=(n_images, 16))[np.repeat(np.arange(n_images), counts)] + rng.normal(size=(counts.sum(), 16))
    return write_regions(demo, out, counts, features)


def write_regions(
    dataset_file: Path, out: Path, counts: np.ndarray, features: np.ndarray, boxes: np.ndarray | None = None
) -> Path:
    """Write a cache of some regions for each image of the demo."""
    ids, n = np.asarray([image.imgid for image in load_dataset_file(dataset_file).images], np.int64), int(counts.sum())
    rows = FeatureRows(
        ids,
        features.astype(np.float16),
        np.zeros((len(ids), 32), np.uint8),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        boxes=np.zeros((n, 4), np.float32) if boxes is None else boxes.astype(np.float32),
        scores=np.ones(n, np.float32),
        image_size=np.full((len(ids), 2), 32, np.int32),
    )
    write_shard(shard_path(out, 0, 1), CacheIdentity("demo", "regions", "image", {}), rows)
    return merge_shards(out, 1, dataset_file, ids)


@pytest.fixture(scope="session")
def tfidf(demo: Path, cache: Path) -> Path:
    """A cache of TF-IDF vectors of the demo's captions, beside that of its images. Read only."""
    config = TfidfConfig(name="tfidf", min_count=2)
    out = cache.with_name("demo_tfidf.h5")
    extract_shards(demo, CaptionExtractor(config, fit_encoder(demo, config, encoder_path(out))), out, 2)
    return merge_feature(demo, out, 2)


@pytest.fixture(scope="session")
def run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs on :func:`tests.conftest.cache`. Read only."""
    return train(cache, experiment(), out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def own_run(run: Path, tmp_path: Path) -> Path:
    """A copy of that run that a test may spoil."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture
def photo(demo: Path) -> Path:
    """A photo of the test split."""
    dataset = load_dataset_file(demo)
    return dataset.image_path(dataset.split("test")[3])


def forget_captions(cache: Path) -> Path:
    """Make a cache one of an earlier version, which records no captions, so that those of its data set may change."""
    with h5py.File(cache, "r+") as file:
        del file["caption_ids"], file["caption_hashes"]
    return cache


def state(run: Path) -> dict[str, Any]:
    """The last checkpoint without the times that a run took, in which equal runs differ."""
    found = RunFolder(run).read_checkpoint()
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "pairs_per_s")} for row in found["rows"]]
    return {**found, "rows": rows, "seconds": 0}


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Bit for bit, whatever is nested in it."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{k}]")
    else:
        assert a == b, where


def weights(run: Path, file: str = "best.safetensors") -> dict[str, torch.Tensor]:
    """Weights of a run, as safetensors reads them."""
    return safetensors.torch.load_file(run / file)


def table(run: Path) -> list[dict[str, str]]:
    """The rows of ``metrics.csv``."""
    return list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))


def numbers(run: Path) -> list[dict[str, float]]:
    """The rows of ``metrics.csv`` without an empty value."""
    return [{key: float(value) for key, value in row.items()} for row in table(run)]


def losses(run: Path) -> list[float]:
    """The loss of each epoch."""
    return [row["loss"] for row in state(run)["rows"]]


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[list[str]], str]:
    """The lines of a search, split at tabs, and its messages."""
    capsys.readouterr()
    done(search_main, *arguments)
    captured = capsys.readouterr()
    return [line.split("\t") for line in captured.out.splitlines()], captured.err


class Crash(Exception):
    """End a training as a crash does."""


@contextmanager
def interrupted(
    *calls: int, of: Any = retrieval.RetrievalTrainer, method: str = "step", crash: bool = False
) -> Iterator[None]:
    """Send a SIGTERM to this process, or crash, in these calls of a method, counted from 0."""
    real, numbered = getattr(of, method), count()

    def call(self: Any, *arguments: Any) -> Any:
        if next(numbered) in calls:
            if crash:
                raise Crash
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, method, call)
        yield


def train_with_stops(
    cache: Path,
    config: ExperimentConfig,
    out: Path,
    stops: Sequence[int],
    of: Any = retrieval.RetrievalTrainer,
    options: TrainOptions = TrainOptions(),
    **further: Any,
) -> Path:
    """Train, with a SIGTERM in each of these steps, counted over all; resume after each."""
    resume = options.model_copy(update={"resume": True})
    with interrupted(*stops, of=of):
        for _ in stops:
            with suppress(Interrupted):
                train(cache, config, out=out, options=resume, **further)
    return train(cache, config, out=out, options=resume, **further)


@pytest.fixture(scope="session")
def caches(few: Path) -> Caches:
    """Made-up caches of candidates, truths and phrases of the demo of 12 images. Read only."""
    return make_caches(few, few.parent.parent / "phrase_features")


@pytest.fixture(scope="session")
def world(caches: Caches) -> World:
    """The training pairs of these caches. Read only."""
    return world_of(caches)


@pytest.fixture(scope="session")
def phrase_run(caches: Caches, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small embedding network of phrases, trained for two epochs. Read only."""
    return train(caches.candidates, small(), out=tmp_path_factory.mktemp("runs") / "phrases")
