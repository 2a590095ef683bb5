from __future__ import annotations

import io
import logging
import re
import subprocess
import sys

import pytest

from tests.pipeline.conftest import Log, Patch
from vse.pipeline import progress
from vse.pipeline.progress import progress_bar


class Terminal(io.StringIO):
    """A standard error stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_lines_say_how_far_it_is(monkeypatch: Patch, caplog: Log) -> None:
    caplog.set_level(logging.INFO)
    assert list(progress_bar(range(5), desc="draw demo")) == [0, 1, 2, 3, 4]
    assert caplog.text == "", "what is done soon says nothing"
    monkeypatch.setattr(progress, "LOG_INTERVAL_SECONDS", 0.0)
    with progress_bar(desc="extract fc7, shard 2 of 4", total=30, unit="image") as bar:
        for _ in range(3):
            bar.update(10)
    lines = [record.message for record in caplog.records]
    line = r"extract fc7, shard 2 of 4: 20 of 30, +[\d.]+k? image/s, 00:00 so far, 00:00 left"
    assert any(re.fullmatch(line, text) for text in lines), lines
    assert lines[-1].startswith("extract fc7, shard 2 of 4: 30 of 30, ")


def test_a_terminal_has_a_bar_and_no_lines(monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    caplog.set_level(logging.INFO)
    assert list(progress_bar(range(5), desc="draw demo", unit="image")) == [0, 1, 2, 3, 4]
    assert "draw demo: 100%" in sys.stderr.getvalue()
    assert caplog.text == ""


KERNEL = """
import sys, types
class Shell:
    config = {"IPKernelApp": {}}
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=Shell)
from vse.pipeline.progress import is_notebook, progress_bar
print(is_notebook(), list(progress_bar(range(3), desc="draw demo", unit="image")))
"""


def test_a_notebook_has_a_bar_though_it_is_no_terminal() -> None:
    """The kernel is a stub. Without the packages for widgets the bar is text."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KERNEL], capture_output=True, text=True, check=True)
    assert done.stdout == "True [0, 1, 2]\n"
    assert "draw demo: 100%" in done.stderr


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_hidden_bar_counts_in_silence(stream: type[io.StringIO], monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", stream())
    with progress_bar(desc="epoch 1/2", total=2, hidden=True) as bar:
        bar.update()
        bar.set_postfix(loss="1")
    assert sys.stderr.getvalue() == caplog.text == ""
