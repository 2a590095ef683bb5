"""Queries that wait for each other are answered together, exactly as one after the other."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import flask
import pytest
import torch

from tests.training.conftest import experiment
from tests.training.serve.conftest import MANY, running
from tests.training.use.attending import scan
from vse.pipeline.errors import UserError
from vse.training.options import RunInputOptions
from vse.training.serve.answers import QueryBatcher, ServedRuns
from vse.training.serve.app import create_app
from vse.training.serve.server import PageServer
from vse.training.training import train
from vse.training.use.model import EncodedQuery
from vse.training.use.searcher import SearchQuery

WORDS = ["a", "red", "blue", "green", "circle", "square", "above", "below", "large", "zebra", "?!"]
FORMS = {"inner products": ["model.dim=32"], "narrow": [], "order": ["model.similarity=order", "model.dim=32"]}


def draw_texts(seed: int, n: int) -> list[str]:
    """Texts of 1 to 100 words, some of which the models do not know."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.choice([1, 2, 5, 9, 100]))) for _ in range(n)]


@pytest.fixture(scope="module", params=[*FORMS, "scan"])
def form(
    request: pytest.FixtureRequest, cache: Path, positions: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ServedRuns]:
    """Return the name of a form, and a run of it."""
    features, sets = (positions, scan("t2i")) if request.param == "scan" else (cache, FORMS[request.param])
    run = train(features, experiment("train.epochs=1", *sets), out=tmp_path_factory.mktemp("runs") / "run")
    return request.param, ServedRuns([run], "test", [RunInputOptions()], MANY, "cpu")


def encode_alone(encode: Callable[[str], EncodedQuery], text: str) -> EncodedQuery | str:
    try:
        return encode(text)
    except UserError as error:
        return str(error)


@pytest.mark.sampled(2)
def test_texts_together_have_bit_for_bit_the_embeddings_and_hits_of_each_alone(form: tuple[str, ServedRuns]) -> None:
    name, served = form
    searcher = served.runs[0].searcher
    for seed, n in enumerate([1, 3, 16, 33]):
        texts = draw_texts(seed, n)
        alone = [encode_alone(searcher.encode, text) for text in texts]
        together = searcher.encode_all(texts)
        for one, other in zip(alone, together, strict=True):
            if isinstance(one, str):
                assert str(other) == one
                continue
            assert isinstance(other, EncodedQuery)
            assert one.remark == other.remark
            assert all(torch.equal(*parts) for parts in zip(one.vectors, other.vectors, strict=True)), name
        rng = random.Random(n)
        queries = [SearchQuery(one, rng.randint(1, 14), rng.randint(0, 5)) for one in alone if not isinstance(one, str)]
        if queries:
            expected = [searcher.answer(False, query.encoded, query.k, query.start) for query in queries]
            for answer, right in zip(searcher.answer_all(False, queries), expected, strict=True):
                assert (answer.hits, answer.rows.tolist()) == (right.hits, right.rows.tolist())
                assert (answer.n_ranked, answer.n_scored) == (right.n_ranked, right.n_scored)


def until(condition: Callable[[], bool]) -> None:
    """Return as soon as a condition holds."""
    poll = threading.Event()
    while not condition():
        poll.wait(0.001)  # lets the other threads run


@contextmanager
def waiting(batcher: QueryBatcher[Any, Any], ask: Callable[[Any], Any], queries: Sequence[Any]) -> Iterator[list[Future[Any]]]:
    """Ask queries of a busy thread. In the block all of them wait; afterwards they are answered."""
    busy, free = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        free.wait()

    with ThreadPoolExecutor(len(queries) + 1) as pool:
        pool.submit(batcher.run, keep_busy)
        busy.wait()
        try:
            asked = [pool.submit(ask, query) for query in queries]
            until(lambda: batcher.n_waiting == len(queries))
            yield asked
        finally:
            free.set()


