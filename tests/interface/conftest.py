"""Fixtures of the tests of the Python interface: caches of regions, a trained run, and an empty working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.conftest import bank as bank
from tests.training.conftest import caches as caches
from tests.training.conftest import phrase_run as phrase_run
from tests.training.conftest import regions as regions
from tests.training.conftest import run as run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, since defaults name files in the current one."""
    monkeypatch.chdir(tmp_path)
    for name in ("VSE_DEVICE", "VSE_WEIGHTS_DIR", "VSE_WORDS"):
        monkeypatch.delenv(name, raising=False)
