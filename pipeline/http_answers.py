"""Answers of HTTP servers that may lie: redirects to other kinds of addresses, endless redirects, slow headers and bodies."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from urllib.parse import urljoin

import requests
import urllib3

SLOWEST = 1000  # bytes a second
_MOST_REDIRECTS = 10
_CHUNK = 1 << 16


def answer_of(url: str, headers: Mapping[str, str], seconds: float) -> requests.Response:
    """Request a file; returns the answer, whose body is still to be read.

    Redirects are followed to http:// and https:// addresses alone, and their bodies are not read.
    Raises requests.RequestException if the server cannot be reached, or if no complete header arrives in twice ``seconds``.
    """
    until = time.monotonic() + 2 * seconds
    for _ in range(_MOST_REDIRECTS):
        answer = _answer_until(url, headers, seconds, until)
        target = answer.headers.get("Location")
        if not answer.is_redirect or target is None:
            return answer
        answer.close()
        url = urljoin(url, target)
        if not url.startswith(("http://", "https://")):
            raise requests.exceptions.InvalidSchema(f"the server redirects to {url:.200}, not an http:// or https:// address")
    raise requests.TooManyRedirects(f"the server redirects more than {_MOST_REDIRECTS} times")


def chunks_of(answer: requests.Response, seconds: float, n_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of an answer as they arrive, at most ``n_bytes``.

    Raises requests.RequestException if the connection breaks, or if fewer than ``SLOWEST`` bytes a second arrive.
    """
    n_before, n_read, start = 0, 0, time.monotonic()
    while n_bytes is None or n_read < n_bytes:
        try:
            chunk = answer.raw.read1(_CHUNK, decode_content=True)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise requests.ConnectionError(str(error)) from error
        if not chunk:
            return
        n_read += len(chunk)
        yield chunk
        if time.monotonic() > start + seconds:
            if n_read - n_before < SLOWEST * seconds:
                raise requests.Timeout(f"the server sends fewer than {SLOWEST} bytes a second")
            n_before, start = n_read, time.monotonic()


def length_in(text: str) -> int | None:
    """Return a length in a header as a number, or None if it is not one."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _answer_until(url: str, headers: Mapping[str, str], seconds: float, until: float) -> requests.Response:
    """Request one address; a thread waits for the header, because a server can send it byte by byte without end."""
    results: list[requests.Response | Exception] = []
    abandoned = threading.Event()

    def request() -> None:
        try:
            answer = requests.get(url, headers=headers, stream=True, timeout=seconds, allow_redirects=False)
            results.append(answer)
            if abandoned.is_set():
                answer.close()
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    if not results:
        abandoned.set()
        raise requests.Timeout("timed out: the server does not end its header")
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]
