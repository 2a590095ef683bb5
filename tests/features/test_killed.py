"""SIGKILL at random moments of a command; a run that is left alone must then be as if it had been the first."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
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


class Forks:
    """Runs commands in forks of one process that has imported the room, so that its imports are paid for once."""

    PROGRAM = """
import importlib, json, os, pkgutil, sys
import vse.features
for module in pkgutil.iter_modules(vse.features.__path__, "vse.features."):
    importlib.import_module(module.name)
for line in sys.stdin:
    module, arguments = json.loads(line)
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        try:
            importlib.import_module(module).main(arguments)
        except SystemExit as stop:
            os._exit(stop.code or 0)
        finally:
            os._exit(1)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def line(self) -> int:
        assert self.server.stdout is not None
        return int(self.server.stdout.readline())

    def start(self, command: tuple[str, list[str]]) -> int:
        """The process that runs ``command``."""
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(command) + "\n")
        return self.line()

    def ends_within(self, seconds: float) -> bool:
        return bool(select.select([self.server.stdout], [], [], seconds)[0])

    def run(self, command: tuple[str, list[str]]) -> None:
        self.start(command)
        assert self.line() == 0


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.server.communicate()


def command(what: str, demo: Path, cache: Path, folder: Path) -> tuple[str, list[str]]:
    """The module and arguments of the command whose killing is tried; it writes ``folder/demo_x.h5``."""
    out = folder / "demo_x.h5"
    if what == "import-precomp":
        arguments = ["import-precomp", str(cache), "--dataset", "demo", "--out-features", str(out)]
        return "vse.features.data_cli", [*arguments, "--out-data", str(folder / "dataset.json")]
    arguments = [what, "--dataset", str(demo), "--out", str(out), "--shards", "12", "--threads", "1"]
    return "vse.features.cli", arguments + EXTRACT[what]


def content(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][:] for name in file}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "kills"), [("cnn", 10), ("regions", 4), ("boxes", 4), ("hglmm", 4), ("import-precomp", 4)])
def test_killed_then_left_alone_gives_the_same_cache(
    what: str, kills: int, forks: Forks, few: Path, cache: Path, tmp_path: Path
) -> None:
    rng = random.Random(0)
    source = export_precomp(cache, tmp_path / "precomp") if what == "import-precomp" else cache
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    statuses = []
    for kill in range(kills):
        process = forks.start(command(what, few, source, killed))
        enough = len(list(killed.glob("*/shard*.json"))) + rng.randrange(4)
        while kill == 0 or not forks.ends_within(rng.uniform(0.002, 0.05)):  # the first is killed as soon as it starts
            if kill == 0 or len(list(killed.glob("*/shard*.json"))) >= min(12, enough):
                with suppress(ProcessLookupError):  # it may have ended meanwhile
                    os.kill(process, signal.SIGKILL)
                break
        statuses.append(forks.line())
    assert -signal.SIGKILL in statuses
    for folder in (killed, whole):
        forks.run(command(what, few, source, folder))
    caches = [verify_cache(folder / "demo_x.h5") for folder in (killed, whole)]
    assert caches[0].key == caches[1].key
    for shard, twin in zip(caches[0].shards, caches[1].shards, strict=True):
        assert shard["features"].path.read_bytes() == twin["features"].path.read_bytes()
    resumed, expected = content(caches[0].path), content(caches[1].path)
    assert resumed.keys() == expected.keys()
    for name, values in resumed.items():
        np.testing.assert_array_equal(values, expected[name])
    assert not [path for path in killed.rglob("*") if path.name.endswith(".tmp")]
