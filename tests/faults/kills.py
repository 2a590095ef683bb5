"""Kill a Python command right before its k-th change of the file system, so that every state in between can be tried.

As a program it imports the commands once; each line of its input is a call, which runs in a fork.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Forks:
    """Commands that run in forks of one process; ``modules`` are imported once."""

    def __init__(self, modules: Sequence[str]) -> None:
        command = [sys.executable, __file__, *modules]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, target: str, arguments: Sequence[object], log: Path, kill_at: int | None = None) -> tuple[int, int]:
        """Run ``module:function`` with its arguments; returns its exit code and the number of its changes.

        The process is killed before its change number ``kill_at`` (0-based), if it comes so far. ``log`` gets what it prints.
        """
        call = {"target": target, "arguments": [str(each) for each in arguments], "log": str(log), "kill_at": kill_at}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        code, n_changes = json.loads(self._process.stdout.readline())
        return code, n_changes

    def close(self) -> None:
        self._process.communicate()


def _main(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        call = json.loads(line)
        counts, counting = os.pipe()
        child = os.fork()
        if child == 0:
            _run(call, counting)
        os.close(counting)
        n_changes = sum(len(part) for part in iter(lambda pipe=counts: os.read(pipe, 4096), b""))
        os.close(counts)
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), n_changes]), flush=True)


def _run(call: dict[str, Any], counting: int) -> None:
    """Run a call, write a byte for each change, and end the process."""
    handle = os.open(call["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(handle, stream)
    n_changes = 0

    def count(event: str, details: tuple[Any, ...]) -> None:
        nonlocal n_changes
        if event in _CHANGES or (event == "open" and isinstance(details[2], int) and details[2] & _WRITES):
            if n_changes == call["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            n_changes += 1
            os.write(counting, b".")

    sys.addaudithook(count)
    module, _, function = call["target"].partition(":")
    code = 1
    try:
        getattr(importlib.import_module(module), function)(call["arguments"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main(sys.argv[1:])
