"""A real HTTP server on loopback that can fail as servers and networks do."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from vse.pipeline.dataset import downloads

Lie = Callable[["Server", BaseHTTPRequestHandler, bytes], None]


@dataclass
class Server:
    """The files of a server by name or path, its faults, and a record of the requests and of the bytes sent."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True  # whether a Range is honoured
    shift: int = 0  # offset of the answer to a Range from the requested start
    cuts: list[int | None] = field(default_factory=list)  # bytes after which the next connections are cut; None: not cut
    codes: list[int] = field(default_factory=list)  # status of the next answers
    length: bool = True  # whether Content-Length is sent
    lies: list[Lie | None] = field(default_factory=list)  # what answers the next requests in place of the truth
    hold: threading.Event | None = None  # a cut connection stays open until this is set
    reached: threading.Event = field(default_factory=threading.Event)  # a connection has come to its cut
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    sent: int = 0
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Serve one request."""
        path, wanted = unquote(request.path).removeprefix("/"), request.headers["Range"]
        name = path if path in self.files else path.rpartition("/")[2]
        self.asked.append((name, wanted))
        code = self.codes.pop(0) if self.codes else 200
        content = self.files.get(name)
        if content is None or code >= 400:
            return request.send_error(404 if content is None else code)
        if lie := self.lies.pop(0) if self.lies else None:
            return lie(self, request, content)
        start, stop, headers = 0, len(content), {"ETag": f'"{zlib.crc32(content)}"'}
        if wanted and self.ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first) + self.shift, min(int(last) + 1, stop) if last else stop
            if start >= len(content):
                return request.send_error(416)
            code, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{len(content)}"
        request.send_response(code)
        if self.length:
            headers["Content-Length"] = str(stop - start)
        for key, value in headers.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "HEAD":
            return None
        cut = self.cuts.pop(0) if self.cuts else None
        body = content[start:stop][:cut]
        self.sent += len(body)  # before the client has received everything
        request.wfile.write(body)
        if cut is not None:
            self.reached.set()
            if self.hold:
                self.hold.wait()
        return None


@contextlib.contextmanager
def served(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> Iterator[Server]:
    """Start a server of these files; clients do not wait before they try again."""
    state = Server(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):  # the client has closed the connection
                state.answer(self)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(downloads, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_port}/"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield state
        if state.hold:
            state.hold.set()
        http.shutdown()
        thread.join()
