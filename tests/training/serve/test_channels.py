from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import flask
import pytest

from tests.training.conftest import Capture, Fails, Patch, done
from tests.training.serve.conftest import running
from vse.pipeline.errors import UserError
from vse.training.serve.cli import serve_main
from vse.training.serve.server import ConnectionLimits, PageServer, is_loopback, list_trusted_hosts

IMPATIENT = ConnectionLimits(idle_timeout_s=0.2, request_timeout_s=0.4, refused_timeout_s=0.2)
LARGE = 30_000_000  # bytes, more than the buffers of a socket hold
HEADER = b"POST /search?as=json HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    """Return the status and the JSON, or else the text, of the response that a connection receives."""
    response = HTTPResponse(connection)
    response.begin()
    text = response.read().decode()
    return response.status, json.loads(text) if response.getheader("Content-Type") == "application/json" else text


@pytest.mark.nightly
def test_a_client_that_stops_sending_is_disconnected(app: flask.Flask) -> None:
    header, photo = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", HEADER + b"Content-Length: 1000\r\n\r\nphoto"
    with running(app, limits=IMPATIENT) as url, ExitStack() as stack:
        half_open = [(stack.enter_context(connect(url)), sent) for sent in (b"", b"GET", header, photo)]
        for client, sent in half_open:
            client.sendall(sent)
        assert [client.recv(1000) for client, _ in half_open] == [b""] * 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\nX: ", HEADER + b"Content-Length: 90000\r\n\r\n"], ids=["header", "photo"]
)
def test_a_client_that_sends_a_byte_now_and_then_is_disconnected(app: flask.Flask, start: bytes) -> None:
    with running(app, limits=IMPATIENT) as url, connect(url) as slow:
        slow.sendall(start)
        slow.settimeout(0.05)
        ended = False
        for _ in range(200):
            try:
                slow.sendall(b"a")
                ended = slow.recv(1000) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
            break
        assert ended


@pytest.mark.nightly
def test_half_open_connections_do_not_keep_others_out_for_long(app: flask.Flask) -> None:
    limits = ConnectionLimits(max_connections=5, idle_timeout_s=0.2, refused_timeout_s=0.2)
    with running(app, limits=limits) as url:
        half_open = [connect(url) for _ in range(30)]
        for connection in half_open:
            assert connection.recv(1000) == b""
            connection.close()
        with connect(url) as client:
            client.sendall(b"GET /page.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert answer_of(client)[0] == 200


@pytest.mark.parametrize("form", ["json", "page"])
def test_a_connection_beyond_the_limit_gets_503_in_the_form_that_it_asks_for(app: flask.Flask, form: str) -> None:
    line = "The server has too many connections; try again in a moment."
    with running(app, limits=ConnectionLimits(max_connections=2)) as url:
        kept = [HTTPConnection(urlsplit(url).netloc) for _ in range(2)]
        for connection in kept:
            connection.request("GET", "/page.js")
            assert connection.getresponse().read()
        for _ in range(3):
            with connect(url) as client:
                client.sendall(f"GET /search?q=a&as={form} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
                status, text = answer_of(client)
                assert client.recv(1000) == b"", "it is closed"
            assert status == 503
            assert text == {"error": line} if form == "json" else line in text
        for connection in kept:
            connection.request("GET", "/page.js")
            assert connection.getresponse().status == 200, "who is connected is served on"
            connection.close()


@pytest.mark.parametrize("header", [b"", b"Expect: 100-continue\r\n"], ids=["at once", "expects to continue"])
def test_a_photograph_that_is_much_too_large_gets_its_answer_while_it_is_sent(app: flask.Flask, header: bytes) -> None:
    with running(app) as url, connect(url) as client:
        client.sendall(HEADER + header + b"Content-Length: %d\r\n\r\n" % LARGE)
        if not header:
            client.sendall(bytes(LARGE))
        status, answer = answer_of(client)
    assert status == 413
    assert answer["error"].startswith("The photograph has more than 0.09")


def test_photographs_that_arrive_at_once_take_bounded_memory(app: flask.Flask) -> None:
    with running(app, limits=ConnectionLimits(max_bodies=1)) as url, connect(url) as first, connect(url) as second:
        for client in (first, second):
            client.sendall(HEADER + b"Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n")
        assert first.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        assert answer_of(second) == (503, {"error": "The server reads other photographs already; try again in a moment."})


def test_one_connection_cannot_let_many_requests_wait() -> None:
    slow = Slow()
    with running(slow, limits=ConnectionLimits(max_requests=3)) as url, connect(url) as client:  # type: ignore[arg-type]
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9)
        slow.begun.wait()
        slow.end.set()
        received = b""
        while part := client.recv(10_000):
            received += part
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200"] * 3 + [b"503"]
    assert received.endswith(b"The server has too many requests; try again in a moment.")


class Slow:
    """An application whose response waits for an event."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
        status, line = environ.get("vse.refused", (200, "done"))
        if status == 200:
            self.begun.set()
            self.end.wait()
        start_response(f"{status} x", [("Content-Type", "text/plain"), ("Content-Length", str(len(line)))])
        return [line.encode()]


