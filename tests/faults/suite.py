"""Count the outcomes of a suite of faults, and write the counts that ``docs/faults.md`` prints.

``pytest -m 'slow or not slow' tests/faults/test_x.py --tries 60 --counts docs/results/faults.csv`` runs the suites of a
file and replaces their rows in that CSV; ``python -m tests.faults.suite`` then writes the page's table from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd
from filelock import FileLock

from tests.docs.pages import ROOT

COUNTS = ROOT / "docs" / "results" / "faults.csv"
PAGE = ROOT / "docs" / "faults.md"
COLUMNS = ["suite", "tries", "refused", "harmless", "wrong", "silent", "command"]
_START, _END = "<!-- generated: faults -->\n", "<!-- generated: end -->"

Outcome = Literal["refused", "harmless", "wrong", "silent"]


@dataclass
class Suite:
    """The outcomes of one suite.

    ``refused``: one clear line and exit code 2, or a documented repair. ``harmless``: the result is equal to that without
    the fault. ``wrong``: a traceback, a hang, a half-written file or a process that does not end. ``silent``: the command
    succeeded, but its result differs.
    """

    name: str
    n_tries: int
    command: str
    outcomes: list[tuple[Outcome, str]] = field(default_factory=list)

    def record(self, outcome: Outcome, detail: str = "") -> None:
        """Count one try; ``detail`` names the fault, and is printed if the outcome is ``wrong`` or ``silent``."""
        self.outcomes.append((outcome, detail))

    def count(self, outcome: Outcome) -> int:
        return sum(recorded == outcome for recorded, _ in self.outcomes)

    def check(self) -> None:
        failures = [f"{outcome}: {detail}" for outcome, detail in self.outcomes if outcome in ("wrong", "silent")]
        assert self.outcomes, f"{self.name}: no try was recorded"
        assert not failures, f"{self.name}: {len(failures)} of {len(self.outcomes)} tries\n" + "\n".join(failures)

    def save(self, counts: Path) -> None:
        """Replace the row of this suite in a CSV of counts; other rows stay."""
        row = {"suite": self.name, "tries": len(self.outcomes), "command": self.command}
        row |= {name: self.count(name) for name in ("refused", "harmless", "wrong", "silent")}
        with FileLock(f"{counts}.lock"):
            known = pd.read_csv(counts) if counts.exists() else pd.DataFrame(columns=COLUMNS)
            table = pd.concat([known[known["suite"] != self.name], pd.DataFrame([row])]).sort_values("suite")
            table[COLUMNS].to_csv(counts, index=False, lineterminator="\n")
        Path(f"{counts}.lock").unlink(missing_ok=True)


StartSuite = Callable[[str, int], Suite]  # a suite by its name and its default number of tries


def page_with_counts(page: str, table: pd.DataFrame) -> str:
    """Return the text of ``docs/faults.md`` with its table replaced by the rows of ``table``."""
    before, _, rest = page.partition(_START)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"the page has no block {_START.strip()}")
    lines = ["| suite | tries | refused | harmless | wrong | silent |", "|---|---|---|---|---|---|"]
    for row in table.to_dict("records"):
        numbers = " | ".join(str(row[name]) for name in ("tries", "refused", "harmless", "wrong", "silent"))
        lines.append(f"| {row['suite']} | {numbers} |")
    return f"{before}{_START}\n" + "\n".join(lines) + f"\n\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_counts(PAGE.read_text(encoding="utf-8"), pd.read_csv(COUNTS)), encoding="utf-8")
