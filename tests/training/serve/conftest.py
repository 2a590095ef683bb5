"""Two runs of the demo, one of which attends, and the application that serves both. Read only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import flask
import pytest
from flask.testing import FlaskClient
from PIL import Image

from tests.training.conftest import experiment
from tests.training.use.attending import scan
from vse.training.options import RunInputOptions
from vse.training.serve.answers import ServedRuns
from vse.training.serve.app import PageSettings, create_app
from vse.training.serve.server import ConnectionLimits, PageServer
from vse.training.training import train
from vse.training.use.searcher import SearcherOptions

MANY = SearcherOptions(n_reranked=200, expects_many_queries=True)


@pytest.fixture(scope="session")
def vectors_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that compares single vectors."""
    return train(cache, experiment("train.epochs=1"), out=tmp_path_factory.mktemp("runs") / "vectors")


@pytest.fixture(scope="session")
def sets_run(positions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that scores every pair, and whose words attend to the cells of a grid."""
    return train(positions, experiment(*scan("t2i")), out=tmp_path_factory.mktemp("runs") / "sets")


@pytest.fixture(scope="session")
def served(vectors_run: Path, sets_run: Path) -> ServedRuns:
    return ServedRuns([vectors_run, sets_run], "test", [RunInputOptions()] * 2, MANY, "cpu")


@pytest.fixture(scope="session")
def app(served: ServedRuns) -> flask.Flask:
    hosts = ["localhost", "127.0.0.1", "[::1]"]
    return create_app(served, PageSettings(n_results=3, max_upload_bytes=100_000, allowed_hosts=hosts))


@pytest.fixture
def client(app: flask.Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture(scope="session")
def encoded() -> Callable[..., bytes]:
    """An image as the bytes of a file."""

    def of(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
        stream = BytesIO()
        image.save(stream, kind, **options)
        return stream.getvalue()

    return of


@contextmanager
def running(app: flask.Flask, upload_bytes: int = 100_000, limits: ConnectionLimits | None = None) -> Iterator[str]:
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
