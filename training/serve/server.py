"""The server of vse-serve, with limits on the number, the time and the bytes of connections.

Waitress, the underlying server, closes a refused connection while the client still sends data. The client then sees a reset
instead of a response. This module sends a response to a refused request, and then reads and discards the rest of the request
before it closes the connection.
"""

from __future__ import annotations

import io
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask, ThreadedTaskDispatcher, WSGITask
from waitress.utilities import Error, RequestEntityTooLarge

from vse.pipeline.errors import UserError

logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # no warnings: a page with many photos fills the queue briefly
REFUSAL_KEY = "vse.refused"  # key in the WSGI environment of a request for the status and the message of a refusal
_TOO_MANY_CONNECTIONS_MESSAGE = "The server has too many connections; try again in a moment."
_TOO_MANY_REQUESTS_MESSAGE = "The server has too many requests; try again in a moment."
_TOO_MANY_BYTES_MESSAGE = "The server reads other photographs already; try again in a moment."
_STOPPING_MESSAGE = "The server is stopping."
_STOPPING_RESPONSE = (
    "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
    f"Content-Length: {len(_STOPPING_MESSAGE)}\r\n\r\n{_STOPPING_MESSAGE}"
).encode()
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_EXTRA_BODY_BYTES = 2**20  # a slightly too large photo still arrives, so that the application can state its limit
_N_OWN_DESCRIPTORS = 8  # number of file descriptors that are not connections: listening sockets and pipes
_N_THREADS = 32  # most threads only wait for the thread that uses the model
_THREAD_END_TIMEOUT_S = 0.25


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on connections. The server closes a connection whose client exceeds a time limit.

    ``max_connections`` : number of connections that are served at once. The same number of extra connections gets status 503.
    ``max_requests`` : number of requests that are answered or wait. A single connection can send several requests at once.
    ``idle_timeout_s`` : time limit of three waits: until a byte is sent or received, until a request header is complete, and
        until the client closes the connection after the last response.
    ``request_timeout_s`` : time limit for sending a request, and for reading a response.
    ``refused_timeout_s`` : time limit for sending a request header on an extra connection, and for a pause between data from
        the client after the last response.
    ``max_bodies`` : limit on the bytes of all request bodies in memory, as a multiple of the largest accepted body.
    ``stop_grace_s`` : seconds from a signal to stop until pending requests are refused.
    """

    max_connections: int = 100
    max_requests: int = 100
    idle_timeout_s: float = 15
    request_timeout_s: float = 60
    refused_timeout_s: float = 2
    max_bodies: int = 8
    stop_grace_s: float = 3.5


class _BusyError(Error):  # type: ignore[misc]
    code = 503
    reason = "Service Unavailable"


class _RefusableRequest(HTTPRequestParser):  # type: ignore[misc]
    """A request that the server can refuse as soon as the header is complete."""

    error: Error | None
    completed: bool

    def __init__(self, channel: Channel, adj: Any) -> None:
        super().__init__(adj)
        self._channel, self._accepted = channel, False

    def received(self, data: bytes) -> int:
        consumed: int = super().received(data)
        if self.headers_finished and not self.error and not self._accepted:
            self._accepted = True
            self.error = self._channel.accept_or_find_refusal(self)
            self.completed = self.completed or self.error is not None
        if self.error:
            self.expect_continue = False  # do not ask the client to send the body
        return consumed


class _RefusalTask(WSGITask):  # type: ignore[misc]
    """A task that passes a refused request to the application, without its body. The application writes the answer."""

    def get_environment(self) -> dict[str, Any]:
        error = self.request.error
        nothing = {"wsgi.input": io.BytesIO(), "CONTENT_LENGTH": "0"}
        return {**super().get_environment(), **nothing, REFUSAL_KEY: (error.code, error.body)}

    def execute(self) -> None:
        self.set_close_on_finish()
        super().execute()


class Channel(HTTPChannel):  # type: ignore[misc]
    """A connection with time limits. The connection stays open until the client has read the last response.

    ``is_over_limit`` : True for a connection beyond ``max_connections``. All its requests are refused.
    ``held_bytes`` : size of the request body that arrives or waits.
    ``drain_start`` : time of the last response; None before it. Later data of the client are discarded.
    """

    request: Any
    close_when_flushed: bool

    def __init__(self, server: LimitedServer, *arguments: Any, **named: Any) -> None:
        self.parser_class = partial(_RefusableRequest, self)
        self.activity_start = time.monotonic()  # when the client began to connect, to send a request or to read a response
        self.drain_start: float | None = None
        self.held_bytes = 0
        self.response_begun = False
        self.is_over_limit = (
            sum(not channel.is_over_limit for channel in server.active_channels.values()) >= server.limits.max_connections
        )
        super().__init__(server, *arguments, **named)

    @staticmethod
    def error_task_class(channel: Channel, request: Any) -> Any:
        """Return the task that answers a request with an error. The application answers if the server refused the request."""
        refused = isinstance(request.error, _BusyError | RequestEntityTooLarge)
        return (_RefusalTask if refused else ErrorTask)(channel, request)

    def accept_or_find_refusal(self, request: Any) -> Error | None:
        """Return the error for a request that must be refused, or None for an accepted request.

        The header of the request has arrived, but not its body. If accepted, the size of the body is added to the held bytes.
        """
        if self.server.is_stopping or self.is_over_limit:
            return _BusyError(_STOPPING_MESSAGE if self.server.is_stopping else _TOO_MANY_CONNECTIONS_MESSAGE)
        if self.server.count_requests() >= self.server.limits.max_requests:
            return _BusyError(_TOO_MANY_REQUESTS_MESSAGE)
        largest = self.adj.max_request_body_size
        size = largest if request.chunked else request.content_length
        if size and self.server.count_held_bytes() + size > self.server.limits.max_bodies * largest:
            return _BusyError(_TOO_MANY_BYTES_MESSAGE)
        self.held_bytes = size
        return None

    def received(self, data: bytes) -> bool:
        """Receive data from the client. Discard data that arrive after the last response."""
        if self.drain_start is not None:
            return False
        if self.request is None:
            self.activity_start = time.monotonic()
        return bool(super().received(data))

    def readable(self) -> bool:
        return self.drain_start is not None or bool(super().readable())

    def handle_write(self) -> None:
        """Send pending data. After the last response, close only the sending direction, so that the client can read on."""
        if self.close_when_flushed and not self.requests:
            self._flush_exception(self._flush_some)
            if not self.total_outbufs_len and not self.will_close:
                self.close_when_flushed = False
                self.drain_start = time.monotonic()
                with suppress(OSError):  # if the client is gone, the next read fails and closes the connection
                    self.socket.shutdown(socket.SHUT_WR)
            if not self.will_close:
                return
        super().handle_write()

    def write_soon(self, data: Any) -> int:
        self.response_begun = True
        written: int = super().write_soon(data)
        return written

    def service(self) -> None:
        super().service()
        self.activity_start, self.held_bytes, self.response_begun = time.monotonic(), 0, False

    def close_if_late(self, now: float) -> None:
        """Close the connection if the client has exceeded a time limit. ``now`` is the time by the monotonic clock."""
        limits = self.server.limits
        if self.drain_start is not None:
            late = (
                now - self.drain_start > limits.idle_timeout_s or time.time() - self.last_activity > limits.refused_timeout_s
            )
        elif self.requests:
            late = False
        elif self.total_outbufs_len or (self.request is not None and self.request.headers_finished):
            late = (
                now - self.activity_start > limits.request_timeout_s
                or time.time() - self.last_activity > limits.idle_timeout_s
            )
        else:
            late = now - self.activity_start > (limits.refused_timeout_s if self.is_over_limit else limits.idle_timeout_s)
        if late:
            self.handle_close()

    def close_if_idle(self) -> bool:
        """Close the connection unless a response is pending, and return whether the connection is closed.

        A request whose body has not completely arrived is refused.
        """
        with self.requests_lock:
            if self.request is not None and self.request.headers_finished and not self.requests:
                self.request.error = _BusyError(_STOPPING_MESSAGE)
                self.requests.append(self.request)
                self.request = None
                self.server.add_task(self)
        if self.requests or self.total_outbufs_len or self.close_when_flushed or self.drain_start is not None:
            return False
        self.handle_close()
        return True

    def close_now(self) -> None:
        """Close the connection. If the response to a request has not begun, send a short refusal first."""
        with self.outbuf_lock:
            if self.requests and not self.response_begun:
                with suppress(OSError):
                    self.socket.send(_STOPPING_RESPONSE)
            self.connected = False  # so that the answering thread writes no more
        self.handle_close()


class LimitedServer(TcpWSGIServer):  # type: ignore[misc]
    """A listening socket and its connections."""

    channel_class = Channel

    def __init__(self, limits: ConnectionLimits, refusals: ThreadedTaskDispatcher, *arguments: Any, **named: Any) -> None:
        self.limits, self._refusal_dispatcher, self.is_stopping = limits, refusals, False
        super().__init__(*arguments, **named)

    def add_task(self, channel: Channel) -> None:
        """Queue the next request of a connection for a thread that answers it. A separate thread answers refused requests."""
        (self._refusal_dispatcher if channel.requests[0].error else self.task_dispatcher).add_task(channel)

    def count_requests(self) -> int:
        """Return the number of requests that are answered or wait."""
        return sum(len(channel.requests) for channel in list(self.active_channels.values()))

    def count_held_bytes(self) -> int:
        """Return the number of bytes of all request bodies that arrive or wait."""
        return sum(channel.held_bytes for channel in self.active_channels.values())

    def maintenance(self, _: float) -> None:
        now = time.monotonic()
        for channel in list(self.active_channels.values()):
            channel.close_if_late(now)

    def stop_listening(self) -> None:
        """Release the port. Open connections stay open."""
        self.is_stopping = True
        self.del_channel()
        self.socket.close()


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def list_trusted_hosts(host: str) -> Sequence[str] | None:
    """Return the host names that requests may address, or None for any name if other machines can reach ``host``.

    If only this machine can reach ``host``, a list of names prevents attacks by DNS rebinding.
    """
    return [*_LOOPBACK_HOSTS, _bracket_ipv6(host)] if is_loopback(host) else None


class PageServer:
    """A server for a WSGI application. Raises UserError if the server cannot listen on the address.

    ``port`` : port number; 0 chooses a free port.
    ``upload_bytes`` : largest size of an uploaded photo.
    ``limits`` : limits on connections; None: the defaults.
    """

    def __init__(self, app: Any, host: str, port: int, upload_bytes: int, limits: ConnectionLimits | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        body_bytes = upload_bytes + _EXTRA_BODY_BYTES
        self._channels: dict[int, Any] = {}  # listening sockets, connections and triggers, by file descriptor
        self._dispatchers = ThreadedTaskDispatcher(), ThreadedTaskDispatcher()
        self._servers: list[LimitedServer] = []
        self._stop_time: float | None = None
        try:
            settings = Adjustments(
                host="127.0.0.1" if host == "localhost" else host,
                port=port,
                ident=None,
                connection_limit=2 * self.limits.max_connections + _N_OWN_DESCRIPTORS,
                cleanup_interval=1,
                recv_bytes=2**16,
                max_request_body_size=body_bytes,
                inbuf_overflow=body_bytes + _EXTRA_BODY_BYTES,
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
            raise UserError(f"--host {host} --port {port}: cannot be served at ({_describe_error(error)})") from None
        work.set_thread_count(_N_THREADS)
        refusals.set_thread_count(1)
        self.url = f"http://{_bracket_ipv6(host)}:{self._servers[0].effective_port}/"

    def run(self) -> None:
        """Serve requests until :meth:`stop` is called. Then answer or refuse pending requests within ``stop_grace_s``."""
        while self._stop_time is None:
            self._handle_events(1)
        for server in self._servers:
            server.stop_listening()
        while not self._close_idle_channels() and (left := self._stop_time - time.monotonic()) > 0:
            self._handle_events(min(left, 1))
        for channel in self._list_connections():
            channel.close_now()

    def stop(self) -> None:
        """End :meth:`run` soon. A second call ends it at once. Other threads and signal handlers may call this method."""
        self._stop_time = time.monotonic() + (self.limits.stop_grace_s if self._stop_time is None else 0)
        if self._channels:  # not closed yet
            self._servers[0].pull_trigger()

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Call :meth:`stop` on Ctrl-C and SIGTERM in the caller's ``with`` block."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Close all connections, and end idle threads."""
        self._disconnect()
        for dispatcher in self._dispatchers:
            dispatcher.shutdown(timeout=_THREAD_END_TIMEOUT_S)

    def _handle_events(self, timeout_s: float) -> None:
        """Handle network events, wait for them at most ``timeout_s`` seconds, and close connections that are too slow."""
        wasyncore.loop(timeout=timeout_s, use_poll=True, map=self._channels, count=1)
        for server in self._servers:
            server.maintenance(time.time())

    def _list_connections(self) -> list[Channel]:
        return [channel for server in self._servers for channel in server.active_channels.values()]

    def _close_idle_channels(self) -> bool:
        """Close idle connections, and return whether all connections are closed."""
        waiting = [channel for channel in self._list_connections() if not channel.close_if_idle()]
        return not waiting

    def _disconnect(self) -> None:
        """Close the listening sockets and all connections."""
        for channel in list(self._channels.values()):
            channel.close()


def _bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _describe_error(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
