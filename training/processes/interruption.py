"""The early end of a training: Ctrl-C, SIGTERM from a scheduler, divergence, collapse, or the loss of a process."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from vse.pipeline.errors import UserError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingFailed(UserError):
    """The error of a training that diverged or collapsed. ``run.json`` records ``state``: ``diverged`` or ``collapsed``."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class StopNow(Exception):
    """The exception that a signal raises in a block of :meth:`Interruption.raise_on_signal`."""


class Interruption:
    """The record of the first Ctrl-C or SIGTERM, after which a training ends.

    The training ends after the current update, or at once in a validation. A second Ctrl-C ends the process at once, and a
    second SIGTERM is ignored. ``signal`` is the number of the first signal, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._raises_on_signal = False

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Record Ctrl-C and SIGTERM in the caller's ``with`` block, without ending it. Outside the main thread, do nothing."""
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
        """Raise :class:`StopNow` in the caller's ``with`` block when a signal arrives, or at once if one arrived before."""
        self._raises_on_signal = True
        try:
            if self.signal is not None:
                raise StopNow
            yield
        finally:
            self._raises_on_signal = False

    def deliver_signal(self, number: int) -> None:
        """Act as if this process had received the signal ``number``. If it has already received a signal, do nothing.

        Threads other than the main thread may call this method.
        """
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
            return  # at a time limit, SLURM sends SIGTERM to srun and to the training, and srun forwards a second SIGTERM
        self.signal = number
        if self._raises_on_signal:
            raise StopNow


_REPORT_SECONDS = 1.0  # time between two reports of a process
_SILENT_SECONDS = 5.0  # a process without a report for this time counts as silent


@dataclass(frozen=True)
class ProcessReport:
    """A report of a process about its state. Each process sends a report every second.

    ``n_reports`` : number of reports of the process so far.
    ``n_exchanges`` : number of times that the process has begun to exchange data with the others.
    ``signal`` : number of the signal that stops the process, or 0.
    ``host`` : host name of the process's machine.
    """

    n_reports: int
    n_exchanges: int
    signal: int
    host: str

    def to_text(self) -> str:
        return f"{self.n_reports} {self.n_exchanges} {self.signal} {self.host}"

    @classmethod
    def from_text(cls, text: str) -> ProcessReport:
        n_reports, n_exchanges, stop, host = text.split(" ", 3)
        return cls(int(n_reports), int(n_exchanges), int(stop), host)


class ProcessWatch:
    """A thread that reports the state of this process to the others, and reads their reports.

    A signal to one process stops all processes, so SIGTERM to any process ends the training with a checkpoint.

    ``store`` : connection to the store through which the processes found each other. Only this thread uses the connection.
    ``rank``, ``size`` : rank of this process, and number of processes.
    ``interruption`` : record of signals to this process; None while the training does not catch signals.
    ``n_exchanges`` : number of times that this process has begun to exchange data with the others.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self.interruption: Interruption | None = None
        self.n_exchanges = 0
        self._n_reports = 0
        self._reports: dict[int, ProcessReport] = {}
        self._last_report_times: dict[int, float] = {}  # when the last new report of each process was read
        self._last_read = time.monotonic()
        self._ends = threading.Event()
        self._report()
        store.wait([f"report {rank}" for rank in range(size)])
        self._report()
        self._thread = threading.Thread(target=self._run, name="vse-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join(timeout=_SILENT_SECONDS)

    def wait_until_others_stop(self) -> None:
        """Wait until every other process has reported a signal, for five seconds at most."""
        until = time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < until and not all(report.signal for report in self._reports.values()):
            time.sleep(_REPORT_SECONDS / 10)

    def is_silent(self, rank: int) -> bool:
        """Return whether a process has not reported for five seconds.

        If this process cannot read any reports, only process 0 counts as silent, because usually process 0 stores the reports.
        """
        now = time.monotonic()
        if now - self._last_read > _SILENT_SECONDS:
            return rank == 0
        return now - self._last_report_times.get(rank, now) > _SILENT_SECONDS

    def find_silent(self) -> list[int]:
        """Return the ranks of the other processes that have not reported for five seconds."""
        return [rank for rank in range(self._size) if rank != self._rank and self.is_silent(rank)]

    def describe_missing(self) -> str:
        """Wait a few seconds for reports, and return a text that names the processes that are silent or behind this one."""
        time.sleep(_SILENT_SECONDS + 2 * _REPORT_SECONDS)
        if silent := self.find_silent():
            return f"no answer from {self._name(silent)}, which was killed or hangs, or whose machine cannot be reached"
        behind = [rank for rank, report in self._reports.items() if report.n_exchanges < self.n_exchanges]
        return f"{self._name(behind)} did not finish its part of the step" if behind else "the exchange of data failed"

    def _name(self, ranks: list[int]) -> str:
        names = [f"{rank} (on {self._reports[rank].host})" if rank in self._reports else str(rank) for rank in ranks]
        return f"process {' and process '.join(names)} of {self._size}"

    def _run(self) -> None:
        while not self._ends.wait(_REPORT_SECONDS):
            try:
                self._report()
            except Exception:  # the connection can raise many kinds of errors; the thread tries again after a second
                continue

    def _report(self) -> None:
        stop = 0 if self.interruption is None else self.interruption.signal or 0
        self._n_reports += 1
        own = ProcessReport(self._n_reports, self.n_exchanges, stop, socket.gethostname())
        self._store.set(f"report {self._rank}", own.to_text())
        for rank in range(self._size):
            if rank != self._rank and self._store.check([f"report {rank}"]):
                report = ProcessReport.from_text(self._store.get(f"report {rank}").decode())
                if report != self._reports.get(rank):
                    self._last_report_times[rank] = time.monotonic()
                self._reports[rank] = report
        self._last_read = time.monotonic()
        signals = [report.signal for report in self._reports.values() if report.signal]
        if signals and self.interruption is not None:
            self.interruption.deliver_signal(signals[0])
