"""Check of vse-serve's answers under load: many clients send requests for a minute, and some requests are invalid.

Claim: with 32 clients for 60 s no answer is wrong, no request hangs, and memory does not grow. One request in ten is
invalid: it has no query, a number out of range, or an unknown id, method or host. Or it sends bytes that are not an image
or not a request, or a photograph with too many pixels or bytes. Some clients hang up. The answer to a valid request must
be the one that a single client got before. The answer to an invalid request must have the status that docs/serve.md names.
``growth_pct`` compares the server's peak memory in the last quarter of the time with that in the second quarter.
``stop_s`` is the time from SIGTERM to the end of the server.
Limits: the demo and the model are tiny, and the clients share the cores of the server, so ``per_s`` is not its highest
rate. The exit code is 1 if an answer is wrong, or if memory grows by more than 10%.

    python benchmarks/load.py
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from common import RESULTS, report

import vse

SERVE = "from vse.training.serve.cli import serve_main; serve_main()"
FEATURE = {"model": "squeezenet1_1", "layer": "features.2", "grid": 2, "weights": "random", "resize": 32, "crop": 32}
MODEL = {"train.epochs": 1, "model.dim": 64, "model.word_dim": 32, "train.batch_size": 32, "train.min_count": 1}
UPLOAD_MB = 1
MOST_GROWTH = 10  # per cent


class Request(NamedTuple):
    """A request and the allowed statuses of its answer; a valid request always gets the same content."""

    method: str
    path: str
    body: bytes = b""
    statuses: tuple[int, ...] = (200,)
    headers: tuple[tuple[str, str], ...] = ()


def form(content: bytes) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return the body and the headers of a form with a photograph."""
    start = b'--x\r\nContent-Disposition: form-data; name="photo"; filename="a.jpg"\r\n\r\n'
    return start + content + b"\r\n--x--\r\n", (("Content-Type", "multipart/form-data; boundary=x"),)


def upload(content: bytes, *statuses: int) -> Request:
    """Return the request of a search by a photograph."""
    body, headers = form(content)
    return Request("POST", "/search?as=json&k=5", body, statuses or (200,), headers)


