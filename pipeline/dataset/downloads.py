"""Download the published files of a data set over HTTP, check them, unpack them and prepare the data set.

Servers are not trusted: slow answers, endless redirects, and redirects to other than HTTP addresses are errors.
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

from vse.pipeline.dataset.preparation import prepare_dataset
from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.files.archives import remove_partial_unpacking, unpack_member
from vse.pipeline.files.outputs import OutputKind, check_output
from vse.pipeline.files.writing import lock_for_writing, remove_temporary_files, sha256_file
from vse.pipeline.presets.schema import DatasetConfig
from vse.pipeline.progress import progress_bar

MAX_ATTEMPTS = 5  # a download fails after this number of consecutive requests with almost no new bytes
FIRST_PAUSE_SECONDS = 1.0  # the pause after the first such request; the pause doubles after each further one
TIMEOUT_SECONDS = 60.0  # seconds without a byte; also the interval in which the speed is measured
MIN_BYTES_PER_SECOND = 1000  # a slower connection is closed
_MAX_REDIRECTS = 10
_CHUNK_BYTES = 1 << 16
_TEMPORARY_ERROR_STATUSES = {408, 429, 500, 502, 503, 504}
log = logging.getLogger(__name__)


def fetch_dataset(config: DatasetConfig, out: Path, base_url: str | None = None, images: bool = True) -> str:
    """Download and unpack the files of the data set ``config`` into ``out``, and write ``out/dataset.json``.

    Existing files are kept, so a second call resumes. ``base_url`` replaces everything in a URL except the file name. With
    ``images=False`` no images are downloaded. Returns a text for the user: the path of ``dataset.json``, or instructions to
    get the images if they are missing.
    """
    if not config.is_published or not config.files:
        raise UserError(f"data set {config.name!r}: its preset names no files to download. {config.where}".strip())
    with lock_for_writing(out, folder=True):
        remove_temporary_files(out)
        for file in config.files:
            target = out / file.to
            remove_partial_unpacking(target)
            is_image = PurePath(file.to).is_relative_to(config.images)
            if target.exists() or (is_image and not images):
                continue
            name = file.url.rpartition("/")[2]
            url = f"{base_url.rstrip('/')}/{name}" if base_url else file.url
            if file.member is None:
                log.info("%s: %s", download(url, target, file.sha256, file.bytes), url)
                continue
            _check_existing_file(out / name, file.sha256, url=url)
            archive = download(url, out / name, file.sha256, file.bytes)
            unpack_member(archive, file.member, target, file.max_bytes)
            log.info("%s: unpacked %s from %s; the archive is no longer needed", target, file.member, archive)
        return _prepare_if_images_exist(config, out)


def _check_existing_file(path: Path, sha256: str, url: str) -> None:
    """Raise UserError if a file exists at ``path`` and its SHA-256 is not ``sha256``. The message names ``url``."""
    check_output(path, OutputKind(f"the archive at {url}", lambda existing: sha256_file(existing) == sha256))


def _prepare_if_images_exist(config: DatasetConfig, out: Path) -> str:
    images_folder = out / config.images
    if not images_folder.is_dir():
        return (
            f"{out}: the annotations are ready. The images are still missing. Put them into the folder "
            f"{images_folder}, then run: vse-data prepare {config.name} --source {out} --out {out}\n{config.where}"
        ).strip()
    return str(prepare_dataset(config, out, out))


def download(url: str, path: Path, sha256: str, n_bytes: int) -> Path:
    """Download ``url``, a file of ``n_bytes`` bytes, to ``path``, unless ``path`` already has this SHA-256; return ``path``.

    The bytes are written to ``<path>.part``, so that a second call requests only the rest. Raises UserError if the server is
    out of reach or sends another file. A complete ``<path>.part`` with the wrong SHA-256 is removed.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: not an http:// or https:// address")
    instead = f"Run the command again, or get the file elsewhere and put it at {path}"
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and sha256_file(path) == sha256:
            return path
        _resume_download(url, part, n_bytes)
        if (actual := sha256_file(part)) != sha256:
            part.unlink()
            wrong = f"SHA256 hash of downloaded file ({path.name}) does not match the known hash"
            raise ConnectionError(f"{wrong}: expected {sha256} but got {actual}")
        part.replace(path)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"{url}: {to_printable_line(error).rstrip('.')}. {instead}") from None
    except OSError as error:
        raise UserError(f"cannot write {part}: {error.strerror or error}") from error
    return path