@contextmanager
def slow_server(grace_s: float) -> Iterator[tuple[PageServer, Slow, socket.socket]]:
    """Yield a server that is busy with the request of a connection, the application, and the connection."""
    slow = Slow()
    server = PageServer(slow, "127.0.0.1", 0, 100_000, ConnectionLimits(stop_grace_s=grace_s))
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(server.run)
        with connect(server.url) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            slow.begun.wait()
            yield server, slow, client
        server.stop()
        slow.end.set()
        ended.result()
    server.close()


def test_a_request_in_progress_is_answered_or_refused_after_a_signal() -> None:
    with slow_server(grace_s=30) as (server, slow, client):
        server.stop()
        slow.end.set()
        assert answer_of(client) == (200, "done")
    with slow_server(grace_s=0.1) as (server, _, client):
        server.stop()
        assert answer_of(client) == (503, "The server is stopping.")


def test_a_request_that_still_arrives_is_refused_after_a_signal_and_the_port_is_free() -> None:
    with slow_server(grace_s=30) as (server, slow, _), connect(server.url) as sending, connect(server.url) as idle:
        sending.sendall(HEADER + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
        assert sending.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        server.stop()
        assert answer_of(sending) == (503, "The server is stopping.")
        assert idle.recv(1000) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(server.url)
        slow.end.set()
    with slow_server(grace_s=30) as (server, slow, client):
        server.stop()
        with connect_until_refused(server.url):
            again = PageServer(slow, "127.0.0.1", urlsplit(server.url).port or 0, 1000)
        again.close()
        slow.end.set()
        assert answer_of(client)[0] == 200


@contextmanager
def connect_until_refused(url: str) -> Iterator[None]:
    """Enter the block when the address takes no connection any more."""
    with pytest.raises(ConnectionError):  # noqa: PT012
        while True:
            with connect(url) as client:
                client.recv(1)
    yield


def test_it_answers_on_the_port_that_it_names(app: flask.Flask) -> None:
    with running(app) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        with urlopen(url) as answer:
            assert answer.status == 200
            assert answer.headers["Server"] is None
            assert "Search demo" in answer.read().decode()
    with pytest.raises(OSError, match="refused"):
        urlopen(url)


def test_a_body_without_a_length_is_refused_where_it_is_too_large(app: flask.Flask) -> None:
    chunk = b"%x\r\n%s\r\n" % (2**20, bytes(2**20))
    with running(app) as url, connect(url) as client:
        client.sendall(HEADER + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 20 + b"0\r\n\r\n")
        assert answer_of(client)[0] == 413


def test_a_taken_port_and_wrong_options_are_one_line(
    app: flask.Flask, vectors_run: Path, sets_run: Path, cache: Path, tmp_path: Path, fails: Fails
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--host 127.0.0.1 --port {port}: cannot be served at"):
            PageServer(app, "127.0.0.1", port, 1000)
    with pytest.raises(UserError, match="--host no.such.host.invalid --port 0: cannot be served at"):
        PageServer(app, "no.such.host.invalid", 0, 1000)
    check = ("--check", "--port", 0, "--device", "cpu")
    line = fails(serve_main, vectors_run, sets_run, "--features", cache, *check)
    assert "--features is given 1 times for 2 runs; give it for each, in their order" in line
    assert "no images in split 'tset'" in fails(serve_main, vectors_run, "--split", "tset", *check)
    assert "could not parse index string Flt" in fails(serve_main, vectors_run, "--index-type", "Flt", *check)
    assert "none" in fails(serve_main, tmp_path / "none", *check)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("192.168.1.4", False)],
)
def test_only_on_loopback_is_the_name_of_the_host_checked(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
    trusted = list_trusted_hosts(host)
    assert (trusted is not None) == loopback
    if trusted is not None:
        assert {"localhost", "127.0.0.1", "[::1]"} <= set(trusted)


def test_check_answers_a_query(vectors_run: Path, sets_run: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    done(serve_main, vectors_run, sets_run, "--check", "--port", 0, "--device", "cpu")
    captured = capsys.readouterr()
    lines = [line.split("\t") for line in captured.out.splitlines()]
    assert [line[0] for line in lines] == [f"vsepp, seed 0 ({run})" for run in (vectors_run, sets_run)]
    assert all(re.fullmatch(r"\d\.\d{3} s", line[1]) and re.fullmatch(r"image \d+", line[2]) for line in lines)
    assert "--host" not in captured.err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit):
        serve_main([str(vectors_run), "--check", "--host", "0.0.0.0", "--port", "0", "--device", "cpu"])
    warnings = [line for line in capsys.readouterr().err.splitlines() if "--host 0.0.0.0: whoever reaches" in line]
    assert len(warnings) == 1
