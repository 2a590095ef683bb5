"""The folders within the rooms: what lies lower imports nothing of what lies higher, and no folder is part of a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each folder, and those of its room that it may import.
_SOLVED_BY = {"kinds", "data", "models", "losses", "adversaries", "run"}
_PREPARED_BY = {*_SOLVED_BY, "solvers", "phrases", "experiment"}
MAY_IMPORT: dict[str, dict[str, set[str]]] = {
    "eval": {
        "defaults": set(),
        "ranking": {"defaults"},
        "files": {"defaults", "ranking"},
        "search": {"defaults", "ranking", "files"},
        "protocols": {"defaults", "ranking", "files", "search"},
        "tables": {"defaults", "ranking", "files", "search", "protocols"},
        "report": {"defaults", "ranking", "files", "search", "protocols"},
        "cli": {"defaults", "ranking", "files", "search", "protocols", "tables", "report"},
    },
    "train": {
        "kinds": set(),
        "data": {"kinds"},
        "models": {"kinds"},
        "losses": {"kinds", "data", "models"},
        "adversaries": {"kinds", "data", "models", "losses"},
        "run": {"kinds", "data", "models"},
        "solvers": _SOLVED_BY,
        "phrases": {*_SOLVED_BY, "solvers"},
        "experiment": {*_SOLVED_BY, "solvers"},
        "prepare": _PREPARED_BY,
        "training": {*_PREPARED_BY, "prepare"},
        "use": {*_PREPARED_BY, "prepare"},
        "named_experiment": {*_PREPARED_BY, "prepare", "training"},
        "serve": {"use"},
        "cli": {*_PREPARED_BY, "prepare", "training", "named_experiment", "use"},
        "__main__": {"cli"},
    },
}
BELOW = {"eval": {"pipeline"}, "train": {"pipeline", "features", "eval"}}


def imported(file: Path) -> Iterator[str]:
    """The modules of ours that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("vse."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vse":
            assert node.level == 0, f"{file}: imports by full name"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def folder_of(file: Path, room: str) -> str:
    first = file.relative_to(ROOT / room).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_folder_imports_only_the_folders_below_it(room: str) -> None:
    allowed, wrong, n_imports = MAY_IMPORT[room], [], 0
    for file in sorted((ROOT / room).rglob("*.py")):
        own = folder_of(file, room)
        if own == "__init__":
            continue
        for module in imported(file):
            parts = module.split(".")
            if parts[1] != room:
                continue
            n_imports += 1
            if parts[2] not in {own, *allowed[own]}:
                wrong.append(f"{file.relative_to(ROOT)} imports {module}")
    assert not wrong
    assert n_imports > 50


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_every_folder_has_its_place(room: str) -> None:
    folders = {folder_of(file, room) for file in (ROOT / room).rglob("*.py")}
    assert folders - {"__init__"} == set(MAY_IMPORT[room])


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    rooms = {
        module.split(".")[1]
        for file in (ROOT / room).rglob("*.py")
        for module in imported(file)
        if not module.startswith("vse.__")
    }
    assert rooms <= {room, *BELOW[room]}
