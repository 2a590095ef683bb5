"""One name, one thing: no class and no module has the name of another one in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("pipeline", "features", "train", "eval")
MODULES = [
    *sorted((ROOT / "_vse/vse").glob("*.py")),
    *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))),
]
SHARED = {"__init__.py", "__main__.py", "cli.py", "base.py"}  # these say the same in every folder


def test_no_module_is_called_like_another() -> None:
    places = defaultdict(list)
    for path in MODULES:
        places[path.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in SHARED} == {}


def test_no_class_is_called_like_another() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
