"""Names that come from files into tables: no live line of LaTeX, no formula of a spreadsheet, nothing a terminal obeys."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.eval.evaluating import Edit, Printed, succeeds
from tests.eval.protocols.test_evaluate import made
from tests.eval.tables.test_summary import made as made_result
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import write_embeddings
from vse.eval.options import AllEvaluateOptions
from vse.eval.protocols.compare import compare_files

HOSTILE = {
    "a line of LaTeX": "demo\n\\input{/etc/passwd}", "a line of LaTeX after a return": "demo\r\\write18{id}",
    "a line of LaTeX after a separator": "demo\u2028\\input{x}", "a line of LaTeX after a next line": "demo\x85\\input{x}",
    "a caret newline": "demo^^M\\input{x}", "a macro": "\\input{x}", "a comment": "demo % \\end{tabular}",
    "another cell": "a & b \\\\ c", "maths": "$\\csname x\\endcsname$ #1 {", "a formula": '=HYPERLINK("http://x","y")',
    "a sum": "+1+cmd|' /C calc'!A0", "a difference": "-2+3", "a function": "@HASH_ATTRIBUTE(1)",
    "a formula after a tab": "\t=1", "an escape sequence": "\x1b[2Jdemo\x1b]0;x\x07",
}  # fmt: skip


def written(command: str, files: list[Path], out: Path) -> str:
    succeeds(table_main, command, *files, "--out", out)
    return out.read_text()


def result(path: Path, name: str) -> Path:
    made_result(path, ["full"])
    path.write_text(json.dumps({**json.loads(path.read_text()), "dataset": name, "experiment": name}))
    return path


def comparison(folder: Path, name: str) -> Path:
    named: dict[str, Any] = {"n_images": 12, "n_each": 3, "dataset": name, "experiment": name}
    files = [write_embeddings(folder / f"{k}.h5", made(noise=k, seed=k, **named)) for k in range(2)]
    return compare_files(files, folder / "c.json", options=AllEvaluateOptions(bootstrap=20, cross_check=False))


def no_live_line(text: str) -> bool:
    """Whether nothing but what the table itself writes is a command, in any line that TeX or Python sees."""
    commands = ("\\input", "\\write18", "\\end{tabular}", "\\csname")
    live = [line for line in text.splitlines() if not line.startswith("%")]
    ours = [line for line in live if line.startswith("\\end{tabular}")]
    return len(ours) == 1 and not any(command in line for line in live if line not in ours for command in commands)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_name_is_no_line_of_latex_and_no_formula_of_a_spreadsheet(kind: str, tmp_path: Path) -> None:
    file = result(tmp_path / "r.json", HOSTILE[kind])
    assert no_live_line(written("summary", [file], tmp_path / "t.tex"))
    assert no_live_line(written("significance", [comparison(tmp_path, HOSTILE[kind])], tmp_path / "s.tex"))
    written("summary", [file], tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as stream:
        [row] = csv.DictReader(stream)
    for field in ("dataset", "experiment"):
        assert not row[field].startswith(("=", "+", "-", "@", "\t", "\r"))
        assert row[field].removeprefix("'") == HOSTILE[kind].replace("\r", "\n"), "apart from that, the name stays"


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_name_is_printed_on_one_line(kind: str, tmp_path: Path, capsys: Printed) -> None:
    name = HOSTILE[kind]
    file = write_embeddings(tmp_path / "e.h5", made(n_images=12, n_each=3, dataset=name, experiment=name))
    succeeds(eval_main, file, "--bootstrap", "0", "--no-cross-check", "--out", tmp_path / "r.json")
    lines = capsys.readouterr().err.split("\n")
    assert all(line.isprintable() for line in lines)
    assert len([line for line in lines if " full: i2t R@1/5/10 " in line]) == 1


def test_negative_numbers_stay_numbers(tmp_path: Path, edit: Edit) -> None:
    file = made_result(tmp_path / "r.json", ["full"])
    edit(file, lambda content: content["protocols"]["full"].__setitem__("rsum", -1.5))
    assert "-1.50" in written("summary", [file], tmp_path / "t.csv")
    assert "'-" not in (tmp_path / "t.csv").read_text()
