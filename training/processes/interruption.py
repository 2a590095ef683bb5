"""The early end of a training: by Ctrl-C, by SIGTERM, or because it diverged or collapsed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vse.pipeline.errors import UserError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingFailed(UserError):
    """A training that diverged or collapsed. ``state`` (``diverged`` or ``collapsed``) is recorded in ``run.json``."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class StopNow(Exception):
    """A signal arrived in a block of :meth:`Interruption.raise_on_signal`."""


class Interruption:
    """Records the first Ctrl-C or SIGTERM. The training then ends after the current update, or at once in a validation.

    A second Ctrl-C ends the process at once, and a second SIGTERM is ignored. ``signal`` is the number of the first signal, or
    None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._raises_on_signal = False

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Catch Ctrl-C and SIGTERM in this block. Outside the main thread, signals are not caught."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def raise_on_signal(self) -> Iterator[None]:
        """Raise :class:`StopNow` in this block as soon as a signal arrives."""
        self._raises_on_signal = True
        try:
            if self.signal is not None:
                raise StopNow
            yield
        finally:
            self._raises_on_signal = False

    def pass_signal(self, number: int) -> None:
        """Act as if the signal ``number`` had arrived, unless one has already. Another thread than the main one calls this."""
        if self.signal is not None:
            return
        if self._raises_on_signal:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:
            self.signal = number

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # at a time limit, SLURM sends SIGTERM to srun and to the training, and srun forwards its own
        self.signal = number
        if self._raises_on_signal:
            raise StopNow
