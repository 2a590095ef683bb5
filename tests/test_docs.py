"""Every command in the documentation runs, every command has its page, and the site builds."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import vse
from tests.docs import experiments
from tests.docs.pages import OTHER, ROOT, RUN, Block, blocks, console_scripts, examples, pages
from tests.docs.world import World

# Commands that no test here runs, by how they begin.
SKIPPED = {
    "pip install": "installs packages; .ci/run does so in a fresh environment",
    "python3 -m venv": "the same",
    ". .venv/bin/activate": "the same",
    "pytest -n auto": "these tests; .ci/run runs them as the README says",
    "cp results/tables/summary_f8k.csv": "copies what the line before it makes, which is a dry run here",
}
# Pages whose python blocks, and those of the docstrings in them, are the cells of one notebook; elsewhere each is a program.
NOTEBOOKS = ("docs/notebook.md", "docs/python.md", "docs/howto/adapters.md")
# Pages whose commands run with each change: the front door, and a loss of one's own. All others run at night.
WITH_EACH_CHANGE = {f"docs/{name}.md" for name in ("index", "quickstart", "tutorial", "python", "howto/loss")} | {"README.md"}
EXAMPLES = re.compile(r"`(vse-[a-z]+(?: [^`]*)?)`")


ALL = [block for page in pages() for block in blocks(page)]


def command(script: str) -> click.Command:
    """The click command that a console script calls, which is ``entry_point(command)``."""
    module, _, name = console_scripts()[script].partition(":")
    entry = inspect.unwrap(getattr(importlib.import_module(module), name))  # the shape checker wraps it
    found = inspect.getclosurevars(entry).nonlocals["command"]
    assert isinstance(found, click.Command)
    return found


def read(page: str | Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def is_shown(line: str, output: str, numbers_vary: bool) -> bool:
    """Return whether a line of the documentation, in which … stands for anything, is one of the output."""
    pattern = ".*".join(re.escape(part) for part in line.split("…"))
    if numbers_vary:
        pattern = re.sub(r"(\\-)?\d([\d,]|\\\.(?=\d))*", r"-?[\\d.,]+", pattern)
        pattern = re.sub(r"(\\ )+", " +", pattern)
    return re.search(rf"^{pattern}$", output, re.M) is not None


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A copy of the repository in which two models of the demo have been trained."""
    made = World(tmp_path_factory.mktemp("docs"))
    try:
        made.run("snakemake --cores all results/demo_vsepp.json results/demo_vse0.json")
        yield made
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in WITH_EACH_CHANGE else pytest.mark.nightly) for page in pages()]
)
def test_the_commands_of_a_page_run(page: str, world: World) -> None:
    world.begin()
    there = blocks(page)
    cells = [block for block in there if page in NOTEBOOKS and block.language == "python" and not block.title]
    if page in NOTEBOOKS:
        assert cells
        world.do_cells([*cells, *examples(page)])
    for block in there:
        if block in cells:
            continue
        if block.title or block.language in RUN:
            try:
                output = world.do(block, tuple(start.removesuffix("\n") for start in SKIPPED if block_starts(block, start)))
            except AssertionError as error:
                raise AssertionError(f"{page}:{block.line}: {error}") from None
            if (how := block.says("same output")) is not None:
                for line in block.output:
                    assert is_shown(line, output, numbers_vary=bool(how)), f"{page}:{block.line}: {line!r} is not in\n{output}"
    records = list((world.folder / "runs").glob("*/seed-*/run.json"))
    assert records
    assert all(json.loads(record.read_text())["state"] == "finished" for record in records)


def block_starts(block: Block, start: str) -> bool:
    """Whether a command of a block begins so; with a line feed at its end, whether one is all of it."""
    parts = [f"{part}\n" for line in block.commands for part in line.split(" && ")]
    return any(part.startswith(start) for part in parts)


def test_every_page_is_in_the_navigation() -> None:
    written = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert written | {"README.md"} == set(pages())


def test_the_page_of_experiments_has_what_their_files_say() -> None:
    said = experiments.PAGE.read_text(encoding="utf-8")
    assert said == experiments.written(), "python -m tests.docs.experiments regenerates it"


def test_every_block_says_what_it_is_so_that_no_command_hides() -> None:
    for block in ALL:
        assert block.language in (*RUN, *OTHER), f"{block.page}:{block.line}"
        if block.language in ("yaml", "diff"):
            assert block.title, f"{block.page}:{block.line}: a file without its name"
        if block.language == "text":
            first = block.text.split()[0]
            commands = {*console_scripts(), "snakemake", "pip", "python", "torchrun", "$"}
            assert first not in commands, f"{block.page}:{block.line}"


@pytest.mark.parametrize("script", console_scripts())
def test_every_command_says_its_version(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, name = console_scripts()[script].partition(":")
    with pytest.raises(SystemExit) as stop:
        getattr(importlib.import_module(module), name)(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"{script} {vse.__version__}\n"


@pytest.mark.parametrize("script", console_scripts())
def test_every_command_has_a_page_with_an_example(script: str) -> None:
    page = f"docs/commands/{script}.md"
    assert any(line.startswith(f"{script} ") for block in blocks(page) for line in block.commands)
    if script != "vse":
        assert described_commands(page) == {script: command(script)}


def test_the_options_of_every_command_of_vse_are_on_one_page() -> None:
    described = [found for page in (ROOT / "docs/commands").glob("*.md") for found in described_commands(page).values()]
    group = command("vse")
    assert isinstance(group, click.Group)
    commands = [group.get_command(click.Context(group), name) for name in group.list_commands(click.Context(group))]
    assert sorted(described, key=id) == sorted(commands, key=id)


def described_commands(page: str | Path) -> dict[str, click.Command]:
    """Return the commands whose options a page lists, by their names there."""
    places = re.findall(r"^::: mkdocs-click\n    :module: (.+)\n    :command: (.+)\n    :prog_name: (.+)$", read(page), re.M)
    return {name: getattr(importlib.import_module(module), entry) for module, entry, name in places}


def test_commands_and_options_named_in_the_text_exist() -> None:
    found = 0
    for page in pages():
        for example in EXAMPLES.findall(read(page).replace("\n", " ")):
            name, *words = shlex.split(example)
            if name not in console_scripts():
                known = ("vse-pipeline", "vse-dataset", "vse-features", "vse-bundle", "vse-noise", "vse-choices")
                assert name in known, f"{page}: {example}"
                continue
            called = command(name)
            if isinstance(called, click.Group) and words and re.fullmatch(r"[a-z][a-z_-]*\w", words[0]):
                if any(line.startswith(f"{name} {words[0]} ") for block in blocks(page) for line in block.commands):
                    continue  # it is run, perhaps because the page itself adds it
                below = called.get_command(click.Context(called), words[0])
                assert below is not None, f"{page}: {example}"
                called = below
            if not isinstance(called, click.Group):
                known = {name for option in called.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
                assert {word for word in words if word.startswith("--")} <= known, f"{page}: {example}"
            found += 1
    assert found > 50
