"""Processes of their own that take signals and exit codes, without the seconds that importing torch costs each of them.

They are forked from a server that has imported it once. No annotations are checked in them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["vse.train.training", "vse.train.cli"])


def start(
    main: Callable[[list[str]], None], arguments: list[str], stderr: Path, environment: Mapping[str, str] | None = None
) -> ForkServerProcess:
    """A process that runs a command and writes what it says to a file; to be joined."""
    process = _CONTEXT.Process(target=_run, args=(main, arguments, stderr, dict(environment or {})), daemon=True)
    process.start()
    return process


def run(
    main: Callable[[list[str]], None], arguments: list[str], stderr: Path, environment: Mapping[str, str] | None = None
) -> int:
    """The exit code of a command in a process of its own."""
    process = start(main, arguments, stderr, environment)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(main: Callable[[list[str]], None], arguments: list[str], stderr: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with stderr.open("w") as log:
        os.dup2(log.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    main(arguments)
