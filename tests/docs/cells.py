"""The python blocks of a page as the cells of one notebook: ``python -m tests.docs.cells FILE`` runs them in order.

The value of a cell's last line is shown as a notebook shows it, as HTML where it can be.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def run_cells(cells: Iterable[tuple[str, str]]) -> None:
    """Run cells, each with the place where it stands, in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for place, text in cells:
        tree = ast.parse(text, place)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, place, "exec"), names)
        if isinstance(last, ast.Expr):
            show(eval(compile(ast.Expression(last.value), place, "eval"), names))


def show(value: object) -> None:
    """Print a value; what has HTML must be able to make it."""
    if value is not None:
        as_html = getattr(value, "_repr_html_", None)
        assert as_html is None or as_html().count("<")
        print(repr(value))


if __name__ == "__main__":
    run_cells(json.loads(Path(sys.argv[1]).read_text()))
