"""The page of the Python interface has all of it, and nothing else."""

from __future__ import annotations

import inspect
from pkgutil import resolve_name

import vse
from tests.docs.pages import blocks, documented, examples

PAGE = "docs/python.md"
SHOWN = documented(PAGE)


def test_the_page_documents_every_public_name_and_no_other() -> None:
    assert {name.rpartition(".")[2] for name in SHOWN} == set(vse.__all__) - {"__version__"}


def test_every_function_has_an_example_that_is_run() -> None:
    assert [block.page for block in examples(PAGE)] == [name for name in SHOWN if inspect.isfunction(resolve_name(name))]
    assert [block.text for block in blocks(PAGE)] == ["import vse\n"]
