"""Test locks for writing: a second writer reports the process that holds the lock, and a kill releases it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.pipeline.conftest import Fails, Log, Patch
from tests.training.conftest import COMMAND
from vse.cli import data_main
from vse.features.cache.shards import shard_path
from vse.features.cli import extract_main
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import lock_for_writing
from vse.training.cli import train_main

HOLD = """
import sys
from pathlib import Path
from vse.pipeline.files.writing import lock_for_writing
with lock_for_writing(Path(sys.argv[1]), folder=sys.argv[2] == "folder"):
    print("held", flush=True)
    sys.stdin.read()
"""
DEMO = ["--set", "model=squeezenet1_1", "--set", "layer=features.2", "--set", "grid=2", "--set", "crop=32"]


@contextmanager
def held(path: Path, folder: bool) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds the lock of ``path``."""
    command = [sys.executable, "-c", HOLD, path, "folder" if folder else "file"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("folder", [True, False])
def test_the_second_writer_is_told_who_the_first_is_and_a_kill_frees_the_lock(folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "x"
    with held(path, folder) as first:
        with (
            pytest.raises(UserError, match=rf"x: process {first.pid} on \S+ \(since .*\) is writing it"),
            lock_for_writing(path, folder),
        ):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
        with lock_for_writing(path, folder), lock_for_writing(path, folder):
            assert path.parent.exists()
    assert not list(tmp_path.rglob("*.lock"))


def test_a_lock_leaves_nothing_and_its_folder_stays_if_something_is_in_it(tmp_path: Path) -> None:
    for file in (None, "x"):
        with lock_for_writing(tmp_path / "a" / "b", folder=True):
            if file:
                (tmp_path / "a" / "b" / file).touch()
        assert os.listdir(tmp_path) == (["a"] if file else [])
    assert os.listdir(tmp_path / "a" / "b") == ["x"]


@pytest.fixture
def nobody() -> Iterator[Path]:
    """Return a folder that every user may write, and run this process as a user without privileges."""
    folder, user = Path(tempfile.mkdtemp()), os.geteuid()
    folder.chmod(0o777)
    if user == 0:
        os.seteuid(65534)
    yield folder
    if user == 0:
        os.seteuid(0)
    shutil.rmtree(folder)


def test_a_lock_file_that_another_user_s_killed_process_left_hinders_nobody(nobody: Path) -> None:
    file = nobody / ".lock"
    file.touch()
    file.chmod(0o444)
    with file.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is writing it"), lock_for_writing(nobody, folder=True):
            pass
    with lock_for_writing(nobody, folder=True):
        assert f"process {os.getpid()} on" in file.read_text()
    assert not file.exists()


def test_where_there_are_no_locks_a_line_says_so(tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with lock_for_writing(tmp_path / "x", folder=True):
        (tmp_path / "x" / "y").touch()
    assert "this file system has no locks" in caplog.text
    assert os.listdir(tmp_path / "x") == ["y"]


@pytest.mark.parametrize("what", ["train", "extract", "shard", "merge", "fit", "demo", "import"])
def test_every_command_that_writes_a_folder_locks_it(what: str, cache: Path, demo: Path, tmp_path: Path, fails: Fails) -> None:
    """The command exits with 2, names the holder of the lock and writes nothing."""
    out = tmp_path / "demo_x.h5"
    of_shard = ["--dataset", demo, "--out", out, "--shards", "2"]
    commands: dict[str, tuple[Callable[..., None], list[object], Path]] = {
        "train": (train_main, ["--features", cache, "--out", tmp_path / "run", *COMMAND], tmp_path / "run"),
        "extract": (extract_main, ["cnn", *of_shard, *DEMO], out),
        "shard": (extract_main, ["cnn", *of_shard, *DEMO, "--shard", "1"], shard_path(out, 1, 2)),
        "merge": (extract_main, ["merge", *of_shard], out),
        "fit": (extract_main, ["fit", *of_shard[:4], "--feature", "tfidf"], tmp_path / "demo_x.encoder.safetensors"),
        "demo": (data_main, ["demo", "--out", tmp_path / "data", "--images", "6"], tmp_path / "data"),
        "import": (data_main, ["import-npy", tmp_path / "x.npz", "--dataset", demo, "--out-features", out], out),
    }
    if what == "import":
        with h5py.File(cache) as file:
            np.savez(tmp_path / "x.npz", features=file["features"][:], ids=file["ids"][:])
    if what == "merge":
        shutil.copytree(cache.with_suffix(".shards"), out.with_suffix(".shards"))
    main, arguments, path = commands[what]
    with held(path, folder=what in ("train", "demo")) as first:
        assert f"process {first.pid} on" in fails(main, *arguments)
        assert not out.exists()
        assert not (tmp_path / "run" / "run.json").exists()
        assert not (tmp_path / "data" / "dataset.json").exists()
