"""The server on a port of this machine: what it is called, what it refuses unread, and how it ends."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import flask
import pytest

from tests.train.serve.running import running
from vse.pipeline.errors import UserError
from vse.train.serve.cli import serve_main
from vse.train.serve.server import PageServer, is_loopback, trusted_hosts

CODE = "from vse.train.serve.cli import serve_main; serve_main()"


def test_it_answers_on_the_port_that_it_names(app: flask.Flask) -> None:
    with running(app) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        with urlopen(url) as answer:
            assert answer.status == 200
            assert answer.headers["Server"] is None
            assert "Search demo" in answer.read().decode()
    with pytest.raises(OSError, match="refused"):
        urlopen(url)


def test_a_request_that_is_much_too_long_is_refused_unread(app: flask.Flask) -> None:
    with running(app) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.putrequest("POST", "/search")
        connection.putheader("Content-Length", str(10**12))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


def test_a_taken_port_is_one_line(app: flask.Flask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--host 127.0.0.1 --port {port}: cannot be served at"):
            PageServer(app, "127.0.0.1", port, 1000)
    with pytest.raises(UserError, match="--host no.such.host.invalid --port 0: cannot be served at"):
        PageServer(app, "no.such.host.invalid", 0, 1000)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("192.168.1.4", False)],
)
def test_only_on_loopback_is_the_name_of_the_host_checked(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
    trusted = trusted_hosts(host)
    assert (trusted is not None) == loopback
    if trusted is not None:
        assert {"localhost", "127.0.0.1", "[::1]"} <= set(trusted)


def test_check_loads_everything_answers_one_query_and_ends(
    vectors_run: Path, sets_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        serve_main([str(vectors_run), str(sets_run), "--check", "--port", "0", "--device", "cpu"])
    captured = capsys.readouterr()
    assert stop.value.code == 0, captured.err
    lines = [line.split("\t") for line in captured.out.splitlines()]
    assert [line[0] for line in lines] == [f"vsepp, seed 0 ({run})" for run in (vectors_run, sets_run)]
    assert all(re.fullmatch(r"\d\.\d{3} s", line[1]) and re.fullmatch(r"image \d+", line[2]) for line in lines)
    assert "--host" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_others_reach_is_a_warning(vectors_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_main([str(vectors_run), "--check", "--host", "0.0.0.0", "--port", "0", "--device", "cpu"])
    warnings = [line for line in capsys.readouterr().err.splitlines() if "--host 0.0.0.0: whoever reaches" in line]
    assert len(warnings) == 1


def test_wrong_options_are_one_line(
    vectors_run: Path, sets_run: Path, cache: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    check = ("--check", "--port", 0, "--device", "cpu")
    line = fails(serve_main, vectors_run, sets_run, "--features", cache, *check)
    assert "--features is given 1 times for 2 runs; give it for each, in their order" in line
    assert "no images in split 'tset'" in fails(serve_main, vectors_run, "--split", "tset", *check)
    assert "could not parse index string Flt" in fails(serve_main, vectors_run, "--index-type", "Flt", *check)
    assert "none" in fails(serve_main, tmp_path / "none", *check)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(vectors_run: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", CODE, str(vectors_run), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().strip()
        with urlopen(f"{url}search?q=a+red+circle&as=json") as answer:
            assert b'"hits"' in answer.read()
        process.send_signal(number)
        out, stderr = process.communicate()
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == "stopped"
    assert list(tmp_path.iterdir()) == []
