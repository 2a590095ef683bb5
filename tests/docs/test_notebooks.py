"""Each notebook of the documentation runs, writes no file, and is committed without output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.cells import run_cells
from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    run_cells([(f"{notebook.name}, cell {k}", "".join(cell["source"])) for k, cell in enumerate(cells)])
    assert list(tmp_path.iterdir()) == []
