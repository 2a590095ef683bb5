"""Runs console scripts in forks of one process that has imported them, so that the seconds of their imports are spent once.

A script that is killed takes the fork with it.

As a program: ``forked.py SOCKET vse-train=vse.train.cli:train_main ...`` serves until it is ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

SNAKEMAKE = {"snakemake": "snakemake.cli:main"}
PYTEST = {"pytest": "__main__:pytest_main"}
# What commands import only for some models, in seconds.
LIBRARIES = ("sentence_transformers", "transformers.models.bert.modeling_bert", "open_clip")
CLIENT = """#!{python} -S
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16)))
"""


class Scripts:
    """Stand-ins for the console scripts ``targets`` (name -> module:function), in the folder ``bin``."""

    def __init__(self, targets: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="vse-"))  # short, as the path of a socket must be
        self._targets, self._environment = targets, environment
        self._server: subprocess.Popen[str] | None = None
        self.bin = self._folder / "bin"
        self.bin.mkdir()
        for name in targets:
            script = self.bin / name
            script.write_text(CLIENT.format(python=sys.executable, path=str(self._folder / "socket"), name=name))
            script.chmod(0o755)

    def start(self) -> None:
        """Import the commands; if they were imported before, import what is ours again."""
        if self._server is not None:
            self._server.send_signal(signal.SIGHUP)
            self._ready()
            return
        path, items = self._folder / "socket", [f"{name}={target}" for name, target in self._targets.items()]
        command = [sys.executable, __file__, str(path), *items]
        self._server = subprocess.Popen(command, env=dict(self._environment), stdout=subprocess.PIPE, text=True)
        self._ready()

    def close(self) -> None:
        """End the server and remove the scripts."""
        if self._server is not None:
            self._server.terminate()
            self._server.communicate()
        shutil.rmtree(self._folder)

    def _ready(self) -> None:
        assert self._server is not None
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"


def serve(path: str, targets: list[str]) -> None:
    """Answer calls of the scripts, each in a fork, as long as the tests are there."""
    mains: dict[str, Callable[[], None]] = {}

    def load(*_: object) -> None:
        gc.unfreeze()
        _forget("vse")
        _import_all("vse")  # the commands import what they run when they run
        for item in targets:
            name, _, target = item.partition("=")
            module, _, function = target.partition(":")
            mains[name] = getattr(importlib.import_module(module), function)
        gc.collect()
        gc.freeze()  # a collection in a fork would write to all that it shares with this process, and so copy it
        print("ready", flush=True)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.settimeout(5)
        for library in LIBRARIES:
            with suppress(ImportError):
                importlib.import_module(library)
        load()
        signal.signal(signal.SIGHUP, load)
        tests = os.getppid()
        while os.getppid() == tests:  # else they were killed
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                _answer(connection, mains)
            connection.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def pytest_main() -> None:
    """The command ``pytest``: its tests import what they test themselves, and check its types as they do."""
    for package in ("vse", "jaxtyping", "anyio"):  # the others are plugins of pytest, which reads them first
        _forget(package)
    import pytest

    sys.exit(pytest.main())


def _forget(package: str) -> None:
    """Let the next import of a package and of its modules read their files."""
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            del sys.modules[name]
    importlib.invalidate_caches()


def _import_all(package: str) -> None:
    """Import every module of a package; one whose extra is not installed is left to the command that needs it."""
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        with suppress(ImportError):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def _answer(connection: socket.socket, mains: Mapping[str, Callable[[], None]]) -> None:
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    name, arguments, folder, environment = json.loads(b"".join(iter(lambda: connection.recv(2**16), b"")))
    ended, end = os.pipe()
    signal.signal(signal.SIGCHLD, lambda *_: os.write(end, b" "))
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream, number in zip(streams, (0, 1, 2), strict=True):
            os.dup2(stream, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [name, *arguments]
        code = 1
        try:
            mains[name]()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    waiting = select.poll()
    waiting.register(connection, 0)  # which tells when the script hangs up
    waiting.register(ended, select.POLLIN)
    if all(descriptor != ended for descriptor, _ in waiting.poll()):
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os._exit(1)
    _, status = os.waitpid(worker, 0)
    connection.send(str(os.waitstatus_to_exitcode(status) % 256).encode())
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
