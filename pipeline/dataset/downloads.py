"""Download published files over HTTP: resumed after a break, checked by their SHA-256, unpacked, prepared.

Answers of HTTP servers that may lie: redirects to other kinds of addresses, endless redirects, slow headers and bodies.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from urllib.parse import urljoin

import requests
import urllib3

from vse.pipeline.dataset.sources import prepare_dataset
from vse.pipeline.errors import UserError, printable
from vse.pipeline.files.archives import remove_partial_unpacking, unpack
from vse.pipeline.files.outputs import OutputKind, check_output
from vse.pipeline.files.writing import clear_temporaries, lock_for_writing, sha256_file
from vse.pipeline.presets.schema import DatasetConfig
from vse.pipeline.progress import progress_bar

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


ATTEMPTS = 5  # requests in a row without a new byte
PAUSE = 1.0  # seconds after the first of them, doubled after each
TIMEOUT = 60.0  # seconds without a byte, and for which the speed is measured
_TRY_AGAIN = {408, 429, 500, 502, 503, 504}
log = logging.getLogger(__name__)


def fetch_dataset(config: DatasetConfig, out: Path, base_url: str | None = None, images: bool = True) -> str:
    """Download the files of ``config`` into ``out``, unpack them there, and write ``out/dataset.json``.

    Files that exist are kept, so a second call resumes where the first one stopped. ``base_url`` replaces
    all of every URL but the file name; ``images=False`` leaves the images out. Returns the path of
    ``dataset.json``, or, if the images are missing, a text that tells what to get and where.
    """
    if not config.is_published or not config.files:
        raise UserError(f"data set {config.name!r}: its preset names no files to download. {config.where}".strip())
    with lock_for_writing(out, folder=True):
        clear_temporaries(out)
        for file in config.files:
            target = out / file.to
            remove_partial_unpacking(target)
            of_images = PurePath(file.to).is_relative_to(config.images)
            if target.exists() or (of_images and not images):
                continue
            name = file.url.rpartition("/")[2]
            url = f"{base_url.rstrip('/')}/{name}" if base_url else file.url
            if file.member is None:
                log.info("%s: %s", download(url, target, file.sha256, file.bytes), url)
                continue
            _check_archive(out / name, file.sha256, part_of=url)
            archive = download(url, out / name, file.sha256, file.bytes)
            unpack(archive, file.member, target, file.max_bytes)
            log.info("%s: %s of %s, which is no longer needed", target, file.member, archive)
        return _prepared(config, out)


def _check_archive(path: Path, sha256: str, part_of: str) -> None:
    """Raises UserError if a file that was not downloaded from there would be replaced."""
    check_output(path, OutputKind(f"the archive at {part_of}", lambda there: sha256_file(there) == sha256))


def _prepared(config: DatasetConfig, out: Path) -> str:
    """Make ``dataset.json`` if the images are there; else what to get and where to put it."""
    images_folder = out / config.images
    if not images_folder.is_dir():
        return (
            f"{out}: the annotations are ready. The images are still missing. Put them into the folder "
            f"{images_folder}, then run: vse-data prepare {config.name} --source {out} --out {out}\n{config.where}"
        ).strip()
    return str(prepare_dataset(config, out, out))


def download(url: str, path: Path, sha256: str, n_bytes: int) -> Path:
    """Download ``url`` to ``path`` unless a file with this SHA-256 is there; returns ``path``.

    What has arrived is kept in ``<path>.part``, also when the process is killed, and the next call requests only
    the rest. :class:`UserError` if the server cannot be reached or has another file; a partial file with
    wrong bytes is removed.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: not an http:// or https:// address")
    instead = f"Run the command again, or get the file elsewhere and put it at {path}"
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and sha256_file(path) == sha256:
            return path
        _resume(url, part, n_bytes)
        if (actual := sha256_file(part)) != sha256:
            part.unlink()
            wrong = f"SHA256 hash of downloaded file ({path.name}) does not match the known hash"
            raise ConnectionError(f"{wrong}: expected {sha256} but got {actual}")
        part.replace(path)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"{url}: {printable(error).rstrip('.')}. {instead}") from None
    except OSError as error:
        raise UserError(f"cannot write {part}: {error.strerror or error}") from error
    return path


def download_whole(url: str, path: Path, n_bytes: int) -> Path:
    """Download ``url``, whose content is checked elsewhere, to ``path``, unless a file of its size is there; returns ``path``.

    What has arrived is kept, and the next call requests the rest, as of :func:`download`.
    """
    if _size(path) != n_bytes:
        part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _resume(url, part, n_bytes)
            part.replace(path)
        except (ConnectionError, ValueError) as error:
            raise UserError(f"{url}: {printable(error).rstrip('.')}. Run the command again") from None
        except OSError as error:
            raise UserError(f"cannot write {part}: {error.strerror or error}") from error
    return path


