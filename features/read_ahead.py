"""Loads items in order, by threads that run ahead of whoever reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Loaded = TypeVar("_Loaded")


def read_ahead(items: Sequence[_Item], load: Callable[[_Item], _Loaded], workers: int, ahead: int) -> Iterator[_Loaded]:
    """``load`` of every item in order, by ``workers`` threads that are ``ahead`` items ahead at most.

    Pillow and numpy release the interpreter lock while they decode and resize, so threads are enough.
    """
    if workers == 0:
        yield from map(load, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting: list[Future[_Loaded]] = [pool.submit(load, item) for item in items[:ahead]]
            for k in range(len(items)):
                result = waiting[k % ahead].result()
                if k + ahead < len(items):
                    waiting[k % ahead] = pool.submit(load, items[k + ahead])
                yield result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
