"""Fixtures of the tests of the Python interface: caches of regions, a trained run, and an empty working folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.conftest import bank as bank
from tests.train.conftest import caches as caches
from tests.train.conftest import phrase_run as phrase_run
from tests.train.conftest import regions as regions
from tests.train.conftest import run as run


def command(main: Callable[..., None], *arguments: object) -> None:
    """Run a command as a console script does."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 0


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, since defaults name files in the current one."""
    monkeypatch.chdir(tmp_path)
    for name in ("VSE_DEVICE", "VSE_WEIGHTS_DIR", "VSE_WORDS"):
        monkeypatch.delenv(name, raising=False)
