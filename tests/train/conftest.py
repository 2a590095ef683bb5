"""Caches of other kinds than :func:`tests.conftest.cache`, and what the tests of a training compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY_FEATURE
from vse.features.caption_extractor import CaptionExtractor, encoder_path, fit_encoder
from vse.features.cnn_extractor import CnnExtractor
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.tfidf import TfidfConfig
from vse.train.experiment import ExperimentConfig, load_experiment
from vse.train.run.folder import RunFolder

SETS = [
    "model.dim=16",
    "model.word_dim=8",
    "train.epochs=3",
    "train.decay_after=2",
    "train.batch_size=32",
    "train.min_count=1",
    "train.learning_rate=2e-4",  # this and the next as in the paper: the demo's preset, which commands read, has others
    "warmup.epochs=0",
]
COMMAND = [argument for setting in SETS for argument in ("--set", setting)]


def experiment(*sets: str, name: str = "vsepp") -> ExperimentConfig:
    """A preset, small: 8 batches an epoch on the demo of 66 images."""
    return load_experiment(name, sets=[*SETS, *sets])


@pytest.fixture(scope="session")
def bank(demo: Path) -> Path:
    """A cache of three random crops per image of the demo. Read only."""
    out = demo.parent.parent / "features" / "demo_bank.h5"
    config = TINY_FEATURE.model_copy(update={"name": "bank", "crops": "rc_bank", "n_random": 3})
    extract_shards(demo, CnnExtractor(config), out, 2)
    return merge(demo, out, 2)


@pytest.fixture(scope="session")
def tfidf(demo: Path, cache: Path) -> Path:
    """A cache of TF-IDF vectors of the demo's captions, beside that of its images. Read only."""
    config = TfidfConfig(name="tfidf", min_count=2)
    out = cache.with_name("demo_tfidf.h5")
    extract_shards(demo, CaptionExtractor(config, fit_encoder(demo, config, encoder_path(out))), out, 2)
    return merge(demo, out, 2)


def state(run: Path) -> dict[str, Any]:
    """The last checkpoint without the times that a run took, in which equal runs differ."""
    found = RunFolder(run).checkpoint()
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
