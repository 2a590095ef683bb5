"""Files of a compositional, a DSVE and a phrase run that are damaged are refused, or make no difference."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.conftest import TINY_FEATURE
from tests.faults.damages import DAMAGES, damage, record_use
from tests.faults.suite import StartSuite
from tests.hostile import refused_or_done
from tests.training.adversaries.conftest import SCAN
from tests.training.conftest import experiment
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.cnn import CnnExtractor
from vse.training.cli import embed_main
from vse.training.training import train

pytestmark = pytest.mark.nightly

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
    return train(positions, experiment(*COMPOSITIONAL), out=tmp_path_factory.mktemp("runs") / "compositional")


@pytest.fixture(scope="module")
def dsve(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model that pools maps of 3 x 3 positions and reads words with SRUs. Read only."""
    folder = tmp_path_factory.mktemp("dsve")
    changes = {"positions": True, "grid": "all", "layer": "features.12", "resize": 64, "crop": 64, "normalize": False}
    out = folder / "demo_tiny.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update=changes)), out, 1)
    return train(merge_feature(demo, out, 1), experiment(*DSVE), out=folder / "run")


def content(path: Path) -> dict[str, object]:
    """Read all numbers of embeddings or of scores, and the attributes that name their run."""
    with h5py.File(path) as file:
        numbers: dict[str, object] = {name: repr(np.asarray(file[name]).tolist()) for name in file}
        return numbers | {name: str(file.attrs.get(name)) for name in OF_RUN}


@pytest.mark.parametrize("kind", ["compositional", "dsve", "phrases"])
def test_a_damaged_file_of_a_run_is_refused_or_makes_no_difference(
    kind: str, request: pytest.FixtureRequest, suite_of_faults: StartSuite
) -> None:
    run: Path = request.getfixturevalue("phrase_run" if kind == "phrases" else kind)
    suite, rng = suite_of_faults(f"vse-embed with a damaged file of the run, {kind}", 6), random.Random(kind)
    assert refused_or_done(embed_main, run, "--out", run.parent / f"{kind}.h5") is None
    expected = content(run.parent / f"{kind}.h5")
    files = sorted(path.name for path in run.iterdir() if path.suffix in (".json", ".yaml", ".safetensors", ".ckpt", ".csv"))
    for number in range(suite.n_tries):
        own = run.parent / f"{kind}-{number}"  # in the same folder: run.json names caches by relative paths
        out = own.with_suffix(".h5")
        shutil.copytree(run, own)
        name, how = files[number % len(files)], list(DAMAGES)[number // len(files) % len(DAMAGES)]
        damage(own / name, how, rng)
        is_same = lambda out=out: content(out) == expected  # noqa: E731
        record_use(suite, f"{how} of {name}, try {number}", is_same, embed_main, own, "--out", out)
        shutil.rmtree(own)
        out.unlink(missing_ok=True)
