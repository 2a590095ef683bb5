"""Ctrl-C and SIGTERM end a training after the step at hand, so that a checkpoint can be written first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vse.pipeline.errors import UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingFailed(UserError):
    """A training ended before its time; ``state`` is what ``run.json`` says then: ``diverged`` or ``collapsed``."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class StopNow(Exception):
    """A signal came where nothing is lost by stopping at once."""


class Interruption:
    """Remembers the first signal; a second one is obeyed at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._at_once = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Catch both signals meanwhile. Only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In this block a signal raises :class:`StopNow` at once."""
        self._at_once = True
        try:
            if self.signal is not None:
                raise StopNow
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        if self._at_once:
            raise StopNow
