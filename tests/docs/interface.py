"""The page ``docs/python.md``, made from the docstrings of ``vse.__all__``: ``python -m tests.docs.interface`` writes it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import vse
from tests.docs.pages import ROOT
from vse.calls import signature_text

PAGE = ROOT / "docs" / "python.md"
INTRODUCTION = """\
# Python

The public interface: what `vse.__all__` lists, and nothing else. [In a notebook](notebook.md) shows it at work. `import vse`
is quick: what a function needs is loaded when it is called. Paths may be texts, `pathlib` paths, or what another function
returned. Arguments have the names and defaults of the options of the [commands](commands/vse-data.md); a mistake raises
`vse.UserError` with the line that the command would print.

```python
import vse
```

## Versions

From version 1.0 on, versions follow [semantic versioning](https://semver.org): the first number changes if something that
worked may no longer do so, the second if something was added, the third if a fault was mended. Before 1.0, the second number
stands for the first. Covered are

- the names in `vse.__all__`, their arguments and defaults, the attributes and methods that this page lists, and the columns of
  frames;
- the [commands](commands/vse-data.md), their options, defaults and exit codes;
- the [file formats](formats.md): a newer version reads what an older one wrote, and a file whose layout changes has another
  `version`.

Not covered are modules below `vse` (`vse.train.losses`, for example), texts of errors and of the log, the look of tables and
reports, and the last digits of metrics.
"""
_SECTION = re.compile(r"^(\w+)\n-{3,}\n", re.M)
_TITLES = {"functions": "Functions", "classes": "What they return", "errors": "Errors"}


def written() -> str:
    """The page as the docstrings have it."""
    kinds: dict[str, list[str]] = {"functions": [], "classes": [], "errors": []}
    for name in vse.__all__:
        if name.startswith("__"):
            continue
        value = public(name)
        is_error = isinstance(value, type) and issubclass(value, Exception)
        kinds["errors" if is_error else "classes" if isinstance(value, type) else "functions"].append(name)
    parts = [INTRODUCTION]
    for kind, names in kinds.items():
        parts += [f"## {_TITLES[kind]}\n", *(described(name) for name in names)]
    return "\n".join(parts)


def public(name: str) -> Any:
    """A public name; ``vse.train`` is also a package, and its function is meant."""
    value = getattr(vse, name)
    return inspect.getattr_static(value, "_function").fget(value) if inspect.ismodule(value) else value


def described(name: str) -> str:
    """The part of the page about a name."""
    value = public(name)
    text, *sections = _SECTION.split(inspect.getdoc(value) or "")
    lines = [f"### `vse.{name}`\n"]
    if inspect.isfunction(value):
        lines += ["```text", f"vse.{signature_text(value)}", "```", ""]
    lines += [plain(text), ""]
    for title, content in zip(sections[::2], sections[1::2], strict=True):
        if title == "Examples":
            lines += ["```python", content.rstrip("\n"), "```", ""]
        elif title == "Returns":
            lines += [f"Returns: {lowered(plain(content))}.", ""]
        else:
            heads = {"Parameters": "| argument | |", "Attributes": "| attribute | |", "Raises": "| raises | |"}
            lines += [heads[title], "|---|---|", *rows(content), ""]
    if isinstance(value, type) and not issubclass(value, Exception):
        lines += methods(value)
    return "\n".join(lines)


def rows(content: str) -> Iterator[str]:
    """A row for each entry ``names : text``, whose text may go on in further lines."""
    joined = re.sub(r"\n {4,}", " ", content.strip())
    for line in joined.splitlines():
        names, _, text = line.partition(" : ")
        shown = ", ".join(f"`{name}`" for name in names.split(", "))
        yield f"| {shown} | {plain(text)} |"


def methods(value: type) -> list[str]:
    """The public methods of a class, as a table; empty without any."""
    own = [(name, each) for name, each in vars(value).items() if inspect.isfunction(each) and not name.startswith("_")]
    shown = [f"| `{signature_of_method(each)}` | {plain(inspect.getdoc(each) or '')} |" for _, each in own]
    return ["| method | |", "|---|---|", *shown, ""] if shown else []


def signature_of_method(method: Any) -> str:
    """A method as it is called, without ``self``."""
    return signature_text(method).replace("(self, ", "(").replace("(self)", "()").replace("slice(None, None, None)", "all")


def plain(text: str) -> str:
    """A docstring's text as Markdown: code in single backticks, names of classes and functions as code."""
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text.strip())
    return text.replace("``", "`").replace("|", "\\|")


def lowered(text: str) -> str:
    """Without its capital, as the end of a sentence."""
    return text[:1].lower() + " ".join(text[1:].split())


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
