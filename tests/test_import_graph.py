"""The graph of imports: each package imports only packages below it, and no module is part of a cycle.

Imports inside functions and under ``TYPE_CHECKING`` count, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW = {"pipeline": [], "features": ["pipeline"], "eval": ["pipeline"], "training": ["pipeline", "features", "eval"]}
# The packages inside each room in their order: a package imports those before it.
LAYERS = {
    "pipeline": ["files", "presets", "dataset", "imports"],
    "features": ["cache", "settings", "backbones", "extractors", "exchange"],
    "eval": ["ranking", "files", "search", "protocols", "tables", "report"],
    "training": [
        "processes",
        "models",
        "losses",
        "data",
        "run",
        "adversaries",
        "solvers",
        "phrases",
        "own_parts",
        "use",
        "share",
        "serve",
    ],
}
MOST_LINES = 400
LONGEST_CHAIN = 19

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the file of every module of the product by its dotted name."""
    found = {f"vse.{file.stem}": file for file in (ROOT / "_vse" / "vse").glob("*.py")}
    for file in (file for room in BELOW for file in (ROOT / room).rglob("*.py")):
        found[".".join(["vse", *file.relative_to(ROOT).with_suffix("").parts])] = file
    return {name.removesuffix(".__init__"): file for name, file in found.items()}


def imported(file: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports by full name"
            for name in node.names:
                yield f"{node.module}.{name.name}"


FILES = modules()


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """The modules that each module imports; ``from package import module`` imports the module."""
    found = {}
    for name, file in FILES.items():
        names = {one if one in FILES else one.rpartition(".")[0] for one in imported(file)}
        found[name] = names & FILES.keys() - {name}
    return found


def test_no_module_is_part_of_a_cycle(graph: Graph) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_chain_of_imports_is_long(graph: Graph) -> None:
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(graph).static_order():
        chains[module] = [*max((chains[one] for one in graph[module]), key=len, default=[]), module]
    longest = max(chains.values(), key=len)
    assert len(longest) <= LONGEST_CHAIN, " <- ".join(longest)


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_rooms_below_it(room: str, graph: Graph) -> None:
    for module in (name for name in graph if f"{name}.".startswith(f"vse.{room}.")):
        assert {".".join(one.split(".")[1:2]) for one in graph[module]} <= {room, *BELOW[room]}, module


@pytest.mark.parametrize("room", LAYERS)
def test_a_package_imports_only_packages_below_it(room: str, graph: Graph) -> None:
    layers = LAYERS[room]
    assert {file.parent.name for file in FILES.values() if file.parent.parent == ROOT / room} == set(layers)
    inside = {name: name.split(".")[2] for name in graph if name.startswith(f"vse.{room}.")}
    for module, own in inside.items():
        above = layers[layers.index(own) + 1 :] if own in layers else []
        assert not {inside[one] for one in graph[module] if one in inside} & set(above), module


def test_no_module_is_long() -> None:
    lengths = {module: len(file.read_text(encoding="utf-8").splitlines()) for module, file in FILES.items()}
    assert {module: length for module, length in lengths.items() if length > MOST_LINES} == {}


@pytest.mark.parametrize("module", sorted(FILES))
def test_a_module_imports_on_windows_too(module: str) -> None:
    """A library that only Unix has is imported in a function or in ``try``, which has a remedy for other systems."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    imported = {name.name.partition(".")[0] for node in tree.body if isinstance(node, ast.Import) for name in node.names} | {
        str(node.module).partition(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level
    }
    assert not imported & {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty"}
