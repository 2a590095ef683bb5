from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.hostile import changed_bytes
from vse.pipeline.errors import UserError
from vse.pipeline.files.archives import unpack_member

GOOD = {"pictures/a.jpg": b"a" * 1000, "pictures/deep/b.jpg": b"b" * 500, "readme.txt": b"not wanted"}


def make_zip(path: Path, members: Mapping[Any, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def make_tar(path: Path, members: Mapping[Any, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zip_entry(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def tar_entry(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def twice(path: Path) -> Path:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore", UserWarning)  # of a duplicate name, which is the point
        for content in (b"one", b"two"):
            archive.writestr("pictures/a.jpg", content)
    return path


def patched(path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    return path


def declaring(path: Path, size: int) -> Path:
    """Write an archive whose directory states ``size`` for its only member, which has 1,000 bytes."""
    make_zip(path, {"pictures/a.jpg": bytes(1000)})
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    assert content[entry + 24 : entry + 28] == (1000).to_bytes(4, "little")
    content[entry + 24 : entry + 28] = size.to_bytes(4, "little")
    path.write_bytes(content)
    return path


MAKERS: dict[str, Callable[[Path], Path]] = {
    "a.zip": lambda path: make_zip(path, GOOD),
    "a.tar": lambda path: make_tar(path, GOOD),
    "a.tar.gz": lambda path: make_tar(path, GOOD),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_folder_or_one_file_is_unpacked_as_the_target(name: str, tmp_path: Path) -> None:
    target = tmp_path / "out" / "images"
    left = tmp_path / "out" / ".images.unpacking" / "content" / "half.jpg"  # of a killed run
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    archive = MAKERS[name](tmp_path / name)
    assert unpack_member(archive, "pictures", target, 1500) == target
    found = {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert found == {"a.jpg": b"a" * 1000, "deep/b.jpg": b"b" * 500}
    assert os.listdir(target.parent) == ["images"]
    assert unpack_member(archive, "pictures/deep/b.jpg", tmp_path / "mine.jpg", 500).read_bytes() == b"b" * 500


def test_the_modes_of_an_archive_are_not_taken_over_and_folders_may_be_members(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {zip_entry("a", stat.S_IFREG | 0o4777): b"a"})
    assert unpack_member(archive, "a", tmp_path / "b", 10).stat().st_mode & 0o7111 == 0
    entries = {zip_entry("pictures/", stat.S_IFDIR | 0o755): b"", "pictures/a.jpg": b"a"}
    assert os.listdir(unpack_member(make_zip(tmp_path / "a.zip", entries), "pictures", tmp_path / "out", 10)) == ["a.jpg"]
    tar = make_tar(tmp_path / "a.tar", {tar_entry("./pictures", tarfile.DIRTYPE): b"", "./pictures/a.jpg": b"a"})
    assert os.listdir(unpack_member(tar, "pictures", tmp_path / "tar", 10)) == ["a.jpg"]


OUTSIDE, KIND, BROKEN = "leads out of the archive", "neither a plain file nor a folder", "not a zip or tar"
EVIL: dict[str, tuple[Callable[[Path], Path], str]] = {
    "zip, parent": (lambda p: make_zip(p, {**GOOD, "../evil": b"x"}), f"member '../evil' .*{OUTSIDE}"),
    "zip, parent inside": (lambda p: make_zip(p, {"pictures/../../evil": b"x"}), OUTSIDE),
    "zip, absolute": (lambda p: make_zip(p, {zipfile.ZipInfo("/tmp/evil"): b"x"}), f"'/tmp/evil' .*{OUTSIDE}"),
    "zip, drive": (lambda p: make_zip(p, {"C:evil": b"x"}), OUTSIDE),
    "zip, backslash": (lambda p: make_zip(p, {"pictures\\..\\evil": b"x"}), OUTSIDE),
    "zip, zero byte": (lambda p: patched(make_zip(p, {"pictures/aX.jpg": b"x"}), b"aX", b"a\0"), OUTSIDE),
    "zip, link": (lambda p: make_zip(p, {**GOOD, zip_entry("l", stat.S_IFLNK | 0o777): b"/etc"}), f"member 'l' .*{KIND}"),
    "zip, fifo": (lambda p: make_zip(p, {zip_entry("f", stat.S_IFIFO | 0o600): b""}), KIND),
    "zip, duplicate": (twice, "member 'pictures/a.jpg' is a duplicate"),
    "zip, bomb": (lambda p: make_zip(p, {"pictures/a": b"\0" * 10**6}), "the 1500 bytes"),
    "zip, sum too large": (lambda p: make_zip(p, {**GOOD, "pictures/c": b"x"}), "'pictures/c' .*1500"),
    "zip, larger than it says": (lambda p: declaring(p, 10), BROKEN),
    "zip, smaller than it says": (lambda p: declaring(p, 1200), "ends 200 bytes too early"),
    "zip, wrong bytes": (lambda p: patched(make_zip(p, GOOD, zipfile.ZIP_STORED), b"aaa", b"abc"), BROKEN),
    "zip, locked": (lambda p: patched(make_zip(p, {"pictures/a": b""}), b"\x14\x00\x00\x00", b"\x14\x00\x01\x00"), BROKEN),
    "zip, a file as folder": (lambda p: make_zip(p, {"pictures/a": b"x", "pictures/a/b": b"y"}), "as .*images: File exists"),
    "tar, parent": (lambda p: make_tar(p, {**GOOD, "../evil": b"x"}), f"member '../evil' .*{OUTSIDE}"),
    "tar, absolute": (lambda p: make_tar(p, {"/tmp/evil": b"x"}), OUTSIDE),
    "tar, symbolic link": (lambda p: make_tar(p, {tar_entry("pictures/l", tarfile.SYMTYPE, "/etc"): b""}), KIND),
    "tar, hard link": (lambda p: make_tar(p, {**GOOD, tar_entry("l", tarfile.LNKTYPE, "readme.txt"): b""}), KIND),
    "tar, device": (lambda p: make_tar(p, {tar_entry("d", tarfile.CHRTYPE): b""}), KIND),
    "tar, fifo": (lambda p: make_tar(p, {tar_entry("f", tarfile.FIFOTYPE): b""}), KIND),
    "tar, duplicate": (lambda p: make_tar(p, {"pictures/a": b"x", "./pictures//a": b"y"}), "is a duplicate"),
    "tar, bomb": (lambda p: make_tar(p, {"pictures/a": b"\0" * 10**6}), "the 1500 bytes"),
    "no archive": (lambda p: (p.write_bytes(b"<html>"), p)[1], BROKEN),
    "empty": (lambda p: (p.write_bytes(b""), p)[1], BROKEN),
    "cut": (lambda p: (make_tar(p, GOOD), p.write_bytes(p.read_bytes()[:60]), p)[2], BROKEN),
    "nothing wanted": (lambda p: make_zip(p, {"pictures2/a": b"x"}), "no file 'pictures'"),
}


@pytest.mark.parametrize("case", EVIL)
def test_an_archive_that_is_not_sound_leaves_nothing(case: str, tmp_path: Path) -> None:
    make, message = EVIL[case]
    archive = make(tmp_path / "evil.tar.gz")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=f"evil.tar.gz.*{message}"):
        unpack_member(archive, "pictures", tmp_path / "out" / "images", 1500)
    assert os.listdir(tmp_path / "out") == []
    assert sorted(os.listdir(tmp_path)) == ["evil.tar.gz", "out"]


@pytest.mark.parametrize("name", MAKERS)
@settings(phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_any_bytes_of_an_archive_are_unpacked_or_leave_nothing(name: str, data: st.DataObject, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.rmtree(work, ignore_errors=True)
    (work / "out").mkdir(parents=True)
    archive = MAKERS[name](work / name)
    archive.write_bytes(data.draw(changed_bytes(archive.read_bytes())))
    unpacked = False
    with suppress(UserError):
        unpack_member(archive, "pictures", work / "out" / "images", 1500)
        unpacked = True
    assert os.listdir(work / "out") == (["images"] if unpacked else [])
    assert sorted(os.listdir(work)) == sorted([name, "out"])


ON_A_SMALL_DISK = """
import resource, sys
from pathlib import Path
from vse.pipeline.files.archives import unpack_member
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
unpack_member(Path("a.zip"), "pictures", Path("images"), 10**6)
"""


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    """Unpack in a child process whose files may not grow beyond 10,000 bytes."""
    make_zip(tmp_path / "a.zip", {"pictures/a": b"fits", "pictures/b": b"\0" * 20_000})
    done = subprocess.run([sys.executable, "-c", ON_A_SMALL_DISK], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "cannot unpack a.zip as images: File too large" in done.stderr
    assert os.listdir(tmp_path) == ["a.zip"]
