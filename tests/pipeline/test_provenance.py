"""Test the provenance in output files: code, command and date."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import h5py
import pytest

import vse
from tests.pipeline.conftest import succeed
from tests.training.conftest import COMMAND
from vse.eval.cli import eval_main
from vse.pipeline.command import current_provenance, find_code_version, format_code_version
from vse.training.cli import embed_main, report_main, search_main, train_main

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    root = tmp_path / "checkout"
    (root / "pipeline").mkdir(parents=True)
    (root / "pipeline" / "x.py").write_text("1\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    return root


def test_a_checkout_knows_its_commit_and_whether_it_was_changed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_code_version.cache_clear()
    commit = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as within a hook of git
    assert find_code_version(checkout) == {"version": vse.__version__, "commit": commit, "changed": False}
    find_code_version.cache_clear()
    (checkout / "runs").mkdir()
    (checkout / "runs" / "test.h5").touch()
    assert find_code_version(checkout)["changed"] is False, "results are no code"
    find_code_version.cache_clear()
    (checkout / "pipeline" / "x.py").write_text("2\n")
    assert find_code_version(checkout)["changed"] is True
    assert format_code_version(find_code_version(checkout)) == f"vse {vse.__version__}, commit {commit[:12]} (changed)"


@pytest.mark.parametrize("where", [".", "pipeline", "venv/site-packages/vse"])
def test_an_installed_copy_knows_its_version_alone(where: str, checkout: Path, tmp_path: Path) -> None:
    """Also if it lies in the repository of another project."""
    root = tmp_path if where == "." else checkout / where
    root.mkdir(parents=True, exist_ok=True)
    find_code_version.cache_clear()
    assert find_code_version(root) == {"version": vse.__version__}
    assert format_code_version(find_code_version(root)) == f"vse {vse.__version__}"


def test_other_provenance_is_left_out_and_a_function_that_python_calls_has_no_command() -> None:
    assert [format_code_version(written) for written in (None, [], {}, {"version": 3})] == [None] * 4
    assert current_provenance()["command"] is None


def test_runs_results_and_reports_say_what_made_them(cache: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "a run", tmp_path / "r.json"
    succeed(train_main, "--features", cache, "--out", run, *COMMAND, "--set", "train.epochs=1")
    succeed(embed_main, run)
    succeed(eval_main, run / "test.h5", "--bootstrap", 100, "--out", out)
    succeed(report_main, out, "--out", tmp_path / "page.html")
    succeed(search_main, run, "a red circle", "--html", tmp_path / "search.html")
    trained = json.loads((run / "run.json").read_text())["made"]
    assert trained["command"].startswith(f"vse-train --features {cache} --out '{run}' --set model.dim=16")
    assert trained["code"] == find_code_version()
    assert abs(datetime.fromisoformat(trained["date"]) - datetime.now(UTC)) < timedelta(hours=1)
    with h5py.File(run / "test.h5") as file:
        said = json.loads(file.attrs["provenance"])
    assert (said["trained"], said["embedded"]["command"]) == (trained, f"vse-embed '{run}'")
    provenance = json.loads(out.read_text())["provenance"]
    assert provenance["trained"] == trained
    assert provenance["made"]["command"].startswith(f"vse-eval '{run}/test.h5' --bootstrap 100")
    described = str(format_code_version(find_code_version()))
    for name, texts in {
        "page.html": (described, f"{run}/test.h5", "--bootstrap 100"),
        "search.html": (described, "vse-search"),
    }.items():
        page = (tmp_path / name).read_text()
        assert all(text in page for text in texts)
