"""An application on a free port of this machine, served in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import flask

from vse.train.serve.server import Limits, PageServer


@contextmanager
def running(app: flask.Flask, upload_bytes: int = 100_000, limits: Limits | None = None) -> Iterator[str]:
    """Its address."""
    server = PageServer(app, "127.0.0.1", 0, upload_bytes, limits)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join()
        server.close()
