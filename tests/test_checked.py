"""The checker of types and shapes that conftest.py installs sees every module, and every shape in it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

import vse
from tests import checked
from tests.checked import CheckedLoader

MODULES = [module.name for module in pkgutil.walk_packages(vse.__path__, "vse.") if not module.name.endswith("__main__")]
SHAPE = re.compile(r"\b(Float|Int|UInt|Bool|Num|Real|Shaped)\d*\[")


def functions(name: str) -> Iterator[Callable[..., Any]]:
    """The functions that a module defines, and the methods of its classes."""
    members = list(vars(importlib.import_module(name)).values())
    members += [member for part in members if inspect.isclass(part) for member in vars(part).values()]
    for member in members:
        function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
        if inspect.isfunction(function) and function.__module__ == name:
            yield function


def test_every_module_is_checked() -> None:
    assert [name for name in MODULES if not isinstance(importlib.import_module(name).__spec__.loader, CheckedLoader)] == []


def test_every_annotation_of_a_shape_can_be_resolved() -> None:
    # jaxtyping does not check what it cannot resolve: names that only a type checker imports.
    for function in (function for name in MODULES for function in functions(name)):
        if SHAPE.search(str(function.__annotations__)):
            get_type_hints(function, include_extras=True)


def test_a_wrong_shape_is_refused_where_annotations_are_strings() -> None:
    module = importlib.import_module("vse.eval.ranking.ranks")
    assert module.annotations.compiler_flag, "from __future__ import annotations"
    with pytest.raises(BeartypeCallHintViolation, match="n dim"):
        module.check_finite("images", torch.zeros(3))


def test_the_first_calls_of_each_test_are_checked() -> None:
    check_finite = importlib.import_module("vse.eval.ranking.ranks").check_finite
    for _ in range(checked.CALLS if checked.CALLS < 100 else 100):
        check_finite("images", torch.zeros(1, 3))
    checked.begin_test()
    with pytest.raises(BeartypeCallHintViolation, match="n dim"):
        check_finite("images", torch.zeros(3))
