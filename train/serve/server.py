"""The server of vse-serve: an application on a port of this machine until Ctrl-C."""

from __future__ import annotations

import ipaddress
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.task import ThreadedTaskDispatcher

from vse.pipeline.errors import UserError
from vse.train.serve.channels import Channel, LimitedServer, Limits

_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MORE = 2**20  # bytes of a request beyond those of a photo, so that the application says that one is too large
_LISTENING = 8  # sockets and pipes of the server itself
_THREADS = 4
_THREADS_END_S = 0.25


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def trusted_hosts(host: str) -> Sequence[str] | None:
    """The names that a server at this address may be called by; None (any) if other machines reach it.

    A page of another site that has its own name point to this machine could else read what is served here.
    """
    return [*_NAMES, _bracketed(host)] if is_loopback(host) else None


class PageServer:
    """An application, bound to an address; :class:`UserError` if it cannot be. ``port`` 0 takes a free one.

    Requests are held in memory, so that nothing is written; one of much more than ``upload_bytes`` is refused unread.
    """

    def __init__(self, app: Any, host: str, port: int, upload_bytes: int, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        body_bytes = upload_bytes + _MORE
        self._channels: dict[int, Any] = {}  # by their file descriptors: what listens, who is connected, and triggers
        self._dispatchers = ThreadedTaskDispatcher(), ThreadedTaskDispatcher()
        self._servers: list[LimitedServer] = []
        self._stop_at: float | None = None
        try:
            settings = Adjustments(
                host="127.0.0.1" if host == "localhost" else host,
                port=port,
                ident=None,
                connection_limit=2 * self.limits.connections + _LISTENING,
                cleanup_interval=1,
                recv_bytes=2**16,
                max_request_body_size=body_bytes,
                inbuf_overflow=body_bytes + _MORE,
                outbuf_overflow=2**26,
                clear_untrusted_proxy_headers=True,
            )
            work, refusals = self._dispatchers
            for listen in settings.listen:
                server = LimitedServer(
                    self.limits, refusals, app, self._channels, dispatcher=work, adj=settings, sockinfo=listen
                )
                self._servers.append(server)
        except (OSError, ValueError) as error:
            self._disconnect()
            raise UserError(f"--host {host} --port {port}: cannot be served at ({_said(error)})") from None
        work.set_thread_count(_THREADS)
        refusals.set_thread_count(1)
        self.url = f"http://{_bracketed(host)}:{self._servers[0].effective_port}/"

    def run(self) -> None:
        """Serve until :meth:`stop`, then answer or refuse the requests in progress, within ``grace_s`` seconds."""
        while self._stop_at is None:
            self._wait(1)
        for server in self._servers:
            server.stop_listening()
        while not self._end_channels() and (left := self._stop_at - time.monotonic()) > 0:
            self._wait(min(left, 1))
        for channel in self._connected():
            channel.end_now()

    def stop(self) -> None:
        """Let :meth:`run` return soon, from another thread or a signal's handler; called again, at once."""
        self._stop_at = time.monotonic() + (self.limits.grace_s if self._stop_at is None else 0)
        if self._channels:  # not closed yet
            self._servers[0].pull_trigger()

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """In this block SIGTERM and Ctrl-C call :meth:`stop`, the latter in a background job, too, where it is ignored."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Stop listening, and end the threads that answer, as far as they do so at once."""
        self._disconnect()
        for dispatcher in self._dispatchers:
            dispatcher.shutdown(timeout=_THREADS_END_S)

    def _wait(self, most_s: float) -> None:
        """Let the connections do what they can, as soon as they can, and end those that are late."""
        wasyncore.loop(timeout=most_s, use_poll=True, map=self._channels, count=1)
        for server in self._servers:
            server.maintenance(time.time())

    def _connected(self) -> list[Channel]:
        return [channel for server in self._servers for channel in server.active_channels.values()]

    def _end_channels(self) -> bool:
        """Close idle connections; return whether none is left that waits for a response."""
        waiting = [channel for channel in self._connected() if not channel.end_soon()]
        return not waiting

    def _disconnect(self) -> None:
        """Close every channel, without which the server's loop ends."""
        for channel in list(self._channels.values()):
            channel.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
