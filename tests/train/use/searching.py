"""What the tests of searches share: the command, and what it prints."""

from __future__ import annotations

import pytest

from vse.train.cli import search_main


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[list[str]], str]:
    """The lines of a search, cut at tabs, and what it says besides."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        search_main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert stop.value.code == 0, captured.err
    return [line.split("\t") for line in captured.out.splitlines()], captured.err
