from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.demo import create_demo
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import OutputKind, check_output
from vse.pipeline.files.writing import parse_json, read_json, remove_temporary_files, write_bytes, write_json

ANYTHING = OutputKind("anything", lambda _: True)


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


def test_json_has_no_nan_and_broken_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not os.listdir(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match=r"x\.json: not valid JSON"):
        read_json(tmp_path / "x.json")


NUMBERS = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
)


@given(JSON, st.booleans())
def test_json_is_read_as_it_was_written(content: object, ascii_only: bool) -> None:
    encoded = json.dumps(content, ensure_ascii=ascii_only).encode()
    # repr tells 1 from 1.0 and True, and 0.0 from -0.0
    assert repr(parse_json(Path("x.json"), encoded)) == repr(content)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775807", -(2**63) + 1),
        ("9223372036854775808", None),
        ("-9223372036854775809", None),
        ("1" + "0" * 308 + ".0", 1e308),
        ("1" + "0" * 309 + ".0", None),
        ("1e308", 1e308),
        ("1e+309", None),
        ("-1E309", None),
        ("1e-400", 0.0),
    ],
)
def test_numbers_that_no_64_bits_hold_are_refused(text: str, number: float | None) -> None:
    for around in ("{}", '{{"images": [{}, "000000000000000000000"]}}', '["1e000", {}]'):
        content = around.format(text).encode()
        if number is None:
            with pytest.raises(UserError, match=r"x\.json: not valid JSON"):
                parse_json(Path("x.json"), content)
        else:
            assert repr(number) in repr(parse_json(Path("x.json"), content))


WRITER = """
import sys
from pathlib import Path
from vse.pipeline.files.writing import open_atomic
with open_atomic(Path(sys.argv[1]), sync=sys.argv[2] == "sync") as stream:
    stream.write(b"half")
    stream.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a process which is writing a file and waits."""
    processes = []

    def start(path: Path, sync: str = "sync") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, str(path), sync]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline() == "writing\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_rest_of_a_killed_writer_alone_is_removed(tmp_path: Path, writer: Callable[..., subprocess.Popen[str]]) -> None:
    path = tmp_path / "file"
    killed = writer(path)
    killed.kill()
    killed.wait()
    living = writer(path)
    assert len(os.listdir(tmp_path)) == 1, "the second writer has removed what the first one left"
    write_bytes(path, b"new")
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 2
    assert f"-{living.pid}." in names[0]
    assert living.communicate("")[0] == ""
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"half", ["file"])


@pytest.mark.parametrize(("idle_hours", "locked", "stays"), [(0, False, True), (30, True, True), (30, False, False)])
def test_a_writer_in_another_container_keeps_its_temporary(idle_hours: int, locked: bool, stays: bool, tmp_path: Path) -> None:
    """Its process id has no meaning here: its file is removed after a day without a change, unless it is locked."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    temporary = tmp_path / f".file.{socket.gethostname()}.0123abcd-{gone.pid}.x.tmp"
    with temporary.open("wb") as stream:
        if locked:
            fcntl.flock(stream, fcntl.LOCK_EX)
        os.utime(temporary, (time.time() - 3600 * idle_hours,) * 2)
        write_bytes(tmp_path / "file", b"new")
    assert temporary.exists() == stays


def test_what_others_call_their_temporaries_stays(tmp_path: Path) -> None:
    names = [".file.another-program.tmp", ".file.tmp", "file.x.tmp", ".file.host-12x.y.tmp"]
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    write_bytes(tmp_path / "file", b"new")
    remove_temporary_files(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "file"])


def test_a_demo_that_was_killed_is_cleared_by_the_next(tmp_path: Path, writer: Callable[..., subprocess.Popen[str]]) -> None:
    images = tmp_path / "data" / "images"
    images.mkdir(parents=True)
    for path in (images / "demo_009999.jpg", tmp_path / "data" / "dataset.json"):
        process = writer(path, "no sync")
        process.kill()
        process.wait()
    assert len(list(tmp_path.rglob("*.tmp"))) == 2
    create_demo(tmp_path / "data", 6)
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(os.listdir(images)) == 6


def special(kind: str, path: Path) -> Path:
    """Create a path that is not a plain file."""
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "device" and os.geteuid() == 0:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 7))  # as /dev/full
    else:
        path.symlink_to("/dev/full" if kind == "device" else path)
    return path


@pytest.mark.parametrize("through_link", [False, True])
@pytest.mark.parametrize("kind", ["folder", "FIFO", "socket", "device", "circle"])
def test_only_plain_files_are_replaced(kind: str, through_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = out = special(kind, Path("x"))
    before = os.lstat(path)
    if through_link:
        out = Path("link")
        out.symlink_to(path)
    for write in (lambda: write_bytes(out, b"new"), lambda: check_output(out, ANYTHING)):
        with pytest.raises(UserError, match=f"cannot write {out}: it is a .*{kind}"):
            write()
    after = os.lstat(path)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert not list(Path().glob(".*"))


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "file"
    link.symlink_to("elsewhere/file")
    for content in (b"first", b"second"):  # a link to nothing yet, and one to a file
        assert write_bytes(link, content) == link
        assert target.read_bytes() == content
        assert link.is_symlink()
    assert os.listdir(tmp_path / "elsewhere") == ["file"]


def test_many_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: write_bytes(tmp_path / "file", bytes([k]) * 1000), range(20)))
    assert len(set((tmp_path / "file").read_bytes())) == 1
    assert os.listdir(tmp_path) == ["file"]
