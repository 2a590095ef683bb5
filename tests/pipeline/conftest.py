"""What tests of data sets share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import succeeds as succeed
from vse.cli import data_main as main

Fails = Callable[..., str]
Log = pytest.LogCaptureFixture
Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def own_json(few: Path, tmp_path: Path) -> Path:
    """A copy of the ``dataset.json`` of 12 images, without the images, that a test may spoil."""
    return Path(shutil.copy(few, tmp_path))


@pytest.fixture
def audited(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The lines that ``vse-data audit`` prints."""

    def run(*arguments: object) -> list[str]:
        succeed(main, "audit", *arguments)
        return capsys.readouterr().out.splitlines()

    return run
