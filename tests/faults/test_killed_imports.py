"""Imports that are killed before a change of the file system, once or several times, and then left alone.

A file under its final name is always complete. The last import gives the same files as one that was never killed.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.faults.kills import Forks
from tests.faults.suite import StartSuite
from tests.features.test_import_clip import vectors, write_part
from tests.pipeline.import_files import photo_bytes, write_tar
from tests.pipeline.saved_datasets import save
from tests.test_killed import files

pytestmark = pytest.mark.nightly

N_IMAGES = 6
MOST_KILLS = 3  # of one try
MAIN = "vse.cli:data_main"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    libraries = ["datasets"] if find_spec("datasets") else []
    forks = Forks(["vse.cli", "vse.features.cli", "vse.features.exchange.formats", *libraries])
    yield forks
    forks.close()


def webdataset(folder: Path) -> Path:
    for number, name in enumerate(("train-0", "test-0")):
        members: list[tuple[str, bytes]] = [("0.cls", b"7")] if number else []
        for k in range(N_IMAGES // 2):
            members += [(f"{k}.jpg", photo_bytes(10 * number + k)), (f"{k}.txt", f"gull {k}".encode())]
        write_tar(folder / f"{name}.tar", members)
    return folder


def saved(folder: Path) -> Path:
    rows = [{"image": {"bytes": photo_bytes(k), "path": None}, "caption": f"gull {k}"} for k in range(N_IMAGES)]
    return save(folder, {"train": rows[2:], "test": rows[:2]})


def clip(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(2):
        rows = [{"image_path": f"{number}-{k}.jpg", "caption": f"gull {k}"} for k in range(N_IMAGES)]
        write_part(folder, number, vectors(rng, N_IMAGES), vectors(rng, N_IMAGES), rows)
    return folder


@pytest.mark.parametrize(
    "source",
    [webdataset, pytest.param(saved, marks=pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")), clip],
)
def test_a_killed_import_and_the_next_give_the_same_files(
    source: Callable[[Path], Path], forks: Forks, suite_of_faults: StartSuite, tmp_path: Path
) -> None:
    names = {"webdataset": "WebDataset", "saved": "Hugging Face", "clip": "clip-retrieval"}
    suite = suite_of_faults(f"killed import, {names[source.__name__]}", 2)
    given, rng = source(tmp_path / "given"), random.Random(0)

    def run(out: Path, kill_at: int | None = None) -> tuple[int, int]:
        arguments = ["import", given, "--out", out / "gulls", "--out-features", out / "features"]
        return forks.run(MAIN, arguments, tmp_path / "log", kill_at)

    code, n_changes = run(tmp_path / "whole")
    assert code == 0, (tmp_path / "log").read_text()
    expected = files(tmp_path / "whole")
    for number in range(suite.n_tries):
        out = tmp_path / f"killed-{number}"
        kills = [number * n_changes // suite.n_tries, *rng.sample(range(n_changes), rng.randrange(MOST_KILLS))]
        codes = [run(out, kill_at)[0] for kill_at in kills]
        ended = -signal.SIGKILL if codes[0] == -signal.SIGKILL and set(codes) <= {-signal.SIGKILL, 0} else None
        partial = {name for name, content in files(out, finished=True).items() if content != expected.get(name)}
        code, _ = run(out)
        found, detail = files(out), f"killed before changes {kills}: {codes}, then {code}"
        if ended is None or code != 0 or partial:
            suite.record("wrong", f"{detail}; partial {partial}; {(tmp_path / 'log').read_text()[-500:]}")
        elif found != expected:
            suite.record("silent", f"{detail}; other files: {set(found) ^ set(expected) or 'other content'}")
        else:
            suite.record("harmless", detail)


def test_a_killed_import_of_parts_does_not_read_finished_parts_again(forks: Forks, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = tmp_path / "given"
    for number in range(3):
        rows = [{"image_path": f"{k % 4}.jpg", "caption": f"gull {number} {k}"} for k in range(N_IMAGES)]
        images = np.repeat(np.arange(4)[:, None], 5, 1).astype(np.float16)[np.arange(N_IMAGES) % 4]
        write_part(given, number, images, vectors(rng, N_IMAGES), rows)

    def run(out: Path, kill_at: int | None = None) -> tuple[int, int]:
        arguments = ["import", given, "--out", out / "gulls", "--out-features", out / "features"]
        return forks.run(MAIN, arguments, tmp_path / "log", kill_at)

    code, n_changes = run(tmp_path / "whole")
    assert code == 0, (tmp_path / "log").read_text()
    expected, tables = files(tmp_path / "whole"), sorted((given / "metadata").iterdir())
    n_finished = []
    for number in range(5):
        out = tmp_path / f"killed-{number}"
        assert run(out, (1 + 2 * number) * n_changes // 10)[0] == -signal.SIGKILL
        finished = sorted((out / "gulls" / ".import.parts.tmp").glob("part-*.parquet"))
        n_finished.append(len(finished))
        originals = [(table, table.read_bytes(), table.stat()) for table in tables[: len(finished)]]
        for table, content, status in originals:  # a reader would refuse this content, in a file that looks unchanged
            table.write_bytes(b"?" * len(content))
            os.utime(table, ns=(status.st_atime_ns, status.st_mtime_ns))
        code, _ = run(out)
        for table, content, status in originals:
            table.write_bytes(content)
            os.utime(table, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert code == 0, (tmp_path / "log").read_text()
        assert files(out) == expected
    assert max(n_finished) == len(tables)
