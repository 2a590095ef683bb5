"""The server of vse-serve: an application on a port of this machine until Ctrl-C."""

from __future__ import annotations

import ipaddress
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vse.pipeline.errors import UserError
from vse.pipeline.extra_packages import extra_package

log = logging.getLogger(__name__)

_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MORE = 2**20  # bytes of a request beyond those of a photo, so that the application says that one is too large


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

    def __init__(self, app: Any, host: str, port: int, upload_bytes: int) -> None:
        waitress = extra_package("waitress", "vse-serve", "serve")
        most = upload_bytes + _MORE
        self._channels: dict[int, Any] = {}  # by their file descriptors: what listens, who is connected, and a trigger
        try:
            self._server = waitress.create_server(
                app,
                map=self._channels,
                host="127.0.0.1" if host == "localhost" else host,
                port=port,
                threads=4,
                ident=None,
                connection_limit=100,
                channel_timeout=30,
                max_request_body_size=most,
                inbuf_overflow=most + _MORE,
                outbuf_overflow=2**26,
                clear_untrusted_proxy_headers=True,
            )
        except (OSError, ValueError) as error:
            self._disconnect()
            raise UserError(f"--host {host} --port {port}: cannot be served at ({_said(error)})") from None
        listening = getattr(self._server, "effective_listen", None) or [(host, self._server.effective_port)]
        self.url = f"http://{_bracketed(host)}:{listening[0][1]}/"

    def run(self) -> None:
        """Serve until Ctrl-C, SIGTERM or :meth:`stop`."""
        with _stopped_by_signals():
            self._server.run()

    def stop(self) -> None:
        """Let :meth:`run` return, from another thread."""
        trigger = next(channel for channel in self._channels.values() if hasattr(channel, "pull_trigger"))
        trigger.pull_trigger(self._disconnect)

    def close(self) -> None:
        """Stop listening, and end the threads that answer."""
        self._disconnect()
        self._server.task_dispatcher.shutdown()

    def _disconnect(self) -> None:
        """Close every channel, without which the server's loop ends."""
        for channel in list(self._channels.values()):
            channel.close()


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """In this block SIGTERM stops what Ctrl-C stops, and Ctrl-C does so in a background job, too, where it is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
