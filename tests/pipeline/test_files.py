from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, write_bytes, write_json


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_bytes(path, b"one")
    assert write_bytes(path, b"two").read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bytes(tmp_path / "file", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*file: No space left on device"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_device_that_is_full_is_named() -> None:
    with pytest.raises(UserError, match="cannot write /proc/nowhere/file"):
        write_bytes(Path("/proc/nowhere/file"), b"")


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not os.listdir(tmp_path)


def test_broken_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match=r"x\.json: not valid JSON"):
        read_json(tmp_path / "x.json")


def test_what_a_killed_writer_left_is_removed_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f".file.{socket.gethostname()}-{gone.pid}.x.tmp"
    living = tmp_path / f".file.{socket.gethostname()}-{os.getpid()}.x.tmp"
    elsewhere = tmp_path / ".file.another-machine-1.x.tmp"
    for temporary in (left, living, elsewhere):
        temporary.touch()
    write_bytes(path, b"new")
    assert {p.name for p in tmp_path.iterdir()} == {"file", living.name, elsewhere.name}


def test_many_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: write_bytes(tmp_path / "file", bytes([k]) * 1000), range(60)))
    assert len(set((tmp_path / "file").read_bytes())) == 1
    assert os.listdir(tmp_path) == ["file"]