def test_all_waiting_queries_are_the_next_batch_and_an_error_is_its_querys_own() -> None:
    sizes = []

    def answer_all(queries: Sequence[int]) -> list[int | Exception]:
        sizes.append(len(queries))
        if -1 in queries:
            raise ZeroDivisionError
        return [UserError("odd") if query % 2 else 10 * query for query in queries]

    batcher = QueryBatcher(answer_all)
    assert batcher.ask(4) == 40
    with waiting(batcher, batcher.ask, range(8)) as asked:
        pass
    assert [str(one.exception()) if place % 2 else one.result() for place, one in enumerate(asked)] == [
        0, "odd", 20, "odd", 40, "odd", 60, "odd",
    ]  # fmt: skip
    with waiting(batcher, batcher.ask, [-1, 2]) as asked:
        pass
    assert all(isinstance(one.exception(), ZeroDivisionError) for one in asked)
    assert batcher.ask(6) == 60
    assert sizes == [1, 8, 2, 1]


def test_after_a_batch_the_next_one_waits_for_as_many_queries_but_a_single_client_does_not_wait() -> None:
    sizes = []

    def answer_all(queries: Sequence[int]) -> list[int]:
        sizes.append(len(queries))
        return list(queries)

    batcher = QueryBatcher(answer_all, max_wait_share=1e9)
    assert [batcher.ask(query) for query in (1, 2)] == [1, 2]
    with waiting(batcher, batcher.ask, [3, 4]):
        pass
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(batcher.ask, 5)
        until(lambda: first.done() or (first.running() and batcher.n_waiting == 0))  # it probably has the query now
        assert batcher.ask(6) == 6
        assert first.result() == 5
    assert sizes == [1, 1, 2, 2]


def get(url: str, text: str) -> Any:
    """Return the hits of each run for a text, or its error."""
    with urlopen(f"{url}search?{urlencode({'q': text, 'as': 'json', 'k': 5})}") as response:
        return [run["hits"] or run["error"] for run in json.load(response)["runs"]]


def test_clients_that_hang_up_while_they_wait_do_not_disturb_others(app: flask.Flask, served: ServedRuns) -> None:
    texts = draw_texts(7, 9)
    batcher = served.runs[0].batcher
    with running(app) as url:
        alone = [get(url, text) for text in texts]
        parts = urlsplit(url)
        gone = [socket.create_connection((parts.hostname, parts.port)) for _ in range(6)]

        def ask(query: str | socket.socket) -> Any:
            if isinstance(query, str):
                return get(url, query)
            return query.sendall(b"GET /search?q=a+red+circle HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")

        with waiting(batcher, ask, [*gone, *texts]) as asked:
            for number, connection in enumerate(gone):
                if number % 2:  # the connection is reset, not closed
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
        assert [one.result() for one in asked[len(gone) :]] == alone
        assert get(url, texts[0]) == alone[0]


def test_queries_that_wait_are_answered_after_sigterm(served: ServedRuns) -> None:
    texts = draw_texts(8, 12)
    server = PageServer(create_app(served), "127.0.0.1", 0, 1000)
    expected = [[list(run.hits) or run.error for run in served.answer_query(text, 5)] for text in texts]
    results: list[Any] = []

    def stop_while_queries_wait() -> None:
        with waiting(served.runs[0].batcher, lambda text: get(server.url, text), texts) as asked:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: is_refused(server.url))
        results.extend(one.result() for one in asked)

    with server.stop_on_signals():
        thread = threading.Thread(target=stop_while_queries_wait)
        thread.start()
        server.run()
    thread.join()
    server.close()
    assert len(results) == len(expected)
    for answers, rights in zip(results, expected, strict=True):
        for answer, right in zip(answers, rights, strict=True):
            if isinstance(answer, str):
                assert answer == right
            else:
                assert [(hit["image"], hit["score"]) for hit in answer] == [(hit.image_id, hit.score) for hit in right]


def is_refused(url: str) -> bool:
    try:
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)).close()
    except ConnectionError:
        return True
    return False
