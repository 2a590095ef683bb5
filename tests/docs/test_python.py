"""The page of the Python interface has all of it, and nothing else."""

from __future__ import annotations

import inspect
import re
from pkgutil import resolve_name

import vse
import vse.arguments
import vse.array_inputs
import vse.evaluation
import vse.pipeline.option_types
import vse.runs
from tests.docs.pages import ROOT, blocks, documented, examples

PAGE = "docs/python.md"
SHOWN = documented(PAGE)


def test_the_page_documents_every_public_name_and_no_other() -> None:
    assert {name.rpartition(".")[2] for name in SHOWN} == set(vse.__all__) - {"__version__"}


def test_every_function_has_an_example_that_is_run() -> None:
    assert [block.page for block in examples(PAGE)] == [name for name in SHOWN if inspect.isfunction(resolve_name(name))]
    assert [block.text for block in blocks(PAGE)] == ["import vse\n"]


def test_each_type_in_the_table_exists() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8").partition("The signatures use these types:")[2].partition("\n:::")[0]
    table = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.M)
    modules = (vse.arguments, vse.array_inputs, vse.evaluation, vse.pipeline.option_types, vse.runs)
    for name in re.findall(r"`(\w+)`", " ".join(table)):
        assert any(hasattr(module, name) for module in modules), name
