"""Files that are written to while a command reads them: one line that names the file, or the result of what was read.

A hook of Python's own (``sys.addaudithook``) writes to a file when the command opens another one, so that the order of events
is always the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.eval.protocols.test_evaluate import made
from tests.faults.suite import StartSuite
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import write_embeddings

CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "all zeros": lambda content: bytes(len(content)),
    "one byte shorter": lambda content: content[:-1],
    "longer": lambda content: content + b"more",
    "reversed": lambda content: content[::-1],
    "random bytes": lambda content: np.random.default_rng(0).bytes(len(content)),
    "half of it overwritten": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
}
QUICK = ["--bootstrap", "0", "--protocol", "full", "--no-cross-check"]
_waiting: list[Any] = []  # the file, how often it is still opened before it happens, and what happens; hooks stay for ever


def _hook(event: str, values: tuple[Any, ...]) -> None:
    if event == "open" and _waiting and str(values[0]) == _waiting[0]:
        _waiting[1] -= 1
        if _waiting[1] == 0:
            change = _waiting[2]
            _waiting.clear()
            change()


sys.addaudithook(_hook)


@contextmanager
def at_open(path: Path, nth: int, change: Callable[[], None]) -> Iterator[None]:
    """In this block call ``change`` when ``path`` is opened for the ``nth`` time (from 1)."""
    _waiting[:] = [str(path), nth, change]
    yield
    _waiting.clear()


def overwrite(path: Path, content: bytes) -> None:
    """Write to a file in place, as ``cp`` does."""
    with path.open("r+b") as stream:
        stream.truncate(len(content))
        stream.write(content)


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    return [write_embeddings(tmp_path / f"seed-{seed}.h5", made(seed=seed)) for seed in (0, 1)]


def evaluated(seeds: list[Path], out: Path) -> int:
    with pytest.raises(SystemExit) as stop:
        eval_main([*map(str, seeds), *QUICK, "--out", str(out)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_embeddings_that_are_overwritten_in_place_are_named_or_have_been_read(
    seeds: list[Path], suite_of_faults: StartSuite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suite_of_faults("embeddings, overwritten while vse-eval reads them", 24)
    content, out = seeds[0].read_bytes(), tmp_path / "result.json"
    assert evaluated(seeds, out) == 0
    expected = json.loads(out.read_text())["protocols"]
    for k in range(suite.n_tries):
        how, nth = list(CHANGES)[k % len(CHANGES)], 1 + k // len(CHANGES) % 3
        seeds[0].write_bytes(content)
        out.unlink(missing_ok=True)
        capsys.readouterr()
        with at_open(seeds[1], nth, lambda how=how: overwrite(seeds[0], CHANGES[how](content))):  # type: ignore[misc]
            code = evaluated(seeds, out)
        said = capsys.readouterr().err.splitlines()
        if code == 2 and not out.exists() and str(seeds[0]) in said[-1] and not any("Traceback" in line for line in said):
            suite.record("refused")
        elif code == 0:
            same = json.loads(out.read_text())["protocols"] == expected
            suite.record("harmless" if same else "silent", f"{how}, at open {nth}")
        else:
            suite.record("wrong", f"{how}, at open {nth}: {code} {said[-5:]}")


def test_a_file_that_is_renamed_over_an_open_one_is_not_read(seeds: list[Path], tmp_path: Path) -> None:
    """Rename as all writers of this project do: the command goes on with the file that it opened."""
    out = tmp_path / "result.json"
    assert evaluated(seeds, out) == 0
    expected, new = json.loads(out.read_text())["protocols"], tmp_path / "new.h5"
    new.write_bytes(b"something else")
    with at_open(seeds[1], 2, lambda: new.rename(seeds[0]) and None):
        assert evaluated(seeds, out) == 0
    assert json.loads(out.read_text())["protocols"] == expected
