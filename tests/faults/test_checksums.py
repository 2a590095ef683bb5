"""Damaged features and checkpoints are found before anything is computed with them."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.faults.damages import DAMAGES, damage, record_use
from tests.faults.suite import StartSuite
from tests.training.conftest import COMMAND, assert_same, experiment, interrupted, state
from vse.features.cache.feature_cache import open_cache
from vse.features.cli import extract_main
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import Interrupted
from vse.training.cli import embed_main, train_main
from vse.training.run.folder import RunFolder
from vse.training.training import train

pytestmark = pytest.mark.nightly


def flip_in_features(cache: Path, split: str, rng: random.Random) -> tuple[Path, bytes]:
    """Flip a bit in the features of an image of a split; returns the shard, and its bytes before that."""
    opened = open_cache(cache)
    images = {image.imgid for image in load_dataset_file(opened.dataset_file).split(split)}
    row = rng.choice([row for row, image in enumerate(opened.ids.tolist()) if image in images])
    starts = np.cumsum([0, *(shard["features"].shape[0] for shard in opened.shard_arrays)])
    shard = int(np.searchsorted(starts, row, side="right")) - 1
    stored = opened.shard_arrays[shard]["features"]
    each = stored.nbytes // stored.shape[0]
    content = stored.path.read_bytes()
    flipped = bytearray(content)
    flipped[stored.offset + (row - int(starts[shard])) * each + rng.randrange(each)] ^= 1 << rng.randrange(8)
    stored.path.write_bytes(flipped)
    return stored.path, content


@pytest.mark.parametrize("use", ["training", "embedding", "verifying"])
def test_a_flipped_bit_in_features_is_found(
    use: str, own_cache: Path, run: Path, tmp_path: Path, suite_of_faults: StartSuite
) -> None:
    suite = suite_of_faults(f"feature cache with a flipped bit, {use}", 6)
    rng = random.Random(use)
    for number in range(suite.n_tries):
        split = ("train", "val", "test")[number % 3]
        shard, content = flip_in_features(own_cache, "train" if use == "training" else split, rng)
        out = tmp_path / f"{number}.h5"
        in_memory = ["--set", f"train.features_in_memory={'true' if number % 2 else 'false'}"]
        command, *arguments = {
            "training": (train_main, "--features", own_cache, *COMMAND, *in_memory, "--out", tmp_path / "run"),
            "embedding": (embed_main, run, "--features", own_cache, "--split", split, "--out", out),
            "verifying": (extract_main, "verify", own_cache),
        }[use]
        record_use(suite, f"{shard.name}, try {number}", lambda: False, command, *arguments)
        assert not out.exists(), "nothing is written from damaged features"
        shard.write_bytes(content)


@pytest.fixture(scope="module")
def stopped(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped") / "run"
    with interrupted(20), suppress(Interrupted):
        train(cache, experiment(), out=out)
    assert RunFolder(out).read_checkpoint()["epoch"] == 2
    return out


def is_same_run(run: Path, other: Path) -> bool:
    """Return whether two runs have the same weights, the same metrics, and the same state, bit for bit."""
    try:
        assert_same(state(run), state(other))
    except AssertionError:
        return False
    return RunFolder(run).best_weights_file.read_bytes() == RunFolder(other).best_weights_file.read_bytes()


def test_a_damaged_checkpoint_is_refused_or_resumes_to_the_same_weights(
    cache: Path, run: Path, stopped: Path, tmp_path: Path, suite_of_faults: StartSuite
) -> None:
    suite, rng = suite_of_faults("damaged checkpoint, resumed", 12), random.Random(0)
    for number in range(suite.n_tries):
        own, how = tmp_path / f"run-{number}", list(DAMAGES)[number % len(DAMAGES)]
        shutil.copytree(stopped, own)
        damage(own / "last.ckpt", how, rng)
        arguments = ["--features", cache, *COMMAND, "--out", own, "--resume"]
        record_use(suite, f"{how}, try {number}", lambda own=own: is_same_run(run, own), train_main, *arguments)  # type: ignore[misc]
        shutil.rmtree(own)
