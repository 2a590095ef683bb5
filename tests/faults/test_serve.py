"""``vse-serve`` is killed or stopped while it starts, answers and stops: nothing is written, and it starts again at once."""

from __future__ import annotations

import json
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from tests.faults.suite import StartSuite

# Imports are made once, and each server is a fork. Its address, and then its exit code, are lines of the standard output.
FORKS = """
import json, os, sys
import vse.training.serve.app, vse.training.serve.answers, vse.training.serve.server, vse.features.backbones.device
from vse.training.serve.cli import serve_main
for line in sys.stdin:
    process = os.fork()
    if process == 0:
        folder, *arguments = json.loads(line)
        os.chdir(folder)
        serve_main(arguments)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
END_S = 30  # for a machine that is busy; 5 are promised for one that is not
Answer = tuple[int, object]  # a status and hits
MOMENTS = ("start", "request", "stop")
QUERY = "/search?" + urlencode({"q": "a red circle", "as": "json", "k": 3})


class Servers:
    """Processes of ``vse-serve``, one after the other, in an empty folder."""

    def __init__(self, run: Path, folder: Path) -> None:
        self._run, self.folder, self._errors = run, folder / "empty", folder / "errors"
        self.folder.mkdir()
        with self._errors.open("w") as errors:
            self._forks = subprocess.Popen(
                [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
            )
        self.process, self._read = 0, 0

    def start(self, port: int) -> None:
        command = [str(self.folder), str(self._run), "--port", str(port), "--device", "cpu", "--threads", "1"]
        self._forks.stdin.write(f"{json.dumps(command)}\n".encode())
        self.process = int(self.line())

    def line(self) -> str:
        """Return the next line that the servers print: an address, or an exit code."""
        assert self.prints_within(END_S), "it hangs"
        return self._forks.stdout.readline().decode().strip()

    def prints_within(self, seconds: float) -> bool:
        return bool(select.select([self._forks.stdout], [], [], seconds)[0])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server, whose fork is reaped only after its exit code is printed."""
        subprocess.run(["kill", f"-{number.value}", str(self.process)], check=False, stderr=subprocess.DEVNULL)

    def errors(self) -> str:
        text = self._errors.read_text()
        before, self._read = self._read, len(text)
        return text[before:]

    def close(self) -> None:
        self._forks.kill()
        self._forks.communicate()


@pytest.fixture
def servers(run: Path, tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(run, tmp_path)
    yield servers
    servers.close()


def ask(url: str) -> Answer:
    """Return the status and the hits of a query; status 0 if there is no connection, or no complete answer."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=END_S)
    try:
        connection.request("GET", QUERY)
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content)["runs"][0]["hits"] if response.status == 200 else None
    except (OSError, HTTPException):
        return 0, None
    finally:
        connection.close()


def end(servers: Servers, moment: str, number: signal.Signals, rng: random.Random) -> tuple[int, list[Future[Answer]]]:
    """Start a server, send a signal at a moment, and return its exit code and the answers to the requests that it had."""
    with ThreadPoolExecutor(8) as pool:
        line, asked = "", []
        if moment == "start":
            servers.prints_within(rng.uniform(0, 0.5))
            servers.send(number)
        else:
            url = servers.line()
            asked = [pool.submit(ask, url) for _ in range(8)]
            servers.prints_within(rng.uniform(0, 0.1))
            if moment == "stop":
                servers.send(signal.SIGTERM)
                servers.prints_within(rng.uniform(0, 0.1))
            servers.send(number)
        while not line.lstrip("-").isdigit():
            line = servers.line()
    return int(line), asked


def fault_of(code: int, moment: str, number: signal.Signals, answers: list[Answer], expected: object) -> str:
    """Return the fault after a signal, or an empty text."""
    allowed = {0, -number} if moment == "start" or number == signal.SIGKILL else {0}
    if code not in allowed | ({130} if number == signal.SIGINT and moment == "start" else set()):
        return f"exit code {code}"
    if any(status == 200 and hits != expected for status, hits in answers):
        return "another answer"
    if any(status not in (0, 200, 503) for status, _ in answers):
        return f"statuses {[status for status, _ in answers]}"
    return ""


@pytest.mark.nightly
def test_a_server_that_ends_at_any_moment_leaves_nothing_and_starts_again(
    servers: Servers, run: Path, suite_of_faults: StartSuite
) -> None:
    suite, rng = suite_of_faults("killed vse-serve", 3), random.Random(0)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    servers.start(0)
    url = servers.line()
    status, expected = ask(url)
    assert status == 200
    servers.send(signal.SIGTERM)
    assert servers.line() == "0"
    port = urlsplit(url).port or 0
    for number in range(suite.n_tries):
        moment = MOMENTS[number % len(MOMENTS)]
        sent = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        servers.start(port)
        code, asked = end(servers, moment, sent, rng)
        fault = fault_of(code, moment, sent, [one.result() for one in asked], expected)
        if {path: path.stat().st_mtime_ns for path in run.rglob("*")} != before or any(servers.folder.iterdir()):
            fault = "a file was written"
        errors = servers.errors()
        if "Traceback" in errors or "cannot be served" in errors:
            fault = errors
        suite.record("wrong" if fault else "harmless", f"{moment}, {sent.name}: {fault}")
    servers.start(port)
    assert ask(servers.line()) == (200, expected), "it starts again"
    servers.send(signal.SIGTERM)
    assert servers.line() == "0"