def png(width: int, height: int) -> bytes:
    """Return a PNG file with a header and almost no pixels."""
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(9))),
        (b"IEND", b""),
    )
    chunks = (struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def good_requests(data: vse.DatasetFile) -> list[Request]:
    """Return searches by texts and photographs, and requests for pages and small photographs."""
    test = data.frame[data.frame["split"] == "test"]
    texts = [Request("GET", "/search?" + urlencode({"q": text, "as": "json", "k": 5})) for text in test["caption"][:20]]
    ids = data.image_ids("test")[:5]
    photos = [upload(data.photo(image_id).read_bytes()) for image_id in ids]
    small = [Request("GET", f"/photo/{image_id}") for image_id in ids]
    return [*texts, *photos, *small, Request("GET", "/"), Request("GET", "/page.js")]


def bad_requests() -> list[Request]:
    """Return requests that the server refuses, as docs/serve.md describes."""
    return [
        Request("GET", "/search?as=json&q=", statuses=(400,)),
        Request("GET", "/search?as=json&q=a&k=999", statuses=(400,)),
        Request("GET", "/search?as=json&q=" + "a" * 2000, statuses=(400,)),
        Request("GET", "/search?as=json&q=a&run=9&hit=1", statuses=(404,)),
        Request("GET", "/photo/999999", statuses=(404,)),
        Request("DELETE", "/search", statuses=(405,)),
        Request("GET", "/", statuses=(400,), headers=(("Host", "evil.example"),)),
        upload(b"no image", 400),
        upload(png(6000, 5000), 400),
        upload(bytes(UPLOAD_MB * 2**20 + 2**19), 413),  # the application refuses it
        upload(bytes(4 * 2**20), 413),  # the server refuses it before it is complete
    ]


def answer(connection: HTTPConnection, request: Request) -> tuple[int, bytes]:
    """Return the status and content of an answer; of JSON, only the hits, without times."""
    connection.request(request.method, request.path, request.body or None, dict(request.headers))
    response = connection.getresponse()
    content = response.read()
    if response.getheader("Content-Type") == "application/json" and response.status == 200:
        found = json.loads(content)
        content = json.dumps([run["hits"] for run in found["runs"]]).encode()
    return response.status, content


def hang_up(host: str, port: int, rng: random.Random) -> None:
    """Send an invalid or incomplete request, and close the connection."""
    sent = rng.choice(
        [b"\x16\x03\x01\x02", b"GET /search?q=a HTTP/1.1\r\nHo", b"POST /search HTTP/1.1\r\nContent-Length: 99\r\n\r\na"]
    )
    with closing(socket.create_connection((host, port))) as connection:
        connection.sendall(sent)


class Client:
    """A client that sends requests until a given time, and records response times and wrong answers."""

    def __init__(self, netloc: str, right: dict[Request, bytes], bad: list[Request], share: float, seed: int) -> None:
        self._netloc, self._right, self._bad, self._share = netloc, right, bad, share
        self._rng = random.Random(seed)
        self.seconds: list[float] = []
        self.wrong: list[str] = []
        self.n_bad = 0

    def run(self, until: float) -> None:
        """Send requests until ``until``; about one in ten closes the connection, the others keep it open."""
        connection = HTTPConnection(self._netloc, timeout=60)
        good = list(self._right)
        while time.monotonic() < until:
            is_bad = self._rng.random() < self._share
            self.n_bad += is_bad
            if is_bad and self._rng.random() < 0.2:
                host, _, port = self._netloc.partition(":")
                hang_up(host, int(port), self._rng)
                continue
            request = self._rng.choice(self._bad if is_bad else good)
            started = time.perf_counter()
            try:
                status, content = answer(connection, request)
            except (OSError, HTTPException) as error:
                self.wrong.append(f"{request.method} {request.path[:60]}: {type(error).__name__} {error}")
                connection.close()
                continue
            self.seconds.append(time.perf_counter() - started)
            if status not in request.statuses or (status == 200 and content != self._right[request]):
                self.wrong.append(f"{request.method} {request.path[:60]}: {status} {content[:80]!r}")
            if self._rng.random() < 0.1:
                connection.close()
        connection.close()


def memory_mb(process: int) -> float:
    """Return the resident memory of a process in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def sampled(stop: threading.Event, process: int) -> list[float]:
    """Return the memory of a process, sampled four times a second until ``stop`` is set."""
    values = []
    while not stop.wait(0.25):
        values.append(memory_mb(process))
    return values


def run_of_demo(folder: Path) -> tuple[vse.DatasetFile, vse.TrainedModel]:
    """Draw a small data set, and train a model on it."""
    data = vse.draw_demo(folder / "data", images=66)
    features = vse.extract(
        data, "fc7", sets=FEATURE, out=folder / "demo.h5", shards=1, options=vse.ExtractOptions(device="cpu")
    )
    return data, vse.train(features, sets=MODEL, out=folder / "run", options=vse.TrainOptions(device="cpu"))


def load(folder: Path, clients: int, seconds: float, share: float) -> tuple[dict[str, object], list[str]]:
    """Run the server under load; return the row of the table, and a line for each wrong answer."""
    data, run = run_of_demo(folder)
    command = [sys.executable, "-c", SERVE, str(run.path), "--port", "0", "--device", "cpu", "--upload-mb", str(UPLOAD_MB)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        netloc = urlsplit(process.stdout.readline().strip()).netloc
        single = HTTPConnection(netloc, timeout=60)
        right = {request: answer(single, request)[1] for request in good_requests(data)}
        single.close()
        many = [Client(netloc, right, bad_requests(), share, seed) for seed in range(clients)]
        stop, until = threading.Event(), time.monotonic() + seconds
        with ThreadPoolExecutor(clients + 1) as pool:
            memory = pool.submit(sampled, stop, process.pid)
            for client in [pool.submit(client.run, until) for client in many]:
                client.result()
            stop.set()
        started = time.perf_counter()
        process.terminate()
        code = process.wait()
        stop_s = time.perf_counter() - started
    wrong = [line for client in many for line in client.wrong] + ([] if code == 0 else [f"exit code {code}"])
    taken = sorted(1000 * one for client in many for one in client.seconds)
    values = memory.result()
    quarter = max(1, len(values) // 4)
    before, after = max(values[quarter : 2 * quarter], default=values[0]), max(values[-quarter:])
    row: dict[str, object] = {"clients": clients, "seconds": seconds, "requests": len(taken) + len(wrong)}
    row |= {"bad": sum(client.n_bad for client in many), "wrong": len(wrong), "per_s": round(len(taken) / seconds, 1)}
    row |= {"median_ms": round(statistics.median(taken), 1), "p95_ms": round(taken[int(0.95 * len(taken))], 1)}
    row |= {"longest_ms": round(taken[-1], 1), "memory_mb": round(after), "growth_pct": round(100 * (after / before - 1), 1)}
    return {**row, "stop_s": round(stop_s, 2)}, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--bad", type=float, default=0.1, help="share of the requests that are invalid")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        row, wrong = load(Path(name), arguments.clients, arguments.seconds, arguments.bad)
    report("load", [row], arguments.out)
    print(*wrong[:20], sep="\n", file=sys.stderr)
    return int(bool(wrong) or float(str(row["growth_pct"])) > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