def download_unverified(url: str, path: Path, n_bytes: int) -> Path:
    """Download ``url`` to ``path`` without a check of the content, and return ``path``.

    If ``path`` already has ``n_bytes`` bytes, nothing is downloaded. A second call after an interruption requests only the
    rest.
    """
    if _file_size(path) != n_bytes:
        part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _resume_download(url, part, n_bytes)
            part.replace(path)
        except (ConnectionError, ValueError) as error:
            raise UserError(f"{url}: {to_printable_line(error).rstrip('.')}. Run the command again") from None
        except OSError as error:
            raise UserError(f"cannot write {part}: {error.strerror or error}") from error
    return path


def read_url(url: str, max_bytes: int) -> bytes:
    """Return the content of the file at ``url``. Raises UserError if the file has more than ``max_bytes``."""
    if (n_bytes := fetch_file_size(url)) > max_bytes:
        raise UserError(f"{url}: the file has {n_bytes} bytes; at most {max_bytes} are allowed")
    with TemporaryDirectory() as folder:
        return download_unverified(url, Path(folder, "content"), n_bytes).read_bytes()


def fetch_file_size(url: str) -> int:
    """Return the size in bytes of the file at ``url``. Raises UserError if the server is out of reach or reports no size."""
    with open_url(url) as stream:
        length = parse_length(stream.headers.get("Content-Length", ""))
    if length is None:
        raise UserError(f"{url}: the server does not report the size of the file; download it, and give its path")
    return length


@contextmanager
def open_url(url: str) -> Iterator[ResponseStream]:
    """Open the file at ``url`` as a stream of bytes.

    Raises UserError if the connection fails, now or while the stream is read.
    """
    reason = ""
    for attempt in range(MAX_ATTEMPTS):
        try:
            response = request_url(url, {"Accept-Encoding": "identity"}, TIMEOUT_SECONDS)
        except (ValueError, requests.TooManyRedirects) as error:
            raise UserError(f"{url}: {to_printable_line(error)}") from None
        except requests.RequestException as error:
            reason = _innermost_reason(error)
        else:
            if response.status_code == 200:
                with response:
                    yield ResponseStream(url, response)
                return
            response.close()
            reason = f"the server answers {response.status_code} {to_printable_line(response.reason)}"
            if response.status_code not in _TEMPORARY_ERROR_STATUSES:
                break
        if attempt < MAX_ATTEMPTS - 1:
            time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
    raise UserError(f"{url}: {reason}")


class ResponseStream:
    """The body of an HTTP response as a readable stream of bytes."""

    def __init__(self, url: str, response: requests.Response) -> None:
        self.headers = response.headers
        self._url, self._chunks = url, read_chunks(response, TIMEOUT_SECONDS)

    def read(self, _: int = -1) -> bytes:
        """Return the next bytes of the body, or empty bytes at its end."""
        try:
            return next(self._chunks, b"")
        except requests.RequestException as error:
            raise UserError(f"{self._url}: {_innermost_reason(error)}") from None


def _resume_download(url: str, part: Path, n_bytes: int) -> None:
    """Request the rest of the file ``part`` until this file has ``n_bytes``.

    Raises ConnectionError after ``MAX_ATTEMPTS`` consecutive requests that each brought fewer than 60,000 new bytes.
    """
    furthest, fruitless = _file_size(part), 0
    free = shutil.disk_usage(part.parent).free
    if n_bytes - furthest > free:
        raise ConnectionError(f"{n_bytes - furthest} bytes are missing, and {part.parent} has room for {free}")
    while _file_size(part) != n_bytes:
        try:
            _append_response(url, part, n_bytes)
            reason = "the connection ended early"
        except ValueError:  # not a valid URL
            raise
        except requests.TooManyRedirects as error:
            raise ConnectionError(_innermost_reason(error)) from None
        except requests.RequestException as error:
            reason = _innermost_reason(error)
        if _file_size(part) >= min(n_bytes, furthest + MIN_BYTES_PER_SECOND * TIMEOUT_SECONDS):
            furthest, fruitless = _file_size(part), 0
            continue
        furthest = max(furthest, _file_size(part))
        fruitless += 1
        if fruitless == MAX_ATTEMPTS:
            raise ConnectionError(f"{reason} ({_file_size(part)} of {n_bytes} bytes have arrived)")
        log.info("%s: %s; trying again", url, reason)
        time.sleep(FIRST_PAUSE_SECONDS * 2 ** (fruitless - 1))


