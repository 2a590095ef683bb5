"""A server on loopback that lies: through ``download``, ``fetch_features`` and ``check_bundle``, as ``vse-data`` calls them.

Its connections are slow in earnest, but a client waits for a fraction of a second only.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.faults.suite import StartSuite
from tests.features.test_bundles import files_in
from tests.features.test_cache import make
from tests.hostile import LONGEST, hanging_is_an_error
from tests.served import Lie, Server, served
from vse.features.exchange.bundle_fetch import check_bundle, fetch_features
from vse.features.exchange.bundles import pack_bundle
from vse.pipeline.dataset import downloads
from vse.pipeline.dataset.downloads import download
from vse.pipeline.errors import UserError

CHUNK = 1 << 16
CONTENT = random.Random(0).randbytes(3 * CHUNK + 17)
SUM = hashlib.sha256(CONTENT).hexdigest()
ENDLESS = 1 << 40  # bytes, of which a client must not read more than some
SECONDS = 0.2  # that a client waits for a byte


def begin(request: BaseHTTPRequestHandler, code: int, **headers: object) -> None:
    request.send_response(code)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), str(value))
    request.end_headers()


def drip(server: Server, request: BaseHTTPRequestHandler, content: Iterable[bytes], pause: float = 0) -> None:
    """Send pieces with a pause after each, until the client has gone."""
    for piece in content:
        request.wfile.write(piece)
        request.wfile.flush()
        if server.hold.wait(pause):
            return


def zeros() -> Iterator[bytes]:
    return (bytes(CHUNK) for _ in range(ENDLESS // CHUNK))


def with_length(length: Callable[[int], object], part: Callable[[bytes], bytes] = bytes) -> Lie:
    """Send the content, or a part of it, with what is said to be its length."""

    def lie(_: Server, request: BaseHTTPRequestHandler, content: bytes) -> None:
        begin(request, 200, Content_Length=length(len(content)))
        request.wfile.write(part(content))

    return lie


def redirect(target: str, code: int = 302) -> Lie:
    return lambda server, request, _: begin(request, code, Location=target.format(url=server.url), Content_Length=0)


def redirect_with_an_endless_body(server: Server, request: BaseHTTPRequestHandler, _: bytes) -> None:
    begin(request, 302, Location=request.path, Content_Length=ENDLESS)
    drip(server, request, zeros())


def endless(server: Server, request: BaseHTTPRequestHandler, content: bytes) -> None:
    begin(request, 200)
    drip(server, request, itertools.chain([content], zeros()))


def other_range(_: Server, request: BaseHTTPRequestHandler, content: bytes) -> None:
    begin(request, 206, Content_Length=9, Content_Range=f"bytes 7-15/{len(content)}")
    request.wfile.write(content[7:16])


def slow_body(server: Server, request: BaseHTTPRequestHandler, content: bytes) -> None:
    begin(request, 200, Content_Length=len(content))
    drip(server, request, (bytes([byte]) for byte in content), SECONDS / 4)


def silent(server: Server, request: BaseHTTPRequestHandler, content: bytes) -> None:
    begin(request, 200, Content_Length=len(content))
    drip(server, request, [content[:9]], 20 * SECONDS)


def without_a_header(pieces: Callable[[], Iterable[bytes]], pause: float) -> Lie:
    return lambda server, request, _: drip(server, request, pieces(), pause)


def status(code: int) -> Lie:
    return lambda _, request, content: begin(request, code, Content_Length=0)


LIES: dict[str, Lie] = {
    "a length too short": with_length(lambda n: n - 5), "a length too long": with_length(lambda n: n + 5),
    "a length of 10^17": with_length(lambda n: 10**17), "a negative length": with_length(lambda n: -n),
    "a length of 5,000 digits": with_length(lambda n: "9" * 5000), "a length that is no number": with_length(lambda n: "\xb2"),
    "two lengths": with_length(lambda n: f"{n}, {n + 1}"), "a redirect to a file": redirect("file:///etc/hostname"),
    "a redirect to ftp": redirect("ftp://127.0.0.1/file"), "a redirect to nowhere": redirect("http://127.0.0.1:1/file"),
    "a redirect to another file": redirect("{url}other", 307), "a redirect to itself": redirect("{url}file", 301),
    "a redirect with an endless body": redirect_with_an_endless_body,
    "a redirect that is no address": redirect("http://[::1/file", 308),
    "other bytes of the same length": with_length(lambda n: n, lambda content: content[::-1]),
    "half of the file": with_length(lambda n: n, lambda content: content[: len(content) // 2]), "an endless file": endless,
    "another range": other_range, "a slow body": slow_body,
    "a slow header": without_a_header(lambda: [b"HTTP/1.1 200 OK\r\nX-Long: ", *[b"x"] * 1000], SECONDS / 4),
    "endless interim answers": without_a_header(lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n"), SECONDS / 10),
    "silence": silent, "204": status(204), "500": status(500), "404": status(404),
    "another protocol": without_a_header(lambda: [b"SSH-2.0-OpenSSH_9.6 \x1b[2J\r\n"], 0),
}  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    cache = make(tmp_path / "made")
    pack_bundle([cache], tmp_path / "bundle")
    pack_bundle([cache], tmp_path / "bundle.tar")
    files = {f"bundle/{path}": content for path, content in files_in(tmp_path / "bundle").items()}
    files |= {"bundle.tar": (tmp_path / "bundle.tar").read_bytes(), "file": CONTENT, "other": CONTENT[::-1]}
    monkeypatch.setattr(downloads, "TIMEOUT_SECONDS", SECONDS)
    monkeypatch.setattr(downloads, "MAX_ATTEMPTS", 2)
    with served(monkeypatch, files) as state:
        state.hold = threading.Event()
        yield state
    gc.collect()  # sockets that are closed late, which would fail another test


FETCHES: dict[str, Callable[[str, Path], object]] = {
    "a file": lambda url, out: download(f"{url}file", out / "file", SUM, len(CONTENT)),
    "a folder": lambda url, out: fetch_features(f"{url}bundle", out),
    "an archive": lambda url, out: fetch_features(f"{url}bundle.tar", out),
    "a check of a folder": lambda url, out: check_bundle(f"{url}bundle"),
}


def fetched(fetch: str, url: str, out: Path) -> object:
    """Fetch into a folder; returns its files, or the list that was checked."""
    found = FETCHES[fetch](url, out)
    return files_in(out) if out.exists() else found


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a socket that is closed late
def test_a_lying_server_is_refused_or_does_no_harm(server: Server, suite_of_faults: StartSuite, tmp_path: Path) -> None:
    """A lie in one answer or in all of them; afterwards the truth gives the same files as from an honest server."""
    suite, rng = suite_of_faults("downloads from a server that sends wrong data", 26), random.Random(0)
    expected = {fetch: fetched(fetch, server.url, tmp_path / fetch) for fetch in FETCHES}
    names = rng.sample([*LIES], len(LIES))
    for number in range(suite.n_tries):
        name, fetch = names[number % len(names)], list(FETCHES)[number // 2 % len(FETCHES)]
        out, after, n_lies = tmp_path / str(number), rng.choice((0, 1)), rng.choice((1, 99))
        server.lies = [None] * after + [LIES[name]] * n_lies
        detail = f"try {number}: {name}, {n_lies} times after {after}, {fetch}"
        outcome, found = "harmless", None
        try:
            with hanging_is_an_error():
                try:
                    found = fetched(fetch, server.url, out)
                except UserError as error:
                    is_clear = server.url in str(error) and str(error).isprintable() and len(str(error)) < LONGEST
                    outcome = "refused" if is_clear else "wrong"
                    detail += f": {error}"
                    server.lies = []
                    found = fetched(fetch, server.url, out)
        except (Exception, AssertionError) as error:
            suite.record("wrong", f"{detail}: {error!r:.500}")
        else:
            suite.record("silent" if found != expected[fetch] else outcome, detail)  # type: ignore[arg-type]
