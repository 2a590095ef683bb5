"""Runs scripts in forks of one process that has imported them, so that the seconds of their imports are spent once.

A script that is killed takes the fork with it.

As a program: ``forked.py SOCKET PID vse-train=vse.training.cli:train_main ...`` serves until it, or the process PID, is ended.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

SNAKEMAKE = {"snakemake": "snakemake.cli:main"}
PYTEST = {"pytest": "__main__:pytest_main"}
PYTHON = {"python": "__main__:python_main"}
TORCHRUN = {"torchrun": "torch.distributed.run:main"}
# What commands import only for some models, in seconds.
LIBRARIES = ("sentence_transformers", "transformers.models.bert.modeling_bert", "open_clip")
_first: set[str] = set()  # modules of the package before pages of the documentation add parts to it
CLIP_TINY = Path(__file__).with_name("clip_tiny.json")  # a network of open_clip that takes no time
# The C modules alone, whose import takes half the time.
CLIENT = """#!{python} -IS
import _socket, marshal, os, sys

server = _socket.socket(_socket.AF_UNIX)
server.connect({path!r})
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
server.sendmsg([b" "], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
server.sendall(marshal.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]))
server.shutdown(_socket.SHUT_WR)
sys.exit(int(server.recv(16)))
"""


class Scripts:
    """Stand-ins for the console scripts ``targets`` (name -> module:function), in the folder ``bin``.

    They work as long as the process ``lifetime`` lives, which is this one unless another one is named.
    """

    def __init__(self, targets: Mapping[str, str], environment: Mapping[str, str], lifetime: int | None = None) -> None:
        self._lifetime = lifetime or os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="vse-"))  # short, as the path of a socket must be
        self._targets, self._environment = targets, environment
        self._server: int | None = None  # the id of its process
        self._lines: IO[str] | None = None  # what it prints
        self.bin = self._folder / "bin"
        self.bin.mkdir()
        for name in targets:
            script = self.bin / name
            script.write_text(CLIENT.format(python=sys.executable, path=str(self._folder / "socket"), name=name))
            script.chmod(0o755)

    def start(self) -> None:
        """Import the commands; if they were imported before, import what is ours again."""
        if self._server is not None:
            os.kill(self._server, signal.SIGHUP)
        else:
            path, items = self._folder / "socket", [f"{name}={target}" for name, target in self._targets.items()]
            command = [sys.executable, __file__, str(path), str(self._lifetime), *items]
            read, write = os.pipe()
            streams = [(os.POSIX_SPAWN_DUP2, write, 1)]
            self._server = os.posix_spawn(sys.executable, command, dict(self._environment), file_actions=streams)
            os.close(write)
            self._lines = os.fdopen(read)
        assert self._lines.readline() == "ready\n"

    def close(self) -> None:
        """End the server and remove the scripts, unless the server is to outlive this process."""
        if self._lines is not None:
            self._lines.close()
        if self._lifetime != os.getpid():
            return
        if self._server is not None:
            os.kill(self._server, signal.SIGTERM)
            os.waitpid(self._server, 0)
        shutil.rmtree(self._folder)


def serve(path: str, lifetime: int, targets: list[str]) -> None:
    """Answer calls of the scripts, each in a fork, as long as the process ``lifetime`` lives."""
    mains: dict[str, Callable[[], Any]] = {}

    def load(*_: object) -> None:
        gc.disable()  # it would go over millions of objects again and again while modules are imported
        _forget("vse")
        _import_all("vse")  # the commands import what they run when they run
        for kind in ("datasets", "features", "experiments", "ladders"):
            importlib.import_module("vse.pipeline.presets.preset_files").list_preset_names(kind)  # which keeps the contents
        if not _first:
            _first.update(_modules_of("vse"))
        for item in targets:
            name, _, target = item.partition("=")
            module, _, function = target.partition(":")
            mains[name] = getattr(importlib.import_module(module), function)
        gc.enable()
        gc.collect()
        gc.freeze()  # a collection in a fork would write to all that it shares with this process, and so copy it
        print("ready", flush=True)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        for library in LIBRARIES:
            with suppress(ImportError):
                importlib.import_module(library)
        with suppress(ImportError):
            importlib.import_module("open_clip").add_model_config(CLIP_TINY)
        importlib.import_module("snakemake.cli").get_argument_parser()  # which finds Snakemake's plugins
        load()
        signal.signal(signal.SIGHUP, load)
        ended, end = os.pipe()
        signal.signal(signal.SIGCHLD, lambda *_: os.write(end, b" "))
        waiting = select.poll()
        waiting.register(server, select.POLLIN)
        waiting.register(ended, select.POLLIN)
        workers: dict[int, socket.socket] = {}  # by process id
        while _is_alive(lifetime):
            for descriptor, _ in waiting.poll(5000):
                if descriptor == server.fileno():
                    connection, _ = server.accept()
                    if (worker := _start(connection, mains)) is not None:
                        workers[worker] = connection
                        waiting.register(connection, 0)  # which tells when the script hangs up
                elif descriptor == ended:
                    os.read(ended, 4096)
                else:
                    waiting.unregister(descriptor)
                    (pid,) = (pid for pid, script in workers.items() if script.fileno() == descriptor)
                    os.kill(pid, signal.SIGKILL)
            _send_codes(workers, waiting)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def pytest_main() -> None:
    """The command ``pytest``: its tests import parts that a page has added again, and check their types as they do."""
    for name in _modules_of("vse") - _first:
        del sys.modules[name]
    for package in ("jaxtyping", "anyio"):  # plugins of pytest, which reads them first
        _forget(package)
    import pytest

    sys.exit(pytest.main())


def python_main() -> None:
    """The command ``python`` with a file, with ``-m`` and a module, or with ``-`` for a program in its input."""
    sys.argv = [argument for argument in sys.argv[1:] if argument != "-u"]
    sys.path.insert(0, str(Path.cwd()))
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-":
        exec(compile(os.fdopen(0).read(), "<stdin>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)


def _modules_of(package: str) -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] == package}


def _forget(package: str) -> None:
    """Let the next import of a package and of its modules read their files."""
    for name in _modules_of(package):
        del sys.modules[name]
    importlib.invalidate_caches()


def _import_all(package: str) -> None:
    """Import every module of a package; one whose extra is not installed is left to the command that needs it."""
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        with suppress(ImportError):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def _start(connection: socket.socket, mains: Mapping[str, Callable[[], Any]]) -> int | None:
    """Run a script in a fork; return its process id, or None if the script was killed before it had sent what to run."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    try:
        name, arguments, folder, environment = marshal.loads(b"".join(iter(lambda: connection.recv(2**16), b"")))
        worker = os.fork()
    except EOFError:
        worker = None
    if worker != 0:
        for stream in streams:
            os.close(stream)
        return worker
    for number in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for stream, number in zip(streams, (0, 1, 2), strict=True):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = shutil.which("python") or sys.executable  # so that what the script starts is a fork, too
    sys.argv = [name, *arguments]
    code = 1
    try:
        sys.exit(mains[name]())
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _send_codes(workers: dict[int, socket.socket], waiting: select.poll) -> None:
    """Send the exit codes of workers that have ended to their scripts."""
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if connection := workers.pop(pid, None):
            with suppress(KeyError):  # of a script that hung up
                waiting.unregister(connection)
            with suppress(OSError):
                connection.send(str(os.waitstatus_to_exitcode(status) % 256).encode())
            connection.close()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
