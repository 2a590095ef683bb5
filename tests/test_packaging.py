from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"pipeline": set(), "features": {"pipeline"}, "eval": {"pipeline"}, "train": {"pipeline", "features", "eval"}}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_to_be_imported_under_its_folder_s_name(room: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"import this package as vse.{room}" in done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_downwards_only(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            rooms = {name.split(".")[1] for name in names if name.startswith("vse.")}
            assert rooms <= ROOMS[room] | {room}, path


def test_presets_and_the_typing_marker_ship_with_the_package() -> None:
    assert files("vse").joinpath("py.typed").is_file()
    assert files("vse.presets").joinpath("config.yaml").is_file()
    assert files("vse.presets").joinpath("experiments", "vsepp.yaml").is_file()


@pytest.mark.parametrize("command", ["pipeline.cli", "features.cli", "train.cli", "eval.cli"])
def test_a_command_s_module_imports(command: str) -> None:
    importlib.import_module(f"vse.{command}")


def test_no_module_is_longer_than_four_hundred_lines_and_none_unpickles() -> None:
    for path in [p for room in ROOMS for p in (ROOT / room).rglob("*.py")]:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        assert "import pickle" not in text
        assert "weights_only=False" not in text
