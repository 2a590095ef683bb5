"""Where a file comes from: the code that made it, the command, and the date."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import vse

_command: ContextVar[str | None] = ContextVar("_command", default=None)


def running(name: str, arguments: Sequence[str]) -> AbstractContextManager[None]:
    """In this block files say that they were made by this command."""
    return making(shlex.join([name, *arguments]))


@contextmanager
def making(command: str) -> Iterator[None]:
    """In this block files say that they were made by what is typed as ``command``, in a shell or in Python."""
    token = _command.set(command)
    try:
        yield
    finally:
        _command.reset(token)


def made() -> dict[str, Any]:
    """What a file says of its making: ``date`` (UTC), ``command`` (None if Python code called a function that is not
    public), ``code``.

    It differs from one making to the next, so it is part of no key and of nothing that is compared.
    """
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": _command.get(), "code": dict(code())}


@cache
def code(root: Path | None = None) -> dict[str, Any]:
    """The ``version`` of this package and, in a checkout, its ``commit`` and whether files were ``changed`` since.

    ``root`` is the folder that holds the package's folders; by default the one that this file was imported from.
    """
    root = Path(__file__).resolve().parents[1] if root is None else root
    version = {"version": vse.__version__}
    top = _git(root, "rev-parse", "--show-toplevel")
    # An installed copy may lie in the repository of something else.
    if top is None or Path(top).resolve() != root.resolve():
        return version
    commit, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
    if commit is None or status is None:
        return version
    return {**version, "commit": commit, "changed": bool(status)}


def described_code(made_by: object) -> str | None:
    """``vse 0.1.0, commit 0123456789ab (changed)`` for a person; None if what a file says of its code is something else."""
    if not isinstance(made_by, dict) or not isinstance(made_by.get("version"), str):
        return None
    commit = f", commit {str(made_by['commit'])[:12]}" if "commit" in made_by else ""
    return f"vse {made_by['version']}{commit}{' (changed)' if made_by.get('changed') else ''}"


def _git(root: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