def read_address(url: str, most_bytes: int) -> bytes:
    """The content of a small file at an address; :class:`UserError` if it has more than ``most_bytes``."""
    if (n_bytes := size_at(url)) > most_bytes:
        raise UserError(f"{url}: {n_bytes} bytes, and no more than {most_bytes} are expected")
    with TemporaryDirectory() as folder:
        return download_whole(url, Path(folder, "content"), n_bytes).read_bytes()


def size_at(url: str) -> int:
    """How many bytes a file at an address has; :class:`UserError` if the server cannot be reached or does not say."""
    with stream_of(url) as answer:
        length = length_in(answer.headers.get("Content-Length", ""))
    if length is None:
        raise UserError(f"{url}: the server does not say how large it is; download it, and give its path")
    return length


@contextmanager
def stream_of(url: str) -> Iterator[Answer]:
    """A file at an address, to be read once; what breaks while it is read is a :class:`UserError`, too."""
    reason = ""
    for attempt in range(ATTEMPTS):
        try:
            answer = answer_of(url, {"Accept-Encoding": "identity"}, TIMEOUT)
        except (ValueError, requests.TooManyRedirects) as error:
            raise UserError(f"{url}: {printable(error)}") from None
        except requests.RequestException as error:
            reason = _reason(error)
        else:
            if answer.status_code == 200:
                with answer:
                    yield Answer(url, answer)
                return
            answer.close()
            reason = f"the server answers {answer.status_code} {printable(answer.reason)}"
            if answer.status_code not in _TRY_AGAIN:
                break
        if attempt < ATTEMPTS - 1:
            time.sleep(PAUSE * 2**attempt)
    raise UserError(f"{url}: {reason}")


class Answer:
    """What a server sends, as a stream of bytes."""

    def __init__(self, url: str, answer: requests.Response) -> None:
        self.headers = answer.headers
        self._url, self._chunks = url, chunks_of(answer, TIMEOUT)

    def read(self, _: int = -1) -> bytes:
        """The next bytes; none at the end."""
        try:
            return next(self._chunks, b"")
        except requests.RequestException as error:
            raise UserError(f"{self._url}: {_reason(error)}") from None


def _resume(url: str, part: Path, n_bytes: int) -> None:
    """Request what ``part`` lacks until it has all ``n_bytes``; ConnectionError after too many requests without progress."""
    furthest, fruitless = _size(part), 0
    free = shutil.disk_usage(part.parent).free
    if n_bytes - furthest > free:
        raise ConnectionError(f"{n_bytes - furthest} bytes are still to come, and {part.parent} has room for {free}")
    while _size(part) != n_bytes:
        try:
            _append(url, part, n_bytes)
            reason = "the connection ended early"
        except ValueError:  # not a valid URL
            raise
        except requests.TooManyRedirects as error:
            raise ConnectionError(_reason(error)) from None
        except requests.RequestException as error:
            reason = _reason(error)
        if _size(part) >= min(n_bytes, furthest + SLOWEST * TIMEOUT):
            furthest, fruitless = _size(part), 0
            continue
        furthest = max(furthest, _size(part))
        fruitless += 1
        if fruitless == ATTEMPTS:
            raise ConnectionError(f"{reason} ({_size(part)} of {n_bytes} bytes have arrived)")
        log.info("%s: %s; trying again", url, reason)
        time.sleep(PAUSE * 2 ** (fruitless - 1))


def _append(url: str, part: Path, n_bytes: int) -> None:
    """One request for the rest of ``part``; from the first byte if the server does not resume."""
    offset = _size(part)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    with answer_of(url, headers, TIMEOUT) as answer:
        status = f"the server answers {answer.status_code} {printable(answer.reason)}"
        continues = answer.status_code == 206
        extent = answer.headers.get("Content-Range" if continues else "Content-Length", "")
        if answer.status_code == 416 or (continues and not extent.startswith(f"bytes {offset}-")):
            part.unlink(missing_ok=True)
            raise requests.HTTPError(status)
        if answer.status_code in _TRY_AGAIN:
            raise requests.HTTPError(status)
        if answer.status_code not in (200, 206):
            raise ConnectionError(status)
        total = length_in(extent.rpartition("/")[2])
        if total not in (None, n_bytes):
            raise ConnectionError(f"the file there has {total} bytes instead of {n_bytes}")
        bar = progress_bar(desc=part.stem, total=n_bytes, initial=offset * continues, unit="B", unit_scale=True)
        with part.open("ab" if continues else "wb") as stream, bar:
            for chunk in chunks_of(answer, TIMEOUT, n_bytes - stream.tell()):
                bar.update(stream.write(chunk[: n_bytes - stream.tell()]))
                stream.flush()  # what has arrived is kept, also if this process is killed


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: BaseException) -> str:
    """Return the innermost cause of an error, e.g. 'Connection refused' inside three layers of libraries, on one line."""
    while error.__context__ is not None:
        error = error.__context__
    return printable(error)
