"""Files of a compositional, a DSVE and a phrase run that are damaged are refused, or make no difference."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.conftest import TINY_FEATURE
from tests.faults.damages import DAMAGES, damage, record_use
from tests.faults.suite import Suite
from tests.train.adversaries.conftest import SCAN
from tests.train.conftest import experiment
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.cnn import CnnExtractor
from vse.train.cli import embed_main
from vse.train.training import train

COMPOSITIONAL = [*SCAN, "adversary={name: compositional, scale: 5, baseline: self_critical}", "train.epochs=1"]
DSVE = [
    "model.image_encoder={name: weldon, channels: 10, k_max: 3, k_min: 2}",
    "model.caption_encoder={name: sru, layers: 2}",
    "loss.mirrored_positive=true",
    "train.epochs=1",
]
OF_RUN = ("dataset", "split", "seed", "similarity", "experiment")


@pytest.fixture(scope="module")
def compositional(positions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with a compositional adversary. Read only."""
    return train(positions, experiment(*COMPOSITIONAL), out=tmp_path_factory.mktemp("runs") / "compositional")


@pytest.fixture(scope="module")
def dsve(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model that pools maps of 3 x 3 positions and reads words with SRUs. Read only."""
    folder = tmp_path_factory.mktemp("dsve")
    changes = {"positions": True, "grid": "all", "layer": "features.12", "resize": 64, "crop": 64, "normalize": False}
    out = folder / "demo_tiny.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update=changes)), out, 1)
    return train(merge(demo, out, 1), experiment(*DSVE), out=folder / "run")


@pytest.fixture(scope="module")
def phrases(phrase_run: Path) -> Path:
    """Train a model that localises phrases. Read only."""
    return phrase_run


def content(path: Path) -> dict[str, object]:
    """Read all numbers of embeddings or of scores, and the attributes that name their run."""
    with h5py.File(path) as file:
        numbers: dict[str, object] = {name: repr(np.asarray(file[name]).tolist()) for name in file}
        return numbers | {name: str(file.attrs.get(name)) for name in OF_RUN}


@pytest.mark.parametrize("kind", ["compositional", "dsve", "phrases"])
def test_a_damaged_file_of_a_run_is_refused_or_makes_no_difference(
    kind: str, request: pytest.FixtureRequest, suite_of_faults: Callable[[str, int], Suite]
) -> None:
    run: Path = request.getfixturevalue(kind)
    suite, rng = suite_of_faults(f"run with a damaged file, embedding, {kind}", 6), random.Random(kind)
    embed = [run, "--out", run.parent / f"{kind}.h5"]
    assert embed_code(*embed) == 0
    expected = content(embed[-1])
    files = sorted(path.name for path in run.iterdir() if path.suffix in (".json", ".yaml", ".safetensors", ".ckpt", ".csv"))
    for number in range(suite.n_tries):
        own, out = (
            run.parent / f"{kind}-{number}",
            run.parent / f"{kind}-{number}.h5",
        )  # in the same folder: run.json names caches by relative paths
        shutil.copytree(run, own)
        name, how = files[number % len(files)], list(DAMAGES)[number // len(files) % len(DAMAGES)]
        damage(own / name, how, rng)
        is_same = lambda out=out: content(out) == expected  # noqa: E731
        record_use(suite, f"{how} of {name}, try {number}", is_same, embed_main, own, "--out", out)
        shutil.rmtree(own)
        out.unlink(missing_ok=True)


def embed_code(*arguments: object) -> object:
    """Return the exit code of ``vse-embed``."""
    with pytest.raises(SystemExit) as stop:
        embed_main([str(argument) for argument in arguments])
    return stop.value.code