def _append_response(url: str, part: Path, n_bytes: int) -> None:
    """Send one request for the rest of ``part`` and append the answer; restart ``part`` if the server cannot resume.

    ``n_bytes`` is the size of the complete file. Raises ConnectionError if the server sends a file of another size.
    """
    offset = _file_size(part)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    with request_url(url, headers, TIMEOUT_SECONDS) as response:
        status = f"the server answers {response.status_code} {to_printable_line(response.reason)}"
        continues = response.status_code == 206
        extent = response.headers.get("Content-Range" if continues else "Content-Length", "")
        if response.status_code == 416 or (continues and not extent.startswith(f"bytes {offset}-")):
            part.unlink(missing_ok=True)
            raise requests.HTTPError(status)
        if response.status_code in _TEMPORARY_ERROR_STATUSES:
            raise requests.HTTPError(status)
        if response.status_code not in (200, 206):
            raise ConnectionError(status)
        total = parse_length(extent.rpartition("/")[2])
        if total not in (None, n_bytes):
            raise ConnectionError(f"the file there has {total} bytes instead of {n_bytes}")
        bar = progress_bar(desc=part.stem, total=n_bytes, initial=offset * continues, unit="B", unit_scale=True)
        with part.open("ab" if continues else "wb") as stream, bar:
            for chunk in read_chunks(response, TIMEOUT_SECONDS, n_bytes - stream.tell()):
                bar.update(stream.write(chunk[: n_bytes - stream.tell()]))
                stream.flush()  # keeps these bytes even if this process is killed


def request_url(url: str, headers: Mapping[str, str], timeout: float) -> requests.Response:
    """Send a GET request and return the response with an unread body.

    Follows redirects to http:// and https:// addresses only. Raises requests.RequestException if the server is out of reach,
    sends nothing for ``timeout`` seconds, or does not send a complete header within twice this time.
    """
    deadline = time.monotonic() + 2 * timeout
    for _ in range(_MAX_REDIRECTS):
        response = _request_once(url, headers, timeout, deadline)
        target = response.headers.get("Location")
        if not response.is_redirect or target is None:
            return response
        response.close()
        url = urljoin(url, target)
        if not url.startswith(("http://", "https://")):
            raise requests.exceptions.InvalidSchema(f"the server redirects to {url:.200}, not an http:// or https:// address")
    raise requests.TooManyRedirects(f"the server redirects more than {_MAX_REDIRECTS} times")


def read_chunks(response: requests.Response, timeout: float, n_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the body of a response in chunks as they arrive.

    Stops once ``n_bytes`` bytes have arrived; if ``n_bytes`` is None, at the end of the body. Raises requests.RequestException
    if the connection breaks, or if fewer bytes than ``MIN_BYTES_PER_SECOND`` arrive per second during ``timeout`` seconds.
    """
    n_before, n_read, start = 0, 0, time.monotonic()
    while n_bytes is None or n_read < n_bytes:
        try:
            chunk = response.raw.read1(_CHUNK_BYTES, decode_content=True)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise requests.ConnectionError(str(error)) from error
        if not chunk:
            return
        n_read += len(chunk)
        yield chunk
        if time.monotonic() > start + timeout:
            if n_read - n_before < MIN_BYTES_PER_SECOND * timeout:
                raise requests.Timeout(f"the server sends fewer than {MIN_BYTES_PER_SECOND} bytes a second")
            n_before, start = n_read, time.monotonic()


def parse_length(text: str) -> int | None:
    """Return the number of bytes that the value of an HTTP header states; None if the value is not a number."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _request_once(url: str, headers: Mapping[str, str], timeout: float, deadline: float) -> requests.Response:
    """Send one request without following redirects; a redirect is returned as the response.

    Raises requests.Timeout if the header is incomplete at ``deadline``, a time of ``time.monotonic``.
    """
    results: list[requests.Response | Exception] = []
    abandoned = threading.Event()

    def request() -> None:
        try:
            response = requests.get(url, headers=headers, stream=True, timeout=timeout, allow_redirects=False)
            results.append(response)
            if abandoned.is_set():
                response.close()
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if not results:
        abandoned.set()
        raise requests.Timeout("timed out: the server does not end its header")
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _innermost_reason(error: BaseException) -> str:
    """Return one line with the message of the exception that first caused an error, e.g. ``Connection refused``."""
    while error.__context__ is not None:
        error = error.__context__
    return to_printable_line(error)
