from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vse.pipeline.files.archives import unpack_member

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "_vse" / "vse"
ROOMS = {"pipeline": set(), "features": {"pipeline"}, "eval": {"pipeline"}, "training": {"pipeline", "features", "eval"}}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_to_be_imported_under_its_folder_s_name(room: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"import this package as vse.{room}" in done.stderr


def test_each_requirement_of_users_has_a_lower_bound_that_the_nightly_job_installs(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "lowest_versions.py", tmp_path / ".ci")
    (tmp_path / "setup.cfg").write_text((ROOT / "setup.cfg").read_text().replace("pandas>=2.3", "pandas"))
    command = [[sys.executable, folder / ".ci" / "lowest_versions.py"] for folder in (ROOT, tmp_path)]
    done, failed = (subprocess.run(line, capture_output=True, text=True, check=False) for line in command)
    assert done.returncode == 0, done.stderr
    pinned = [Requirement(line) for line in done.stdout.splitlines()]
    assert {"torch", "transformers", "flask"} <= {requirement.name for requirement in pinned}
    assert all([one.operator for one in requirement.specifier] == ["=="] for requirement in pinned)
    assert failed.returncode == 1
    assert "no lower bound of pandas" in failed.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what an install needs, in a folder named ``vse``, which is what a clone of the repository may be called."""
    copy = tmp_path_factory.mktemp("parent") / "vse"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.h5", "*.shards")
    for name in ["_vse", "config", *ROOMS]:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ["setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, copy)
    return copy


def python(folder: Path, code: str, *options: str) -> str:
    """What a program prints that runs in ``folder`` and knows of no install of ours but what it names."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(source: Path, call: str) -> None:
    """Run one call of the build backend, as pip does it, in the folder of the source."""
    python(source, f"from setuptools import build_meta; build_meta.{call}")


def install(source: Path, mode: str, out: Path) -> Path:
    """Install without pip: a wheel, plain or editable, unpacked into a folder that serves as ``site-packages``."""
    calls = {
        "plain": f"build_wheel({str(out)!r})",
        "editable": f"build_editable({str(out)!r})",
        "strict": f"build_editable({str(out)!r}, {{'editable_mode': 'strict'}})",
    }
    build(source, calls[mode])
    (wheel,) = out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(out / "site")
    return out / "site"


@pytest.fixture(scope="module")
def plain(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``site-packages`` of a plain wheel. Read only."""
    return install(clone, "plain", tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["plain", "editable", "strict"])
def test_vse_imports_beside_a_folder_of_that_name_however_it_is_installed(
    mode: str, plain: Path, clone: Path, tmp_path: Path
) -> None:
    site = plain if mode == "plain" else install(clone, mode, tmp_path / "wheels")
    (tmp_path / "with an empty one" / "vse").mkdir(parents=True)
    code = (
        f"import site; site.addsitedir({str(site)!r}); import vse, vse.{', vse.'.join(ROOMS)}, vse.eval.ranking, vse.presets\n"
    )
    code += "print(vse.__version__, vse.__file__)\n"
    code += "import pkgutil; assert ('snakemake_logger_plugin_vse', True) in [module[1:] for module in pkgutil.iter_modules()]"
    for folder in [tmp_path, tmp_path / "with an empty one", clone, clone.parent]:
        version, file = python(folder, code, "-S").split(maxsplit=1)
        assert version == "0.1.0"
        assert Path(file.strip()).is_relative_to(site if mode == "plain" else clone)


@pytest.mark.slow
def test_a_wheel_works_without_the_repository(plain: Path, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(plain)!r})
import numpy as np
import vse
from vse.cli import main
assert vse.__file__.startswith({str(plain)!r})
for line in ("doctor", "new loss my_loss.py", "check my_loss.py:my_loss"):
    try:
        main(line.split())
    except SystemExit as stop:
        assert not stop.code
print(vse.evaluate(np.eye(4), np.eye(4), image_of_caption=range(4)))
"""
    output = python(tmp_path, code)
    for expected in ("Python", "vse check my_loss.py:my_loss", "is sound", "100.0"):
        assert expected in output


@pytest.mark.parametrize("wanted", [None, "cpu"])
def test_faiss_is_for_gpus_where_it_can_be_or_for_processors_alone(
    wanted: str | None, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VSE_FAISS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("VSE_FAISS", wanted)
    build(clone, f"prepare_metadata_for_build_wheel({str(tmp_path)!r})")
    (metadata,) = tmp_path.rglob("METADATA")
    requirements = [Requirement(line) for line in message_from_string(metadata.read_text()).get_all("Requires-Dist", [])]
    needed = {one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})}
    here = "cpu" if wanted == "cpu" or (sys.platform, platform.machine()) != ("linux", "x86_64") else "gpu"
    assert {name for name in needed if name.startswith("faiss")} == {f"faiss-{here}"}
    assert needed > {"torch", "numpy", "click", "snakemake"}


@pytest.mark.nightly
@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_rooms_and_the_sdist_makes_the_same_wheel(
    plain: Path, clone: Path, tmp_path: Path
) -> None:
    kinds = {".py", ".yaml", ".csv", ".html", ".js"}
    expected = {Path(room, path.relative_to(clone / room)) for room in ROOMS for path in (clone / room).rglob("*")}
    expected |= {Path("presets", path.relative_to(clone / "config")) for path in (clone / "config").rglob("*")}
    expected |= {Path(path.name) for path in (clone / "_vse" / "vse").glob("*.py")}
    packed = {path.relative_to(plain / "vse") for path in (plain / "vse").rglob("*")}
    assert {path for path in packed if path.suffix in kinds} == {path for path in expected if path.suffix in kinds}

    (tmp_path / "again").mkdir()
    build(clone, f"build_sdist({str(tmp_path)!r})")
    (archive,) = tmp_path.glob("*.tar.gz")
    source = unpack_member(archive, archive.name.removesuffix(".tar.gz"), tmp_path / "unpacked", max_bytes=10**9)
    again = install(source, "plain", tmp_path / "again")
    files = [
        {path.relative_to(site) for path in site.rglob("*") if "__pycache__" not in path.parts} for site in (plain, again)
    ]
    assert files[0] == files[1]


def test_no_module_unpickles() -> None:
    for path in [*PACKAGE.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]:
        text = path.read_text()
        assert "import pickle" not in text
        assert "weights_only=False" not in text


def test_the_image_of_jobs_leaves_out_what_the_workflow_makes_and_its_extras_exist() -> None:
    """Without this, an image would hold data sets and caches, and pip would only warn about an unknown extra."""
    made = (ROOT / ".gitignore").read_text().partition("# python")[0].splitlines()[1:]
    assert {line.strip("/") for line in made} <= set((ROOT / ".dockerignore").read_text().splitlines())
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", (ROOT / "Containerfile").read_text(), re.M)
    assert set(extras.split(",")) <= set(setup["options.extras_require"])
