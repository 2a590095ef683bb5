"""Damaged and hostile FAISS index files: refused in one line, or the search finds what it found before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.faults.suite import StartSuite
from tests.pipeline.import_files import photo_bytes
from vse.eval.search.index import IndexSource, build_index, hash_ids, metadata_file, read_index, search_index, write_index
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file

pytestmark = pytest.mark.nightly

FACTORIES = ("Flat", "IVF4,Flat", "HNSW8", "PCA4,IVF4,SQ8", "PQ4x4", "IVF4,PQ4x4")
CORPUS = np.random.default_rng(0).normal(size=(700, 8)).astype(np.float32)
INDEXED = IndexSource(700, 8, "cosine", hash_ids(np.arange(700)), {"side": "images", "split": "test", "weights": 64 * "a"})
SIZES = (0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**64 - 1)

# Reads and searches each index in a process of its own, which may crash, hang or fill the memory.
EACH_ALONE = """
import os, resource, signal, sys
from pathlib import Path
import numpy as np
from tests.faults.test_index_files import CORPUS, INDEXED
from vse.eval.search.index import search_index
from vse.eval.search.index import read_index
from vse.pipeline.errors import UserError

for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        signal.alarm(30)
        resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
        try:
            found = search_index(read_index(Path(name), INDEXED).index, CORPUS[:20], 5)
        except UserError as error:
            os._exit(2 if name in str(error) and "\\n" not in str(error) else 1)
        except BaseException:
            os._exit(1)
        os._exit(0 if found.rows.shape == (20, 5) and (found.rows < len(CORPUS)).all() else 3)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def _flipped(content: bytes, rng: np.random.Generator) -> bytes:
    spoilt = bytearray(content)
    spoilt[rng.integers(len(spoilt))] ^= 1 << int(rng.integers(8))
    return bytes(spoilt)


def _other_kind(_: bytes, rng: np.random.Generator) -> bytes:
    others = (photo_bytes(3), b"Milk, bread\n", b'{"format": "vse-index"}', b"", bytes(1000), rng.bytes(5000))
    return others[int(rng.integers(len(others)))]


DAMAGES: dict[str, Callable[[bytes, np.random.Generator], bytes]] = {
    "a flipped bit": _flipped,
    "a cut": lambda content, rng: content[: int(rng.integers(len(content)))],
    "another kind of file": _other_kind,
    "more bytes": lambda content, rng: content + rng.bytes(int(rng.integers(1, 100))),
    "a part twice": lambda content, rng: content[: int(rng.integers(len(content)))] + content,
}


def test_a_damaged_index_is_refused(suite_of_faults: StartSuite, tmp_path: Path) -> None:
    suite, rng = suite_of_faults("damaged FAISS indexes", 30), np.random.default_rng(1)
    made = {}
    for number, factory in enumerate(FACTORIES):
        file = write_index(tmp_path / f"{number}.faiss", build_index(CORPUS, factory), INDEXED)
        found = search_index(read_index(file, INDEXED).index, CORPUS, 5)
        made[file] = (file.read_bytes(), metadata_file(file).read_bytes(), found)
    for k in range(suite.n_tries):
        file = list(made)[k % len(made)]
        damage = list(DAMAGES)[k // len(made) % len(DAMAGES)]
        content, note, expected = made[file]
        of_note = rng.random() < 0.25
        file.write_bytes(content if of_note else DAMAGES[damage](content, rng))
        metadata_file(file).write_bytes(DAMAGES[damage](note, rng) if of_note else note)
        detail = f"{FACTORIES[k % len(made)]}: {damage} in the {'note' if of_note else 'index'}"
        try:
            found = search_index(read_index(file, INDEXED).index, CORPUS, 5)
        except UserError as error:
            suite.record("refused" if str(file) in str(error) and "\n" not in str(error) else "wrong", f"{detail}: {error}")
        except Exception as error:
            suite.record("wrong", f"{detail}: {error!r}")
        else:
            same = np.array_equal(found.rows, expected.rows) and np.array_equal(found.scores, expected.scores)
            suite.record("harmless" if same else "silent", detail)


@pytest.mark.nightly
def test_an_index_with_hostile_sizes_is_refused(suite_of_faults: StartSuite, tmp_path: Path) -> None:
    """Write a size that the file does not hold over eight bytes near its start, with a note that vouches for it.

    Whoever writes both files can make any result; the search neither crashes nor hangs nor names rows that are not there.
    """
    suite, rng = suite_of_faults("FAISS indexes that state false sizes", 6), np.random.default_rng(2)
    tries = []
    for k in range(suite.n_tries):
        factory = FACTORIES[k % len(FACTORIES)]
        file = write_index(tmp_path / f"{k}.faiss", build_index(CORPUS, factory), INDEXED)
        content, size = bytearray(file.read_bytes()), SIZES[int(rng.integers(len(SIZES)))]
        at = int(rng.integers(4, min(len(content) - 8, 400)))
        content[at : at + 8] = size.to_bytes(8, "little")
        file.write_bytes(content)
        note = json.loads(metadata_file(file).read_text())
        metadata_file(file).write_text(json.dumps({**note, "sha256": sha256_file(file)}))
        tries.append((file, f"{factory}: {size} at byte {at}"))
    command = [sys.executable, "-c", EACH_ALONE, *(str(file) for file, _ in tries)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for (_, detail), status in zip(tries, map(int, done.stdout.split()), strict=True):
        suite.record({0: "harmless", 2 << 8: "refused"}.get(status, "wrong"), f"{detail}: status {status}")  # type: ignore[arg-type]
