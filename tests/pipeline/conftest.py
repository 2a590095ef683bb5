"""What tests of data sets share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vse.pipeline.cli import main


@pytest.fixture
def audited(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The lines that ``vse-data audit`` prints."""

    def run(*arguments: object) -> list[str]:
        with pytest.raises(SystemExit) as stop:
            main(["audit", *map(str, arguments)])
        assert stop.value.code == 0
        return capsys.readouterr().out.splitlines()

    return run
