"""Let the page of the Python interface display docstrings as Python has them, with the arguments that options describe."""

from __future__ import annotations

import inspect
from pkgutil import resolve_name
from typing import Any

import griffe


class DescribedArguments(griffe.Extension):
    """Replace the docstrings of functions that ``describe_arguments`` completes."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if any("describe_arguments" in str(decorator.value) for decorator in func.decorators) and func.docstring:
            func.docstring.value = inspect.getdoc(resolve_name(func.path))
