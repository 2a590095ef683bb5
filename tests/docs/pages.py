"""The documentation as a test reads it: fenced blocks, the commands in them, and what a comment says about a block.

A block with a title is a file of that name, or with the language ``diff`` a change of one. A block without a title is run:
``sh`` line by line, of ``console`` the lines behind ``$``, ``python`` as a program. Comments before a block change that:

- ``<!-- test: skip: REASON -->`` does not run it.
- ``<!-- test: dry-run: REASON -->`` runs its snakemake commands with ``--dry-run``.
- ``<!-- test: replace A by B: REASON -->`` runs it with B for A.
- ``<!-- test: fails -->`` expects exit code 2.
- ``<!-- test: same output -->`` compares the output that is shown with the one that comes.
- ``<!-- test: same output but for numbers -->`` does so, too, but numbers and the width of columns may differ.
"""

from __future__ import annotations

import configparser
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent

ROOT = Path(__file__).parents[2]
RUN = ("sh", "console", "python")
OTHER = ("text", "json", "ini", "yaml", "diff")
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?$')
_DOCUMENTED = re.compile(r"^::: (vse\.\S+)$((?:\n    .*)*)", re.M)
_DIRECTIVE = re.compile(r"^<!-- test: (.+) -->$")
_KNOWN = re.compile(r"skip: .+|dry-run: .+|replace .+? by \S+: .+|fails|same output( but for numbers)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, from the line ``line`` on."""

    page: str
    line: int
    language: str
    title: str
    text: str
    directives: tuple[str, ...]

    def says(self, what: str) -> str | None:
        """What a directive says behind ``what``; None if there is no such one."""
        return next((d.removeprefix(what) for d in self.directives if d.startswith(what)), None)

    @property
    def commands(self) -> list[str]:
        """What is typed; a command that a backslash continues is one."""
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]
        else:
            lines = re.split(r"(?<!\\)\n", self.text.strip())
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def output(self) -> list[str]:
        """The lines of a console that are not typed."""
        return [line for line in self.text.splitlines() if line and not line.startswith("$ ")]


def console_scripts() -> dict[str, str]:
    """The commands of the package, as ``module:function``."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    return {name.strip(): target.strip() for name, target in (line.split("=") for line in lines)}


def pages() -> list[str]:
    """Paths of all pages: in the order of the site, then README.md."""
    nav = re.findall(r":\s+(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    return [*(f"docs/{name}" for name in nav), "README.md"]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page. In README.md a fence has no language: all but the diagram are commands."""
    found: list[Block] = []
    directives: list[str] = []
    lines = iter(enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1))
    for number, line in lines:
        if directive := _DIRECTIVE.match(line):
            assert _KNOWN.fullmatch(directive[1]), f"{page}:{number}: unknown or without a reason: {line}"
            directives.append(directive[1])
        elif fence := _FENCE.match(line):
            text = "\n".join(iter(lambda: next(lines)[1], "```")) + "\n"
            language = fence[1] or ("text" if "──" in text else "sh") if page == "README.md" else fence[1]
            found.append(Block(page, number, language, fence[2] or "", text, tuple(directives)))
            directives = []
        else:
            assert not line.startswith("```"), f"{page}:{number}: not a fence that the tests read: {line}"
            assert not directives, f"{page}:{number}: a directive stands directly before its block"
    return found


def documented(page: str) -> dict[str, str]:
    """What mkdocstrings documents on a page: of each name, such as ``vse.embed``, the options below it."""
    found = _DOCUMENTED.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(dict(found)) == len(found), f"{page}: a name comes twice"
    return dict(found)


def examples(page: str) -> list[Block]:
    """The python blocks in the docstrings that a page shows, in the order of the page."""
    texts = {name: inspect.getdoc(resolve_name(name)) or "" for name in documented(page)}
    return [
        Block(name, 1 + text.count("\n", 0, block.start()), "python", "", dedent(block[1]), ())
        for name, text in texts.items()
        for block in re.finditer(r"^ *```python\n(.*?\n) *```$", text, re.M | re.S)
    ]


def patched(text: str, diff: str) -> str:
    """``text`` with the changes of a diff whose parts begin with ``@@``; the lines of each part occur once."""
    for part in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = part.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if not line.startswith("+"))
        new = "".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(old) == 1, f"{text.count(old)} places for\n{old}"
        text = text.replace(old, new)
    return text
