"""The page of the Python interface has all of it, and nothing else."""

from __future__ import annotations

import inspect
import re
from pkgutil import resolve_name

import pytest

import vse
from tests.docs.pages import blocks, documented, examples

PAGE = "docs/python.md"
SHOWN = documented(PAGE)


def test_the_page_documents_every_public_name_and_no_other() -> None:
    assert {name.rpartition(".")[2] for name in SHOWN} == set(vse.__all__) - {"__version__"}
    assert [name for name in SHOWN if name.count(".") > 1] == ["vse.runs.train"]
    assert resolve_name("vse.runs.train") is inspect.getattr_static(vse.train, "_function").fget(vse.train)


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_names_every_public_method_of_a_class_and_no_other(name: str) -> None:
    value = resolve_name(name)
    functions = inspect.getmembers(value, inspect.isfunction) if isinstance(value, type) else []
    public = {method for method, _ in functions if not method.startswith("_")}
    own = [method for method in vars(value) if method in public]
    inherited = sorted(public - set(own))
    assert listed("members", name) == own + inherited
    assert listed("inherited_members", name) == inherited


def listed(option: str, name: str) -> list[str]:
    """Return the methods that an option of the page lists for a class."""
    found = re.search(rf"\b{option}: \[(.*)\]", SHOWN[name])
    return found[1].split(", ") if found else []


@pytest.mark.parametrize("name", [name for name in SHOWN if isinstance(resolve_name(name), type)])
def test_the_attributes_that_a_class_documents_have_types(name: str) -> None:
    text = inspect.getdoc(resolve_name(name)) or ""
    for line in text.partition("Attributes:\n")[2].splitlines():
        assert re.match(r"        \S|    \w+ \(\S.*\): \S", line), line


def test_every_function_has_an_example_that_is_run() -> None:
    assert [block.page for block in examples(PAGE)] == [name for name in SHOWN if inspect.isfunction(resolve_name(name))]
    assert [block.text for block in blocks(PAGE)] == ["import vse\n"]
