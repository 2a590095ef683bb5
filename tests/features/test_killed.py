"""SIGKILL at random moments of a command; a run that is left alone must then be as if it had been the first."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from vse.features.cache import verify_cache
from vse.features.precomp import export_precomp


def options(*settings: str) -> list[str]:
    return [argument for setting in settings for argument in ("--set", setting)]


EXTRACT = {
    "cnn": [*options("model=squeezenet1_1", "layer=features.2", "grid=2", "resize=32", "crop=32", "weights=random")],
    "regions": [
        *options("model=fasterrcnn_resnet50_fpn", "weights=random", "shorter=32", "longer=48", "proposals=8"),
        *options("min_boxes=4", "max_boxes=4"),
    ],
    "boxes": [
        *options("model=squeezenet1_1", "map=features.1", "layer=features.2", "pool=8", "shorter=32", "longer=48"),
        *options("weights=random", "n_boxes=4"),
    ],
    "hglmm": [*options("trained_dim=8", "trained_epochs=2", "min_count=1", "centres=4", "pca=16")],
}


def command(what: str, demo: Path, cache: Path, folder: Path) -> list[str]:
    """The command whose killing is tried; it writes ``folder/demo_x.h5``."""
    out = folder / "demo_x.h5"
    if what == "import-precomp":
        module, arguments = "data_cli", ["import-precomp", str(cache), "--dataset", "demo", "--out-features", str(out)]
        arguments += ["--out-data", str(folder / "dataset.json")]
    else:
        module, arguments = "cli", [what, "--dataset", str(demo), "--out", str(out), "--shards", "33", "--threads", "1"]
        arguments += EXTRACT[what]
    return [sys.executable, "-c", f"from vse.features.{module} import main; main()", *arguments]


def content(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][:] for name in file}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "kills"), [("cnn", 10), ("regions", 4), ("boxes", 4), ("hglmm", 4), ("import-precomp", 4)])
def test_killed_then_left_alone_gives_the_same_cache(what: str, kills: int, demo: Path, cache: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    precomp = export_precomp(cache, tmp_path / "precomp") if what == "import-precomp" else cache
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for _ in range(kills):
        process = subprocess.Popen(command(what, demo, precomp, killed), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        enough = len(list(killed.glob("*/shard*.json"))) + chance.randrange(4)
        while process.poll() is None and len(list(killed.glob("*/shard*.json"))) < min(33, enough):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=chance.uniform(0.01, 0.2))
        process.kill()
        process.communicate()
    for folder in (killed, whole):
        subprocess.run(command(what, demo, precomp, folder), check=True, capture_output=True)
    caches = [verify_cache(folder / "demo_x.h5") for folder in (killed, whole)]
    assert caches[0].key == caches[1].key
    for shard, twin in zip(caches[0].shards, caches[1].shards, strict=True):
        assert shard["features"].path.read_bytes() == twin["features"].path.read_bytes()
    found, expected = content(caches[0].path), content(caches[1].path)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name])
    assert not [path for path in killed.rglob("*") if path.name.endswith(".tmp")]
