"""Answer queries in one thread; all queries that wait are answered together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class QueryBatches(Generic[Asked, Answer]):
    """A thread that answers the queries of other threads, several queries at once.

    Queries that arrive during a computation form the next batch. A query never waits for others to arrive.

    ``answer_all`` : function that returns, for each query of a batch, its answer or an exception for the waiting thread.
    """

    def __init__(self, answer_all: Callable[[Sequence[Asked]], Sequence[Answer | Exception]]) -> None:
        self._answer_all = answer_all
        self._waiting: SimpleQueue[tuple[Asked, Future[Answer]]] = SimpleQueue()
        self._executor = ThreadPoolExecutor(1)

    @property
    def n_waiting(self) -> int:
        """The number of queries that wait for the next batch."""
        return self._waiting.qsize()

    def ask(self, query: Asked) -> Answer:
        """Return the answer to a query. Raises the exception that ``answer_all`` returned for this query."""
        future: Future[Answer] = Future()
        self._waiting.put((query, future))
        self._executor.submit(self._answer_waiting)  # finds nothing if an earlier call has answered the query
        return future.result()

    def run(self, work: Callable[[], Result]) -> Result:
        """Run a function in the answering thread, and return its result."""
        return self._executor.submit(work).result()

    def _answer_waiting(self) -> None:
        batch: list[tuple[Asked, Future[Answer]]] = []
        try:
            while True:
                batch.append(self._waiting.get_nowait())
        except Empty:
            pass
        if not batch:
            return
        try:
            answers = self._answer_all([query for query, _ in batch])
        except Exception as error:  # is raised in each waiting thread
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
